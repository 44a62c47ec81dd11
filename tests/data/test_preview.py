"""One look before the first step: what would be a silent 0 % for a whole run is refused, with its cause."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.files import tables_of
from helpers.refusals import refused
from pytest import CaptureFixture, LogCaptureFixture, MonkeyPatch
from test_tokenizer import CHATML, DROPS_SYSTEM, THINKS, smollm2, with_template
from transformers import AutoTokenizer, LlamaForCausalLM

from gtpo.arguments import PromptArguments
from gtpo.data.preview import check_first_rows, look
from gtpo.data.tokenizer import prepare_tokenizer
from gtpo.models.hub import TINY_BASE
from gtpo.prompts import TAGS
from gtpo.runs.script import run_script

TABLES = tables_of(__file__)

PROMPT = [{"role": "user", "content": "Ann has 3 pens and 4 pencils, and gives 2 pens to Bo. How many pens has she?"}]
THINK = "<think> </think> <answer> </answer>"
TEMPLATES = {"chatml": CHATML, "thinks": THINKS, "drops the system turn": DROPS_SYSTEM, "nothing": "{# nothing #}"}
BEGIN = "assistant\n' }}{% endif %}"
TEMPLATES["writes the first tag"] = CHATML.replace(BEGIN, BEGIN.replace("\n", "\n<reasoning>\n"))
TEMPLATES["writes another tag"] = CHATML.replace(BEGIN, BEGIN.replace("\n", "\n<answer>"))
TEMPLATES["no user"] = CHATML.replace("message['content']", "(message['content'] if message['role'] != 'user' else '')")
TEMPLATES["no assistant"] = CHATML.partition("{% if add_generation_prompt")[0]
TEMPLATES["last turn"] = CHATML.replace("in messages", "in messages[-1:]")
TEMPLATES["begins by the user's end"] = (  # as Mistral's
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] + eos_token }}{% else %}"
    "{{ '[INST]' + m['content'] + '[/INST]' }}{% endif %}{% endfor %}"
)
TEMPLATES["cuts"] = CHATML.replace("message['content']", "message['content'][:40]")


@pytest.mark.parametrize("case", TABLES.values(), ids=TABLES)
def test_the_gold_answer_earns_everything_or_says_why(case: dict[str, Any]) -> None:
    tokenizer = smollm2(TEMPLATES[case.get("template", "chatml")], case.get("specials", ()))
    prompt = PromptArguments(tags=case.get("tags", " ".join(TAGS)))
    prepare_tokenizer(tokenizer, "some/model", None, prompt)
    asked = prompt.format.to_messages([*case.get("before", []), *PROMPT])
    golds = [case.get("gold", "4")] * 3
    if "fault" in case:
        with refused(case["fault"]):
            check_first_rows(tokenizer, [asked] * 3, golds, prompt)
        return
    seen = look(tokenizer, asked, golds[0], prompt)
    assert (seen.fault, seen.follows_format, seen.is_correct) == (None, True, True)
    check_first_rows(tokenizer, [PROMPT] * 3, golds, prompt)


def test_a_reward_of_ones_own_needs_no_gold_answer(caplog: LogCaptureFixture) -> None:
    plain, special = smollm2(), smollm2(tags=TAGS)
    prompt = PromptArguments()
    golds = ["4"] * 100
    golds[64] = "((("
    check_first_rows(plain, [PROMPT] * 100, golds, prompt)
    assert "1 of 25 rows that were tried" in caplog.text and "prompt 65 of 100" in caplog.text
    check_first_rows(special, [PROMPT], ["((("], prompt, scored=["own.py:f"])
    check_first_rows(plain, [PROMPT], ["((("], prompt, scored=["format"])
    with refused("special token"):
        check_first_rows(special, [PROMPT], ["4"], prompt, scored=["format"])


def test_an_empty_reasoning_block_is_told(caplog: LogCaptureFixture) -> None:
    prompt = PromptArguments(tags=THINK, chat_template_kwargs={"enable_thinking": False})
    check_first_rows(with_template(THINKS), [PROMPT], ["4"], prompt)
    assert "writes an empty reasoning block" in caplog.text


def test_scripts_refuse_special_tags_and_show_a_prompt(
    here: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    """The paper's tags as special tokens, as many people add them before SFT."""

    def run(script: str, *argv: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *argv])
        with pytest.raises(SystemExit) as ended:
            run_script(importlib.import_module(script).main)
        return ended.value.code, *capsys.readouterr()

    tokenizer = AutoTokenizer.from_pretrained(TINY_BASE)
    model = LlamaForCausalLM.from_pretrained(TINY_BASE)
    tokenizer.add_special_tokens({"additional_special_tokens": list(TAGS)})
    model.resize_token_embeddings(len(tokenizer))
    for part in (model, tokenizer):
        part.save_pretrained(here / "special")
    special = ("--model", str(here / "special"))
    arithmetic = ("--dataset", "arithmetic", "--limit", "8", "--G", "4", "--prompts_per_step", "1")
    for script, *argv in (
        ("train_gtpo", *arithmetic),
        ("train_sft", *arithmetic[:4]),
        ("evaluate", "--benchmarks", "arithmetic", "--limit", "8", "--k", "1"),
    ):
        code, _, stderr = run(script, *special, *argv)
        assert code == 2 and "the tag <reasoning> is a special token" in stderr
    code, shown, _ = run("train_gtpo", *special, *arithmetic, "--dry_run")
    assert not code and "# Its scores: format 1 of 10" not in shown and "# error: the tag <reasoning>" in shown
    code, shown, _ = run("train_gtpo", *arithmetic, "--dry_run")
    assert not code
    assert "# Its scores: format 10 of 10, accuracy 10 of 10." in shown and "# <answer>" in shown
