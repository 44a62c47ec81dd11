"""The study of small models: claims, verdicts, one update, pages. Not part of the wheel."""
