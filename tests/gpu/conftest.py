"""The GPU check (`make gpu-check`): its device, its report, and what its parts share.

Each part writes its numbers into the fixture of that name. The report, ``results/gpu/<card>.json``, is written whole
after every part, so that it holds what ran even where a later part, or the machine, gives up. A part that this call
leaves out keeps the entry of an earlier call, which names its own revision.

    python -m pytest tests/gpu                                # all of it, on the card
    python -m pytest tests/gpu -k head                        # one part
    python -m pytest tests/gpu --gpu-check-device cpu         # what a CPU can run, with small shapes
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
from checks import ROOT, SIZES, VARIANTS, Sizes, build_model, call, flags, need

REPORT = pytest.StashKey[dict[str, Any]]()
GIB = 2**30


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-check-device", choices=("cuda", "cpu"), default="cuda")
    parser.addoption("--gpu-check-output", help="Folder of the report; results/gpu, or outputs/gpu-check for a CPU.")


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Only a call that names this folder runs it: for another, this file is not there yet when the session starts."""
    return None if REPORT in config.stash else True


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    device = config.getoption("gpu_check_device")
    card = "cpu" if device == "cpu" else card_name()
    folder = config.getoption("gpu_check_output") or ROOT / ("results/gpu" if device == "cuda" else "outputs/gpu-check")
    path = Path(folder) / f"{re.sub(r'[^a-z0-9]+', '-', card.lower()).strip('-')}.json"
    earlier = json.loads(path.read_text())["parts"] if path.is_file() else {}
    config.stash[REPORT] = {"path": path, "environment": describe(device), "parts": earlier}


def card_name() -> str:
    if not torch.cuda.is_available():
        raise pytest.UsageError(
            "PyTorch sees no GPU here (`torch.cuda.is_available()` is False; the NVIDIA driver has to be R580 or newer "
            "for PyTorch 2.13): --gpu-check-device cpu runs what a CPU can run."
        )
    return torch.cuda.get_device_name(0)


def describe(device: str) -> dict[str, Any]:
    """Versions, revision and machine, and the card's driver, memory and capability."""
    from tracking import environment

    about = environment() | {"device": device}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        about |= {
            "card": properties.name,
            "driver": driver_version(),
            "cuda": torch.version.cuda,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gib": properties.total_memory / GIB,
            "bfloat16": torch.cuda.is_bf16_supported(including_emulation=False),
        }
    return about


def driver_version() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    result: pytest.TestReport = (yield).get_result()
    report = item.config.stash[REPORT]
    if result.when == "setup" and result.passed:
        return  # its outcome comes with the call
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
    from faults import write_atomically

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
    """What the part measures: goes into the report, whatever becomes of the part."""
    return request.node.stash.setdefault(NUMBERS, {})


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("gpu_check_device"))


@pytest.fixture(scope="session")
def sizes(device: str) -> Sizes:
    return SIZES[device]


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for models and runs; emptied afterwards, for pytest would keep three times 16 GB."""
    folder = tmp_path_factory.mktemp("gpu-check")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def model(work: Path, sizes: Sizes, device: str) -> Callable[[str], Path]:
    """The folder of a model of ``sizes.shapes``, built when it is first asked for."""

    def get(name: str) -> Path:
        folder = work / "models" / name
        if not folder.is_dir():
            build_model(folder, name, sizes.shapes[name], device)
        return folder

    return get


@pytest.fixture(scope="session")
def run(work: Path, model: Callable[[str], Path], sizes: Sizes, device: str) -> Callable[[str, str, str], Path]:
    """The directory of a small training run; made when it is first asked for, and then shared."""
    failed: dict[Path, str] = {}

    def get(method: str, name: str, variant: str) -> Path:
        need(VARIANTS[variant][0], device)
        folder = work / "runs" / f"{method}-{name}-{variant}"
        if folder in failed:
            pytest.fail(failed[folder])
        if not folder.is_dir():
            words = flags(model(name), variant, sizes, device)
            launch = work / "launched" / folder.name
            try:
                call([ROOT / f"train_{method}.py", "--output_dir", folder, *words], device, launch, sizes.seconds)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                failed[folder] = f"the run {folder.name} failed: {str(error)[-3000:]}"
                pytest.fail(failed[folder])
        return folder

    return get
