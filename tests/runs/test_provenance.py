"""Where a result comes from: the git revision."""

from pathlib import Path

import pytest
from helpers.scripts import run_process

from gtpo.runs import provenance
from gtpo.runs.provenance import git_revision


def test_the_git_revision_of_a_changed_checkout_is_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*argv: str) -> str:
        identity = ("-c", "user.name=name", "-c", "user.email=name@example.com")
        return run_process(["git", *identity, *argv], cwd=tmp_path).stdout

    (tmp_path / "runs.py").write_text("old\n")
    for command in (("init",), ("add", "runs.py"), ("commit", "-m", "message"), ("tag", "-a", "v1", "-m", "message")):
        git(*command)
    commit = git("rev-parse", "HEAD").strip()
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "runs.py"))
    assert git_revision() == commit
    (tmp_path / "runs.py").write_text("new\n")
    assert git_revision() == f"{commit}-dirty"
