"""One-step effects: which policies there are, what is stored and shown of their groups."""

from typing import Any

import pytest
from helpers.refusals import refused

from study.mechanism import policies_of, summarize
from study.rendering import render


def group(number: int, grpo: float, gtpo: float) -> dict[str, Any]:
    effects = {
        name: {"tags": value, "answer": 2 * value, "norm": 1.0} for name, value in (("GRPO", grpo), ("GTPO", gtpo))
    }
    line = {"group": number, "format_reward": 1.0, "accuracy_reward": number / 4}
    return line | {"effects": effects}


NOTHING = {"group": 9, "format_reward": 1.0, "accuracy_reward": 0.0, "effects": {}}
GROUPS = [group(0, -1.0, 2.0), group(1, -2.0, 3.0), group(2, -3.0, 1.0), group(3, 2.0, 2.0)]


def test_effects_by_hand() -> None:
    """Of -1, -2, -3, 2 the mean is -1; the differences 3, 5, 4, 0 have mean 3 and t(3) = 3.182 times 2.160 / 2."""
    summary = summarize([*GROUPS, NOTHING])
    assert (summary["groups"], summary["informative"]) == (5, 4)
    assert summary["rewards"] == {"format_reward": 1.0, "accuracy_reward": pytest.approx(0.3)}
    rows = {(row["objective"], row["target"]): row for row in summary["rows"]}
    assert rows.keys() == {(objective, target) for objective in ("GRPO", "GTPO") for target in ("tags", "answer")}
    row = rows["GTPO", "tags"]
    assert (row["number"], row["mean"]) == (4, 2.0)
    assert row["minus_grpo"] == [3.0, pytest.approx(3.1824 * 2.1602 / 2, abs=1e-3)]
    row = rows["GRPO", "answer"]
    assert (row["mean"], row["half_width"]) == (-2.0, pytest.approx(3.1824 * 2.1602, abs=1e-3))


def test_the_page_shows_what_there_is() -> None:
    """Groups without tags of the policy's own have dashes."""
    text = render("mechanism.template.md", {"mechanism": {"tiny-base": summarize([*GROUPS, NOTHING])}})
    assert "| the tiny model at its start | 5, 4 | -1000.00 ± 3437.00 | +3000.00 ± 3437.00 | - | - |" in text


def test_the_list_names_the_run_that_is_trained_first(sandbox: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert sandbox.study("mechanism", "--only", "tiny", "--list") == 0
    *policies, run = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in policies] == ["tiny base", "tiny step 40", "tiny step 120"]
    assert run.split() == ["grpo-1e-3-s1", "missing", "0.36", "CPU", "minutes"]  # 0.3 for 100 steps


def test_policies_are_found_by_a_part_of_their_name() -> None:
    assert [policy.name for policy in policies_of(["tiny step"])] == ["tiny step 40", "tiny step 120"]
    with refused("nothing"):
        policies_of(["nothing"])
