"""The dtype of the weights that are trained."""

from typing import Any


def keep_adapter_in_float32(model: Any) -> None:
    """Cast the trainable weights of a model with a quantized base to float32, in place; other models keep their dtype.

    TRL 1.14 casts them to bfloat16. At a learning rate of 1e-6 most updates are then rounded away.
    """
    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
