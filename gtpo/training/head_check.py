"""Whether the loss is that of the model's own logits: some families scale or cut them in ways that no config names."""

from typing import Any

import torch

from gtpo.errors import RunError
from gtpo.forward.hidden_states import hidden_states_and_logits
from gtpo.processes import any_process

TOKENS = 64  # of one completion
TF32 = 2**-10  # its rounding, of float32 products on a GPU


@torch.no_grad()
def check_head(trainer: Any, batch: dict[str, Any]) -> None:
    """Raise RunError if ln pi of the loss is not that of the model's logits, beyond the rounding of their dtype.

    Args:
        trainer: Ours.
        batch: With ``prompt_ids``, ``completion_ids`` and their masks, of this process.
    """
    row = int(batch["completion_mask"].sum(1).argmax())
    prompt, completion = (
        batch[f"{part}_ids"][row][batch[f"{part}_mask"][row].bool()] for part in ("prompt", "completion")
    )
    completion = completion[:TOKENS]
    causal_lm, ids = trainer._causal_lm(trainer.model), torch.cat([prompt, completion])
    hidden, logits = hidden_states_and_logits(trainer.model_wrapped, causal_lm.get_decoder(), ids)
    hidden, logits = (states[len(prompt) - 1 : len(ids) - 1] for states in (hidden, logits))  # (T, H), (T, V)
    logps, _ = trainer._head(causal_lm, hidden, completion)
    own = (logits.float() / trainer.temperature).log_softmax(-1).gather(-1, completion[:, None]).squeeze(-1)
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(trainer.accelerator.mixed_precision, hidden.dtype)
    rounding = max(torch.finfo(dtype).eps for dtype in (logits.dtype, hidden.dtype, precision))
    rounding = max(rounding, TF32) if logits.is_cuda else rounding
    bound = 1e-3 + rounding * logits.float().abs().amax() / trainer.temperature
    difference = (logps.float() - own).abs().mean()
    if any_process(not bool(difference <= bound), logits.device):  # NaN too
        kind = trainer.model.config.model_type
        raise RunError(
            f"the loss does not know how {kind} models compute their logits: ln pi of {len(own)} tokens is "
            f"{logps.mean():.3g} on average in the loss and {own.mean():.3g} by the model's logits (difference "
            f"{difference:.2g} nats): train it with TRL's GRPOTrainer and gtpo_trl.py, or pick another model."
        )
