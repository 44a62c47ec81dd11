"""python -m gtpo.evaluation.chat: greedy completions of base and adapter, the run's prompt, the loop, its flags."""

import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from helpers.runs import fake_run
from pytest import CaptureFixture, LogCaptureFixture, MonkeyPatch, fixture, raises

from gtpo.errors import printable
from gtpo.evaluation import chat
from gtpo.evaluation.sampling import Sampling
from gtpo.prompts import to_messages

QUESTION = "How much is 3 + 4?"


@fixture
def shown(monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]) -> Callable[..., list[str]]:
    """``shown(*argv)``: what is printed below each title, in order; ``shown.titles`` are these."""
    titles: list[str] = []

    def run(*argv: object) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["chat", *map(str, argv), "--max_new_tokens", "12"])
        chat.main()
        printed = capsys.readouterr().out
        parts = printed.split("\n--- ")[1:]
        titles[:] = [part.partition("\n")[0] for part in parts]
        return [part.partition("\n")[2].removesuffix("\n\n> ").strip() for part in parts]

    run.titles = titles  # type: ignore[attr-defined]
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
    assert shown.titles == [f"base model ({tiny.name})", adapters[0].name]
    other = "How much is 5 + 6?"
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{other}\n{QUESTION}\n"))
    of_other = [expected(to_messages(other), adapter) for adapter in (None, adapters[0])]
    assert shown(adapters[0]) == [*of_other, *both]  # one question after the other
    assert shown(tiny, QUESTION) == both[:1]
    assert shown.titles == [f"model ({tiny.name})"]
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


def test_it_is_greedy_and_brief_unless_told(tiny: Path, monkeypatch: MonkeyPatch) -> None:
    asked: list[Sampling] = []
    monkeypatch.setattr(chat, "TransformersSampler", lambda model, how: asked.append(how) or 1 / 0)
    for flags in ([], ["--temperature", "0.5", "--seed", "3", "--max_new_tokens", "9"]):
        monkeypatch.setattr(sys, "argv", ["chat", str(tiny), QUESTION, *flags])
        with raises(ZeroDivisionError):
            chat.main()
    assert asked == [
        Sampling(1, 0.0, 1.0, 0, 256, 1, load_in_4bit=False),
        Sampling(1, 0.5, 1.0, 3, 9, 1, load_in_4bit=False),
    ]
