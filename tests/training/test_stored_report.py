"""A run's completions table and report page: values belong to the right completion, although rows are shuffled."""

import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from datasets import Dataset
from helpers import canned
from helpers.canned import GROUP, canned_group, make_trainer
from helpers.files import read_settings, write_lines, write_settings
from helpers.hostile_html import HOSTILE
from helpers.reference import naive_completion_entropy, naive_conflict_mask, naive_entropy_filter
from helpers.runs import metrics_of
from pyarrow import Table
from pyarrow.parquet import read_table, write_table
from pytest import CaptureFixture, LogCaptureFixture, MonkeyPatch, TempPathFactory, approx, fixture, mark
from test_trainer import plain_logps_and_entropy

from gtpo.prompts import to_messages
from gtpo.reports import html
from gtpo.reports.html import logged_text, read_group, write_report
from gtpo.runs.directory import RunDirectory
from gtpo.training.batch import padded_batch
from gtpo.training.metrics_writer import MetricsWriter

PROMPTS = [to_messages(f"{i} + 1?") for i in range(8)]


def some_cut(step: int, size: int = GROUP) -> list[list[int]]:
    """A third of the completions lacks the end token."""
    return [ids if i % 3 else ids[:-1] for i, ids in enumerate(canned_group(step, size))]


@fixture(scope="module")
def run(tiny: Path, tmp_path_factory: TempPathFactory) -> Path:
    """A run of two steps in micro-batches, whose rows TRL shuffles, with its completions table and metrics."""
    directory = tmp_path_factory.mktemp("run")
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "max_steps": 2}
    trainer = make_trainer("gtpo", tiny, directory, log_completions=True, num_completions_to_print=0, **settings)
    trainer.train_dataset = Dataset.from_dict({"prompt": PROMPTS, "answer": [str(i + 1) for i in range(8)]})
    trainer.add_callback(MetricsWriter(RunDirectory(directory)))
    with MonkeyPatch.context() as patch:
        patch.setattr(canned, "canned_group", some_cut)
        trainer.train()
    config = {"run_name": "<a run>", "model": "tiny", "dataset": "canned", "num_generations": GROUP}
    write_settings(directory / "config.yaml", config | {"conflict_correction": True})
    return directory


@fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """The run, to be changed."""
    return shutil.copytree(run, tmp_path / "run")


def tables(run: Path) -> list[tuple[Path, list[dict[str, Any]]]]:
    """The files of its completions and their rows, step by step."""
    return [(path, read_table(path).to_pylist()) for path in RunDirectory(run).completion_tables()]


def store(rows: list[dict[str, Any]], path: Path) -> None:
    write_table(Table.from_pylist(rows), path)


@fixture
def without_curves(monkeypatch: MonkeyPatch) -> None:
    """What is tested is beside them, and a drawing takes longer than the rest of the page."""
    monkeypatch.setattr(html, "_curves", lambda *_: "")


def test_each_completion_has_its_own_entropy_delta_and_spans(run: Path, build: Any) -> None:
    (_, rows), _ = tables(run)
    untrained, completions = build("gtpo"), some_cut(0)
    prompt_ids, *_ = untrained._tokenize_prompts(PROMPTS[:1] * GROUP)
    batch = padded_batch(prompt_ids, completions, 0, untrained.accelerator.device)
    entropy = naive_completion_entropy(plain_logps_and_entropy(untrained, batch)[1])
    advantages = [row["advantage"] for row in rows]
    masks = naive_conflict_mask(completions, advantages, GROUP)
    assert [row["entropy"] for row in rows] == approx(entropy, abs=1e-4)
    delta = naive_entropy_filter(entropy, advantages, 0.1, 5.05, "auto")
    assert 0 < sum(delta) < GROUP and [row["delta"] for row in rows] == delta
    for row, ids, mask in zip(rows, completions, masks, strict=True):
        inside = "".join(logged_text(row["completion"])[start:end] for start, end in row["conflicts"])
        marked = [token for token, conflict in zip(ids, mask, strict=True) if conflict]
        assert inside == untrained.processing_class.decode(marked, skip_special_tokens=True)


