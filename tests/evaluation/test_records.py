"""Records as JSON: what is stored is read and written without a change."""

import json
from pathlib import Path

from helpers.files import read_json

from gtpo.evaluation.records import Entry

# An entry of results.json as it is stored: these names may not change.
STORED = read_json(Path(__file__).with_name("stored_entry.json"))


def test_an_entry_is_written_as_it_was_read() -> None:
    entry = Entry.read(json.loads(json.dumps(STORED)))
    assert entry.write() == STORED | {"trained_on": None}
    assert (entry.origin.adapter, entry.per_problem[0].c) == ("outputs/demo/gtpo/adapter", 1)
    earlier = {name: value for name, value in STORED.items() if name not in ("data", "dropped", "graded_by")}
    assert Entry.read(earlier).write() == entry.write() | {"data": {}, "dropped": {}, "graded_by": {}}
