"""One look before the first step: what would be a silent 0 % for a whole run is refused, with its cause."""

import re
from pathlib import Path
from typing import Any

import pytest
from helpers.files import tables_of
from helpers.refusals import refused
from helpers.scripts import RunScript
from test_tokenizer import CHATML, DROPS_SYSTEM, SMOLLM2, THINKS, byte_level
from transformers import AutoTokenizer, LlamaForCausalLM

from gtpo.arguments import PromptArguments
from gtpo.data.preview import MOST_ROWS, check_first_rows, look
from gtpo.data.tokenizer import prepare_tokenizer
from gtpo.models.hub import TINY_BASE
from gtpo.prompts import TAGS

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
    specials = [*SMOLLM2["specials"], *case.get("specials", [])]
    template = TEMPLATES[case.get("template", "chatml")]
    tokenizer = byte_level(**SMOLLM2 | {"specials": specials, "template": template})
    prompt = PromptArguments(**{"tags": case["tags"]} if "tags" in case else {})
    gold, words = case.get("gold", "4"), case.get("fault")
    prepare_tokenizer(tokenizer, "some/model", None, prompt)
    asked = [*case.get("before", []), *PROMPT]
    seen = look(tokenizer, prompt.format.to_messages(asked), gold, prompt)
    if words is None:
        assert (seen.fault, seen.follows_format, seen.is_correct) == (None, True, True)
        check_first_rows(tokenizer, [PROMPT] * 3, [gold] * 3, prompt)
        return
    assert re.search(words, str(seen.fault)), seen
    with refused(words):
        check_first_rows(tokenizer, [prompt.format.to_messages(asked)] * 3, [gold] * 3, prompt)


def test_a_reward_of_ones_own_needs_no_gold_answer(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_level(**SMOLLM2)
    golds = ["4"] * 100
    golds[64] = "((("
    check_first_rows(tokenizer, [PROMPT] * 100, golds, PromptArguments())
    assert "1 of 25 rows that were tried" in caplog.text and "prompt 65 of 100" in caplog.text and MOST_ROWS >= 25
    special = byte_level(**SMOLLM2 | {"specials": [*SMOLLM2["specials"], *TAGS]})
    check_first_rows(special, [PROMPT], ["((("], PromptArguments(), scored=["own.py:f"])
    check_first_rows(tokenizer, [PROMPT], ["((("], PromptArguments(), scored=["format"])
    with refused("special token"):
        check_first_rows(special, [PROMPT], ["4"], PromptArguments(), scored=["format"])


def test_an_empty_reasoning_block_is_told(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_level(["<eos>"], THINKS, eos_token="<eos>")
    prompt = PromptArguments(tags=THINK, chat_template_kwargs={"enable_thinking": False})
    check_first_rows(tokenizer, [PROMPT], ["4"], prompt)
    assert "writes an empty reasoning block" in caplog.text


def save_special(directory: Path) -> str:
    """The tiny base with the paper's tags as special tokens, as many people add them before SFT."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_BASE)
    model = LlamaForCausalLM.from_pretrained(TINY_BASE)
    tokenizer.add_special_tokens({"additional_special_tokens": list(TAGS)})
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def test_scripts_refuse_special_tags_and_show_a_prompt(tmp_path: Path, run_script: RunScript) -> None:
    model = save_special(tmp_path / "special")
    train = ["--model", model, "--dataset", "arithmetic", "--max_steps", "1", "--report_to", "none"]
    commands = {
        "train_gtpo.py": [*train, "--G", "4", "--prompts_per_step", "1"],
        "train_sft.py": train,
        "evaluate.py": ["--model", model, "--benchmarks", "arithmetic", "--k", "1", "--limit", "2"],
    }
    for script, argv in commands.items():
        ended = run_script(tmp_path, script, *argv, code=2)
        assert "the tag <reasoning> is a special token" in ended.stderr, script
    ended = run_script(tmp_path, "train_gtpo.py", *commands["train_gtpo.py"], "--dry_run")
    assert "# Its scores: format 1 of 10" not in ended.stdout and "# error: the tag <reasoning>" in ended.stdout
    ended = run_script(tmp_path, "train_gtpo.py", "--model", "tiny", "--dataset", "arithmetic", "--dry_run")
    assert "# Its scores: format 10 of 10, accuracy 10 of 10." in ended.stdout and "# <answer>" in ended.stdout
