"""Evaluation: which models, their completions on the benchmarks, scores, table. The command is ``evaluate.py``."""
