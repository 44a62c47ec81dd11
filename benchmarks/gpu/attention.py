"""The attention that Unsloth and vLLM take on this machine: ``python attention.py FILE --backend=unsloth``.

For heads of 128, as Llama and Qwen have; no model is loaded. The file gets JSON.
"""

import importlib.metadata
import json
import sys
from pathlib import Path

sys.path[:1] = [str(Path(__file__).parents[2])]

from gtpo.models.backend import load_backend  # noqa: E402

if __name__ == "__main__":
    load_backend("unsloth")  # before transformers is imported
    import torch
    from unsloth.models import _utils
    from unsloth.utils.attention_dispatch import select_attention_backend
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    is_old = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
    with set_current_vllm_config(VllmConfig()):
        engine = get_attn_backend(128, torch.float16 if is_old else torch.bfloat16, None).get_name()
    names = ("xformers", "flash_attn", "triton")
    found = {name: [d.version for d in importlib.metadata.distributions(name=name)] for name in names}
    versions = {name: versions[0] if versions else "not installed" for name, versions in found.items()}
    if found["xformers"] and _utils.xformers is None:
        versions["xformers"] += " (does not load)"
    Path(sys.argv[1]).write_text(
        json.dumps({"Unsloth": select_attention_backend(), "vLLM": engine} | versions), encoding="utf-8"
    )
