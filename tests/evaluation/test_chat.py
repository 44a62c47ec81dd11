"""python -m gtpo.evaluation.chat: greedy completions of base and adapter, the run's prompt, the loop, its flags."""

import io
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from helpers.runs import fake_run
from peft import PeftModel
from pytest import CaptureFixture, LogCaptureFixture, MonkeyPatch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gtpo.errors import printable
from gtpo.evaluation import chat
from gtpo.evaluation.sampling import Sampling
from gtpo.prompts import to_messages

QUESTION = "How much is 3 + 4?"


def shown(argv: list[str], monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]) -> list[str]:
    """What is printed below each title, in order."""
    monkeypatch.setattr(sys, "argv", ["chat", *argv, "--max_new_tokens", "12"])
    chat.main()
    return [text.partition("\n")[2].strip() for text in capsys.readouterr().out.split("\n--- ")[1:]]


def greedy(tiny: Path, adapter: Path | None, messages: Any) -> str:
    """Twelve tokens by argmax, one forward pass each."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, str(adapter)) if adapter else model
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = ids["input_ids"]
    new = []
    while len(new) < 12 and tokenizer.eos_token_id not in new:
        with torch.no_grad():
            both = torch.cat([ids, torch.tensor([new], dtype=torch.long)], 1)
            new.append(int(model(input_ids=both).logits[0, -1].argmax()))
    text = tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip()
    return "\n".join(map(printable, text.split("\n")))


def test_base_and_adapter_answer_greedily_until_an_empty_line(
    adapters: list[Path],
    tiny: Path,
    monkeypatch: MonkeyPatch,
    capsys: CaptureFixture[str],
    caplog: LogCaptureFixture,
) -> None:
    expected = [greedy(tiny, adapter, to_messages(QUESTION)) for adapter in (None, adapters[0])]
    assert expected[0] != expected[1]
    assert shown([str(adapters[0]), QUESTION], monkeypatch, capsys) == expected
    for text in (f"{QUESTION}\n\nthree\n", QUESTION):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert [found.removesuffix("\n\n>") for found in shown([str(adapters[0])], monkeypatch, capsys)] == expected
    assert "word problems" not in caplog.text
    shown(["tiny", QUESTION], monkeypatch, capsys)
    assert "the tiny model knows one kind of question: word problems" in caplog.text


def test_the_prompt_of_the_run_is_used(
    outputs: Path, tiny: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    fake_run(outputs / "older", {"system_prompt": "Be brief."})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    for checkpoint, adapter in (("last", "adapter"), ("best", "best")):
        texts = shown([str(outputs / "older"), QUESTION, "--checkpoint", checkpoint], monkeypatch, capsys)
        assert texts == [greedy(tiny, path, messages) for path in (None, outputs / "older" / adapter)]


def test_a_merged_or_base_model_is_asked_alone(
    outputs: Path, tiny: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    expected = [greedy(tiny, None, to_messages(QUESTION))]
    assert shown([str(tiny), QUESTION], monkeypatch, capsys) == expected
    merged = shutil.copytree(tiny, outputs / "older" / "merged")
    fake_run(outputs / "older", {"system_prompt": "Be brief."})
    brief = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    assert shown(["outputs/older/merged", QUESTION], monkeypatch, capsys) == [greedy(merged, None, brief)]
    names = ("tiny", "Qwen/Qwen2.5-3B-Instruct", "outputs/older", "outputs/newest", "nowhere")
    assert list(map(chat.is_model, names)) == [True, True, False, False, False]


def test_flags_and_precision_of_the_run_reach_the_sampler(outputs: Path, monkeypatch: MonkeyPatch) -> None:
    fake_run(outputs / "older", {"load_in_4bit": True})
    monkeypatch.setattr("gtpo.evaluation.targets.gpu_is_available", lambda: True)
    monkeypatch.setattr("gtpo.evaluation.targets.is_installed", lambda package: True)
    samplings: list[Sampling] = []
    monkeypatch.setattr(chat, "TransformersSampler", lambda model, how, prompt: samplings.append(how))
    monkeypatch.setattr(chat, "questions", lambda: [])
    monkeypatch.setattr(sys, "argv", f"chat {outputs}/older --temperature 0.7 --seed 3 --max_new_tokens 9".split())
    chat.main()
    assert samplings == [Sampling(1, 0.7, 1.0, 3, 9, 1, load_in_4bit=True)]
