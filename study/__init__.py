"""The study of small models: comparisons, paired by seed, and their pages. Not part of the wheel."""

from collections.abc import Mapping, Sequence
from typing import Any

from gtpo.arguments import DataArguments, FormatArguments, ModelArguments, RewardArguments, RunArguments

SETTINGS = (DataArguments, FormatArguments, RewardArguments, ModelArguments, RunArguments)  # of every training run
Row = dict[str, Any]  # of a page, a summary or a JSON file
Values = Mapping[str, Any]
Seeds = Sequence[int]
Numbers = Sequence[float]
Words = Sequence[str]
