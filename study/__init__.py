"""The study of small models: comparisons, claims, verdicts, one update, pages. Not part of the wheel."""

from gtpo.arguments import DataArguments, FormatArguments, ModelArguments, RewardArguments, RunArguments

SETTINGS = (DataArguments, FormatArguments, RewardArguments, ModelArguments, RunArguments)  # of every training run
