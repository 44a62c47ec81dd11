"""Records as JSON: what is stored is read and written without a change, and damage is named."""

import json
from typing import Any

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
    "data": {"source": "arithmetic", "data_dir": None, "grader": None},
    "graded_by": {"git_revision": None, "math-verify": "0.8", "timeouts": 0},
    "per_problem": [
        {"id": "arithmetic/0", "gold": "4", "n": 2, "c": 1, "formatted": 2}
        | {"correct": "01", "correct_lenient": "11", "majority": "00"}
    ],
}
ABOUT = {name: STORED[name] for name in ("model", "adapter", "checkpoint", "environment", "data")}


def test_an_entry_is_written_as_it_was_read() -> None:
    entry = Entry.read(json.loads(json.dumps(STORED)))
    assert json.dumps(entry.write()) == json.dumps(STORED)  # in the same order
    assert (entry.origin.adapter, entry.per_problem[0].c) == ("outputs/demo/gtpo/adapter", 1)
    by_user = STORED | {"per_problem": [{k: v for k, v in STORED["per_problem"][0].items() if k != "correct_lenient"}]}
    assert Entry.read(by_user).write() == by_user
    earlier = {name: value for name, value in STORED.items() if name not in ("data", "dropped", "graded_by")}
    assert Entry.read(earlier).write() == earlier | {"data": {}, "dropped": {}, "graded_by": {}}


def test_settings_are_written_as_they_were_read_and_judge_is_a_name_of_grader() -> None:
    line = {"settings": STORED["settings"], "about": ABOUT}
    assert json.dumps(Head.read(line).write()) == json.dumps(line)
    judged = {"source": "mine.csv", "judge": "own.py:f"}
    for record in (Head.read(line | {"about": ABOUT | {"data": judged}}), Entry.read(STORED | {"data": judged})):
        assert record.origin.data == {"source": "mine.csv", "grader": "own.py:f"}
