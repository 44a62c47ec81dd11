"""A tiny model whose completions earn rewards without training."""

import math
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer


def build_parrot(tiny: Path, directory: Path, answer: str) -> Path:
    """A model of which about half of the completions are ``answer``, the others noise, saved to ``directory``.

    Its layers are identities and its embeddings are set by hand, so the next token depends only on the last one: after
    the prompt comes the complete answer as one token, and after that EOS.
    """
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.add_tokens([AddedToken(answer, normalized=False)])
    said = tokenizer.convert_tokens_to_ids(answer)
    end = tokenizer.eos_token_id
    start = tokenizer.convert_tokens_to_ids("<|assistant|>")
    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.resize_token_embeddings(len(tokenizer))
    strength = math.log(len(tokenizer)) / math.sqrt(model.config.hidden_size)  # p = 1 / 2 against V tokens of logit 0
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = model.get_input_embeddings().weight
        head = model.get_output_embeddings().weight
        embedding.zero_()
        head.zero_()
        embedding[:, 0] = embedding[start, 1] = embedding[said, 2] = 1
        embedding[[start, said], 0] = 0
        head[said, 1] = strength
        head[end, 2] = 3 * strength
        head[end, 0] = strength
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
