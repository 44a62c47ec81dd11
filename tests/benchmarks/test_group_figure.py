"""The figure of the README: its completions, their order and their colors."""

import sys
from pathlib import Path
from typing import Any

import pytest

from gtpo.reports.groups import Group

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from group_figure import COLORS, draw_group

GROUP = Group(
    prompt="",
    messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "1 + 1?"}],
    gold_answer="2",
    tokens=[["<a>", "no"], ["<a>", "2"], ["<a>", "3"]],
    rewards={"format_reward": [1.0, 10.0, 10.0], "accuracy_reward": [0.0, 10.0, 0.0]},
    advantages=[-1.5, 1.0, 0.5],
    weights=[[0.0, 1.0], [2.0, 1.0], [2.0, 1.0]],
    entropy=[0.1] * 3,
    keep=[1.0] * 3,
)


def test_rows_are_by_advantage_and_colors_are_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (drawn.append(self), save(self, *args, **kw))[1])
    draw_group(GROUP, [0, 2], str(tmp_path / "group.png"))
    assert (tmp_path / "group.png").stat().st_size > 3000
    (axis,) = drawn[0].axes
    texts = [text.get_text() for text in axis.texts]
    assert texts[0] == "1 + 1?  (right answer: 2)"
    assert texts[5:15] == ["+1.00", "10", "10", "<a>", "2", "-1.50", "1", "0", "<a>", "no"]
    boxes: list[Any] = [patch.get_facecolor() for patch in axis.patches]
    from matplotlib.colors import to_rgba

    assert boxes == [to_rgba(COLORS[2.0]), to_rgba("none"), to_rgba(COLORS[0.0]), to_rgba("none")]
