"""One GTPO step on each family of models equals Eq. 11 on the plain logits, with LoRA and with all weights trained.

The models are random and small; what distinguishes a family (how it scales logits, embeddings and attention, tied
weights, biases, norms, positions, windows) has the values of a published config.json.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.canned import GROUP, batch_of, canned_advantages, canned_group, make_trainer
from helpers.reference import naive_conflict_mask, naive_conflict_weights
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow

GAMMA = 0.1
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "initializer_range": 0.2, "max_position_embeddings": 512}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 128,
}
WINDOW = {"sliding_window": 8}  # shorter than most completions, so that it matters
FAMILIES: Any = {  # by model type
    "llama": {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True, "rms_norm_eps": 1e-6},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 32},
    "gemma2": {
        "head_dim": 32,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 32,
        **WINDOW,
    },
    "gemma3_text": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window_pattern": 2, **WINDOW},
    "mistral": WINDOW,
    "phi3": {},
    "olmo2": {"rms_norm_eps": 1e-6},
    "granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 1 / 16,
        "logits_scaling": 8.0,
        "tie_word_embeddings": True,
    },
    "cohere2": {"logit_scale": 0.25, "sliding_window_pattern": 4, **WINDOW},
    "smollm3": {"no_rope_layer_interval": 4, "tie_word_embeddings": True},
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1},
}
FULL = ("llama", "gemma2", "cohere2", "qwen3_moe")  # tied, capped, scaled, with experts
CASES = [(family, "all-linear") for family in FAMILIES] + [(family, None) for family in FULL]


@pytest.mark.parametrize(("family", "target_modules"), CASES)
def test_a_step_equals_equation_11_on_the_plain_logits(
    family: str, target_modules: str | None, tiny: Path, tmp_path: Path
) -> None:
    save_model(family, tiny, tmp_path / "model")
    gtpo = {"gamma": GAMMA, "entropy_filter": "off"}
    options = {"target_modules": target_modules, "router_aux_loss_coef": 0.0}
    trainer = make_trainer("gtpo", tmp_path / "model", tmp_path / "run", gtpo=gtpo, **options)
    expected = plain_gradients(trainer)
    trainer.compute_loss(trainer.model, batch_of(trainer)).backward()
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    torch.testing.assert_close(gradients_of(trainer), expected, atol=1e-4 * largest, rtol=1e-3)


def save_model(family: str, tiny: Path, directory: Path) -> None:
    """A random model of a family with the tokenizer of the tiny model."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **SIZES, **ids, **FAMILIES[family])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def plain_gradients(trainer: Any) -> dict[str, Tensor]:
    """Gradients of Eq. 11 by the model's own logits, one completion at a time, without padding and without a filter."""
    prompt = trainer.processing_class(trainer.train_dataset[0]["prompt"])["input_ids"]
    completions = canned_group(0)
    advantages = canned_advantages().tolist()
    weights = naive_conflict_weights(naive_conflict_mask(completions, advantages, GROUP), advantages)
    for ids, advantage, row in zip(completions, advantages, weights, strict=True):
        logits = trainer.model(input_ids=torch.tensor([prompt + ids]), use_cache=False).logits[0]
        log_pi = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
        entropy = -(log_pi.exp() * log_pi).sum(-1).mean().item()
        assert entropy < 0.99 * math.log(logits.shape[-1])  # not uniform: the scale of the logits matters
        scale = (advantage - GAMMA * entropy) / len(ids) / GROUP
        (-scale * (log_pi[range(len(ids)), ids] * torch.tensor(row)).sum()).backward()
    return gradients_of(trainer)


def gradients_of(trainer: Any) -> dict[str, Tensor]:
    """They are 0 afterwards."""
    found = {name: weight.grad for name, weight in trainer.model.named_parameters() if weight.grad is not None}
    trainer.model.zero_grad()
    return found
