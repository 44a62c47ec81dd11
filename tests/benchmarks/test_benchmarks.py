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

PROVENANCE = {"command", "date", "revision", "machine", "threads", "python", "versions"}


@pytest.mark.slow
def test_loss_benchmark_measures_time_memory_and_accuracy(tmp_path: Path) -> None:
    """From the repository root, as in a terminal."""
    shape = "float32:8:64"
    output = tmp_path / "results" / "out.json"
    flags = ["--shapes", shape, "--group", "4", "--length", "6", "--rounds", "1", "--output", str(output)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "benchmarks/bench_loss.py", *flags]
    completed = run_process(command, env=environment)
    result = read_json(output)
    assert completed.stdout.strip().endswith(table(bench_loss.TABLE, result))  # libraries may print something before it
    assert result.keys() > PROVENANCE
    assert result["command"].startswith(f"python benchmarks/bench_loss.py --shapes {shape} ")
    assert result["threads"] == 1 and result["versions"]["torch"]
    assert (result["group"], result["length"], list(result["shapes"])) == (4, 6, [shape])
    entry = result["shapes"][shape]
    assert {bench_loss.OURS, "trl logits", bench_loss.LIMIT} <= entry["seconds"].keys()
    for peer in ("trl logits", "trl fused", "liger"):  # each has a time or a reason
        assert (peer in entry["seconds"]) != bool(entry["reasons"].get(peer)), peer
    assert min(entry["seconds"].values()) > 0
    assert entry["peak_mib"].keys() == entry["seconds"].keys() - {bench_loss.LIMIT}
    ours = entry["accuracy"][bench_loss.OURS]
    assert ours.keys() == {"gradient", "gradient, confident", "entropy", "entropy, largest"}
    assert max(ours.values()) < 1e-5  # observed 1e-6


def test_step_benchmark_times_the_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the shape of the tiny model, in this process."""
    monkeypatch.setattr(bench_step, "peak_in_own_process", lambda script, name, flags: {"gtpo": 3.0, "trl": 6.0}[name])
    flags = ["--models", "tiny", "--group", "4", "--prompt", "12", "--length", "16", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["bench_step.py", *flags, "--output", str(tmp_path / "out.json")])
    threads = torch.get_num_threads()
    try:
        bench_step.main()
    finally:
        torch.set_num_threads(threads)
    result = read_json(tmp_path / "out.json")
    entry = result["models"]["tiny"]
    assert (result["group"], result["prompt"], result["length"]) == (4, 12, 16)
    assert entry["parameters"] == 2 * 512 * 128 + 3 * (4 * 128**2 + 3 * 128 * 384 + 2 * 128) + 128
    assert list(entry["seconds"]) == ["generation", "scoring", "forward and backward", "optimizer"]
    assert all(seconds[name] > 0 for seconds in entry["seconds"].values() for name in ("gtpo", "trl"))
    assert 0 < entry["gradient_error"] < 1e-5
    printed = table(bench_step.TABLE, result)
    assert capsys.readouterr().out.strip().endswith(printed)
    assert "| peak, MiB | 3 | 6 | 2.00 |" in printed
    sums = [sum(seconds[name] for seconds in entry["seconds"].values()) for name in ("gtpo", "trl")]
    assert f"| sum | {sums[0]:.2f} | {sums[1]:.2f} | {sums[1] / sums[0]:.2f} |" in printed


def test_the_exact_gradient_equals_autograd_in_float64() -> None:
    case = bench_loss.make_case("float64:4:7", group=2, length=3, device="cpu")
    hidden = case.hidden.flatten(0, 1).requires_grad_()
    ids = case.ids.flatten()
    log_pi = (hidden @ case.weight.T).log_softmax(-1)
    logps = log_pi.gather(1, ids[:, None]).squeeze(1)
    entropy = -(log_pi.exp() * log_pi).sum(-1)
    logps.sum().backward()
    (truth,) = bench_loss.exact(hidden.detach(), case.weight, ids)
    for actual, expected in zip(truth, (hidden.grad, logps, entropy), strict=True):
        assert (actual - expected).abs().max() < 1e-12
