"""The prompt is box 8.2 of the paper, and the reference completion has its format."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from helpers.files import write_settings
from helpers.settings import parsed
from trl.trainer.utils import is_async_callable

from gtpo.arguments import DataArguments, PromptArguments, stored_prompt
from gtpo.data.load import load_named, to_demonstrations
from gtpo.evaluation.arguments import EvaluationArguments
from gtpo.grading.user_functions import checked_reward, with_prefill
from gtpo.prompts import PAPER, to_completion, to_messages
from rewards import rewards_in

BOX_8_2 = """\
You are a helpful assistant for solving math problems.
Given a question, first think step by step between <reasoning> and </reasoning>.
Then, give the final answer between <answer> and </answer>."""


def test_the_system_prompt_is_box_8_2_verbatim() -> None:
    assert to_messages("1 + 1?") == [{"role": "system", "content": BOX_8_2}, {"role": "user", "content": "1 + 1?"}]


def test_a_reference_completion_has_the_tags() -> None:
    assert to_completion("1 + 1 = 2", "2") == "<reasoning>\n1 + 1 = 2\n</reasoning>\n<answer>\n2\n</answer>"


# ---- other prompts and tags ----

THINK = "<think> </think> <answer> </answer>"


def test_the_default_prompt_names_the_tags() -> None:
    prompt = PromptArguments(tags=THINK)
    assert prompt.system_prompt == BOX_8_2.replace("reasoning>", "think>")
    assert PromptArguments(tags=THINK, system_prompt=BOX_8_2) == prompt
    assert stored_prompt(vars(prompt))["system_prompt"] is None  # of a run that is read with other --tags
    assert stored_prompt({"system_prompt": "Be brief."}) == {"system_prompt": "Be brief."}


def test_a_format_with_other_tags() -> None:
    form = PromptArguments(tags=THINK, system_prompt="none").format
    assert form.to_messages("1 + 1?") == [{"role": "user", "content": "1 + 1?"}]
    text = form.to_completion("1 + 1 = 2", "2")
    assert text == "<think>\n1 + 1 = 2\n</think>\n<answer>\n2\n</answer>"


def test_files_are_read_when_the_settings_are(here: Path) -> None:
    Path("prompt.txt").write_text("Be brief.\n")
    Path("template.jinja").write_text("{{ messages }}")
    argv = ["--model", "tiny", "--system_prompt", "prompt.txt", "--chat_template", "template.jinja"]
    prompt = parsed(*argv, "--output_dir", ".", method="grpo").prompt
    assert (prompt.system_prompt, prompt.chat_template) == ("Be brief.", "{{ messages }}")
    assert EvaluationArguments(system_prompt="prompt.txt").prompt == {"system_prompt": "Be brief."}
    Path("template.jinja").unlink()
    assert PromptArguments(**vars(prompt)) == prompt  # as config.yaml has them


@pytest.mark.parametrize("method", ["grpo", "sft"])
def test_training_stores_the_prompt_and_template_arguments(method: str, here: Path) -> None:
    argv = ["--model", "tiny", "--tags", THINK, "--chat_template_kwargs", '{"enable_thinking": false}']
    settings = parsed(*argv, "--output_dir", ".", method=method)
    stored = settings.to_dict()
    assert stored["tags"] == THINK and "<think>" in stored["system_prompt"]
    assert stored["chat_template_kwargs"] == {"enable_thinking": False}
    if method == "grpo":
        assert settings.trainer.chat_template_kwargs == {"enable_thinking": False}
    write_settings(here / "config.yaml", stored)
    assert parsed("--config", "config.yaml", method=method).to_dict() == stored


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        (("Be brief.", "--reward", "accuracy"), "<answer> </answer>"),
        (("Write <think>.", "--tags", THINK), "</think> <answer> </answer>"),
        (("Be brief.", "--reward", "mine.py:f"), None),
        (("none",), None),
    ],
)
def test_a_system_prompt_without_tags_is_a_warning(
    flags: tuple[str, ...], missing: str | None, here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parsed("--model", "tiny", "--output_dir", ".", "--system_prompt", *flags, method="grpo")
    assert (f"--system_prompt lacks {missing}," in caplog.text) == bool(missing)
    assert ("system_prompt" in caplog.text) == bool(missing)


def test_rows_have_the_prompt_and_the_tags() -> None:
    form = PromptArguments(tags=THINK, system_prompt="Be brief.").format
    paper, rows = (load_named(DataArguments("arithmetic", limit=2), prompt_format=f) for f in (PAPER, form))
    assert [turn["content"] for turn in rows[0]["prompt"]] == ["Be brief.", paper[0]["prompt"][1]["content"]]
    assert rows[0]["solution"] == paper[0]["solution"].replace("reasoning>", "think>")
    demonstrations = to_demonstrations(rows, {"enable_thinking": False})
    assert demonstrations["chat_template_kwargs"][:] == [{"enable_thinking": False}] * 2  # TRL reads this column
    assert to_demonstrations(rows).column_names == ["prompt", "completion"]


# ---- rewards ----


def test_the_rewards_of_other_tags() -> None:
    rewards = rewards_in(PromptArguments(tags=THINK).format)
    good = "<think>1 + 1</think><answer>2</answer>"
    completions = [good, to_completion("1 + 1", "2"), "2"]
    assert rewards["format"](completions=completions, tags=["a column", "of that name", ""]) == [10.0, 1.0, 0.0]
    tagged = rewards_in(PromptArguments(tags="[think] [/think] [answer] [/answer]").format)
    assert tagged["accuracy"](completions=["[answer]2[/answer]", good], answer=["2", "2"]) == [10.0, 0.0]
    assert [reward.__name__ for reward in rewards.values()] == ["format_reward", "accuracy_reward"]  # in metrics.jsonl


def test_rewards_see_what_the_template_has_written() -> None:
    def plain(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(c if isinstance(c, str) else c[0]["content"])) for c in completions]

    async def later(completions: list[Any], **_: Any) -> list[float]:
        return plain(completions)

    completions = ["ab", [{"role": "assistant", "content": "abc"}]]
    both = [checked_reward(plain), checked_reward(later)]
    with_tag, awaited = with_prefill(both, "<think>\n")
    assert with_tag(completions=completions) == [10.0, 11.0] and completions[0] == "ab"
    assert is_async_callable(awaited) and asyncio.run(awaited(completions=completions)) == [10.0, 11.0]
    assert with_tag.__name__ == "plain" and with_prefill(both, "")[0](completions=["ab"]) == [2.0]
