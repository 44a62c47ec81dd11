"""SmolLM2 with the stored warm start merged in float32, which `study compare early` trains.

python -m study.warm_start outputs/early/base
"""

import sys
from pathlib import Path

from gtpo.runs.script import run_script

ADAPTER = Path("results/early/warm_start")  # its recipe: study/early_warm_start.yaml


def main() -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    model = AutoPeftModelForCausalLM.from_pretrained(ADAPTER, dtype="float32")
    AutoTokenizer.from_pretrained(model.active_peft_config.base_model_name_or_path).save_pretrained(sys.argv[1])
    model.merge_and_unload().save_pretrained(sys.argv[1])


if __name__ == "__main__":
    run_script(main)
