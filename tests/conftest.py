"""Shared by all tests: one thread per process, no network, and an untrained tiny model."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ["OMP_NUM_THREADS"] = "1"  # subprocesses of tests too: threads that wait for each other only cost time

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an untrained tiny Llama with tokenizer and chat template."""
    from models import build_tiny

    return build_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the real JSONL files (GSM8K, MATH, AIME, AMC), named by GTPO_DATA_DIR."""
    folder = os.environ.get("GTPO_DATA_DIR")
    if not folder:
        pytest.skip("GTPO_DATA_DIR does not name the folder of the real data files")
    return Path(folder)
