"""The benchmark scripts: a run at a tiny shape, and the content of its results."""

import os
import sys
from pathlib import Path

import pytest
from helpers.files import read_json
from helpers.scripts import ROOT, run_process

sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_loss
import bench_step
import torch
from timing import table


@pytest.mark.slow
def test_loss_benchmark_measures_time_memory_and_accuracy(tmp_path: Path) -> None:
    """From the repository root, as in a terminal."""
    shape = "float32:8:64"
    output = tmp_path / "results" / "out.json"
    flags = ["--shapes", shape, "--group", "4", "--length", "6", "--rounds", "1", "--output", output]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    completed = run_process([sys.executable, "benchmarks/bench_loss.py", *flags], env=environment)
    result = read_json(output)
    assert completed.stdout.strip().endswith(table(bench_loss.TABLE, result))  # libraries may print something before it
    assert result["command"].startswith(f"python benchmarks/bench_loss.py --shapes {shape} ")
    entry = result["shapes"][shape]
    assert {*entry["seconds"], *entry["reasons"]} == {*bench_loss.HEADS, "liger", bench_loss.LIMIT}
    assert entry["peak_mib"].keys() == entry["seconds"].keys() - {bench_loss.LIMIT}
    ours = entry["accuracy"][bench_loss.OURS]
    assert len(ours) == 3 and max(ours.values()) < 1e-5  # observed 1e-6


def test_step_benchmark_times_the_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the shape of the tiny model, in this process."""
    monkeypatch.setattr(bench_step, "peak_in_own_process", lambda script, name, flags: {"gtpo": 3.0, "trl": 6.0}[name])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    output = tmp_path / "out.json"
    flags = f"--models tiny --group 4 --prompt 12 --length 16 --rounds 1 --output {output}"
    monkeypatch.setattr(sys, "argv", ["bench_step.py", *flags.split()])
    bench_step.main()
    result = read_json(output)
    entry = result["models"]["tiny"]
    assert list(entry["seconds"]) == ["generation", "scoring", "forward and backward", "optimizer"]
    assert 0 < entry["gradient_error"] < 1e-5
    printed = table(bench_step.TABLE, result)
    assert "| peak, MiB | 3 | 6 | 2.00 |" in printed
    ours, theirs = (sum(seconds[name] for seconds in entry["seconds"].values()) for name in ("gtpo", "trl"))
    assert f"| sum | {ours:.2f} | {theirs:.2f} | {theirs / ours:.2f} |" in printed


def test_the_exact_gradient_equals_autograd_in_float64() -> None:
    case = bench_loss.make_case("float64:4:7", group=2, length=3, device="cpu")
    hidden = case.hidden.flatten(0, 1).requires_grad_()
    ids = case.ids.flatten()
    log_pi = (hidden @ case.weight.T).log_softmax(-1)
    logps = log_pi.gather(1, ids[:, None]).squeeze(1)
    entropy = -(log_pi.exp() * log_pi).sum(-1)
    logps.sum().backward()
    (truth,) = bench_loss.exact(hidden.detach(), case.weight, ids)
    torch.testing.assert_close(tuple(truth), (hidden.grad, logps, entropy), rtol=0, atol=1e-12)
