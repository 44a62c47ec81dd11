import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluate import DEFAULTS
from gtpo.arguments import MODEL_ALIASES
from gtpo.backend import gpu_is_available
from gtpo.errors import UsageError, nearest

OUTPUTS = Path("outputs")


@dataclass(frozen=True)
class Target:
    """One row of the table: an adapter, or the base model where ``adapter`` is None."""

    label: str
    adapter: Path | None = None
    checkpoint: str | None = None


def find_targets(adapters: Sequence[str] | None, model: str | None, checkpoint: str) -> list[Target]:
    """The rows of the table, in the order of the flags; without any, the newest finished run under outputs/.

    Raises:
        UsageError: If a run or adapter is not there, or two of them have one name.
    """
    if not adapters and model:
        return [Target("")]
    if not adapters:
        finished = sorted(OUTPUTS.rglob("adapter/adapter_config.json"), key=lambda path: path.stat().st_mtime)
        if not finished:
            raise UsageError(
                f"no finished run under {OUTPUTS}/: train one (`python train_gtpo.py --model tiny --dataset "
                "arithmetic` on a CPU), name a run with --adapter RUN, or evaluate a base model with --model tiny."
            )
        newest = str(finished[-1].parent.parent)
        print(
            f"Evaluating {newest}, the newest finished run under {OUTPUTS}/ (--adapter RUN names another).", flush=True
        )
        adapters = [newest]
    if not model and set(adapters) == {"base"}:
        raise UsageError("--adapter base alone names no base model: add a run to it, or --model tiny|llama|qwen.")
    targets = []
    for name in adapters:
        try:
            targets.append(Target("") if name == "base" else adapter_target(name, checkpoint))
        except UsageError as error:
            if not Path(name).is_dir() or set(adapters) <= {name, "base"}:
                raise
            print(f"Left out: {error}", flush=True)
    if not any(target.adapter for target in targets) and set(adapters) != {"base"}:
        raise UsageError(f"none of --adapter {' '.join(adapters)} is finished: name a run that is.")
    labels = [target.label for target in targets]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise UsageError(
            f"two of --adapter are called {twice or 'base'!r}: name each once, or evaluate them into two --output_dir."
        )
    return targets


def adapter_target(name: str, checkpoint: str) -> Target:
    """The adapter of a run at a checkpoint, or an adapter folder itself.

    Raises:
        UsageError: If there is no such adapter.
    """
    folder = Path(name)
    if not folder.is_dir():
        runs = [str(path.parent.parent) for path in OUTPUTS.rglob("adapter/adapter_config.json")]
        raise UsageError(f"--adapter {name} is no folder{nearest(name, runs)}: expected a run directory or an adapter.")
    if (folder / "adapter_config.json").is_file():
        if checkpoint != DEFAULTS["checkpoint"]:
            raise UsageError(
                f"--checkpoint {checkpoint} is part of a run, and {name} is an adapter itself: name the run."
            )
        return Target(label_of(folder), folder)
    adapter = folder / {"last": "adapter", "best": "best"}.get(checkpoint, f"checkpoint-{checkpoint}")
    if not (adapter / "adapter_config.json").is_file():
        there = sorted(
            path.parent.name.removeprefix("checkpoint-").replace("adapter", "last")
            for path in folder.glob("*/adapter_config.json")
            if path.parent.name in ("adapter", "best") or path.parent.name.startswith("checkpoint-")
        )
        way_out = f"--checkpoint takes {', '.join(there)} here" if there else "its training has not finished"
        raise UsageError(f"{name} has no {adapter.name}/adapter_config.json: {way_out}.")
    at = "" if checkpoint == DEFAULTS["checkpoint"] else f"@{checkpoint}"
    return Target(label_of(folder) + at, adapter, checkpoint)


def label_of(folder: Path) -> str:
    """A run's name in tables and paths: its path under outputs/, joined with dashes; elsewhere the folder's name."""
    folder, root = folder.resolve(), OUTPUTS.resolve()
    if folder.name == "adapter":
        folder = folder.parent
    return "-".join(folder.relative_to(root).parts) if folder.is_relative_to(root) else folder.name


def base_model(targets: Sequence[Target], model: str | None) -> str:
    """The base model that all adapters were trained on; without an adapter, what --model names.

    Raises:
        UsageError: If an adapter names none, two name different ones, or it is a local folder that is gone.
    """
    bases: dict[str, Path] = {}
    for target in targets:
        if target.adapter:
            bases.setdefault(adapter_config(target.adapter)["base_model_name_or_path"], target.adapter)
    first, *others = bases or [MODEL_ALIASES.get(str(model), str(model))]
    for other in others:
        if not same_model(first, other):
            raise UsageError(
                f"{bases[first]} was trained on {first} and {bases[other]} on {other}: evaluate them in two calls, "
                "`--regrade` prints one table of all."
            )
    local = Path(first).is_absolute() or first.startswith(".") or first.count("/") > 1
    if bases and local and not model and not Path(first).exists():
        raise UsageError(
            f"{bases[first]} was trained on {first}, which is not here: name the base model with --model "
            "(--model tiny makes the tiny one)."
        )
    return first


def adapter_config(adapter: Path) -> dict[str, Any]:
    """The LoRA settings that PEFT stores with an adapter.

    Raises:
        UsageError: If they cannot be read or name no base model.
    """
    path = adapter / "adapter_config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}.") from error
    if not isinstance(config, dict) or not config.get("base_model_name_or_path"):
        raise UsageError(f"{path} names no base_model_name_or_path: write the model's Hub id or folder there.")
    if not (adapter / "adapter_model.safetensors").is_file():
        raise UsageError(f"{adapter} has no adapter_model.safetensors; adapter_model.bin, a pickle, is not read.")
    return config


def same_model(a: str, b: str) -> bool:
    """Whether two names mean one model: equal, one folder, or of one last part where a Hub id has a copy.

    Copies are a local folder (downloaded, or moved since) and Unsloth's, of which an adapter trained in 4 bit names
    ``unsloth/meta-llama-3.1-8b-instruct-unsloth-bnb-4bit`` or the like.
    """
    here = [Path(name).exists() for name in (a, b)]
    if a == b or all(here):
        return a == b or Path(a).samefile(b)
    plain = [
        Path(name).name.lower().removesuffix("-bnb-4bit").removesuffix("-unsloth").removeprefix("meta-")
        for name in (a, b)
    ]
    return plain[0] == plain[1] and (any(here) or "unsloth" in (a.partition("/")[0], b.partition("/")[0]))


def refuse_large_model_without_gpu(model: str) -> None:
    """Refuse the paper's models on a CPU, unless --backend transformers asks for it.

    Raises:
        UsageError: Without a GPU.
    """
    large = any(same_model(model, MODEL_ALIASES[alias]) for alias in ("llama", "qwen"))
    if (large or model.endswith("bnb-4bit")) and not gpu_is_available():
        raise UsageError(
            f"{model} needs a GPU and PyTorch sees none here: check torch.cuda.is_available() and the NVIDIA driver "
            "(R580 or newer), evaluate --model tiny --benchmarks arithmetic on a CPU, or insist with --backend "
            "transformers (hours)."
        )


def is_tiny(model: str) -> bool:
    """Whether a resolved model is the tiny base that is built here."""
    return (Path(model) / "tiny.json").is_file()


def short_name(model: str) -> str:
    """A model's name in tables and paths."""
    return "tiny" if is_tiny(model) else Path(model).name
