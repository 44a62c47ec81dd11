"""Where a result comes from: the git revision."""

from pathlib import Path

from helpers.scripts import run_process
from pytest import MonkeyPatch

from gtpo.runs import provenance
from gtpo.runs.provenance import git_revision


def test_the_git_revision_of_a_changed_checkout_is_dirty(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    file = tmp_path / "runs.py"
    file.write_text("old\n")
    identity = ("-c", "user.name=name", "-c", "user.email=name@example.com")
    for command in ("init", "add runs.py", "commit -m message", "tag -a v1 -m message", "rev-parse HEAD"):
        done = run_process(["git", *identity, *command.split()], cwd=tmp_path)
    commit = done.stdout.strip()
    monkeypatch.setattr(provenance, "__file__", str(file))
    assert git_revision() == commit
    file.write_text("new\n")
    assert git_revision() == f"{commit}-dirty"
