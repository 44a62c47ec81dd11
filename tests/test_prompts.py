"""The prompt is box 8.2 of the paper, and the reference completion has its format."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from helpers.files import write_settings
from helpers.settings import parsed
from trl.trainer.utils import is_async_callable

from gtpo.arguments import DataArguments, PromptArguments
from gtpo.data.load import load_train, to_demonstrations
from gtpo.grading.user_functions import checked_reward, with_prefill
from gtpo.prompts import PAPER, SYSTEM_PROMPT, to_completion, to_messages
from rewards import rewards_in

BOX_8_2 = """\
You are a helpful assistant for solving math problems.
Given a question, first think step by step between <reasoning> and </reasoning>.
Then, give the final answer between <answer> and </answer>."""


def test_the_system_prompt_is_box_8_2_verbatim() -> None:
    assert SYSTEM_PROMPT == BOX_8_2
    assert to_messages("1 + 1?") == [{"role": "system", "content": BOX_8_2}, {"role": "user", "content": "1 + 1?"}]


def test_a_reference_completion_has_the_tags() -> None:
    assert to_completion("1 + 1 = 2", "2") == "<reasoning>\n1 + 1 = 2\n</reasoning>\n<answer>\n2\n</answer>"


# ---- other prompts and tags ----

THINK = "<think> </think> <answer> </answer>"


def test_the_default_prompt_names_the_tags() -> None:
    prompt = PromptArguments(tags=THINK)
    assert prompt.system_prompt == BOX_8_2.replace("reasoning>", "think>")
    assert PromptArguments().format == PAPER
    stored = PromptArguments(tags=THINK, system_prompt=BOX_8_2)  # config.yaml of a run, read with other --tags
    assert stored == prompt


def test_a_format_with_other_tags() -> None:
    form = PromptArguments(tags=THINK, system_prompt="none").format
    assert form.to_messages("1 + 1?") == [{"role": "user", "content": "1 + 1?"}]
    text = form.to_completion("1 + 1 = 2", "2")
    assert text == "<think>\n1 + 1 = 2\n</think>\n<answer>\n2\n</answer>"
    assert form.follows_format(text) and not PAPER.follows_format(text)
    assert not form.follows_format(to_completion("1 + 1 = 2", "2"))


def test_files_are_read_when_the_settings_are(here: Path) -> None:
    Path("prompt.txt").write_text("Be brief.\n")
    Path("template.jinja").write_text("{{ messages }}")
    prompt = PromptArguments(system_prompt="prompt.txt", chat_template="template.jinja")
    assert (prompt.system_prompt, prompt.chat_template) == ("Be brief.", "{{ messages }}")
    Path("template.jinja").unlink()
    again = PromptArguments(**vars(prompt))  # as config.yaml has them
    assert again == prompt
    assert PromptArguments(chat_template_kwargs='{"enable_thinking": false}').template_kwargs == {
        "enable_thinking": False
    }


def test_training_stores_the_prompt_and_template_arguments(tmp_path: Path) -> None:
    argv = ["--model", "tiny", "--tags", THINK, "--chat_template_kwargs", '{"enable_thinking": false}']
    for method in ("grpo", "sft"):
        settings = parsed(*argv, "--output_dir", str(tmp_path), method=method)
        stored = settings.to_dict()
        assert stored["tags"] == THINK and "<think>" in stored["system_prompt"]
        assert stored["chat_template_kwargs"] == {"enable_thinking": False}
        if method == "grpo":
            assert settings.trainer.chat_template_kwargs == {"enable_thinking": False}
        write_settings(tmp_path / "config.yaml", stored)
        again = parsed("--config", str(tmp_path / "config.yaml"), method=method)
        assert again.to_dict() == stored


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        (("--system_prompt", "Be brief."), "<reasoning> </reasoning> <answer> </answer>"),
        (("--system_prompt", "Write <think>.", "--tags", THINK), "</think> <answer> </answer>"),
        (("--system_prompt", "Be brief.", "--reward", "accuracy"), "<answer> </answer>"),
        (("--system_prompt", "Be brief.", "--reward", "mine.py:f"), None),
        (("--system_prompt", f"Use {THINK}.", "--tags", THINK), None),
        (("--system_prompt", "none"), None),
        (("--tags", THINK), None),
    ],
)
def test_a_system_prompt_without_tags_is_a_warning(
    flags: tuple[str, ...], missing: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parsed("--model", "tiny", "--output_dir", str(tmp_path), *flags, method="grpo")
    said = " ".join(text for text in caplog.messages if "system_prompt" in text)
    assert missing in said if missing else said == ""


def test_rows_have_the_prompt_and_the_tags() -> None:
    form = PromptArguments(tags=THINK, system_prompt="Be brief.").format
    paper, rows = (load_train(DataArguments("arithmetic", limit=2), 0, False, f) for f in (PAPER, form))
    assert [turn["content"] for turn in rows[0]["prompt"]] == ["Be brief.", paper[0]["prompt"][1]["content"]]
    assert rows[0]["solution"] == paper[0]["solution"].replace("reasoning>", "think>")
    demonstrations = to_demonstrations(rows, {"enable_thinking": False})
    assert demonstrations["chat_template_kwargs"][:] == [{"enable_thinking": False}] * 2  # TRL reads this column
    assert to_demonstrations(rows).column_names == ["prompt", "completion"]


# ---- rewards ----


def test_the_rewards_of_other_tags() -> None:
    rewards = rewards_in(PromptArguments(tags=THINK).format)
    good = "<think>1 + 1</think><answer>2</answer>"
    paper = to_completion("1 + 1", "2")
    assert rewards["format"](completions=[good, paper, "2"], tags=["a column", "of that name", ""]) == [10.0, 1.0, 0.0]
    tagged = rewards_in(PromptArguments(tags="[think] [/think] [answer] [/answer]").format)
    assert tagged["accuracy"](completions=["[answer]2[/answer]", good], answer=["2", "2"]) == [10.0, 0.0]
    assert [reward.__name__ for reward in rewards.values()] == ["format_reward", "accuracy_reward"]  # in metrics.jsonl


def test_rewards_see_what_the_template_has_written() -> None:
    def plain(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(c) if isinstance(c, str) else len(c[0]["content"])) for c in completions]

    async def later(completions: list[Any], **_: Any) -> list[float]:
        return plain(completions)

    completions = ["ab", [{"role": "assistant", "content": "abc"}]]
    both = [checked_reward(plain), checked_reward(later)]
    with_tag, awaited = with_prefill(both, "<think>\n")
    assert with_tag(completions=completions) == [10.0, 11.0] and completions[0] == "ab"
    assert is_async_callable(awaited) and asyncio.run(awaited(completions=completions)) == [10.0, 11.0]
    assert with_tag.__name__ == "plain" and with_prefill(both, "")[0](completions=["ab"]) == [2.0]
    rewards = with_prefill([checked_reward(rewards_in(PromptArguments(tags=THINK).format)["format"])], "<think>\n")
    assert rewards[0](completions=["1 + 1</think><answer>2</answer>"]) == [10.0]
