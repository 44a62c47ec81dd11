"""A run's completions table and report page: values belong to the right completion, although rows are shuffled."""

import json
import shutil
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from datasets import Dataset
from helpers import canned
from helpers.canned import GROUP, canned_group, make_trainer, trained_weights
from helpers.files import read_settings, write_json, write_lines, write_settings
from helpers.hostile_html import HOSTILE
from helpers.reference import naive_completion_entropy, naive_conflict_mask, naive_entropy_filter
from helpers.runs import metrics_of
from pyarrow import Table
from pyarrow.parquet import read_table, write_table
from pytest import LogCaptureFixture, MonkeyPatch, TempPathFactory, approx, fixture, mark
from test_trainer import plain_logps_and_entropy

from gtpo.prompts import to_messages
from gtpo.reports.html import read_group, write_report
from gtpo.runs.directory import RunDirectory
from gtpo.training.batch import padded_batch
from gtpo.training.metrics_writer import MetricsWriter


@fixture(scope="module")
def run(tiny: Path, tmp_path_factory: TempPathFactory) -> Path:
    """A run of two steps in micro-batches, with its completions table and metrics."""
    directory = tmp_path_factory.mktemp("run")
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "max_steps": 2}
    trainer = make_trainer("gtpo", tiny, directory, log_completions=True, num_completions_to_print=0, **settings)
    trainer.add_callback(MetricsWriter(RunDirectory(directory)))
    trained_weights(trainer)
    config = {"run_name": "<a run>", "model": "tiny", "dataset": "canned", "num_generations": GROUP}
    write_settings(directory / "config.yaml", config | {"conflict_correction": True})
    return directory


@fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """The run, to be changed."""
    return shutil.copytree(run, tmp_path / "run")


def test_each_completion_has_its_own_entropy_delta_and_spans(run: Path, build: Any) -> None:
    rows = read_table(sorted((run / "completions").glob("*.parquet"))[0]).to_pylist()
    untrained = build("gtpo")
    prompt_ids = untrained.processing_class([rows[0]["prompt"]] * GROUP)["input_ids"]
    batch = padded_batch(prompt_ids, canned_group(0), 0, untrained.accelerator.device)
    entropy = naive_completion_entropy(plain_logps_and_entropy(untrained, batch)[1])
    advantages = [row["advantage"] for row in rows]
    delta = naive_entropy_filter(entropy, advantages, 0.1, 5.05, "auto")
    masks = naive_conflict_mask(canned_group(0), advantages, GROUP)
    assert 0 < sum(delta) < GROUP
    for i, (row, ids) in enumerate(zip(rows, canned_group(0), strict=True)):
        assert row["entropy"] == approx(entropy[i], abs=1e-4)
        assert row["delta"] == delta[i]
        inside = "".join(row["completion"][start:end] for start, end in row["conflicts"])
        marked = [token for token, conflict in zip(ids, masks[i], strict=True) if conflict]
        assert inside == untrained.processing_class.decode(marked, skip_special_tokens=True)


def test_the_table_has_turns_gold_answer_and_cut_off(build: Any, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """With micro-batches, whose rows TRL shuffles; a third of the completions lacks the end token."""
    whole = canned.canned_group

    def some_cut(step: int, size: int = GROUP) -> list[list[int]]:
        return [ids if i % 3 else ids[:-1] for i, ids in enumerate(whole(step, size))]

    monkeypatch.setattr(canned, "canned_group", some_cut)
    batches = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "max_steps": 2}
    trainer = build("gtpo", log_completions=True, num_completions_to_print=0, **batches)
    prompts = [to_messages(f"{i} + 1?") for i in range(8)]
    trainer.train_dataset = Dataset.from_dict({"prompt": prompts, "answer": [str(i + 1) for i in range(8)]})
    trainer.train()
    tables = sorted((tmp_path / "completions").glob("*.parquet"))
    for step, path in enumerate(tables):
        rows = read_table(path).to_pylist()
        assert len(rows) == GROUP
        assert [row["cut_off"] for row in rows] == [i % 3 == 0 for i in range(GROUP)]
        assert all(row["messages"] == prompts[step] and row["gold_answer"] == str(step + 1) for row in rows)
    group = read_group(tables[1], GROUP, ["reward_parity"])[1]
    assert group.rewards == ["reward_parity"]
    assert [row["cut_off"] for row in group.rows] == [i % 3 == 0 for i in range(GROUP)]


