"""One group as HTML: what is coloured, struck out and escaped; and a group that a trainer samples."""

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from canned import GROUP, _Canned, canned_group, make_trainer
from reference import naive_conflict_mask, naive_conflict_weights

from config import UsageError
from report import GroupView, group_html, group_of

GREEN, GREY, PLAIN = "rgba(46, 160, 67, 0.4)", "rgba(128, 128, 128, 0.4)", None

VIEW = GroupView(
    prompt="<s>How many?\nSay it.",
    tokens=[["<answer>", "\n", "1", "</s>"], ["<answer>", "2", "</s>"], ["3"]],
    rewards={"format": [10.0, 1.0, 0.0], "accuracy": [10.0, 0.0, 2.5]},
    advantages=[-0.5, 1.25, 0.0],
    weights=[[0.0, 0.0, 1.0, 0.0], [2.0, 1.0, 2.0], [1.0]],
    entropy=[0.1, 0.75, 0.6931],
    delta=[1.0, 0.0, 1.0],
)


class Table(HTMLParser):
    """What a browser would show: per row the cells' texts, and per completion its pieces with colour and strike."""

    void = frozenset({"br", "meta", "img", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.pieces: list[list[tuple[str, str | None, bool]]] = []
        self.tags: set[str] = set()
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.open.append((tag, dict(attrs).get("style") or ""))
        if tag == "tr":
            self.rows.append([])
            self.pieces.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        names = [tag for tag, _ in self.open]
        if "td" in names or "th" in names:
            self.rows[-1][-1] += data
        if "td" in names and "code" in names:
            colours = [match[1] for tag, style in self.open if (match := re.fullmatch("background: (.*)", style))]
            self.pieces[-1].append((data, colours[-1] if colours else PLAIN, "s" in names))


def test_a_row_is_a_completion_and_the_best_comes_first() -> None:
    header, *rows = Table(group_html(VIEW)).rows
    assert header == ["A", "format", "accuracy", "⟨H⟩", "completion"]
    assert rows == [
        ["+1.25", "1", "0", "0.750", "<answer>2</s>"],
        ["+0.00", "0", "2.5", "0.693", "3"],
        ["-0.50", "10", "10", "0.100", "<answer>↵1</s>"],
    ]


def test_tokens_are_coloured_by_their_weight_alone() -> None:
    kept = dataclasses.replace(VIEW, delta=[1.0, 1.0, 1.0])
    assert Table(group_html(kept)).pieces[1:] == [
        [("<answer>", GREEN, False), ("2", PLAIN, False), ("</s>", GREEN, False)],
        [("3", PLAIN, False)],
        [("<answer>↵", GREY, False), ("1", PLAIN, False), ("</s>", GREY, False)],
    ]


def test_other_weights_are_plain() -> None:
    view = dataclasses.replace(VIEW, weights=[[0.5, 1.5, 3.0, 4.0], [1.0, 1.0, 1.0], [1.0]])
    assert {colour for row in Table(group_html(view)).pieces for _, colour, _ in row} == {PLAIN}


def test_filtered_completions_are_struck_out_and_keep_their_colours() -> None:
    pieces = Table(group_html(VIEW)).pieces[1:]
    assert pieces[0] == [("<answer>", GREEN, True), ("2", PLAIN, True), ("</s>", GREEN, True)]
    assert not any(struck for row in pieces[1:] for _, _, struck in row)


def test_legend_is_one_line_and_shows_the_colours() -> None:
    legend = group_html(VIEW).rpartition("<p>")[2]
    assert GREEN in legend and GREY in legend and "<s>" in legend
    assert "\n" not in legend and "<br" not in legend


HOSTILE = [
    "<script>alert(1)</script>",
    "</code></td></table><b>out</b>",
    '"><img src=x onerror="alert(1)">',
    "&lt;b&gt; &amp; & &#60;",
    "<!-- ",
    "]]> <![CDATA[",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_everything_is_escaped(text: str) -> None:
    view = GroupView(text, [[text[:3], text[3:]]], {text: [1.0]}, [0.0], [[1.0, 1.0]], [0.5], [1.0])
    table = Table(group_html(view))
    assert table.rows == [["A", text, "⟨H⟩", "completion"], ["+0.00", "1", "0.500", text]]
    assert table.tags <= {"div", "p", "code", "table", "thead", "tbody", "tr", "th", "td", "span", "s"}
    prompt = group_html(dataclasses.replace(view, tokens=[["x"]], weights=[[1.0]], rewards={}))
    assert text not in prompt and Table(prompt).tags <= table.tags


def test_text_has_the_colour_of_the_page() -> None:
    """A notebook may be light or dark: only translucent backgrounds, and no colour of text."""
    styles = re.findall('style="([^"]*)"', group_html(VIEW))
    rules = [rule.strip() for style in styles for rule in style.split(";")]
    assert {rule for rule in rules if rule.startswith("color")} == {"color: inherit"}
    assert {rule for rule in rules if rule.startswith("background")} == {
        *(f"background: {colour}" for colour in (GREEN, GREY)),
        "background: none",
    }


def test_lists_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError):
        group_html(dataclasses.replace(VIEW, weights=[[0.0], [2.0, 1.0, 2.0], [1.0]]))


# ---- a group of a trainer ----


@pytest.mark.parametrize("method", ["gtpo", "grpo"])
def test_group_of_a_trainer(method: str, tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer(method, tiny, tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=3)
    entropies = sorted(group_of(trainer, 1).entropy)
    threshold = (entropies[3] + entropies[4]) / 2 if method == "gtpo" else float("inf")
    if method == "gtpo":
        trainer.gtpo.entropy_threshold = threshold
    view = group_of(trainer, 1)
    completions = canned_group(0)
    tokenizer = trainer.processing_class
    assert view.prompt == tokenizer.decode(tokenizer(trainer.train_dataset[1]["prompt"])["input_ids"])
    assert [len(tokens) for tokens in view.tokens] == [len(ids) for ids in completions]
    assert ["".join(tokens) for tokens in view.tokens] == [tokenizer.decode(ids) for ids in completions]
    assert view.rewards == {"reward_parity": [float(sum(ids) % 3) for ids in completions]}
    rewards = torch.tensor(view.rewards["reward_parity"])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert view.advantages == pytest.approx(expected.tolist(), abs=1e-5)
    mask = naive_conflict_mask(completions, view.advantages, GROUP)
    naive = naive_conflict_weights(mask, view.advantages)
    assert view.weights == (naive if method == "gtpo" else [[1.0] * len(ids) for ids in completions])
    assert {0.0, 1.0, 2.0} == {weight for row in naive for weight in row}  # the case has all three
    assert view.delta == [float(entropy <= threshold) for entropy in view.entropy]
    assert sum(view.delta) == (4 if method == "gtpo" else GROUP)
    assert Table(group_html(view)).rows[1:]


def test_what_is_shown_is_what_the_training_step_logs(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path, learning_rate=0.0)
    trainer.train_dataset = trainer.train_dataset.select([0])  # the prompt of the step
    trainer.gtpo.entropy_threshold = sorted(group_of(trainer, 0).entropy)[GROUP // 2]
    view = group_of(trainer, 0)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["entropy"] == pytest.approx(sum(view.entropy) / GROUP, abs=1e-5)
    assert 0 < log["filtered_fraction"] == pytest.approx(view.delta.count(0.0) / GROUP)
    coloured = sum(weight != 1 for row in view.weights for weight in row)
    assert 0 < coloured <= round(log["conflict_tokens"] * GROUP)  # a token of A = 0 is on the mask with weight 1


@pytest.mark.parametrize("method", ["gtpo", "grpo"])
def test_a_look_leaves_no_trace(method: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_Canned, "_generate_single_turn")  # sample from the policy: the random generator matters

    def trained(look: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        settings = {"log_completions": True, "num_completions_to_print": 0, "max_completion_length": 6, "max_steps": 2}
        trainer = make_trainer(method, tiny, tmp_path / str(look), **settings)
        before = torch.random.get_rng_state()
        if look:
            was_training = trainer.model.training
            assert group_of(trainer, 5) == group_of(trainer, 5)
            assert trainer.model.training == was_training
            assert not trainer._logs["prompt"] and trainer.state.num_input_tokens_seen == 0
            assert all(weight.grad is None for weight in trainer.model.parameters())
        assert torch.equal(before, torch.random.get_rng_state())
        trainer.train()
        times = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
        logs = [{key: value for key, value in row.items() if key not in times} for row in trainer.state.log_history]
        weights = {n: w.detach().clone() for n, w in trainer.model.named_parameters() if w.requires_grad}
        table = pandas.concat(map(pandas.read_parquet, sorted((tmp_path / str(look) / "completions").iterdir())))
        return {"logs": logs, "completions": table.to_csv(index=False)}, weights

    (plain_traces, plain), (looked_traces, looked) = trained(False), trained(True)
    assert plain_traces == looked_traces
    assert all(torch.equal(plain[name], looked[name]) for name in plain)


def test_several_processes_are_refused(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer("grpo", tiny, tmp_path)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    with pytest.raises(UsageError, match="from one process, and 2"):
        group_of(trainer, 0)


def test_tokens_keep_their_space_and_special_tokens(tiny: Path, tmp_path: Path) -> None:
    from report import _texts

    tokenizer = make_trainer("grpo", tiny, tmp_path).processing_class
    text = "<reasoning>\n3 + 4 = 7\n</reasoning> Ann has more."
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    assert "".join(_texts(tokenizer, ids)) == text + "</s>"
    assert _texts(tokenizer, ids)[-1] == "</s>"
    assert _texts(tokenizer, []) == []
