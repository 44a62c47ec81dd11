"""Records as JSON: what is stored is read and written without a change, and damage is named."""

import json
from typing import Any

import pytest

from gtpo.evaluation.records import Entry, Head

# An entry of results.json as it is stored: these names may not change.
STORED: dict[str, Any] = {
    "label": "demo-gtpo",
    "benchmark": "arithmetic",
    "problems": 1,
    "dropped": {"with an empty answer": 1},
    "k": 2,
    "scores": {"pass": {"1": 50.0, "2": 100.0}, "format": 100.0, "tokens": 31.5},
    "intervals": {"pass": {"1": [0.0, 97.5], "2": [2.5, 100.0]}},
    "settings": {"benchmark": "arithmetic", "problems": 1, "problems_hash": "7c0e", "k": 2, "batch_size": None},
    "model": "outputs/tiny/base-1",
    "adapter": "outputs/demo/gtpo/adapter",
    "checkpoint": "last",
    "environment": {"packages": {"torch": "2"}},
    "data": {"source": "arithmetic", "data_dir": None, "judge": None},
    "graded_by": {"git_revision": None, "math-verify": "0.8", "timeouts": 0},
    "per_problem": [
        {
            "id": "arithmetic/0",
            "gold": "4",
            "n": 2,
            "c": 1,
            "formatted": 2,
            "correct": "01",
            "correct_lenient": "11",
            "majority": "00",
        }
    ],
}


def test_an_entry_is_written_as_it_was_read() -> None:
    entry = Entry.read(json.loads(json.dumps(STORED)))
    assert json.dumps(entry.write()) == json.dumps(STORED)  # in the same order
    assert (entry.origin.adapter, entry.per_problem[0].c) == ("outputs/demo/gtpo/adapter", 1)
    by_user = STORED | {"per_problem": [{k: v for k, v in STORED["per_problem"][0].items() if k != "correct_lenient"}]}
    assert Entry.read(by_user).write() == by_user
    earlier = {name: value for name, value in STORED.items() if name not in ("data", "dropped", "graded_by")}
    assert Entry.read(earlier).write() == earlier | {"data": {}, "dropped": {}, "graded_by": {}}


def test_the_first_line_of_a_completion_file_is_written_as_it_was_read() -> None:
    about = {name: STORED[name] for name in ("model", "adapter", "checkpoint", "environment", "data")}
    line = {"settings": STORED["settings"], "about": about}
    assert json.dumps(Head.read(line).write()) == json.dumps(line)
    for damaged in ({"about": about}, {"settings": {}}, {"settings": {}, "about": {}}):
        with pytest.raises((KeyError, TypeError)):
            Head.read(damaged)


@pytest.mark.parametrize("changes", [{"correct": "010"}, {"majority": "0"}, {"id": None}])
def test_a_problem_with_other_digits_or_without_a_key_is_refused(changes: dict[str, Any]) -> None:
    problem = {name: value for name, value in (STORED["per_problem"][0] | changes).items() if value is not None}
    with pytest.raises((TypeError, ValueError), match=r"its problems do not have 2 samples|missing .* 'id'"):
        Entry.read(STORED | {"per_problem": [problem]})


@pytest.mark.parametrize("name", ["label", "benchmark", "problems", "k", "scores", "intervals", "settings", "model"])
def test_an_entry_without_a_key_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"missing .*'{name}'"):
        Entry.read({key: value for key, value in STORED.items() if key != name})
