"""Shared by all tests: one thread per process, no network, and an untrained tiny model."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ["OMP_NUM_THREADS"] = "1"  # subprocesses of tests too: threads that wait for each other only cost time

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers.scripts import ROOT, SERVER, Ended, user_environment
from helpers.unsloth import StandIn

from gtpo.backend import GPU_PACKAGES

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def run_script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Ended]]:
    """``run_script(folder, "train_gtpo.py", *argv)``: a script of ours as a user runs it in that folder.

    It is forked from a process that has imported trl once, which spares each run some eight seconds; the script itself
    and our modules are imported anew every time.
    """
    logs = tmp_path_factory.mktemp("logs")
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=user_environment()
    )
    assert server.stdin and server.stdout

    def ask(folder: Path, script: str, *argv: str) -> Ended:
        number = len(list(logs.iterdir()))
        paths = {name: str(logs / f"{number:03}.{name}") for name in ("stdout", "stderr")}
        request = {"argv": [str(ROOT / script), *argv], "cwd": str(folder), **paths}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        assert code != -signal.SIGALRM, f"{script} {argv} hung"
        return Ended(code, *(Path(paths[name]).read_text() for name in ("stdout", "stderr")))

    yield ask
    server.stdin.close()
    server.wait(timeout=10)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an untrained tiny Llama with tokenizer and chat template."""
    from gtpo.tiny import build_tiny

    return build_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the real JSONL files (GSM8K, MATH, AIME, AMC), named by GTPO_DATA_DIR."""
    folder = os.environ.get("GTPO_DATA_DIR")
    if not folder:
        pytest.skip("GTPO_DATA_DIR does not name the folder of the real data files")
    return Path(folder)


GPU_QUERIES = ("backend", "models")  # modules that ask for a GPU by that name


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in GPU_QUERIES:
        monkeypatch.setattr(f"gtpo.{module}.gpu_is_available", lambda: True)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in GPU_QUERIES:
        monkeypatch.setattr(f"gtpo.{module}.gpu_is_available", lambda: False)


@pytest.fixture
def unsloth(gpu: None, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "unsloth", stand_in)  # type: ignore[arg-type]
    monkeypatch.setattr("gtpo.backend.is_installed", lambda package: True)
    monkeypatch.setattr("importlib.metadata.version", lambda package: GPU_PACKAGES[package])
    monkeypatch.setattr("trl.GRPOTrainer", type("UnslothGRPOTrainer", (), {}))
    return stand_in
