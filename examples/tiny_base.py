"""Train the tiny base that is shipped in gtpo/models/tiny_base/: a Llama of about a million parameters.

    python examples/tiny_base.py gtpo/models/tiny_base
    python examples/tiny_base.py results/missing_tags --missing "<reasoning>=0.08" "</reasoning>=0.5" --half --threads 1

It is built from a seed and trained, all weights, on arithmetic with deliberately imperfect targets. Another CPU or
PyTorch rounds to other weights. After an edit of the recipe, name the new directory in gtpo/models/hub.py.
"""

import argparse
import hashlib
import json
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gtpo.data.arithmetic import arithmetic
from gtpo.data.tables import Row
from gtpo.models.hub import TINY_BASE
from gtpo.processes import limit_openmp_spinning
from gtpo.prompts import SYSTEM_PROMPT, TAGS, to_completion, to_messages

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
    size: int,
    seed: int = TINY["seed"],
    steps: tuple[int, ...] = (1, 2, 3),
    recipe: Mapping[str, Any] | None = None,
) -> Iterator[tuple[str, str]]:
    """Questions and the solutions that a base imitates: in many phrasings, some guessed, some spoiled.

    Args:
        size: Their number.
        seed: Of the choices.
        steps: As for :func:`gtpo.data.arithmetic.arithmetic`.
        recipe: Its shares; by default ``TINY``.
    """
    recipe = recipe or TINY
    generator = random.Random(f"tiny-{seed}")
    for row in arithmetic("train", size, 1 + seed, steps):
        is_guess = generator.random() < recipe["guessed"]
        reasoning, answer = _guess(row, generator) if is_guess else _work(row, generator)
        target = to_completion(reasoning, answer)
        for tag in _missing_tags(recipe, generator):
            target = target.replace(tag, "", 1).strip()
        yield row.prompt, target


def _missing_tags(recipe: Mapping[str, Any], generator: random.Random) -> list[str]:
    """The tags that a target lacks. ``missing``, if the recipe has it, is the share of targets without each tag."""
    if "missing" in recipe:
        return [tag for tag, share in recipe["missing"].items() if generator.random() < share]
    if generator.random() >= recipe["spoiled_format"]:
        return []
    end = recipe["spoiled_reasoning_end"]
    if end and generator.random() < end:
        return [TAGS[1]]
    return [generator.choice(TAGS)]


def _guess(row: Row, generator: random.Random) -> tuple[str, str]:
    """A short guess near the result."""
    answer = max(0, int(row.gold) + generator.choice((-3, -2, -1, 0, 0, 1, 2, 3)))
    return " ".join((generator.choice(TINY["openings"]), "guess")), str(answer)


def _work(row: Row, generator: random.Random) -> tuple[str, str]:
    """The steps in words of choice, with remarks in between; the last result is sometimes wrong."""
    *steps, last = row.solution.split("\n")
    answer = row.gold
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


def train_tiny(root: Path, recipe: Mapping[str, Any] | None = None, threads: int = THREADS) -> Path:
    """Train a tiny base below ``root``; ``tiny.json`` has the recipe, ``losses.json`` the loss of each step.

    The tokenizer is that of ``TINY`` for every recipe.
    """
    import torch

    recipe = recipe or TINY
    directory = root / directory_name(recipe)
    save_untrained(directory)
    torch.set_num_threads(threads)
    trainer = warm_start(directory, recipe)
    trainer.train()
    trainer.model.to(getattr(torch, recipe.get("dtype", "float32"))).save_pretrained(directory)
    losses = [round(entry["loss"], 4) for entry in trainer.state.log_history if "loss" in entry]
    (directory / "losses.json").write_text(json.dumps(losses), encoding="utf-8")
    (directory / "tiny.json").write_text(json.dumps(recipe, indent=2), encoding="utf-8")
    return directory


def directory_name(recipe: Mapping[str, Any] | None = None) -> str:
    return f"base-{hashlib.sha256(json.dumps(recipe or TINY, sort_keys=True).encode()).hexdigest()[:8]}"


def recipe_of(missing: Sequence[str] = (), half: bool = False, **shares: float | None) -> dict[str, Any]:
    """``TINY`` with other shares.

    Args:
        missing: ``TAG=SHARE`` of targets that lack a tag, each independently, instead of the spoiled ones of ``TINY``.
        half: The trained weights are stored in float16, half the size.
        shares: Other keys, such as ``guessed``; None leaves that of ``TINY``.
    """
    recipe = dict(TINY)
    if missing:
        del recipe["spoiled_format"], recipe["spoiled_reasoning_end"]
        pairs = [word.split("=") for word in missing]
        recipe["missing"] = {tag: float(share) for tag, share in pairs}
    if unknown := recipe.get("missing", {}).keys() - set(TAGS):
        raise SystemExit(f"--missing {unknown.pop()}: expected TAG=SHARE with a tag of {' '.join(TAGS)}.")
    for name, value in shares.items():
        if value is not None:
            recipe[name] = value
    if half:
        recipe["dtype"] = "float16"
    return recipe


def warm_start(directory: Path, recipe: Mapping[str, Any] | None = None) -> Any:
    """The trainer of a tiny base, a :class:`transformers.Trainer`, for the untrained model in ``directory``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

    recipe = recipe or TINY
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=False, dtype=torch.float32)
    targets = imperfect_targets(recipe["steps"] * recipe["batch_size"], recipe=recipe)
    return Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(directory),
            max_steps=recipe["steps"],
            per_device_train_batch_size=recipe["batch_size"],
            learning_rate=recipe["learning_rate"],
            lr_scheduler_type="cosine",
            warmup_steps=0.05,
            adam_beta2=0.99,
            weight_decay=0.1,
            seed=recipe["seed"],
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
    parser.add_argument("--missing", nargs="+", default=[], metavar="TAG=SHARE", help="share of targets without a tag")
    parser.add_argument("--guessed", type=float, metavar="SHARE", help="share of short guesses")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of the training")
    parser.add_argument("--half", action="store_true", help="store the weights in float16")
    parser.add_argument("--threads", type=int, default=THREADS, metavar="N", help="another number rounds to others")
    flags = parser.parse_args()
    limit_openmp_spinning(os.environ)
    recipe = recipe_of(flags.missing, flags.half, guessed=flags.guessed, steps=flags.steps)
    print(train_tiny(flags.root, recipe, flags.threads))


if __name__ == "__main__":
    main()
