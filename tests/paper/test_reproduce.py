"""The experiment matrix, the runs that reproduce.py starts, resumes and skips, and the page with its numbers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_paper_configs import FIGURES as PAPER_FIGURES
from trl import GRPOConfig, SFTConfig

import config
import page
import reproduce
from config import (
    DataArguments,
    GTPOArguments,
    ModelArguments,
    RewardArguments,
    RunArguments,
    UsageError,
    parse,
)
from experiments import (
    Results,
    evaluations,
    experiment,
    experiments_of,
    figure_names,
    find_figure,
    groups_of,
    load_matrix,
    read_results,
    runs_of,
)
from page import Curve, judge, measure, render, unit_of, verdict

ROOT = Path(__file__).parent.parent
MATRIX = load_matrix()
ALL = figure_names(MATRIX)
TINY_RUNS = runs_of(MATRIX, ALL, "tiny")
CLASSES: dict[str, tuple[type, ...]] = {  # as the train scripts read them
    "gtpo": (DataArguments, RewardArguments, ModelArguments, RunArguments, GTPOArguments, GRPOConfig),
    "grpo": (DataArguments, RewardArguments, ModelArguments, RunArguments, GRPOConfig),
    "sft": (DataArguments, ModelArguments, RunArguments, SFTConfig),
}

# ---- the matrix ----


def test_names_are_unique_and_every_run_is_shown() -> None:
    class Loader(yaml.SafeLoader):
        pass

    def mapping(loader: Any, node: Any) -> dict[Any, Any]:
        keys = [loader.construct_object(key) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        assert len(keys) == len(set(keys)), f"a key twice in {keys}"
        return yaml.SafeLoader.construct_mapping(loader, node, deep=True)

    Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    yaml.load((ROOT / "configs" / "experiments.yaml").read_text(), Loader)
    assert set(TINY_RUNS) == set(MATRIX["tiny"]["runs"])
    for scale in ("tiny", "paper"):
        for name in ALL:
            for curves in groups_of(MATRIX, name, scale).values():
                assert len(set(curves.values())) == len(curves), f"{name} shows a run twice"


def test_paper_scale_shows_the_runs_of_the_paper() -> None:
    """Which runs a figure has is written by hand in test_paper_configs.py."""
    for title, runs in PAPER_FIGURES.items():
        name = title.lower().replace("fig. ", "fig").replace("table ", "table")
        assert set(runs_of(MATRIX, [name], "paper")) == runs, title


def test_no_two_tiny_runs_are_the_same() -> None:
    settings = {name: repr(sorted(settings.items())) for name, settings in MATRIX["tiny"]["runs"].items()}
    methods = {name: name.partition("-")[0] + settings[name] for name in settings}
    assert len(set(methods.values())) == len(methods)


@pytest.mark.parametrize("name", TINY_RUNS)
def test_tiny_run_resolves(name: str) -> None:
    run = experiment(MATRIX, "tiny", name, 2)
    script, *flags = run.words
    method = name.partition("-")[0]
    assert script == f"train_{method}.py"
    resolved = parse(method, CLASSES[method], [*flags, "--dry_run", "true"])[-1]
    settings = MATRIX["tiny"]["base"][method] | MATRIX["tiny"]["runs"][name]
    for key, value in settings.items():
        assert resolved[{"G": "num_generations"}.get(key, key)] == value, key
    assert (resolved["seed"], resolved["model"]) == (2, "tiny")
    assert resolved["output_dir"] == f"outputs/reproduce/tiny/{name}-s2"


@pytest.mark.parametrize("name", ["sft-qwen-math", "grpo-llama-gsm8k-g8-beta0.04", "gtpo-qwen-gsm8k-onlyneg0.7"])
def test_paper_run_is_its_file_in_a_folder_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(config, "gpu_is_available", lambda: True)
    method = name.partition("-")[0]
    flags = experiment(MATRIX, "paper", name, 5).words[1:]
    own = parse(method, CLASSES[method], [*flags, "--use_cpu", "true", "--dry_run", "true"])[-1]
    file = ["--config", f"configs/paper/{name}.yaml", "--use_cpu", "true", "--dry_run", "true"]
    there = parse(method, CLASSES[method], file)[-1]
    assert own == there | {"seed": 5, "output_dir": f"outputs/reproduce/paper/{name}-s5"}


def test_expected_cost_by_hand() -> None:
    """7,473 prompts x 12 completions x 1.2 s; 7,500 solutions x 0.3 s."""
    assert experiment(MATRIX, "paper", "gtpo-llama-gsm8k-g12", 1).cost == pytest.approx(7473 * 12 * 1.2 / 3600)
    assert experiment(MATRIX, "paper", "sft-qwen-math", 1).cost == pytest.approx(7500 * 0.3 / 3600)


def test_shared_runs_are_run_once_and_first_seeds_first() -> None:
    runs = experiments_of(MATRIX, ["fig1", "fig3", "choice"], "tiny")
    labels = [run.label for run in runs]
    assert len(set(labels)) == len(labels) == 5 * 3 + 7
    seeds = [run.seed for run in runs if run.seed != 101]
    assert seeds == sorted(seeds)
    assert {run.seed for run in runs if "choice" in run.name} == {101}
    assert {run.seed for run in experiments_of(MATRIX, ["fig1"], "tiny", [9])} == {9}


def test_unknown_figure_is_refused() -> None:
    with pytest.raises(UsageError, match=r"figure 'fig33' is unknown \(did you mean 'fig3'\?\): pick from fig1, "):
        find_figure(MATRIX, "fig33")


# ---- running, with scripts that stand in for the real ones ----

SCRIPT = """
import json, pathlib, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
run = pathlib.Path(flags["--output_dir"])
with open("calls.jsonl", "a") as file:
    given = sorted(set(flags) & {"--resume", "--overwrite"})
    file.write(json.dumps([pathlib.Path(sys.argv[0]).stem, run.name, given]) + "\\n")
