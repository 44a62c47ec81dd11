"""TRL's tests of GRPOTrainer on TRL's class and on ours; the counts, and the tests that only ours fail.

    python tests/backends/trl_suite/run.py TRL_CLONE [pytest arguments]

The clone supplies ``tests`` and ``scripts`` alone; the installed TRL is tested. They need pytest-timeout, parameterized
and jmespath. Models and data are random ones under the names that the tests use (``hub.py``). Exit code 1 if a test
that TRL passes fails with one of our trainers, and not with a refusal.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TRAINERS = ("trl", "grpo", "gtpo", "gtpo_trl")
REFUSALS = ("is not supported", "GTPO has no ", "GTPOTrainer does not support", "has no KL term", "add a router loss")


def results(trainer: str, links: Path, hub: Path, arguments: list[str]) -> dict[str, str]:
    """Passed, skipped, refused or failed, by test; the tests run in the directory of the models."""
    log = hub / f"{trainer}.jsonl"
    log.unlink(missing_ok=True)
    offline = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(HERE), str(ROOT), str(links), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | offline | {"PYTHONPATH": path, "TRAINER": trainer, "LOG": str(log)}
    environment["HF_DATASETS_CACHE"] = str(hub / "cache")
    argv = [sys.executable, "-m", "pytest", "-p", "plugin", "-p", "no:cacheprovider", "-q", "--timeout", "120"]
    argv += ["--rootdir", str(links), "-o", "addopts=", "-W", "ignore", "-k", "not VLM"]
    argv += [str(links / "tests" / "test_grpo_trainer.py"), *arguments]
    ended = subprocess.run(argv, cwd=hub, env=environment)
    if ended.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sys.exit(f"the tests of {trainer} ended with {ended.returncode}: some of them did not run")
    found = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        kind, text = row["error"] or ("", "")
        is_refusal = row["outcome"] == "failed" and (kind == "UsageError" or any(part in text for part in REFUSALS))
        found[row["test"]] = "refused" if is_refusal else row["outcome"]
    return found


def links_to(clone: Path, folder: Path) -> Path:
    """A directory with ``tests`` and ``scripts`` of a clone of TRL, without its ``trl``; the installed one is imported.

    Of a clone on the path ``trl.__version__`` would be that of the installed package all the same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tests", "scripts"):
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(clone.resolve() / name)
    return folder


def main() -> int:
    clone, arguments = Path(sys.argv[1]).resolve(), sys.argv[2:]
    hub = Path(tempfile.gettempdir()) / "gtpo-trl-suite"
    hub.mkdir(exist_ok=True)
    subprocess.run([sys.executable, str(HERE / "hub.py"), str(hub), str(clone)], cwd=hub, check=True)
    links = links_to(clone, hub / "links")
    each = {trainer: results(trainer, links, hub, arguments) for trainer in TRAINERS}
    passed = [test for test, outcome in each["trl"].items() if outcome == "passed"]
    print(f"TRL {version('trl')}: {len(passed)} tests pass with its GRPOTrainer; of these:")
    only_ours = False
    for trainer in TRAINERS[1:]:
        count = Counter(each[trainer].get(test, "not run") for test in passed)
        print(f"  {trainer}: " + ", ".join(f"{number} {outcome}" for outcome, number in sorted(count.items())))
        for test in passed:
            if each[trainer].get(test) not in ("passed", "refused", "skipped"):
                only_ours = True
                print(f"    {test}")
    return int(only_ours)


if __name__ == "__main__":
    sys.exit(main())
