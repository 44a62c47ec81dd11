"""The GPU check (`pytest tests/gpu`): its device, its report, and its fixtures.

Each part stores its measurements in the fixture ``numbers``. The report, ``outputs/gpu-check/<gpu>.json``, is written
after every part, so that it is complete even if a later part or the machine fails. A part that is not selected keeps
its entry of an earlier call, which has its own git revision.

    python -m pytest tests/gpu                                # all parts, on a GPU
    python -m pytest tests/gpu -k head                        # one part
    python -m pytest tests/gpu --gpu-check-device cpu         # the parts that run on a CPU, with small shapes
"""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import ROOT, SIZES, VARIANTS, Sizes, build_model, call, describe, flags, need

REPORT = pytest.StashKey[dict[str, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-check-device", choices=("cuda", "cpu"), default="cuda")
    parser.addoption("--gpu-check-output", help="Directory of the report: outputs/gpu-check.")


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Collect this directory only if it is named: otherwise pytest loads this file after its session has started."""
    return None if REPORT in config.stash else True


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    device = config.getoption("gpu_check_device")
    name = "cpu" if device == "cpu" else gpu_name()
    default = ROOT / "outputs" / "gpu-check"
    directory = Path(config.getoption("gpu_check_output") or default)
    path = directory / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
    earlier = json.loads(path.read_text())["parts"] if path.is_file() else {}
    config.stash[REPORT] = {"path": path, "environment": describe(device), "parts": earlier}


def gpu_name() -> str:
    if not torch.cuda.is_available():
        raise pytest.UsageError(
            "PyTorch sees no GPU (torch.cuda.is_available() is False; PyTorch 2.13 needs NVIDIA driver R580 or newer): "
            "--gpu-check-device cpu runs the parts that need none."
        )
    return torch.cuda.get_device_name(0)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    result: pytest.TestReport = (yield).get_result()
    report = item.config.stash[REPORT]
    if result.when == "setup" and result.passed:
        return  # the outcome is that of the call
    if result.when == "teardown" and result.passed:
        return
    entry: dict[str, Any] = {"outcome": result.outcome, "seconds": round(result.duration, 3)}
    if result.skipped:
        entry["reason"] = result.longrepr[2].removeprefix("Skipped: ")
    elif result.failed:
        entry["message"] = "".join(str(call.excinfo.value) if call.excinfo else result.longreprtext)[-3000:]
    if numbers := item.stash.get(NUMBERS, {}):
        entry["numbers"] = numbers
    entry["git_revision"] = report["environment"]["git_revision"]
    entry["finished"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    report["parts"][item.name.removeprefix("test_")] = entry
    write(report)


def write(report: dict[str, Any]) -> None:
    from gtpo.files import write_atomically

    path = report["path"]
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"environment": report["environment"], "parts": report["parts"]}
    write_atomically(path, json.dumps(content, indent=2, sort_keys=True) + "\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if REPORT in config.stash:
        terminalreporter.write_line(f"report: {config.stash[REPORT]['path']}")


NUMBERS = pytest.StashKey[dict[str, Any]]()


@pytest.fixture
def numbers(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Measurements of the part; they are in the report even if it fails."""
    return request.node.stash.setdefault(NUMBERS, {})


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("gpu_check_device"))


@pytest.fixture(scope="session")
def sizes(device: str) -> Sizes:
    return SIZES[device]


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory for models and runs, deleted afterwards: pytest would keep three of them, 16 GB each."""
    directory = tmp_path_factory.mktemp("gpu-check")
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def model(work: Path, sizes: Sizes, device: str) -> Callable[[str], Path]:
    """The directory of a model of ``sizes.shapes``, built on first use."""

    def get(name: str) -> Path:
        directory = work / "models" / name
        if not directory.is_dir():
            build_model(directory, name, sizes.shapes[name], device)
        return directory

    return get


@pytest.fixture(scope="session")
def run(work: Path, model: Callable[[str], Path], sizes: Sizes, device: str) -> Callable[[str, str, str], Path]:
    """The run directory of a small training run, trained on first use and then shared."""
    failed: dict[Path, str] = {}

    def get(method: str, name: str, variant: str) -> Path:
        need(VARIANTS[variant][0], device)
        directory = work / "runs" / f"{method}-{name}-{variant}"
        if directory in failed:
            pytest.fail(failed[directory])
        if not directory.is_dir():
            argv = ["--output_dir", directory, *flags(model(name), variant, sizes, device)]
            try:
                call([ROOT / f"train_{method}.py", *argv], device, work / "launched" / directory.name, sizes.seconds)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                failed[directory] = f"the run {directory.name} failed: {str(error)[-3000:]}"
                pytest.fail(failed[directory])
        return directory

    return get
