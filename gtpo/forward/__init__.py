"""A line belongs here if it turns tokens into tokens, hidden states or log-probabilities with a loaded model."""
