"""Fixtures of all tests. Tests run with one thread per process and without a network."""

import functools
import gc
import gzip
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ["OMP_NUM_THREADS"] = "1"  # also in subprocesses; more threads only contend

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from helpers.scripts import Forked, RunScript, ScriptServer
from helpers.unsloth import FakeUnsloth

from gtpo.models.backend import GPU_PACKAGES

# GTPO_DATA_DIR is a default of --data_dir: the code under test must not see it, the workers of pytest-xdist must.
REAL_DATA = os.environ.pop("GTPO_DATA_DIR", None) or os.environ.get("GTPO_REAL_DATA")
if REAL_DATA:
    os.environ["GTPO_REAL_DATA"] = REAL_DATA


FORKED = pytest.StashKey[Forked | None]()


def pytest_configure(config: pytest.Config) -> None:
    """A worker of pytest-xdist imports the libraries once, for itself and for its scripts.

    Hypothesis has the same examples on every machine and in every run; nothing is timed.
    """
    if hasattr(config, "workerinput"):
        config.stash[FORKED] = Forked.after_imports()
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if runs_tests and find_spec("hypothesis"):  # the environments of Unsloth and of a GPU lack it
        from hypothesis import settings

        settings.register_profile("same", derandomize=True, deadline=None, database=None)
        settings.load_profile("same")


def pytest_collection_finish() -> None:
    """The objects of imports stay: ``train`` collects garbage twice, and would search all of them.

    Accelerate reads the metadata of PEFT some twenty times for each trainer, and each checkpoint compiles the same two
    templates of model cards: here once in a process.
    """
    for module, owner, name in (
        ("accelerate.utils.imports", "", "_is_package_available"),
        ("jinja2", "Environment", "compile"),
    ):
        if found := sys.modules.get(module):
            pure = getattr(found, owner) if owner else found
            setattr(pure, name, functools.cache(getattr(pure, name)))
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def run_script(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunScript]:
    """``run_script(directory, "train_gtpo.py", *argv)``: run a script in a directory, as a user does."""
    server = ScriptServer(tmp_path_factory.mktemp("logs"), process=request.config.stash.get(FORKED, None))
    yield server.run
    server.close()


@pytest.fixture(autouse=True)
def release_runs() -> Iterator[None]:
    """A process holds the lock of its run until it ends; a test process starts many runs."""
    yield
    if start := sys.modules.get("gtpo.runs.start"):
        for lock in start._locks.values():
            lock.release(force=True)
        start._locks.clear()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``tmp_path``, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of an untrained tiny Llama with tokenizer and chat template."""
    from examples.tiny_base import save_untrained_tiny
    from gtpo.models.hub import TINY_BASE

    return save_untrained_tiny(tmp_path_factory.mktemp("tiny"), base=TINY_BASE.with_name("base-16f86973"))


@pytest.fixture(scope="session")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with one layer, for runs that are compared with each other: a module's ``tiny``, with ``FILTER``."""
    from examples.tiny_base import save_untrained_tiny
    from gtpo.models.hub import TINY_BASE

    base = TINY_BASE.with_name("base-16f86973")
    return save_untrained_tiny(tmp_path_factory.mktemp("shallow"), base=base, num_hidden_layers=1)


@pytest.fixture
def build(tiny: Path, tmp_path: Path) -> Callable[..., Any]:
    """``build(method, name, **settings)``: a canned trainer of the tiny model in this directory of ``tmp_path``."""
    from helpers.canned import make_trainer

    return lambda method, name="", **settings: make_trainer(method, tiny, tmp_path / name, **settings)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the real JSONL files (GSM8K, MATH, AIME, AMC), named by GTPO_DATA_DIR; packed ones are unpacked."""
    directory = REAL_DATA
    if not directory:
        pytest.skip("GTPO_DATA_DIR does not name the folder of the real data files")
    unpacked = tmp_path_factory.mktemp("data")
    for path in Path(directory).glob("*.jsonl*"):
        if path.suffix == ".gz":
            (unpacked / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
        else:
            (unpacked / path.name).symlink_to(path.resolve())
    return unpacked


@pytest.fixture
def isolated_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep test files out of the user's cache."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


# modules that import gpu_is_available by name
GPU_QUERIES = (
    "models.backend",
    "cli.parse",
    "cli.presets",
    "cli.build",
    "models.load",
    "evaluation.sampling",
    "evaluation.targets",
    "evaluation.jobs",
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in GPU_QUERIES:
        monkeypatch.setattr(f"gtpo.{module}.gpu_is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (8, 0))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in GPU_QUERIES:
        monkeypatch.setattr(f"gtpo.{module}.gpu_is_available", lambda: False)


@pytest.fixture
def unsloth(gpu: None, monkeypatch: pytest.MonkeyPatch) -> FakeUnsloth:
    fake = FakeUnsloth()
    monkeypatch.setattr("trl.GRPOTrainer", type("UnslothGRPOTrainer", (), {}))  # imports trl, which reads versions
    monkeypatch.setitem(sys.modules, "unsloth", fake)  # type: ignore[arg-type]
    monkeypatch.setattr("gtpo.models.backend.is_installed", lambda package: True)
    monkeypatch.setattr("gtpo.models.backend.installed_version", GPU_PACKAGES.get)
    return fake