if pathlib.Path("fail").exists() and run.name in pathlib.Path("fail").read_text():
    sys.exit("CUDA is unhappy")
(run / "adapter").mkdir(parents=True, exist_ok=True)
(run / "best").mkdir(exist_ok=True)
rows = [{"step": s, "accuracy": s + 0.25, "formatting": s, "entropy": 0.1, "step_time": 6.0} for s in (1, 2, 3)]
(run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
(run / "adapter" / "adapter_config.json").write_text("{}")
"""
EVALUATE = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
for name in ("benchmarks", "checkpoint", "k", "limit", "output_dir"):
    parser.add_argument("--" + name)
parser.add_argument("--adapter", nargs="+")
flags = parser.parse_args()
with open("calls.jsonl", "a") as file:
    file.write(json.dumps(["evaluate", flags.benchmarks, flags.checkpoint, len(flags.adapter)]) + "\\n")
folder, entries = pathlib.Path(flags.output_dir), []
for run in map(pathlib.Path, flags.adapter):
    label = "-".join(run.parts[1:]) + ("" if flags.checkpoint == "last" else "@" + flags.checkpoint)
    scores = {score: {str(2**i): 50.0 for i in range(7)} for score in ("pass", "maj")}
    entry = {"adapter": str(run / "adapter"), "benchmark": flags.benchmarks, "scores": scores, "label": label}
    entry |= {"k": 64, "problems": 1, "intervals": {}}
    (folder / label).mkdir(parents=True, exist_ok=True)
    (folder / label / (flags.benchmarks + ".json")).write_text(json.dumps(entry))
stored = [json.loads(path.read_text()) for path in folder.glob("*/*.json")]
(folder / "results.json").write_text(json.dumps({"results": stored}))
"""


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory where the train scripts and evaluate.py are stand-ins, and pictures are empty files."""
    monkeypatch.chdir(tmp_path)
    for method in ("sft", "grpo", "gtpo"):
        (tmp_path / f"train_{method}.py").write_text(SCRIPT)
    (tmp_path / "evaluate.py").write_text(EVALUATE)
    monkeypatch.setattr("models.ensure_tiny", lambda: None)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, path, **_: Path(path).touch())
    return tmp_path


def command(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    """The exit code of reproduce.py."""
    monkeypatch.setattr(sys, "argv", ["reproduce.py", *argv])
    try:
        reproduce.main()
    except SystemExit as exit:
        return int(exit.code or 0)
    return 0


def calls(sandbox: Path) -> list[Any]:
    """What the stand-ins were called with since the last look."""
    path = sandbox / "calls.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


def test_runs_are_made_then_skipped_and_drawn(
    sandbox: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "fig3", "fig1", "--seeds", "4", "--jobs", "2") == 0
    made = calls(sandbox)
    assert {name for _, name, _ in made} == {f"{name}-s4" for name in runs_of(MATRIX, ["fig1", "fig3"], "tiny")}
    assert len(made) == 5 and all(script == f"train_{name.partition('-')[0]}" for script, name, _ in made)
    assert "outputs/reproduce/tiny/figures/fig3.png" in capsys.readouterr().out
    assert (sandbox / "outputs/reproduce/tiny/figures/fig1.pdf").is_file()
    assert command(monkeypatch, "fig3", "--seeds", "4") == 0
    assert calls(sandbox) == []  # all complete
    assert command(monkeypatch, "fig3", "--seeds", "4", "5") == 0
    assert {name for _, name, _ in calls(sandbox)} == {f"{name}-s5" for name in runs_of(MATRIX, ["fig3"], "tiny")}


def test_half_done_run_is_resumed_and_one_without_a_checkpoint_begins_anew(
    sandbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, torn = (sandbox / "outputs/reproduce/tiny" / f"{name}-s1" for name in ("gtpo-g8", "grpo-g8-beta0"))
    (half / "checkpoint-150").mkdir(parents=True)
    (half / "checkpoint-150" / "files.json").write_text("{}")
    torn.mkdir(parents=True)
    (torn / "config.yaml").write_text("")
    assert command(monkeypatch, "fig3", "--seeds", "1") == 0
    flags = {name: given for _, name, given in calls(sandbox)}
    assert flags["gtpo-g8-s1"] == ["--resume"] and flags["grpo-g8-beta0-s1"] == ["--overwrite"]
    assert flags["grpo-g8-beta0.04-s1"] == []


def test_one_failure_does_not_stop_the_rest(
    sandbox: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (sandbox / "fail").write_text("gtpo-g8-s1")
    assert command(monkeypatch, "fig3", "--seeds", "1", "--jobs", "1") == 1
    assert len(calls(sandbox)) == 5
    said = capsys.readouterr().out
    log = "outputs/reproduce/tiny/logs/gtpo-g8-s1.log"
    assert f"gtpo-g8-s1 failed (exit code 1): {log} tells why; python train_gtpo.py --G 8" in said
    assert "CUDA is unhappy" in (sandbox / log).read_text()
    assert "fig3: no run gtpo-g8:" in said and "fig3.png" in said
    (sandbox / "fail").unlink()
    assert command(monkeypatch, "fig3", "--seeds", "1") == 0
    assert [name for _, name, _ in calls(sandbox)] == ["gtpo-g8-s1"]


def test_evaluation_follows_where_the_figure_needs_it(sandbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(monkeypatch, "fig2", "table1", "--seeds", "1", "2") == 0
    scored = [call for call in calls(sandbox) if call[0] == "evaluate"]
    assert scored == [  # GRPO at its best accuracy reward, the others at the end
        ["evaluate", "arithmetic", "last", 2 * 3],
        ["evaluate", "arithmetic", "best", 2 * 4],
        ["evaluate", "arithmetic_hard", "last", 2 * 3],
        ["evaluate", "arithmetic_hard", "best", 2 * 4],
    ]
    assert (sandbox / "outputs/reproduce/tiny/figures/table1.md").is_file()
    assert command(monkeypatch, "fig2", "table1", "--seeds", "1", "2") == 0
    assert calls(sandbox) == []


def test_evaluation_flags_are_evaluate_s_own(sandbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import evaluate

    assert command(monkeypatch, "fig2", "--seeds", "1") == 0
    for call in evaluations(MATRIX, ["fig2", "table1"], "tiny", [1]):
        flags = evaluate.parse(list(call.words[1:]))
        assert flags.benchmarks == [call.benchmark] and flags.checkpoint == call.checkpoint
        assert {"k": flags.k, "limit": flags.limit} == MATRIX["tiny"]["evaluation"][call.benchmark]


def test_list_tells_the_state_of_each_run(
    sandbox: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {run.name: run for run in experiments_of(MATRIX, ["fig3"], "tiny", [1])}
    (runs["gtpo-g8"].folder / "adapter").mkdir(parents=True)
    (runs["gtpo-g8"].folder / "adapter" / "adapter_config.json").write_text("{}")
    (runs["grpo-g8-beta0"].folder / "checkpoint-150").mkdir(parents=True)
    (runs["grpo-g8-beta0"].folder / "checkpoint-150" / "files.json").write_text("{}")
    busy = runs["grpo-g8-beta1e-6"]
    busy.log.parent.mkdir(parents=True)
    hold = (
        "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(busy.log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stdout.readline() == b"held\n"
        assert command(monkeypatch, "fig3", "--seeds", "1", "--list") == 0
        process.communicate()
    said = capsys.readouterr().out
    states = {line.split()[0]: line[len(line.split()[0]) :].strip().split("  ")[0] for line in said.splitlines()[:-1]}
    assert states == {
        "gtpo-g8-s1": "done",
        "grpo-g8-beta0-s1": "half done",
        "grpo-g8-beta1e-6-s1": "running",
        "grpo-g8-beta0.04-s1": "missing",
        "gtpo-correction-only-s1": "missing",
    }
    assert "5 runs: 1 done, 1 running, 1 half done, 2 missing" in said
    assert calls(sandbox) == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no figure named: pick from fig1, fig2"),
        (["fig33"], "figure 'fig33' is unknown"),
        (["word", "--scale", "paper"], "word has no runs at paper scale"),
        (["fig3", "--jobs", "0"], "--jobs is 0: expected at least 1"),
    ],
)
def test_bad_usage_is_refused(argv: list[str], message: str, sandbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=message):
        command(monkeypatch, *argv)
    assert calls(sandbox) == []


# ---- the page ----


@pytest.mark.parametrize(
    ("margins", "met", "word"),
    [
        ([3.0, 2.0, 1.0], True, "holds"),
        ([6.0, 3.0, -0.1], True, "cannot be seen at this scale"),  # a seed against it
        ([1.9, 1.9, 1.9], True, "cannot be seen at this scale"),  # too small
        ([-1.9, -1.9, -1.9], True, "cannot be seen at this scale"),
        ([-3.0, -2.0, -1.0], True, "does not hold"),
        ([-9.0, 1.0, -1.0], True, "cannot be seen at this scale"),
        ([3.0, 3.0, 3.0], False, "cannot be seen at this scale"),
        ([], True, "not run"),
    ],
)
def test_verdict(margins: list[float], met: bool, word: str) -> None:
    assert verdict(margins, 2.0, met) == word


def test_measures_by_hand() -> None:
    raw = [0.0, 4.0, 8.0, 6.0, 2.0, 4.0]  # window 2: 0, 2, 6, 7, 4, 3
    smoothed = [0.0, 2.0, 6.0, 7.0, 4.0, 3.0]
    one = Curve([10, 20, 30, 40, 50, 60], raw, smoothed, 2)
    measured = {kind: one.measure(kind) for kind in ("start", "end", "highest", "early", "late", "mean", "fall")}
    assert measured == {"start": 2.0, "end": 3.0, "highest": 7.0, "early": 2.0, "late": 3.0, "mean": 4.0, "fall": 4.0}
    assert one.measure("half step") == 30  # 6 is the first of at least 3.5
    assert one.measure("fall step") == 50  # from 7 to 3: 5 is passed where it is 4
    with pytest.raises(ValueError, match="kind 'middle' is unknown"):
        one.measure("middle")


def small_results() -> Results:
    metrics = {
        "a": {seed: [{"step": step, "accuracy": 10.0 * seed + step} for step in range(3)] for seed in (1, 2)},
        "b": {1: [{"step": step, "accuracy": 5.0} for step in range(3)]},
    }
    scores = {"a": {"arithmetic": {1: {"scores": {"maj": {"8": 70.0}}}}}}
    return Results(metrics, scores)


def test_claim_is_measured_seed_by_seed() -> None:
    results = small_results()
    assert measure(results, "end of accuracy in a", 1, 1) == 12.0
    assert measure(results, "end of accuracy in b, a", 1, 1) == 12.0
    assert measure(results, "maj@8 of arithmetic in a", 1, 1) == 70.0
    assert measure(results, 10, 1, 1) == 10.0
    claim = {"figure": "f", "claim": "c", "more": "end of accuracy in a", "less": "end of accuracy in b"}
    judged = judge(claim, results, [1, 2, 3], 1, {"points": 2.0})
    assert judged["margins"] == {"1": 7.0} and judged["verdict"] == "holds"  # seeds 2 and 3 lack a run
    needs = claim | {"needs": "end of accuracy in a > 12"}
    assert judge(needs, results, [1], 1, {"points": 2.0})["verdict"] == "cannot be seen at this scale"
    assert judge(claim | {"more": "end of accuracy in c"}, results, [1], 1, {"points": 2.0})["verdict"] == "not run"


def test_claims_speak_of_runs_and_figures_of_the_matrix() -> None:
    rules = yaml.safe_load((ROOT / "configs" / "claims.yaml").read_text())
    results = Results({name: {1: FULL} for name in TINY_RUNS}, dict.fromkeys(TINY_RUNS, BENCHMARKS))
    for claim in rules["claims"]:
        judged = judge(claim, results, [1], 2, rules["least"])
        assert list(judged["margins"]) == ["1"], claim
        shown = set(runs_of(MATRIX, [claim["figure"]], "tiny"))
        for side in ("more", "less"):
            if isinstance(claim[side], str):
                assert set(claim[side].partition(" in ")[2].split(", ")) <= shown, claim
    assert {claim["figure"] for claim in rules["claims"]} == {
        *(name for name in ALL if name[:3] in ("fig", "tab")),
        "fast",
    }


FULL = [{"step": s} | dict.fromkeys((*page.METRICS, "step_time"), float(s)) for s in range(1, 7)]
BENCHMARKS = {
    name: {1: {"scores": {score: {str(2**i): 1.0 for i in range(7)} for score in ("pass", "maj")}}}
    for name in ("arithmetic", "arithmetic_hard")
}


@pytest.mark.parametrize(
    ("words", "unit"),
    [
        ("end of accuracy in a", "points"),
        ("late of entropy in a", "nats"),
        ("half step of kl in a", "steps"),
        ("mean of conflict_tokens in a", "tokens"),
        ("pass@64 of arithmetic_hard in a, b", "points"),
    ],
)
def test_units(words: str, unit: str) -> None:
    assert unit_of(words) == unit


def test_page_of_a_few_runs(sandbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Condensed, judged and rendered from what the stand-ins left; a second time from the condensed numbers alone."""
    (sandbox / "docs").mkdir()
    (sandbox / page.TEMPLATE).write_text((ROOT / page.TEMPLATE).read_text())
    page.README.write_text("<!-- paper scale -->\n<!-- end -->\nbetween\n<!-- tiny scale -->\nold\n<!-- end -->\n")
    assert command(monkeypatch, "fig2", "--seeds", "1", "2") == 0
    made = page.write_page(MATRIX)
    assert all(path.is_file() for path in made)
    first = page.PAGE.read_text()
    kept = read_results([page.FOLDER])
    found = read_results([Path("outputs")])
    assert kept.metrics == found.metrics
    assert kept.scores["gtpo-g8"]["arithmetic"][2]["scores"] == found.scores["gtpo-g8"]["arithmetic"][2]["scores"]
    (sandbox / "outputs").rename(sandbox / "gone")
    page.write_page(MATRIX)
    assert page.PAGE.read_text() == first
    assert "GTPO trains to higher accuracy than GRPO, G = 8." in first and "not run" in first
    readme = page.README.read_text()
    assert "| LLaMA, GSM8K | GTPO | - / 30.0 | - / 13.3 | - / 80.0 | - / 42.5 |" in readme  # Table 1, k = 64
    assert "between" in readme and "old" not in readme and readme.count("<!-- end -->") == 2


def test_readme_table_has_mean_and_range_over_seeds() -> None:
    def entries(value: float) -> dict[str, dict[int, dict[str, Any]]]:
        scores = [{str(2**i): value + add for i in range(7)} for add in (0.0, 3.0)]
        seeds = {seed: {"scores": {"pass": table, "maj": table}} for seed, table in enumerate(scores)}
        return dict.fromkeys(("arithmetic", "arithmetic_hard"), seeds)

    scores = {"gtpo-g8": entries(10.0), "gtpo-g12": entries(20.0), "sft": entries(5.0)}
    table = page.readme_tables(MATRIX, Results({}, scores))["tiny scale"].splitlines()
    assert table[2:] == [
        "| SFT (sft) |" + " 6.5 (5.0 - 8.0) |" * 6,
        "| GRPO (not run) |" + " - |" * 6,
        "| GTPO (gtpo-g12) |" + " 21.5 (20.0 - 23.0) |" * 6,
    ]


def test_fill_wants_its_comments() -> None:
    assert page.fill("a\n<!-- x -->\nold\n<!-- end -->b", "x", "new") == "a\n<!-- x -->\n\nnew\n\n<!-- end -->b"
    with pytest.raises(ValueError, match="no `<!-- y -->`"):
        page.fill("a\n<!-- x -->\n<!-- end -->", "y", "new")


def test_page_has_the_numbers_of_the_results() -> None:
    summary = json.loads((ROOT / page.FOLDER / "summary.json").read_text())
    assert page.summarise(MATRIX, read_results([ROOT / page.FOLDER])) == summary
    assert render(summary, (ROOT / page.TEMPLATE).read_text()) == (ROOT / page.PAGE).read_text()
    readme = (ROOT / "README.md").read_text()
    for name, table in page.readme_tables(MATRIX, read_results([ROOT / page.FOLDER])).items():
        assert page.fill(readme, name, table) == readme


def test_kept_results_are_small() -> None:
    assert sum(path.stat().st_size for path in (ROOT / page.FOLDER).iterdir()) < 3e6


# ---- the task with a reward of its own ----


def test_required_word() -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import required_word
    finally:
        sys.path.remove(str(ROOT / "examples"))
    texts = ["<answer>\n12\n</answer>", "<answer>34</answer>", "no tags: 1", "<answer>1</answer><answer>2</answer>"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert required_word.word_reward(completions, answer=["1", "1", "1", "1"])[:3] == [10.0, 0.0, 0.0]
    stored = [json.loads(line) for line in (ROOT / "examples" / "required_word.jsonl").read_text().splitlines()]
    assert stored == list(required_word.rows())
    assert {row["answer"] for row in stored} == {"1", "2"}
    for row in stored:
        asks_for_2 = any(f" {thing}." in row["prompt"] for thing in ("eggs", "pens", "shells", "stamps"))
        assert row["answer"] == ("2" if asks_for_2 else "1")
