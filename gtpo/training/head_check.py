"""Whether the loss is that of the model's own logits: some families scale or cut them in ways that no config names."""

from typing import Any

import torch
from torch import Tensor

from gtpo.errors import RunError
from gtpo.forward.hidden_states import computes_logits
from gtpo.processes import any_process

TOKENS = 64  # of one completion


@torch.no_grad()
def check_head(trainer: Any, batch: dict[str, Any]) -> None:
    """Raise RunError if ln pi of the loss is not that of the model's logits, beyond the rounding of their dtype.

    Args:
        trainer: Ours.
        batch: With ``prompt_ids``, ``completion_ids`` and their masks, of this process.
    """
    lengths = batch["completion_mask"].sum(1)
    row = int(lengths.argmax())
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    one: dict[str, Tensor] = {name: batch[name][row : row + 1] for name in names}
    one |= {name: one[name][:, :TOKENS] for name in names[2:]}
    prompt, completion = (one[f"{part}_ids"][one[f"{part}_mask"].bool()] for part in ("prompt", "completion"))
    ids, count = torch.cat([prompt, completion])[None], len(completion)
    logps = trainer.scores(trainer.model_wrapped, one, 1)[0][one["completion_mask"].bool()]  # (count,)
    with computes_logits():
        logits = trainer.model_wrapped(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    logits = logits[0, len(prompt) - 1 : len(prompt) - 1 + count]
    own = (logits.float() / trainer.temperature).log_softmax(-1).gather(-1, completion[:, None]).squeeze(-1)
    device, dtypes = logits.device.type, [logits.dtype, trainer.model.get_output_embeddings().weight.dtype]
    if torch.is_autocast_enabled(device):
        dtypes.append(torch.get_autocast_dtype(device))
    rounding = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
    bound = 1e-3 + rounding * logits.float().abs().amax() / trainer.temperature
    difference = (logps.float() - own).abs().mean()
    if any_process(not bool(difference <= bound), logits.device):  # NaN too
        kind = trainer.model.config.model_type
        raise RunError(
            f"the loss does not know how {kind} models compute their logits: ln pi of {count} tokens is "
            f"{logps.mean():.3g} on average in the loss and {own.mean():.3g} by the model's logits (difference "
            f"{difference:.2g} nats): train it with TRL's GRPOTrainer and gtpo_trl.py, or pick another model."
        )
