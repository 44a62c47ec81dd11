"""Security: remote code is not run, secrets are not stored, a printed command can be pasted."""

import ast
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.runs import fake_run
from helpers.scripts import ROOT
from helpers.settings import parsed
from pytest import MonkeyPatch

from gtpo.errors import RunError, UsageError
from gtpo.reports.wandb import start_wandb
from gtpo.runs.directory import RunDirectory, command_of


def test_no_auto_class_runs_remote_code() -> None:
    """Without the argument Transformers asks on the terminal whether to run the code of a model."""
    calls = [
        (path.name, node.lineno, ast.unparse(node))
        for path in [*ROOT.glob("*.py"), *ROOT.glob("gtpo/**/*.py")]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and re.match(r"Auto\w+\.from|FastLanguageModel\.from|LLM", ast.unparse(node.func))
    ]
    assert len(calls) >= 9
    assert [call for call in calls if "trust_remote_code=False" not in call[2]] == []


@pytest.mark.parametrize("planted", ["a link", "hf_secretOfTheHub"])
def test_a_stored_wandb_id_sends_no_text_of_files(planted: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("wandb.init", lambda **options: SimpleNamespace(define_metric=lambda *_, **__: None, **options))
    secret = tmp_path / "secret"
    secret.write_text("abcd1234")  # as the id of a run
    identity = tmp_path / "wandb_id"
    identity.symlink_to(secret) if planted == "a link" else identity.write_text(planted)
    first, second = (start_wandb(parsed("--output_dir", str(tmp_path)), RunDirectory(tmp_path)).id for _ in range(2))
    assert first == second == identity.read_text() and first not in ("abcd1234", planted)
    assert secret.read_text() == "abcd1234" and not identity.is_symlink()


def test_a_printed_command_is_quoted_and_names_code(tmp_path: Path) -> None:
    stored = {"model": "tiny", "gamma": 0.1, "reward": ["format", "my file.py:f"], "report_to": "none"}
    stored |= {"push_to_hub": True, "hub_model_id": "me/m"}
    run = fake_run(tmp_path / "a b;touch PWNED;$(touch PWNED)", stored)
    sends = ["--push_to_hub", "true", "--hub_model_id", "me/m"]
    expected = ["python", "train_gtpo.py", "--config", str(run.config), *sends, "--reward", "format", "my file.py:f"]
    assert shlex.split(command_of(run, "--config", str(run.config))) == expected


@pytest.mark.parametrize(
    "text", [f"word 'hf_{'SECRET' * 6}'", "https://me:SECRET@host/x.csv", "https:/me:pa/SECRET@host/x.csv"]
)
def test_no_error_repeats_a_token_or_a_password(text: str) -> None:
    assert "SECRET" not in str(UsageError(f"{text} does not exist"))
    assert str(UsageError(f"{text} hf_transfer does not exist")).endswith(" hf_transfer does not exist")


@pytest.mark.parametrize("text", ["\x1b[31mred", "bell\x07", "\u202eright to left", "\x9b2J", "\ud800"])
def test_a_message_sends_no_commands_to_the_terminal(text: str) -> None:
    for kind in (UsageError, RunError):
        assert str(kind(f"naïve\n ⟨H⟩ 中文 {text}")).startswith("naïve ⟨H⟩ 中文 ")
        assert str(kind(text)).isprintable()
