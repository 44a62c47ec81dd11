"""Build the models and data sets that TRL's tests name, as local directories: random weights, a small tokenizer.

    python hub.py DIR TRL_CLONE

In DIR ``from_pretrained("trl-internal-testing/...")`` finds them as relative paths, so no test and no library has to be
patched. TRL_CLONE has the model with custom code.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import transformers as tf
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

OUT = Path(sys.argv[1]) / "trl-internal-testing"
CHECKOUT = Path(sys.argv[2]) if len(sys.argv) > 2 else None
TEMPLATES = Path(trl.__file__).parent / "chat_templates"

LINES = [
    "Order on the desk saves time", "A short answer is often", "The river runs faster after", "Nobody counts the steps",
    "Small tools beat large", "Read the label before", "Every rule has its", "When in doubt ask", "A quiet engine is",
    "Names should tell what", "Warm bread is better than", "Plans change when the", "One road leads to",
    "It is hard to", "If the test fails then", "If the test passes then", "Maps are one great",
]  # fmt: skip
TEST_LINES = ["Rain comes from the", "A letter takes longer than"]

SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>",
    "</tool_response>", "<think>", "</think>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip


def tokenizer(template: str) -> tf.PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(LINES + TEST_LINES, trainer)
    made = tf.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return made


SIZES = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
DENSE = SIZES | {"intermediate_size": 32}
MOE = DENSE | {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
FAMILIES = {  # name: (config, sizes, chat template)
    "tiny-Qwen2ForCausalLM-2.5": ("Qwen2", DENSE, "qwen2_5"),
    "tiny-Qwen3ForCausalLM": ("Qwen3", DENSE | {"head_dim": 4}, "qwen3"),
    "tiny-LlamaForCausalLM-3.2": ("Llama", DENSE, "llama3_2"),
    "tiny-MistralForCausalLM-0.2": ("Mistral", DENSE, "qwen2_5"),
    "tiny-Gemma2ForCausalLM": ("Gemma2", DENSE | {"head_dim": 4}, "gemma"),
    "tiny-Cohere2ForCausalLM": ("Cohere2", DENSE, "cohere2"),
    "tiny-Glm4MoeForCausalLM": (
        "Glm4Moe", MOE | {"head_dim": 4, "n_routed_experts": 4, "use_qk_norm": True}, "glm4moe"
    ),
    "tiny-GptOssForCausalLM": ("GptOss", DENSE | {"num_local_experts": 4, "num_experts_per_tok": 2}, "gptoss"),
    "tiny-Qwen3MoeForCausalLM": ("Qwen3Moe", MOE | {"num_experts": 4, "head_dim": 4}, "qwen3"),
    "tiny-NemotronHForCausalLM-nano": (
        "NemotronH",
        {
            "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32,
            "layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 8, "mamba_head_dim": 4,
            "mamba_n_groups": 1, "ssm_state_size": 16, "mamba_d_conv": 4, "mamba_expand": 2, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
            "use_mamba_kernels": False,
        },
        "nemotron_3_nano",
    ),
}  # fmt: skip
REWARDS = {
    "tiny-Qwen2ForSequenceClassification-2.5": ("Qwen2", DENSE, "qwen2_5"),
    "tiny-Qwen3ForSequenceClassification": ("Qwen3", DENSE | {"head_dim": 4}, "qwen3"),
    "tiny-LlamaForSequenceClassification-3.2": ("Llama", DENSE, "llama3_2"),
}


def build(name: str, family: str, sizes: dict, template: str, suffix: str, **more: object) -> None:
    made = tokenizer(template)
    torch.manual_seed(len(name))
    ids = {"pad_token_id": made.pad_token_id, "eos_token_id": made.eos_token_id, "bos_token_id": None}
    config = getattr(tf, f"{family}Config")(vocab_size=len(made), tie_word_embeddings=False, **sizes, **ids, **more)
    model = getattr(tf, f"{family}{suffix}")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # enough spread that rewards and gradients are not rounding
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    model.save_pretrained(OUT / name)
    made.save_pretrained(OUT / name)


def remote_code() -> None:
    if CHECKOUT is None or not (CHECKOUT / "scripts").is_dir():
        return
    folder, code = OUT / "tiny-RemoteForCausalLM", CHECKOUT / "scripts/generate_tiny_models/for_causal_lm/_remote_code"
    sys.path.insert(0, str(code.parent))
    from _remote_code import configuration_remote, modeling_remote

    made = tokenizer("qwen2_5")
    configuration_remote.RemoteConfig.register_for_auto_class()
    modeling_remote.RemoteForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    ids = {"pad_token_id": made.pad_token_id, "eos_token_id": made.eos_token_id, "bos_token_id": None}
    config = configuration_remote.RemoteConfig(vocab_size=len(made), **DENSE, **ids)
    modeling_remote.RemoteForCausalLM(config).save_pretrained(folder)
    made.save_pretrained(folder)
    for file in code.glob("*_remote.py"):
        shutil.copy(file, folder / file.name)


def dataset() -> None:
    folder, kinds = OUT / "zen", {}
    kinds["standard_prompt_only"] = lambda line: {"prompt": line}
    kinds["conversational_prompt_only"] = lambda line: {"prompt": [{"role": "user", "content": line}]}
    head = ["---", "configs:"]
    for kind, row in kinds.items():
        head += [f"- config_name: {kind}", "  data_files:"]
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for split, lines in (("train", LINES), ("test", TEST_LINES)):
            path = folder / kind / f"{split}.jsonl"
            path.write_text("".join(json.dumps(row(line)) + "\n" for line in lines))
            head += [f"  - split: {split}", f"    path: {kind}/{split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*head, "---", ""]))


if __name__ == "__main__":
    dataset()
    for name, (family, sizes, template) in FAMILIES.items():
        build(name, family, sizes, template, "ForCausalLM")
    for name, (family, sizes, template) in REWARDS.items():
        build(name, family, sizes, template, "ForSequenceClassification", num_labels=1)
    try:
        remote_code()
    except Exception as error:
        print("no model with custom code:", repr(error)[:200])
    print(sorted(path.name for path in OUT.iterdir()))
