"""GSM8K in the columns that verl reads, with the paper's system prompt: train.parquet and test.parquet.

    GTPO_DATA_DIR=data python examples/verl/gsm8k_parquet.py outputs/verl/data

GTPO_DATA_DIR names the directory of gsm8k_train.jsonl and gsm8k_test.jsonl, with `question` and `answer` as on the Hub
(openai/gsm8k). Needs the repository's root on PYTHONPATH, for the prompt of ``rewards.py``.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from rewards import PAPER


def verl_row(row: dict[str, str], split: str, index: int) -> dict[str, Any]:
    """One row of verl's from one of the data set's; ValueError without a gold answer."""
    _, mark, gold = row["answer"].rpartition("#### ")
    gold = gold.replace(",", "").strip()
    if not mark or not gold:
        raise ValueError(f"row {index} of {split} has no answer after '#### '.")
    return {
        "data_source": "openai/gsm8k",
        "prompt": PAPER.to_messages(row["question"]),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": gold},
        "extra_info": {"split": split, "index": index},
    }


def main(directory: str) -> None:
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        source = Path(os.environ["GTPO_DATA_DIR"], f"gsm8k_{split}.jsonl")
        given = pd.read_json(source, lines=True, dtype=False).to_dict("records")
        rows = [verl_row(row, split, index) for index, row in enumerate(given)]
        pd.DataFrame(rows).to_parquet(target / f"{split}.parquet")
        print(f"{target / split}.parquet: {len(rows)} rows")


if __name__ == "__main__":
    if len(sys.argv) != 2 or "GTPO_DATA_DIR" not in os.environ:
        sys.exit(__doc__)
    main(sys.argv[1])
