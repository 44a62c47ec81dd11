"""pytest plugin: TRL's own tests of GRPOTrainer with one of our trainers in its place.

``TRAINER`` is trl, grpo, gtpo or gtpo_trl (whose GTPOConfig replaces GRPOConfig); ``LOG`` gets a JSON line a test.
Nothing of TRL's tests is stored here: ``make test-backend BACKEND=trl-suite TRL=DIR`` names a clone of TRL.
"""

import gc
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(1)


def pytest_configure() -> None:
    """Functions that tests of an older TRL import and the installed one has no more: of packages that are absent."""
    import trl
    import trl.import_utils as utils

    folder = Path(trl.__file__).parent
    if not list(folder.parent.glob("trl-*.dist-info")):
        raise pytest.UsageError(f"{folder} is not an installed TRL: the tests would run the code of a clone")
    for package in ("joblib", "mergekit", "harbor", "openreward"):
        name = f"is_{package}_available"
        if not hasattr(utils, name):
            setattr(utils, name, lambda: False)


def classes(name: str) -> tuple[type, type]:
    """A trainer and its config."""
    import trl

    import gtpo
    from examples import gtpo_trl

    return {
        "trl": (trl.GRPOTrainer, trl.GRPOConfig),
        "grpo": (gtpo.GRPOTrainer, trl.GRPOConfig),
        "gtpo": (gtpo.GTPOTrainer, trl.GRPOConfig),
        "gtpo_trl": (gtpo_trl.GTPOTrainer, gtpo_trl.GTPOConfig),
    }[name]


def pytest_collection_modifyitems(items: list[Any]) -> None:
    trainer, config = classes(os.environ["TRAINER"])
    for module in {item.module for item in items}:
        if hasattr(module, "GRPOTrainer"):
            module.GRPOTrainer, module.GRPOConfig = trainer, config


def pytest_collection_finish() -> None:
    gc.freeze()  # the objects of imports: every train collects garbage twice


def pytest_runtest_setup(item: Any) -> None:
    torch.manual_seed(0)
    random.seed(0)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    report = (yield).get_result()
    if report.when == "call" or report.outcome != "passed":
        error = [call.excinfo.typename, str(call.excinfo.value)[:200]] if call.excinfo else None
        row = {"test": item.nodeid.split("::", 1)[1], "outcome": report.outcome, "error": error}
        with Path(os.environ["LOG"]).open("a", encoding="utf-8") as log:
            log.write(json.dumps(row) + "\n")