def test_the_table_has_turns_gold_answer_and_cut_off(run: Path) -> None:
    for step, (_, rows) in enumerate(tables(run)):
        assert [row["cut_off"] for row in rows] == [i % 3 == 0 for i in range(GROUP)]
        assert all(row["messages"] == PROMPTS[step] and row["gold_answer"] == str(step + 1) for row in rows)


@mark.usefixtures("without_curves")
def test_columns_of_rewards_are_those_of_the_metrics(copy: Path) -> None:
    """Not what a reward logs, nor a reward that a resumed run added; one may return None for a row."""
    for path, rows in tables(copy):
        rows[0]["reward_parity"] = None
        store([row | {"extracted": "an answer"} for row in rows], path)
    write_lines(copy / "metrics.jsonl", [line | {"rewards/other/mean": 1.0} for line in metrics_of(copy)])
    page = write_report(copy).read_text()
    assert ">reward_parity</th>" in page and ">-</td>" in page
    assert "extracted" not in page and "other</th>" not in page


def test_the_page_shows_curves_and_groups_and_escapes(run: Path) -> None:
    page = write_report(run).read_text()
    assert "A group of step 1<" in page and "A group of step 2<" in page
    assert "<title>GRPO of tiny on canned: &lt;a run&gt;</title>" in page
    assert "would do" not in page  # a GTPO run: the colours show the weights it used
    drawing = page.partition("<svg")[2].partition("</svg>")[0]
    assert "stroke: currentColor" in drawing and "#000000" not in drawing  # text and axes: readable on a dark page
    assert "fill: #ffffff" not in drawing and "background" not in page.partition("</style>")[0]
    assert 'data-name="reward_parity"' in page  # the label of a value in the stacked table of a narrow page


@mark.parametrize("text", ["abcd", [{"role": "assistant", "content": "abcd"}]], ids=["text", "TRL 1.16"])
def test_a_stored_table_with_two_groups_shows_the_first(text: Any, tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    row = {"step": 7, "prompt": "1 + 1?", "completion": text, "entropy": 0.5, "delta": 1.0, "conflicts": [[1, 3]]}
    store([row | {"advantage": advantage, "format": advantage} for advantage in (1.0, -1.0, 0.0, 0.5)], path)
    step, group = read_group(path, 2, ["format", "accuracy"])
    assert (step, group.rewards, [row["format"] for row in group.rows]) == (7, ["format"], [1.0, -1.0])
    assert group.rows[0]["spans"] == [("a", 1.0), ("bc", 2.0), ("d", 1.0)]
    weights = {2.0: [2.0, 0.0, 1.0, 2.0], 1.0: [1.0, 0.0, 1.0, 1.0]}  # --conflict_positive_weight
    for positive_weight, expected in weights.items():
        _, every = read_group(path, 4, [], positive_weight)
        assert [row["spans"][1] for row in every.rows] == [("bc", weight) for weight in expected]


@mark.usefixtures("without_curves")
@mark.parametrize("kind", ["truncated", "entropy missing"])
def test_an_unreadable_table_is_skipped_with_a_warning(kind: str, copy: Path, caplog: LogCaptureFixture) -> None:
    """After a kill while it was written, or of another program."""
    path, rows = tables(copy)[-1]
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:500])
    else:
        store([{name: value for name, value in row.items() if name != "entropy"} for row in rows], path)
    assert write_report(copy).read_text().count("A group of step ") == 1 and str(path) in caplog.text


