"""Records as JSON: what is stored is read and written without a change."""

import json
from pathlib import Path

from helpers.files import read_json

from gtpo.evaluation.records import Entry, Head, Sampling, Scores
from gtpo.evaluation.storage import sampled_as

# An entry of results.json as it is stored: these names may not change.
STORED = read_json(Path(__file__).with_name("stored_entry.json"))


def test_an_entry_is_written_as_it_was_read() -> None:
    entry = Entry.read(json.loads(json.dumps(STORED)))
    assert entry.write() == STORED | {"trained_on": None}
    assert (entry.origin.adapter, entry.per_problem[0].c) == ("outputs/demo/gtpo/adapter", 1)
    assert entry.settings.sampling == Sampling(2, 0.5, 0.9, 1, 64, None, load_in_4bit=True)
    assert entry.settings.prompt.template_kwargs == {"style": "plain"}
    assert entry.strict.means == {"pass": {1: 50.0, 2: 100.0}}
    assert entry.lenient == Scores({"pass": {1: 100.0, 2: 100.0}}, {"pass": {1: [2.5, 100.0]}})
    earlier = {name: value for name, value in STORED.items() if name not in ("data", "dropped", "graded_by")}
    assert Entry.read(earlier).write() == entry.write() | {"data": {}, "dropped": {}, "graded_by": {}}


def test_an_entry_by_another_grader_has_no_lenient_scores() -> None:
    scores = {name: value for name, value in STORED["scores"].items() if name != "pass_lenient"}
    stored = STORED | {"scores": scores, "intervals": {"pass": STORED["intervals"]["pass"]}}
    entry = Entry.read(stored)
    assert entry.lenient is None and entry.strict.means == {"pass": {1: 50.0, 2: 100.0}}
    assert entry.write() == stored | {"trained_on": None}


def test_scores_without_settings_are_of_unknown_sampling() -> None:
    """They are not those of the default settings; a setting that was not stored yet has its default."""
    bare = {name: value for name, value in STORED.items() if name != "settings"}
    assert not sampled_as(Head.of_entry(bare).settings, ["--k", "64"])
    assert sampled_as(Head.of_entry(bare | {"settings": {"temperature": 1.0}}).settings, ["--k", "64"])
    assert not sampled_as(Head.of_entry(bare | {"settings": {"temperature": 0.5}}).settings, ["--temperature", "1.0"])