def test_a_column_that_a_reward_logs_is_no_reward(copy: Path) -> None:
    for path in (copy / "completions").glob("*.parquet"):
        table = read_table(path)
        write_table(table.append_column("extracted", [[f"answer {i}" for i in range(len(table))]]), path)
    page = write_report(copy).read_text()
    assert ">reward_parity</th>" in page and "extracted" not in page


def test_the_page_shows_curves_and_groups_and_escapes(run: Path) -> None:
    page = write_report(run).read_text()
    assert page.count("<svg") == 1 and page.count("A group of step ") == 2
    assert "A group of step 1<" in page and "A group of step 2<" in page
    assert "<title>GRPO of tiny on canned: &lt;a run&gt;</title>" in page
    assert "would do" not in page  # a GTPO run: the colours show the weights it used
    drawing = page.partition("<svg")[2].partition("</svg>")[0]
    assert "stroke: currentColor" in drawing and "#000000" not in drawing  # text and axes: readable on a dark page
    assert "fill: #ffffff" not in drawing and "background" not in page.partition("</style>")[0]
    assert 'data-name="reward_parity"' in page  # the label of a value in the stacked table of a narrow page


def test_a_held_out_prompt_stands_above_three_completions(copy: Path, tmp_path: Path) -> None:
    for step in (0, 5, 10, 15, 20):
        prompt = "2 < 3?"
        completion = [{"role": "assistant", "content": f"yes, {step}"}]  # TRL 1.16; 1.14 has text
        text = json.dumps({"step": step, "prompt": prompt, "completion": completion, "rewards": {"parity": step / 10}})
        (copy / "completions" / f"held_out_{step:05d}.json").write_text(text)
    (tmp_path / "other.json").write_text(text.replace("yes, 20", "of another place"))
    (copy / "completions" / "held_out_00025.json").symlink_to(tmp_path / "other.json")
    page = write_report(copy).read_text()
    section = page.split("<h2>One held-out prompt over training</h2>")[1].split("<h2>")[0]
    columns = ["".join(Document(part).text) for part in section.split("<td ")[1:]]
    shown = [column.partition(">")[2] for column in columns]
    assert shown == [f"step {s}parity {s / 10:g}completionyes, {s}" for s in (0, 10, 20)]
    assert section.count("2 &lt; 3?") == 1


