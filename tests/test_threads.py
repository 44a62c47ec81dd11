"""How idle threads of PyTorch wait."""

import os
import subprocess
import sys

import pytest
from helpers.scripts import ROOT

from gtpo.threads import bound_waiting


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": "3000"}),
        ({"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "3000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        ({"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "7"}),
    ],
)
def test_threads_spin_for_a_moment_unless_the_user_says_otherwise(
    given: dict[str, str], expected: dict[str, str]
) -> None:
    environment = dict(given)
    bound_waiting(environment)
    assert environment == expected


@pytest.mark.parametrize("script", ["train_gtpo", "train_grpo", "train_sft", "evaluate"])
def test_scripts_bound_the_waiting_before_torch_is_imported(script: str) -> None:
    code = f"import sys, os, {script}; print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_WAIT", "GOMP"))}
    completed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert completed.stdout.split() == ["3000", "False"], completed.stderr
