"""python -m gtpo.evaluation.chat: greedy completions of base and adapter, the run's prompt, the loop, its flags."""

import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from helpers.runs import fake_run
from pytest import CaptureFixture, LogCaptureFixture, MonkeyPatch, fixture

from gtpo.errors import printable
from gtpo.evaluation import chat
from gtpo.prompts import to_messages

QUESTION = "How much is 3 + 4?"


@fixture
def shown(monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]) -> Callable[..., list[str]]:
    """``shown(*argv)``: what is printed below each title, in order."""

    def run(*argv: object) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["chat", *map(str, argv), "--max_new_tokens", "12"])
        chat.main()
        parts = capsys.readouterr().out.split("\n--- ")[1:]
        return [part.partition("\n")[2].removesuffix("\n\n> ").strip() for part in parts]

    return run


@fixture
def expected(ask_greedily: Callable) -> Callable[..., str]:
    """``expected(messages, adapter)``: the greedy completion, as it is shown."""
    return lambda *asked: "\n".join(map(printable, ask_greedily(*asked)[0].strip().split("\n")))


def test_base_and_adapter_answer_until_an_empty_line(
    adapters: list[Path],
    tiny: Path,
    shown: Callable,
    expected: Callable,
    monkeypatch: MonkeyPatch,
    caplog: LogCaptureFixture,
) -> None:
    both = [expected(to_messages(QUESTION), adapter) for adapter in (None, adapters[0])]
    assert both[0] != both[1]
    assert shown(adapters[0], QUESTION) == both
    for text in (f"{QUESTION}\n\nthree\n", QUESTION):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert shown(adapters[0]) == both
    assert shown(tiny, QUESTION) == both[:1]
    assert "word problems" not in caplog.text
    shown("tiny", QUESTION)
    assert "the tiny model knows one kind of question: word problems" in caplog.text


def test_a_run_and_its_merged_model_have_its_prompt(
    outputs: Path, tiny: Path, shown: Callable, expected: Callable
) -> None:
    run = fake_run(outputs / "older", {"system_prompt": "Be brief."})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    base = expected(messages)
    shutil.copytree(tiny, run.merged)
    assert shown(run.path, QUESTION) == [base, expected(messages, run.adapter)]
    assert shown(run.path, QUESTION, "--checkpoint", "best") == [base, expected(messages, run.path / "best")]
    assert shown(run.merged, QUESTION) == [base]
