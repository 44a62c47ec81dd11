"""The SFT loss is plain cross-entropy over the completion tokens, its metrics are means over them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

from gtpo.arguments import DataArguments
from gtpo.data.load import load_named, to_demonstrations
from gtpo.training.sft import SFTTrainer

ATOL = 1e-6  # observed 2e-7


def test_the_loss_is_the_cross_entropy_of_completions(tiny: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    model = AutoModelForCausalLM.from_pretrained(tiny)
    rows = load_named(DataArguments("arithmetic")).select(range(6))
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        args=SFTConfig(output_dir=str(tmp_path), max_length=2048, bf16=False, use_cpu=True, report_to="none"),
        train_dataset=to_demonstrations(rows),
    )
    trainer.model.eval()
    batch = next(iter(trainer.get_eval_dataloader(trainer.train_dataset)))
    with torch.no_grad():
        loss = trainer.compute_loss(model, batch)

    nats = []
    for prompt, solution in zip(rows["prompt"], rows["solution"], strict=True):
        start = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        target = [*tokenizer.encode(solution, add_special_tokens=False), tokenizer.eos_token_id]
        with torch.no_grad():
            log_pi = model(torch.tensor([start + target])).logits[0].double().log_softmax(-1)
        nats += [-log_pi[len(start) - 1 + t, token].item() for t, token in enumerate(target)]
    assert abs(loss.item() - sum(nats) / len(nats)) < ATOL


@pytest.mark.parametrize(("batch", "accumulation"), [(8, 1), (4, 2), (2, 4), (1, 8)])
@pytest.mark.parametrize("steps_of_a_line", [1, 2])
def test_token_accuracy_does_not_depend_on_the_micro_batch(
    batch: int, accumulation: int, steps_of_a_line: int, tiny: Path, tmp_path: Path
) -> None:
    """Against a count over the tokens of both steps; the rate is 0, so all have the same weights."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = "{% for turn in messages %}{{ turn.content }}{% endfor %}"
    model = AutoModelForCausalLM.from_pretrained(tiny)
    lengths = [3, 40, 5, 1, 17, 2, 29, 8, 11, 23, 2, 35, 4, 19, 6, 1]
    texts = [" ".join(str(n * k % 97) for k in range(n)) for n in lengths]
    rows = Dataset.from_dict({"prompt": ["1 + 1?"] * 16, "completion": texts})
    options: dict[str, Any] = {"learning_rate": 0.0, "shuffle_dataset": False, "max_steps": 2, "report_to": "none"}
    options |= {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    options |= {
        "logging_steps": steps_of_a_line,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    args = SFTConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, **options)
    trainer = SFTTrainer(model=model, processing_class=tokenizer, args=args, train_dataset=rows)
    labels = torch.cat([torch.tensor(row["labels"]) for row in trainer.train_dataset])
    with torch.no_grad():  # the most frequent token is predicted in about half of the places
        frequent = labels[labels != -100].mode().values
        model.lm_head.weight[:] = model.lm_head.weight * (torch.arange(len(model.lm_head.weight)) == frequent)[:, None]
    correct, entropies = [], []
    with torch.no_grad():
        for row in trainer.train_dataset:
            ids, mask = torch.tensor(row["input_ids"]), torch.tensor(row["labels"])[1:] != -100
            log_pi = model(ids[None]).logits[0, :-1].log_softmax(-1)
            correct.append((log_pi.argmax(-1) == ids[1:])[mask].float())
            entropies.append(-(log_pi.exp() * log_pi).sum(-1)[mask])
    trainer.train()
    logged = [line for line in trainer.state.log_history if "mean_token_accuracy" in line]
    assert len(logged) == 2 // steps_of_a_line
    share = 16 // len(logged)
    for number, line in enumerate(logged):
        rows_of_line = slice(number * share, (number + 1) * share)
        expected = torch.cat(correct[rows_of_line]).mean().item()
        assert expected > 0.03
        assert line["mean_token_accuracy"] == pytest.approx(expected, abs=1e-5)
        assert line["entropy"] == pytest.approx(torch.cat(entropies[rows_of_line]).mean().item(), rel=1e-4)
