"""The policy: which backend runs it, the tiny model that is built here, LoRA, loading and saving.

``load_backend`` has to run before anything imports trl, transformers or peft: on a GPU, Unsloth patches all three.
"""

import hashlib
import importlib.metadata
import json
import logging
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock

from config import MODEL_ALIASES, ModelArguments, UsageError, early_arguments, gpu_is_available, is_installed, nearest
from prompts import SYSTEM_PROMPT, TAGS, to_completion, to_messages

logger = logging.getLogger(__name__)
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL reports each trainer's construction otherwise

GPU_PACKAGES = {  # as in requirements.txt; Unsloth goes on without 4-bit weights where bitsandbytes is missing
    "unsloth": "2026.10.7",
    "unsloth_zoo": "2026.10.7",
    "vllm": "0.27.1",
    "bitsandbytes": "0.50.2",
}

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


def load_backend(argv: list[str] | None = None) -> str:
    """Decide between Unsloth and Transformers, and import Unsloth where it is chosen: the first thing a script does.

    Args:
        argv: Command line without the program; ``sys.argv[1:]`` by default.

    Returns:
        "unsloth" or "transformers".

    Raises:
        UsageError: If the backend is unknown, or Unsloth is chosen and cannot run, or was imported too late.
    """
    early = early_arguments(list(sys.argv[1:] if argv is None else argv))
    choice = early.backend
    if choice not in ("auto", "unsloth", "transformers"):
        raise UsageError(f"--backend {choice!r} is unknown: pick one of auto, unsloth, transformers.")
    if choice == "auto":
        choice = "unsloth" if early.model != "tiny" and gpu_is_available() else "transformers"
    if choice == "transformers" or early.dry_run:  # a plan needs neither GPU nor packages
        return choice
    if not gpu_is_available():
        raise UsageError(
            "--backend unsloth needs a GPU that PyTorch sees, and there is none: use --backend transformers."
        )
    for package, pinned in GPU_PACKAGES.items():
        if not is_installed(package):
            raise UsageError(
                f"{package} is not installed: `pip install -r requirements.txt`, or --backend transformers."
            )
        if (found := importlib.metadata.version(package)) != pinned:
            raise UsageError(f"{package} {found} is installed, {pinned} is needed: `pip install -r requirements.txt`.")
    early_imports = {"trl", "transformers", "peft"} & sys.modules.keys()
    if early_imports and "unsloth" not in sys.modules:
        raise UsageError(
            f"{sorted(early_imports)[0]} was imported before Unsloth, which patches it: load_backend() first."
        )
    if os.environ.get("UNSLOTH_VLLM_STANDBY") == "1":
        logger.warning("UNSLOTH_VLLM_STANDBY=1: Unsloth takes its own share of the GPU, not --gpu_memory_utilization")
    import unsloth  # noqa: F401  (its import is its effect)
    from trl import GRPOTrainer

    if not GRPOTrainer.__name__.startswith("Unsloth"):
        raise UsageError("Unsloth did not patch trl.GRPOTrainer: delete unsloth_compiled_cache/ and start again.")
    return choice


def load_policy(arguments: ModelArguments, backend: str, seed: int, use_vllm: bool = False) -> tuple[Any, Any]:
    """The base model with a fresh LoRA adapter, and its tokenizer.

    Raises:
        UsageError: If the model cannot be found, is gated, or its tokenizer pads with its end-of-text token.
    """
    path = resolve_model(arguments.model)
    if backend == "unsloth":
        return _load_unsloth(arguments, path, seed, use_vllm)
    from peft import LoraConfig, get_peft_model
    from transformers import set_seed

    # TRL merges the adapter into the weights for vLLM and takes it out again: in bfloat16 that wears them out.
    model, tokenizer = load_base(path, arguments.load_in_4bit, full_precision=use_vllm)
    set_seed(seed)  # the adapter's starting weights
    lora = LoraConfig(
        r=arguments.lora_rank,
        lora_alpha=arguments.lora_rank,
        target_modules=arguments.lora_target_modules,
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, lora), tokenizer
    except ValueError as error:
        raise UsageError(f"PEFT cannot put the adapter on {path}: {str(error).splitlines()[0]}") from error


