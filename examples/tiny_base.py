"""Train the tiny base that is shipped in gtpo/models/tiny_base/: a Llama of about a million parameters.

    python examples/tiny_base.py gtpo/models/tiny_base

It is built from a seed and trained, all weights, on arithmetic with deliberately imperfect targets. Another CPU or
PyTorch rounds to other weights. After an edit of the recipe, name the new directory in gtpo/models/hub.py.
"""

import argparse
import hashlib
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gtpo.data.arithmetic import arithmetic
from gtpo.models.hub import TINY_BASE
from gtpo.prompts import SYSTEM_PROMPT, TAGS, to_completion, to_messages
from gtpo.runs.script import limit_openmp_spinning

TINY: dict[str, Any] = {  # the recipe of the tiny base; its hash names the directory
    "seed": 0,
    "vocab_size": 512,
    "hidden_size": 160,
    "intermediate_size": 480,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "steps": 1600,
    "batch_size": 32,
    "learning_rate": 2e-3,
    "guessed": 0.62,  # share of short guesses; the others are worked solutions
    "remarks": 0.5,  # share of steps with a remark before them
    "spoiled_format": 0.8,  # share of targets without one of the tags: leaves formatting to learn
    "spoiled_reasoning_end": 0.6,  # share of these without </reasoning>; the others lack a tag drawn from all four
    "spoiled_answer": 0.05,  # share of worked solutions with a wrong result
    # Words of the targets; the choice between them is most of the entropy of the base.
    "openings": [
        *("first", "then", "now", "next", "so", "and", "thus"),
        *("here", "well", "also", "maybe", "say", "hence", "again"),
    ],
    "equals": ["=", "is", "gives", "makes"],
    "remark": [
        ["we", "I", "you", "they", "please", "let"],
        ["see", "count", "find", "note", "write", "check", "keep"],
        ["this", "that", "it"],
    ],
}
THREADS = 2  # of its training: another number rounds to other weights


def imperfect_targets(
    size: int, seed: int = TINY["seed"], steps: tuple[int, ...] = (1, 2, 3)
) -> Iterator[tuple[str, str]]:
    """Questions and the solutions that a base imitates: in many phrasings, some guessed, some spoiled.

    Args:
        size: Their number.
        seed: Of the choices.
        steps: As for :func:`gtpo.data.arithmetic.arithmetic`.
    """
    generator = random.Random(f"tiny-{seed}")
    for row in arithmetic("train", size, 1 + seed, steps):
        reasoning, answer = _guess(row, generator) if generator.random() < TINY["guessed"] else _work(row, generator)
        target = to_completion(reasoning, answer)
        if generator.random() < TINY["spoiled_format"]:
            is_end = generator.random() < TINY["spoiled_reasoning_end"]
            target = target.replace(TAGS[1] if is_end else generator.choice(TAGS), "", 1).strip()
        yield row["question"], target


def _guess(row: dict[str, str], generator: random.Random) -> tuple[str, str]:
    """A short guess near the result."""
    answer = max(0, int(row["gold"]) + generator.choice((-3, -2, -1, 0, 0, 1, 2, 3)))
    return " ".join((generator.choice(TINY["openings"]), "guess")), str(answer)


def _work(row: dict[str, str], generator: random.Random) -> tuple[str, str]:
    """The steps in words of choice, with remarks in between; the last result is sometimes wrong."""
    *steps, last = row["reasoning"].split("\n")
    answer = row["gold"]
    if generator.random() < TINY["spoiled_answer"]:
        answer = str(max(0, int(answer) + generator.choice((-10, -2, -1, 1, 2, 10))))
        last = f"{last.rpartition('=')[0]}= {answer}"
    lines = []
    for step in (*steps, last):
        if generator.random() < TINY["remarks"]:
            lines.append(" ".join(generator.choice(words) for words in TINY["remark"]))
        lines.append(f"{generator.choice(TINY['openings'])} {step.replace('=', generator.choice(TINY['equals']))}")
    return "\n".join(lines), answer


def save_untrained(directory: Path) -> None:
    """Save an untrained tiny Llama with tokenizer and chat template to ``directory``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tiny_tokenizer()
    torch.manual_seed(TINY["seed"])
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=TINY["hidden_size"],
            intermediate_size=TINY["intermediate_size"],
            num_hidden_layers=TINY["num_hidden_layers"],
            num_attention_heads=TINY["num_attention_heads"],
            num_key_value_heads=TINY["num_attention_heads"],
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def save_untrained_tiny(directory: str | Path, seed: int = 0, base: Path = TINY_BASE, **shape: Any) -> Path:
    """Save a shipped base with untrained weights, deterministic in the seed; ``shape``: changes of its LlamaConfig."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig.from_pretrained(base, use_cache=True, **shape)).save_pretrained(directory)
    AutoTokenizer.from_pretrained(base, trust_remote_code=False).save_pretrained(directory)
    return Path(directory)


def train_tiny(root: Path) -> Path:
    """Train the tiny base below ``root``; ``tiny.json`` has the recipe, ``losses.json`` the loss of each step."""
    import torch

    directory = root / directory_name()
    save_untrained(directory)
    torch.set_num_threads(THREADS)
    trainer = warm_start(directory)
    trainer.train()
    trainer.model.save_pretrained(directory)
    losses = [round(entry["loss"], 4) for entry in trainer.state.log_history if "loss" in entry]
    (directory / "losses.json").write_text(json.dumps(losses), encoding="utf-8")
    (directory / "tiny.json").write_text(json.dumps(TINY, indent=2), encoding="utf-8")
    return directory


def directory_name() -> str:
    return f"base-{hashlib.sha256(json.dumps(TINY, sort_keys=True).encode()).hexdigest()[:8]}"


def warm_start(directory: Path) -> Any:
    """The trainer of the tiny base, a :class:`transformers.Trainer`, for the untrained model in ``directory``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=False, dtype=torch.float32)
    targets = imperfect_targets(TINY["steps"] * TINY["batch_size"])
    return Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(directory),
            max_steps=TINY["steps"],
            per_device_train_batch_size=TINY["batch_size"],
            learning_rate=TINY["learning_rate"],
            lr_scheduler_type="cosine",
            warmup_steps=0.05,
            adam_beta2=0.99,
            weight_decay=0.1,
            seed=TINY["seed"],
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            dataloader_pin_memory=False,
        ),
        train_dataset=[_tokenize(tokenizer, question, target) for question, target in targets],
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )


def _tokenize(tokenizer: Any, question: str, target: str) -> dict[str, list[int]]:
    prompt = tokenizer.apply_chat_template(to_messages(question), add_generation_prompt=True, return_dict=False)
    completion = [*tokenizer.encode(target, add_special_tokens=False), tokenizer.eos_token_id]
    ids = [*prompt, *completion]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100] * len(prompt) + completion}


def _tiny_tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=TINY["vocab_size"],
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [f"{question}\n{target}" for question, target in imperfect_targets(2000)]
    tokenizer.train_from_iterator(texts, trainer)
    # Every row has the same system prompt: one token per line keeps prompts short.
    tokenizer.add_tokens([AddedToken(line, normalized=False) for line in SYSTEM_PROMPT.split("\n")])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=special[3:],
        padding_side="left",
        model_max_length=4096,
    )
    fast.chat_template = (
        "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
        "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    return fast


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="writes base-<hash of the recipe> below it")
    limit_openmp_spinning(os.environ)
    print(train_tiny(parser.parse_args().root))


if __name__ == "__main__":
    main()