@mark.usefixtures("without_curves")
def test_the_first_middle_and_last_table_of_each_run_are_shown(
    copy: Path, run: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    """The command writes the page of one run after the other."""
    first, rows = tables(copy)[0]
    for step in range(3, 7):
        store([row | {"step": step} for row in rows], first.with_name(f"completions_0000{step}.parquet"))
    monkeypatch.setattr(sys, "argv", ["html", str(copy), str(run)])
    html.main()
    assert capsys.readouterr().out.split() == [f"{copy}/report.html", f"{run}/report.html"]
    shown = [re.findall(r"A group of step (\d)<", (place / "report.html").read_text()) for place in (copy, run)]
    assert shown == [["1", "4", "6"], ["1", "2"]]


@mark.parametrize("text", HOSTILE)
def test_nothing_that_reaches_the_page_is_markup(text: str, copy: Path) -> None:
    """Run name, model, data, every setting, reward names, and every text of a table of completions."""
    config = read_settings(copy / "config.yaml")
    named = dict.fromkeys(("run_name", "model", "dataset", "reward", text), text)
    write_settings(copy / "config.yaml", config | named)
    write_lines(copy / "metrics.jsonl", [line | {f"rewards/{text}/mean": 1.0} for line in metrics_of(copy)])
    planted = dict.fromkeys(("step", "prompt", "completion", "gold_answer"), text) | {"conflicts": [[1, 3]], text: 2.0}
    turns = [{"role": text, "content": text}], None
    for (path, rows), messages in zip(tables(copy), turns, strict=True):
        store([row | planted | {"messages": messages} for row in rows], path)
    page = write_report(copy).read_text()
    document = Document(page)
    assert not {"script", "img"} & document.tags
    assert not [name for name in document.attributes if name.startswith("on")]
    # At least title, steps, a reward's column and score, turns, gold answers and completions.
    assert page.count("<svg") == 1  # no text is mathematics
    assert page.count("A group of step ") == 2 and document.text.count(text) > 2 * 3 + 4 + GROUP


class Document(HTMLParser):
    """The tags, names of attributes and text of a page as a browser reads them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.text = set(), set(), ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(dict(attrs))

    def handle_data(self, data: str) -> None:
        self.text += data


@mark.usefixtures("without_curves")
def test_the_page_has_problems_and_the_command(copy: Path) -> None:
    assert "cut off at" not in write_report(copy).read_text()
    write_settings(copy / "config.yaml", read_settings(copy / "config.yaml") | {"gamma": 0.25})
    write_lines(copy / "metrics.jsonl", [line | {"completions/clipped_ratio": 1.0} for line in metrics_of(copy)])
    page = write_report(copy).read_text()
    assert f"python train_gtpo.py --config {copy}/config.yaml --output_dir outputs/NAME" in page
    assert "<p>100 % of the completions of steps 1 to 2 were cut off" in page


@mark.usefixtures("without_curves")
def test_a_table_is_written_when_the_loss_has_used_all_of_it(
    tiny: Path, tmp_path: Path, caplog: LogCaptureFixture
) -> None:
    """Of a generation for two updates; that of the run's last step has what is known, which the page shows."""
    logged = {"log_completions": True, "num_completions_to_print": 0}
    settings = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    trainer = make_trainer("gtpo", tiny, tmp_path, max_steps=5, **logged, **settings)
    trainer.add_callback(MetricsWriter(RunDirectory(tmp_path)))
    trainer.train()
    found = {int(path.stem.rpartition("_")[2]): rows for path, rows in tables(tmp_path)}
    assert [*found] == [2, 4, 5]
    for step, rows in found.items():
        unknown = [row for row in rows if row["entropy"] is None or row["entropy"] != row["entropy"]]
        assert len(rows) == GROUP and len(unknown) == (GROUP // 2 if step == 5 else 0)
    one = make_trainer("gtpo", tiny, tmp_path / "one", max_steps=1, **logged)  # the same first weights
    one.train()
    [(_, of_one)] = tables(tmp_path / "one")
    same = [a["entropy"] == approx(b["entropy"], rel=1e-5) for a, b in zip(found[2], of_one, strict=True)]
    assert [row["completion"] for row in found[2]] == [row["completion"] for row in of_one]
    assert sum(same) == GROUP // 2  # those of its first update
    config = {"run_name": "a", "model": "tiny", "dataset": "canned", "num_generations": GROUP}
    write_settings(tmp_path / "config.yaml", config | {"conflict_correction": True})
    page = write_report(tmp_path).read_text()
    assert "is not shown" not in caplog.text and page.count('data-name="⟨H⟩"') == 3 * GROUP
    assert page.count('white-space: nowrap">-</td>') == GROUP // 2


def test_a_step_that_spans_two_generations_fills_the_newer_table_with_its_own(tiny: Path, tmp_path: Path) -> None:
    """Three micro-batches a generation, two a step: the second step has the end of one and the start of another."""
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 3}
    settings |= {"max_steps": 2, "num_completions_to_print": 0}
    trainer = make_trainer("gtpo", tiny, tmp_path, log_completions=True, learning_rate=0.0, **settings)
    trainer.train()
    [(_, rows)] = tables(tmp_path)
    assert sum(row["entropy"] == row["entropy"] and row["entropy"] is not None for row in rows) == 4