def load_base(path: str, load_in_4bit: bool = False, full_precision: bool = False) -> tuple[Any, Any]:
    """A causal language model and its tokenizer with Transformers: bfloat16 on a GPU that has it, float32 on a CPU.

    Args:
        path: Hub id or local folder.
        load_in_4bit: QLoRA's NF4 weights (arXiv 2305.14314) with bitsandbytes, each process on its own GPU.
        full_precision: float32 on a GPU too.

    Raises:
        UsageError: If the model cannot be loaded, or 4-bit weights are wanted without a GPU or bitsandbytes.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    has_bf16 = gpu_is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    options: dict[str, Any] = {"dtype": torch.bfloat16 if has_bf16 and not full_precision else torch.float32}
    if load_in_4bit:
        if not gpu_is_available():
            raise UsageError("--load_in_4bit needs a GPU, and PyTorch sees none: leave it out on a CPU.")
        if not is_installed("bitsandbytes"):
            raise UsageError("--load_in_4bit needs bitsandbytes: `pip install -r requirements.txt`.")
        half = torch.bfloat16 if has_bf16 else torch.float16
        options = {
            "dtype": half,
            "quantization_config": BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=half,
                bnb_4bit_quant_storage=half,  # so that FSDP can shard them
            ),
            "device_map": {"": int(os.environ.get("LOCAL_RANK", 0))},
        }
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(path, **options)
    except (OSError, ValueError) as error:
        raise UsageError(_why_not_loaded(path, error)) from error
    check_tokenizer(tokenizer, path)
    return model, tokenizer


def resolve_model(name: str) -> str:
    """The Hub id or local path behind ``--model``; ``tiny`` is built first where it is missing."""
    target = MODEL_ALIASES.get(name, name)
    if "/" not in target and target != "tiny" and not Path(target).is_dir():
        raise UsageError(
            f"model {name!r} is unknown{nearest(name, MODEL_ALIASES)}: pick tiny, llama, qwen, a Hub id (owner/name) "
            "or a local path."
        )
    return str(ensure_tiny()) if target == "tiny" else target


def check_tokenizer(tokenizer: Any, path: str) -> None:
    """Give a tokenizer without a padding token one of its reserved tokens; refuse one that pads with its EOS.

    Raises:
        UsageError: If padding cannot be told from the end of a completion, or there is no chat template.
    """
    if tokenizer.pad_token_id is None:
        reserved = ("<|finetune_right_pad_id|>", "<|reserved_special_token_0|>", "<|endoftext|>", "<pad>", "<unk>")
        free = [t for t in reserved if t in tokenizer.get_vocab() and t != tokenizer.eos_token]
        tokenizer.pad_token = free[0] if free else tokenizer.eos_token
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise UsageError(
            f"the tokenizer of {path} pads with its end-of-text token {tokenizer.eos_token!r}, so the end of a "
            "completion could not be told from padding: set another pad_token in its tokenizer_config.json."
        )
    if tokenizer.chat_template is None:
        raise UsageError(f"the tokenizer of {path} has no chat template: use an instruction-tuned model.")


def save_adapter(trainer: Any, resolved: dict[str, Any]) -> None:
    """Write the trained adapter with tokenizer and model card to ``adapter/``, whole or not at all.

    ``merge: 16bit`` writes ``merged/`` beside it, and ``push_to_hub`` uploads what was written last.

    Raises:
        UsageError: If the upload fails; what was trained lies in the run directory by then.
    """
    run_directory = Path(resolved["output_dir"])
    folder, unfinished = run_directory / "adapter", run_directory / "adapter.tmp"
    shutil.rmtree(unfinished, ignore_errors=True)
    from faults import replace_folder

    trainer.save_model(str(unfinished))  # every process takes part; the main one writes
    if not trainer.is_world_process_zero():
        return
    (unfinished / "training_args.bin").unlink(missing_ok=True)  # a pickle; config.yaml holds the settings
    shutil.rmtree(unfinished / "ref", ignore_errors=True)  # the reference of GRPO's KL: the adapter at step 0
    trainer.create_model_card(model_name=run_directory.name)
    card = run_directory / "README.md"
    base = trainer.model.config._name_or_path  # TRL links the base model to the Hub, where a local folder is not
    text = card.read_text().replace("[None](https://huggingface.co/None)", f"`{base}`")
    (unfinished / "README.md").write_text(text + _usage(resolved) + _settings(resolved))
    card.unlink()
    replace_folder(unfinished, folder)
    if resolved["merge"] == "16bit":
        merge_adapter(folder, resolve_model(resolved["model"]), run_directory / "merged")
        (run_directory / "merged" / "README.md").write_text(text + _MERGED_USAGE + _settings(resolved))
    from data import BENCHMARK_NAMES

    merged = ", merged/ a model that stands alone" if resolved["merge"] == "16bit" else ""
    benchmark = resolved.get("dataset")
    score = f"; to score it: python evaluate.py --benchmarks {benchmark} --adapter {run_directory}"
    score = score if benchmark in BENCHMARK_NAMES else ""
    logger.warning("%s: report.html shows the run, adapter/ is what was trained%s%s", run_directory, merged, score)
    if resolved["push_to_hub"]:
        _upload(run_directory / ("merged" if resolved["merge"] == "16bit" else "adapter"), resolved)


def merge_adapter(adapter: str | Path, base: str, folder: str | Path) -> None:
    """Write ``base`` with the adapter merged into its weights, in 16 bits, as a model that stands alone.

    The base is loaded anew in bfloat16 in the main memory, not the 4-bit weights that were trained on: twice as many GB
    as it has billions of parameters.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from faults import replace_folder

    folder, unfinished = Path(folder), Path(f"{folder}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, device_map="cpu")
    PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(adapter).save_pretrained(unfinished)
    replace_folder(unfinished, folder)


_MERGED_USAGE = """
## Use

The adapter is merged into the weights: the model stands alone.

```bash
vllm serve PATH_OR_HUB_ID
```
"""


def _usage(resolved: dict[str, Any]) -> str:
    base, rank = MODEL_ALIASES.get(resolved["model"], resolved["model"]), resolved["lora_rank"]
    return f"""
## Use

```python
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("PATH_OR_HUB_ID")
```

```bash
vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules adapter=PATH_OR_HUB_ID
```
"""


def _settings(resolved: dict[str, Any]) -> str:
    return f"""
It answers in the tags of its system prompt:

```text
{SYSTEM_PROMPT}
```

## Settings

```yaml
{yaml.safe_dump({key: value for key, value in resolved.items() if value is not None}, sort_keys=True).strip()}
```
"""


def _upload(folder: Path, resolved: dict[str, Any]) -> None:
    import httpx
    from huggingface_hub import HfApi

    name = resolved["hub_model_id"] or Path(resolved["output_dir"]).name
    hub = HfApi()
    try:
        repository = hub.create_repo(name, private=resolved["hub_private_repo"], exist_ok=True).repo_id
        hub.upload_folder(folder_path=folder, repo_id=repository, commit_message="Trained adapter")
    except (OSError, ValueError, httpx.HTTPError) as error:  # no network, no right to write, no such name
        raise UsageError(
            f"trained and saved in {folder}, but not uploaded: {str(error).splitlines()[0]} "
            f"`hf upload {name} {folder}` sends it."
        ) from error


def _why_not_loaded(path: str, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "gated repo" in str(error):  # as Transformers words it
        return f"{path} is gated: accept its licence on the Hub, then `hf auth login` or set HF_TOKEN."
    return f"cannot load model {path!r}: {reason} Pick tiny, llama, qwen, a Hub id or a folder with a config.json."


def _load_unsloth(arguments: ModelArguments, path: str, seed: int, use_vllm: bool) -> tuple[Any, Any]:
    from unsloth import FastLanguageModel

    try:
        model, tokenizer = FastLanguageModel.from_pretrained(
            model_name=path,
            max_seq_length=arguments.max_seq_length,
            load_in_4bit=arguments.load_in_4bit,
            fast_inference=use_vllm,  # vLLM in this process, sharing the weights; goes with use_vllm
            max_lora_rank=arguments.lora_rank,
            gpu_memory_utilization=arguments.gpu_memory_utilization,
        )
    except (OSError, ValueError) as error:
        raise UsageError(_why_not_loaded(path, error)) from error
    check_tokenizer(tokenizer, path)
    model = FastLanguageModel.get_peft_model(  # Unsloth ignores TRL's peft_config
        model,
        r=arguments.lora_rank,
        lora_alpha=arguments.lora_rank,
        target_modules=arguments.lora_target_modules,
        use_gradient_checkpointing="unsloth",  # keeps the activations in main memory
        random_state=seed,
    )
    # Unsloth loads its own 4-bit copy of a known model; the adapter belongs to the model that was named.
    model.peft_config["default"].base_model_name_or_path = path
    return model, tokenizer


# The tiny model: a Llama of about a million parameters that plays the part of the paper's instruct model.


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

    from tracking import ProgressBar

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
    from data import arithmetic

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

    from data import arithmetic

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
