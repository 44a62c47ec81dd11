"""examples/calculator.py: the tiny model learns to write calls, and GTPO and GRPO train it in several turns."""

from pathlib import Path
from typing import Any

import pytest
import torch

from examples import calculator
from examples.calculator import Calculator, correct_answer
from gtpo.training.tools import policy_mask

CPU = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True}


def test_the_calculator_calculates_and_says_what_it_expects() -> None:
    box = Calculator()
    box.reset(prompt="any", answer="12")
    assert [box.calculate(text) for text in ("7 + 5", " 7-5", "7*5 ", "5 - 7")] == ["12", "2", "35", "-2"]
    for text in ("7 / 5", "7 + 5 + 1", "__import__('os')", ""):
        with pytest.raises(ValueError, match="expected two whole numbers"):
            box.calculate(text)
    assert box.calls == 8


def test_the_reward_reads_the_last_message() -> None:
    def turns(*texts: str) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": text} for text in texts]

    completions = [turns("5", "12"), turns("12", "13"), turns("", "It is 12."), turns(""), turns("12 or 13")]
    assert correct_answer(completions, answer=["12"] * 5, other=[1] * 5) == [1.0, 0.0, 1.0, 0.0, 0.0]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calculator.warm_start(tmp_path_factory.mktemp("warm"), steps=150)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gtpo", "grpo"])
def test_the_policy_calls_and_the_answers_have_no_gradient(method: str, warm: Path, tmp_path: Path) -> None:
    trainer = calculator.train(method, warm, tmp_path, max_steps=3, **CPU)
    log = [row for row in trainer.state.log_history if "loss" in row]
    assert len(log) == 3 and all(row["tools/call_frequency"] > 0.2 for row in log)
    assert any(row["grad_norm"] > 0 for row in log)

    trainer.model.train()
    trainer._by_prompt = False  # rows as they are: the place of a token in its row is known
    states: list[torch.Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        output.last_hidden_state.retain_grad()
        states.append(output.last_hidden_state)

    for row in range(20):  # until a group has calls, and rewards of both kinds
        batch = trainer._generate_and_score_completions([trainer.train_dataset[row]] * 8)
        if batch["advantages"].any() and not batch["tool_mask"].all():
            break
    hook = trainer._causal_lm(trainer.model).get_decoder().register_forward_hook(keep)
    trainer.current_gradient_accumulation_steps = 1
    trainer.compute_loss(trainer.model, batch).backward()
    hook.remove()
    (hidden,) = states  # the state before a token predicts it
    prompts = batch["prompt_mask"].sum(1)
    policy, answers = policy_mask(batch).bool(), batch["completion_mask"].bool() & ~batch["tool_mask"].bool()
    assert answers.sum() > 5
    norms = hidden.grad.norm(dim=-1)
    for row, start in enumerate(prompts.tolist()):
        width = policy.shape[1]
        of_row = torch.nn.functional.pad(norms[row, start - 1 :], (0, width))[:width]
        assert not of_row[answers[row]].any()
    moved = trainer._tokens_with_gradient(trainer._lambda(batch), batch) & policy
    assert moved.any() and (norms > 0).any()
