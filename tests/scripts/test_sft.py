"""The SFT loss is plain cross-entropy over the completion tokens."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from gtpo.arguments import DataArguments
from gtpo.data.load import load_train, to_demonstrations

ATOL = 1e-6  # observed 2e-7


def test_the_loss_is_the_cross_entropy_of_completions(tiny: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    model = AutoModelForCausalLM.from_pretrained(tiny)
    rows = load_train(DataArguments("arithmetic")).select(range(6))
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
