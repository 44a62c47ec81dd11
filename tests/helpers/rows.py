"""Rows as a dry run plans them."""

from types import SimpleNamespace
from typing import Any

from datasets import Dataset

from gtpo.arguments import DataArguments, ModelArguments, RunArguments, Settings
from gtpo.data.load import load_rows


def planned(dataset: str, **flags: Any) -> Dataset:
    """The training rows of a dry run of ``dataset``."""
    run = RunArguments(dry_run=True)
    settings = Settings("grpo", DataArguments(dataset, **flags), ModelArguments(), run, SimpleNamespace(seed=0))
    rows, _ = load_rows(settings)
    return rows