@mark.parametrize("text", ["abcd", [{"role": "assistant", "content": "abcd"}]], ids=["text", "TRL 1.16"])
def test_a_stored_table_with_two_groups_shows_the_first(text: Any, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    row = {"step": 7, "prompt": "1 + 1?", "completion": text, "entropy": 0.5, "delta": 1.0, "conflicts": [[1, 3]]}
    rows = [row | {"advantage": advantage, "format": float(i)} for i, advantage in enumerate((1.0, -1.0, 0.0, 0.5))]
    write_table(pyarrow.Table.from_pylist(rows), tmp_path / "table.parquet")
    step, group = read_group(tmp_path / "table.parquet", 2, ["format", "accuracy"])
    assert (step, group.rewards, [row["format"] for row in group.rows]) == (7, ["format"], [0.0, 1.0])
    assert group.rows[0]["spans"] == [("a", 1.0), ("bc", 2.0), ("d", 1.0)]
    assert group.rows[1]["spans"] == [("a", 1.0), ("bc", 0.0), ("d", 1.0)]
    every = read_group(tmp_path / "table.parquet", 4, ["format"])[1]
    assert every.rows[2]["spans"] == [("a", 1.0), ("bc", 1.0), ("d", 1.0)]  # A = 0
    skipped = read_group(tmp_path / "table.parquet", 2, ["format"], positive_weight=1.0)[1]
    assert [row["spans"][1][1] for row in skipped.rows] == [1.0, 0.0]  # --conflict_positive_weight 1


@mark.parametrize("kind", ["truncated", "entropy missing"])
def test_an_unreadable_table_is_skipped_with_a_warning(kind: str, copy: Path, caplog: LogCaptureFixture) -> None:
    """After a kill while it was written, or before compute_loss filled it in."""
    last = max((copy / "completions").glob("*.parquet"))
    rows = read_table(last).to_pylist()
    if kind == "truncated":
        last.write_bytes(last.read_bytes()[:500])
    else:
        write_table(Table.from_pylist([rows[0] | {"entropy": None}, *rows[1:]]), last)
    assert write_report(copy).read_text().count("A group of step ") == 1 and str(last) in caplog.text


def test_missing_rewards_do_not_fail_the_report(copy: Path) -> None:
    """A reward that returns None for a row, and one that a resumed run added."""
    for path in (copy / "completions").glob("*.parquet"):
        rows = read_table(path).to_pylist()
        rows[0]["reward_parity"] = None
        write_table(Table.from_pylist(rows), path)
    lines = [line | {"rewards/other/mean": 1.0} for line in metrics_of(copy)]
    write_lines(copy / "metrics.jsonl", lines)
    page = write_report(copy).read_text()
    assert page.count("A group of step ") == 2 and ">-</td>" in page and "other</th>" not in page


@mark.parametrize("text", HOSTILE)
def test_nothing_that_reaches_the_page_is_markup(text: str, copy: Path) -> None:
    """Run name, model, data, every setting, reward names, and every text of a table of completions."""
    config = read_settings(copy / "config.yaml")
    config |= dict.fromkeys(("run_name", "model", "dataset", "reward", text), text)
    write_settings(copy / "config.yaml", config)
    reward = f"rewards/{text}/mean"
    rows = [line | {reward: 1.0} for line in metrics_of(copy)]
    write_lines(copy / "metrics.jsonl", rows)
    planted = {"step": text, "prompt": text, "completion": text, "gold_answer": text, "conflicts": [[1, 3]]}
    first, last = sorted((copy / "completions").glob("*.parquet"))
    for path, messages in ((first, [{"role": text, "content": text}]), (last, None)):
        stored = [row | planted | {text: 2.0, "messages": messages} for row in read_table(path).to_pylist()]
        write_table(Table.from_pylist(stored), path)
    page = write_report(copy).read_text()
    document = Document(page)
    assert not {"script", "img"} & document.tags and not document.handlers
    seen = "".join(document.text)
    # At least title, settings, steps, a reward's column and score, turns, gold answers and completions.
    assert page.count("<svg") == 1  # no text is mathematics
    assert page.count("A group of step ") == 2 and seen.count(text) > 2 * 3 + 4 + GROUP


class Document(HTMLParser):
    """The tags, event handlers and text of a page as a browser reads them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.handlers: list[str] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_has_settings_problems_scores_and_entropy(copy: Path) -> None:
    page = write_report(copy).read_text()
    assert "<td>num_generations</td><td><code>12</code>" in page
    settings = read_settings(copy / "config.yaml")
    write_settings(copy / "config.yaml", settings | {"gamma": 0.25, "mine": "<1>", "beta": None})
    write_json(copy / "environment.json", {"gpus": [], "cpu_count": 2, "platform": "Linux"})
    changed = write_report(copy).read_text()
    assert "<td>gamma</td><td><code>0.25</code>" in changed and "<td>beta</td>" not in changed
    assert "<td>mine</td><td><code>&lt;1&gt;</code>" in changed  # of an earlier revision
    assert f"python train_gtpo.py --config {copy}/config.yaml --output_dir outputs/NAME" in changed
    steps = [line["step_time"] for line in metrics_of(copy)]
    assert f"Steps took {timedelta(seconds=round(sum(steps)))} in all, {sum(steps) / len(steps):.1f} s each" in changed
    assert "<p>On 2 CPU cores, Linux</p>" in changed and "<p>On " not in page
    write_json(copy / "environment.json", {"git_revision": 3, "cpu_count": 2, "platform": "Linux"})
    write_settings(copy / "config.yaml", settings | {"model": "llama"})
    assert "base model meta-llama/Llama-3.1-8B-Instruct" in write_report(copy).read_text()
    assert "reward_parity" in page and "cut off at" not in page
    write_json(copy / "initial_entropy.json", {"initial_entropy": 0.5, "filter_on": False})
    rows = metrics_of(copy)
    (copy / "metrics.jsonl").write_text(
        "".join(json.dumps(row | {"completions/clipped_ratio": 1.0}) + "\n" for row in rows)
    )
    page = write_report(copy).read_text()
    assert "0.500 nats before training, entropy filter off" in page
    assert "<p>100 % of the completions of steps 1 to 2 were cut off" in page
