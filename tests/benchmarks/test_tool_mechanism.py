"""The targets of one update on tool calls: the syntax that all calls share, and their arguments."""

import sys
from pathlib import Path
from typing import Any

import torch
from helpers.canned import CALL, GROUP, TURNS, make_trainer
from helpers.scripts import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from tool_mechanism import CLOSING, OPENING, OfCalls


def of_calls(trainer: Any) -> OfCalls:
    effects = object.__new__(OfCalls)  # without the groups
    effects.trainer = trainer
    return effects


def test_the_targets_are_the_syntax_and_the_arguments_of_calls(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path, tools=True)
    trainer.model.train()
    batch = trainer._generate_and_score_completions([trainer.train_dataset[0]] * GROUP)
    found, decode = of_calls(trainer)._masked(batch, "own "), trainer.processing_class.decode
    for row, turns in enumerate(TURNS):
        calls = [turn for turn in turns if turn.startswith(OPENING) and turn.endswith(CLOSING)]
        syntax, arguments = (
            decode(batch["completion_ids"][row][found[f"own {n}"][row]]) for n in ("syntax", "arguments")
        )
        assert syntax == (OPENING + CLOSING) * len(calls), turns
        assert arguments == "".join(call[len(OPENING) : -len(CLOSING)] for call in calls)
    assert found["own syntax"].sum() == 35 * 6


def test_a_call_in_the_answer_of_a_tool_is_no_target(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path, tools=True)
    ids = torch.tensor([trainer.processing_class.encode(CALL.format("7 + 5"), add_special_tokens=False)])
    mask = torch.ones_like(ids)
    batch = {"completion_ids": ids, "completion_mask": mask, "tool_mask": 0 * mask}
    assert not of_calls(trainer)._masked(batch, "")["syntax"].any()


def test_right_dialogues_call_with_the_steps_of_the_solution(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path, tools=True)
    row = {"question": "How many?", "reasoning": "7 + 5 = 12\n12 * 3 = 36", "gold": "36"}
    prompt = trainer.processing_class.apply_chat_template(
        [{"role": "user", "content": row["question"]}], add_generation_prompt=True, return_dict=False
    )
    (batch,) = of_calls(trainer)._solutions([prompt], [row])
    decode = trainer.processing_class.decode
    text = decode(batch["completion_ids"][0])
    assert text == f"{CALL.format('7 + 5')}<|user|>12<|assistant|>{CALL.format('12 * 3')}<|user|>36<|assistant|>36</s>"
    assert decode(batch["completion_ids"][0][batch["arguments"][0]]) == "7 + 512 * 3"
