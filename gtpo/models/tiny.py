"""The tiny base: a Llama of about a million parameters that replaces the paper's instruct model.

It is part of the package, so that every machine starts from the same weights; examples/tiny_base.py made them.
"""

from pathlib import Path
from typing import Any

TINY_BASE = Path(__file__).parent / "tiny_base" / "base-97e8bdbf"  # named by the hash of its recipe


def is_tiny(model: str | Path) -> bool:
    """Whether a directory is a tiny base, this one or an earlier one."""
    return (Path(model) / "tiny.json").is_file()


def shipped_instead(path: str | Path) -> Path | None:
    """The tiny base here whose path another machine names; None for a path that exists, or is of none."""
    base = TINY_BASE.parent / Path(path).name
    return base if is_tiny(base) and not Path(path).exists() else None


def save_untrained_tiny(directory: str | Path, seed: int = 0, base: Path = TINY_BASE, **shape: Any) -> Path:
    """Save the tiny base with untrained weights to ``directory``; deterministic in the seed.

    Args:
        directory: Where the model and its tokenizer are saved.
        seed: Of the weights.
        base: Whose configuration and tokenizer it has.
        shape: Fields of the LlamaConfig that differ from those of the tiny base.
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig.from_pretrained(base, use_cache=True, **shape)).save_pretrained(directory)
    AutoTokenizer.from_pretrained(base, trust_remote_code=False).save_pretrained(directory)
    return Path(directory)
