"""The README: short, and with the numbers of the stored demo. Its commands: tests/docs/test_docs_commands.py."""

import re

from helpers.files import read_json
from helpers.scripts import ROOT

README = (ROOT / "README.md").read_text()


def test_the_demo_in_the_readme_is_the_stored_one() -> None:
    stored = read_json(ROOT / "results/demo/summary.json")
    shown = re.findall(r"^  (\w+) +\(%\)  (\w+) +([\d.]+) +([\d.]+)$", README, re.MULTILINE)
    assert len(shown) == 4
    for name, way, *numbers in shown:
        expected = [f"{stored[f'{name}_{when}_{way}']:.1f}" for when in ("before", "after")]
        assert numbers == expected


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 115


def test_the_readme_names_no_machine() -> None:
    """Neither its paths nor the host of its package index."""
    assert not re.findall(r"/(?:work|tmp|home|root|mnt)/|\.local\b|simple/|index-url", README)
