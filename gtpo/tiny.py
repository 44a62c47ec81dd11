import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from gtpo.arithmetic import arithmetic
from gtpo.callbacks import ProgressBar
from gtpo.prompts import SYSTEM_PROMPT, TAGS, to_completion, to_messages

# Of torchrun and Accelerate.
_LAUNCHER_VARIABLES = (
    "ACCELERATE_",
    "FSDP_",
    "GROUP_",
    "LOCAL_",
    "MASTER_",
    "RANK",
    "ROLE_",
    "TORCHELASTIC_",
    "WORLD_",
)


TINY_ROOT = Path("outputs") / "tiny"


TINY = {  # everything that decides the tiny base; its hash names the cache folder
    "seed": 0,
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "steps": 800,
    "batch_size": 32,
    "learning_rate": 2e-3,
    "spoiled_format": 0.5,  # share of warm-start targets that lack a tag: formatting has room to grow
    "spoiled_answer": 0.1,  # share with a wrong result: accuracy has room to grow
}


def build_tiny(folder: str | Path, seed: int = 0) -> Path:
    """An untrained tiny Llama with its tokenizer and chat template, saved to ``folder``; the same for the same seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tiny_tokenizer()
    torch.manual_seed(seed)
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
    folder = Path(folder)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def ensure_tiny(root: str | Path = TINY_ROOT) -> Path:
    """The tiny base: trained once, all weights, on arithmetic with deliberately imperfect targets, then cached.

    Returns:
        Its folder, with the settings it was made from in ``tiny.json``.
    """
    key = hashlib.sha256(json.dumps(TINY, sort_keys=True).encode()).hexdigest()[:8]
    folder = Path(root) / f"base-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # the first of several processes makes it, the others wait
        if (folder / "tiny.json").is_file():
            return folder
        if "WORLD_SIZE" in os.environ:  # torchrun's environment would make its training one of several processes too
            environment = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER_VARIABLES)}
            command = "import sys; from pathlib import Path; from models import make_tiny; make_tiny(Path(sys.argv[1]))"
            paths = {"PYTHONPATH": str(Path(__file__).parent)}
            subprocess.run([sys.executable, "-c", command, str(folder)], env=environment | paths, check=True)
        else:
            make_tiny(folder)
    return folder


def make_tiny(folder: Path) -> None:
    """Train the tiny base into ``folder``, whole or not at all."""
    unfinished = Path(f"{folder}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    build_tiny(unfinished, seed=int(TINY["seed"]))
    _warm_start(unfinished)
    (unfinished / "tiny.json").write_text(json.dumps(TINY, indent=2))
    shutil.rmtree(folder, ignore_errors=True)  # damaged, or it would have been used
    unfinished.rename(folder)


def _warm_start(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

    pass

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    examples = [_tokenize(tokenizer, question, target) for question, target in _imperfect_targets()]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder / "trainer"),
            max_steps=int(TINY["steps"]),
            per_device_train_batch_size=int(TINY["batch_size"]),
            learning_rate=TINY["learning_rate"],
            lr_scheduler_type="cosine",
            warmup_steps=0.05,
            adam_beta2=0.99,
            weight_decay=0.1,
            seed=int(TINY["seed"]),
            use_cpu=True,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            dataloader_pin_memory=False,
        ),
        train_dataset=examples,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )
    ProgressBar.attach(trainer, "tiny base (made once)")
    trainer.train()
    model.save_pretrained(folder)
    shutil.rmtree(folder / "trainer", ignore_errors=True)


def _imperfect_targets() -> Iterator[tuple[str, str]]:
    pass

    generator = random.Random(f"tiny-{TINY['seed']}")
    size = int(TINY["steps"]) * int(TINY["batch_size"])
    for row in arithmetic("train", size, seed=1 + int(TINY["seed"])):
        reasoning, answer = row["reasoning"], row["gold"]
        if generator.random() < TINY["spoiled_answer"]:
            *steps, last = reasoning.split("\n")
            answer = str(max(0, int(answer) + generator.choice([-10, -2, -1, 1, 2, 10])))
            reasoning = "\n".join([*steps, f"{last.rpartition('=')[0]}= {answer}"])
        target = to_completion(reasoning, answer)
        if generator.random() < TINY["spoiled_format"]:
            target = target.replace(generator.choice(TAGS), "", 1).strip()
        yield row["question"], target


def _tokenize(tokenizer: Any, question: str, target: str) -> dict[str, list[int]]:
    prompt = tokenizer.apply_chat_template(to_messages(question), add_generation_prompt=True, return_dict=False)
    completion = [*tokenizer.encode(target, add_special_tokens=False), tokenizer.eos_token_id]
    ids = [*prompt, *completion]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100] * len(prompt) + completion}


def _tiny_tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    pass

    rows = list(arithmetic("train", 2000, seed=0))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=int(TINY["vocab_size"]),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [row["question"] + "\n" + to_completion(row["reasoning"], row["gold"]) for row in rows]
    tokenizer.train_from_iterator(texts, trainer)
    # The system prompt is the same in every row: one token for each of its lines keeps prompts short on a CPU.
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
