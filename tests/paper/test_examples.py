"""examples/: the demo's commands and printed numbers, and the task with a reward of its own."""

import subprocess
import sys
from hashlib import sha256
from pathlib import Path

from helpers.files import read_json, read_lines
from helpers.scripts import ROOT, run_process
from pytest import MonkeyPatch, fixture, mark

DEMO = ROOT / "examples" / "demo.py"
RECORD = """
import json, os, pathlib, sys
with open("calls.jsonl", "a") as file:
    file.write(json.dumps([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]) + "\\n")
pathlib.Path("threads").open("a").write(os.environ["OMP_NUM_THREADS"] + " ")
if pathlib.Path("fail").exists() and "{name}" in pathlib.Path("fail").read_text():
    sys.exit(3)
"""
EVALUATE = """
output = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
output.mkdir(parents=True)
scores = {"pass": {"1": 12.5}, "format": 25.0}, {"pass": {"1": 50.0}, "format": 100.0}
entries = [{"adapter": adapter, "scores": s} for adapter, s in zip((None, "outputs/demo/gtpo/adapter"), scores)]
(output / "results.json").write_text(json.dumps({"results": entries}))
for label, answer in (("base-tiny", 0), ("demo-gtpo", 8)):
    (output / label).mkdir()
    rows = [{"id": f"arithmetic/{i}", "completion": f"<answer>{answer}</answer>"} for i in range(4)]
    (output / label / "arithmetic.jsonl").write_text("\\n".join(map(json.dumps, [{"settings": {}}, *rows])))
"""
TRAIN = """
run = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
run.mkdir(parents=True)
stored = {"git_revision": "0123abc", "gpus": [], "cpu_count": 2, "packages": {"torch": "2.13", "trl": "1.14"}}
(run / "environment.json").write_text(json.dumps(stored))
(run / "initial_entropy.json").write_text('{"initial_entropy": 0.4236}')
(run / "metrics.jsonl").write_text('{"step": 1}\\n{"step": 2}\\n')
"""
CHAT = """
print("\\n--- base model (tiny)\\n<answer> 3 </answer>\\n\\n--- demo-gtpo\\n<answer> 4 </answer>")
"""
OUTPUTS = {"train_gtpo.py": TRAIN, "evaluate.py": EVALUATE, "figures.py": ""}


@fixture
def repository(tmp_path: Path) -> Path:
    """A copy of the demo beside scripts that record their command line."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "demo.py").write_text(DEMO.read_text())
    (tmp_path / "gtpo" / "evaluation").mkdir(parents=True)
    for path in (ROOT / "gtpo").iterdir():
        if path.name != "evaluation":
            (tmp_path / "gtpo" / path.name).symlink_to(path)
    (tmp_path / "gtpo" / "evaluation" / "chat.py").write_text(RECORD.replace("{name}", "chat.py") + CHAT)
    for name, output in OUTPUTS.items():
        (tmp_path / name).write_text(RECORD.replace("{name}", name) + output)
    return tmp_path


def demo(repository: Path, *argv: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, repository / "examples" / "demo.py", *argv]
    return subprocess.run(command, cwd=cwd or repository, capture_output=True, text=True, timeout=60)


@mark.slow
@mark.parametrize("cwd", [".", "examples"])
def test_demo_trains_evaluates_and_draws(cwd: str, repository: Path) -> None:
    done = demo(repository, "--small", "--seed", "5", cwd=repository / cwd)
    assert done.returncode == 0, done.stderr
    train, greedy, evaluate, figures, chat = (" ".join(call) for call in read_lines(repository / "calls.jsonl"))
    training = "--model tiny --dataset arithmetic --G 12 --seed 5 --max_steps 40"
    assert chat.startswith("chat.py outputs/demo-s5/gtpo Tom has 6 eggs.")
    assert train == f"train_gtpo.py {training} --output_dir outputs/demo-s5/gtpo"
    assert evaluate.startswith("evaluate.py ") and "--limit 40" in evaluate
    assert figures.startswith("figures.py --runs outputs/demo-s5/gtpo")
    assert "--temperature 0" in greedy and "--temperature" not in evaluate
    summary = read_json(repository / "outputs" / "demo-s5" / "summary.json")
    for way in ("greedy", "sampled"):
        assert (summary[f"accuracy_before_{way}"], summary[f"accuracy_after_{way}"]) == (12.5, 50.0)
        assert (summary[f"formatting_before_{way}"], summary[f"formatting_after_{way}"]) == (25.0, 100.0)
    assert "accuracy   (%)  greedy         12.5          50.0" in done.stdout
    shown = "(right answer: 8)\n  before  <answer>0</answer>\n  after   <answer>8</answer>"
    assert f"How many apples does Tom have?  {shown}" in done.stdout
    assert done.stdout.count("\n  before  ") == 1  # the others are wrong after the training too
    assert f"python train_grpo.py {training} --output_dir outputs/demo-s5/grpo" in done.stdout
    assert "| formatting | sampled | 25.0 | 100.0 |" in (repository / "outputs/demo-s5/report.md").read_text()
    assert (f"Working directory: {repository}" in done.stdout) == (cwd != ".")


def test_demo_stops_where_a_script_fails(repository: Path) -> None:
    (repository / "fail").write_text("train_gtpo.py")
    done = demo(repository)
    assert done.returncode == 3
    assert "demo.py: `python train_gtpo.py` failed with exit code 3" in done.stderr
    assert len(read_lines(repository / "calls.jsonl")) == 1


def test_required_word(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import required_word

    texts = ["<answer>\n12\n</answer>", "<answer>34</answer>", "no tags: 1"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert required_word.word_reward(completions, answer=["1", "1", "1"]) == [10.0, 0.0, 0.0]
    assert read_lines(ROOT / "examples" / "required_word.jsonl") == list(required_word.rows())


def test_the_warm_start_of_smollm2_is_the_stored_one(tmp_path: Path) -> None:
    """By the hash of its rows; the recipe of the tiny base has changed since."""
    run_process([sys.executable, "examples/smol_data.py", tmp_path])
    text = (tmp_path / "warm_start.jsonl").read_bytes()
    assert sha256(text).hexdigest()[:16] == "e696bab2265476a6"
