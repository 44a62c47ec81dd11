"""Records as JSON: what is stored is read and written without a change."""

import json
from pathlib import Path

from helpers.files import read_json

from gtpo.evaluation.records import Entry

# An entry of results.json as it is stored: these names may not change.
STORED = read_json(Path(__file__).with_name("stored_entry.json"))


def test_an_entry_is_written_as_it_was_read() -> None:
    entry = Entry.read(json.loads(json.dumps(STORED)))
    assert json.dumps(entry.write()) == json.dumps(STORED)  # in the same order
    assert (entry.origin.adapter, entry.per_problem[0].c) == ("outputs/demo/gtpo/adapter", 1)
    by_user = STORED | {"per_problem": [{k: v for k, v in STORED["per_problem"][0].items() if k != "correct_lenient"}]}
    assert Entry.read(by_user).write() == by_user
    earlier = {name: value for name, value in STORED.items() if name not in ("data", "dropped", "graded_by")}
    assert Entry.read(earlier).write() == earlier | {"data": {}, "dropped": {}, "graded_by": {}}
