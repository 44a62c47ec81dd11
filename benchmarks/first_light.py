"""What only a GPU can show, in about an hour: `make first-light`.

    python benchmarks/first_light.py                           # every stage that results/gpu/<GPU>.json does not have
    python benchmarks/first_light.py --stages head gradient    # these, again
    python benchmarks/first_light.py --minutes 10              # what is worth most in that time; --plan prints it
    python benchmarks/first_light.py --work DIR                # models, runs and logs on a fast disk, kept
    python benchmarks/first_light.py --model DIR               # the stage `learning` with these weights too
    python benchmarks/first_light.py --page                    # the tables of docs/gpu.md, from results/gpu/
    python benchmarks/first_light.py --miniature               # on a CPU

Stages of correctness run side by side, where the GPU has the memory; what is timed runs alone and afterwards. Each
stage has a time limit, prints one line, and is stored at once: an interrupted command continues with the stages that
were running. A stage whose result is wrong says FAILED and why, and the next one runs. Models have random weights, but
for those that learn: the tiny base, and Qwen2.5-0.5B-Instruct where it can be downloaded.
"""

import argparse
import itertools
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PARTS = ROOT / "benchmarks" / "gpu"
sys.path[:0] = [str(ROOT), str(PARTS)]

import yaml  # noqa: E402
from checks import (  # noqa: E402
    SIZES,
    STEPS,
    VARIANTS,
    Sizes,
    build_model,
    describe,
    environment_of_runs,
    flags,
    long_prompts,
    metrics_of,
)

from gtpo.files import write_atomically  # noqa: E402
from gtpo.models.hub import hub_is_reachable  # noqa: E402
from gtpo.models.memory import GIB, estimate, hours_of_steps, shape_of  # noqa: E402

LEAST_COSINE = 0.98  # of the gradient of a LoRA matrix in 16 bits with that in float64
HEAD_ENTROPY = 3e-3  # nats, of the mean over rows; observed 4e-4 in bfloat16 on a CPU
MAX_GAP = 0.2  # nats per token between trainer and sampler; bfloat16 engines differ by a few hundredths
LEAST_GPU = 38.0  # GiB for the 8B shape in 16 bits, or for stages side by side
LEAST_DISK = 20.0  # GiB for the 8B shape
LEARNING_STEPS = {"cuda": 30, "cpu": 2}
REAL_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"  # 1 GB
REPLACEMENTS = f"""
import sys
sys.path += {[str(ROOT), str(ROOT / "tests")]}
from helpers import gpu_replacements
gpu_replacements.replace()
"""
FREEZE = "import unsloth\nfrom unsloth_zoo import vllm_utils\nvllm_utils.load_lora = lambda *args, **kwargs: None\n"
HALF = """
import torch, unsloth
load = unsloth.FastLanguageModel.from_pretrained
unsloth.FastLanguageModel.from_pretrained = staticmethod(lambda **options: load(**options | {"dtype": torch.float16}))
"""  # Unsloth loads bfloat16 where the GPU has it, and then refuses --fp16
TRL_1_16 = f"""
import os
os.environ["PYTHONPATH"] = path = {str(ROOT / ".venv-trl-1.16.0")!r}
sys.path.insert(0, path)
"""  # the fused head, which the pinned 1.14.2 lacks
FLOAT32_HEAD = """
import vllm
class Engine(vllm.LLM):
    def __init__(self, **options):
        super().__init__(**options | {"hf_overrides": {"head_dtype": "float32"}})
vllm.LLM = Engine
"""
NO_SEEDS = "from gtpo.evaluation import sampling\nsampling.derived_seed = lambda *names: None\n"


class Fault(Exception):
    """A stage whose result is wrong: the message is its verdict."""


@dataclass
class Bench:
    """Where the stages run: the device (cuda, or cpu for the miniature), and a directory of models and runs.

    ``place`` is the working directory of its processes: Unsloth writes its compiled trainers there, and two processes
    may not do so at once. ``launch`` runs a script, as :func:`launch_process`; ``before`` is Python source that every
    process executes before its script, a fault in a test. ``real`` is a directory of real weights. ``numbers`` are what
    the running stage has measured, stored even if it fails; ``results`` those of the stages that are done.
    """

    device: str
    work: Path
    launch: Callable[..., tuple[int, str]]
    before: str = ""
    real: Path | None = None
    deadline: float = math.inf
    place: Path | None = None
    building: Any = field(default_factory=threading.Lock)  # a model, by one stage at a time
    numbers: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def about(self) -> dict[str, Any]:
        return describe(self.device)

    @property
    def sizes(self) -> Sizes:
        return SIZES[self.device]

    def model(self, name: str) -> Path:
        """The directory of a model of ``sizes.shapes``."""
        directory = self.work / "models" / name
        with self.building:
            if not (directory / "config.json").is_file():
                unfinished = directory.with_suffix(".tmp")
                build_model(unfinished, name, self.sizes.shapes[name], self.device)
                unfinished.rename(directory)
        return directory

    def run(
        self, script: Path, *argv: object, name: str, before: str = "", device: str | None = None
    ) -> tuple[int, str]:
        """Run a script in its own process: (exit code, output), which is kept in ``work/name.txt``."""
        needs_packages = "--backend=unsloth" in argv or "--backend=vllm" in argv
        if (seconds := self.deadline - time.monotonic()) <= 0:
            raise TimeoutError
        place = self.place or self.work
        place.mkdir(parents=True, exist_ok=True)
        code, output = self.launch(
            place, script, *map(str, argv), before=self.before + before, device=device or self.device,
            needs_packages=needs_packages, seconds=seconds,
        )  # fmt: skip
        (self.work / f"{name}.txt").write_text(output)
        return code, output

    def succeed(self, script: Path, *argv: object, name: str, before: str = "", device: str | None = None) -> str:
        """As :meth:`run`; a script that fails is a fault of the stage."""
        code, output = self.run(script, *argv, name=name, before=before, device=device)
        if code:
            last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
            raise Fault(f"{name}: exit code {code}: {last[:300]}")
        return output

    def trained(self, method: str, variant: str) -> Path:
        """A run of four steps on a backend, made on first use."""
        run = self.work / f"{method}-{variant}"
        if not (run / "adapter").is_dir():
            argv = [*flags(self.model("llama"), variant, self.sizes, self.device), "--overwrite=true"]
            self.succeed(ROOT / f"train_{method}.py", *argv, "--output_dir", run, name=run.name)
        return run


def launch_process(
    directory: Path, script: Path, *argv: str, before: str, device: str, needs_packages: bool, seconds: float
) -> tuple[int, str]:
    """Run a script in a process of its own; without a GPU, Unsloth and vLLM with the replacements of tests/helpers."""
    replaced = REPLACEMENTS if device == "cpu" and needs_packages else ""
    source = f"import runpy, sys\ndel sys.argv[0]\nsys.path[:1] = {[str(script.parent), str(ROOT)]}\n"
    source += f"{replaced}{before}\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    ended = subprocess.run(
        [sys.executable, "-c", source, str(script), *argv],
        cwd=directory,
        env=environment_of_runs(device),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    return ended.returncode, ended.stdout


# The stages: each returns its verdict


def attention(bench: Bench) -> str:
    """The attention that Unsloth and vLLM take here, and whether xformers loads."""
    file = bench.work / "attention.json"
    bench.succeed(PARTS / "attention.py", file, "--backend=unsloth", name="attention")
    bench.numbers |= json.loads(file.read_text())
    return ", ".join(f"{name} {found}" for name, found in bench.numbers.items())


def head(bench: Bench) -> str:
    """Time, memory and accuracy of the head next to the limit of two matmuls and the heads of TRL 1.16 and Liger."""
    file = bench.work / "head.json"
    argv = ["--device", bench.device, *bench.sizes.benchmark, "--output", file]
    if bench.device == "cuda":
        argv += ["--length", 300] if bench.about["memory_gib"] < LEAST_GPU else []  # for the logits path
        argv = argv if bench.about["bfloat16"] else [str(word).replace("bfloat16", "float16") for word in argv]
    bench.succeed(ROOT / "benchmarks" / "bench_loss.py", *argv, name="head", before=TRL_1_16)
    bench.numbers |= json.loads(file.read_text())
    for shape, measured in bench.numbers["shapes"].items():
        off = measured["accuracy"]["ours"]
        is_float32 = shape.startswith("float32")
        bounds = dict.fromkeys(("gradient", "gradient, confident"), 1e-4 if is_float32 else 0.03)
        wrong = [f"{x} {off[x]:.1e}" for x, most in (bounds | {"entropy": HEAD_ENTROPY}).items() if not off[x] <= most]
        if wrong:
            raise Fault(f"{shape} is off by {', '.join(wrong)}")
    measured = next(iter(bench.numbers["shapes"].values()))
    seconds = measured["seconds"]
    peers = ", ".join(f"{x} {1e3 * seconds[x]:.0f}" for x in ("trl logits", "trl fused", "liger") if x in seconds)
    return (
        f"{1e3 * seconds['ours']:.0f} ms, {seconds['ours'] / seconds['limit']:.2f} x two matmuls ({peers}), "
        f"{measured['peak_mib']['ours']:.0f} MiB, gradient off by {measured['accuracy']['ours']['gradient']:.1%}"
    )


def gradient(bench: Bench) -> str:
    """The gradient of a whole step, by backend and precision, with that of a CPU in float64."""
    import torch
    from gradient import GROUP, reference_gradient
    from safetensors.torch import load_file

    model = bench.model("llama")
    reference: dict[str, torch.Tensor] = {}
    low = []
    for variant in VARIANTS_16_BIT:
        for precision in ("bf16", "fp16") if bench.device == "cuda" else ("bf16", "float32"):
            if precision == "bf16" and bench.device == "cuda" and not bench.about["bfloat16"]:
                continue
            name = f"{variant} {precision}"
            file = bench.work / f"gradient-{variant}-{precision}.safetensors"
            argv = [
                *flags(model, variant, bench.sizes, bench.device),
                *("--load_in_4bit=false", "--use_vllm=false", "--optim=adamw_torch", "--overwrite=true"),
                *(f"--bf16={str(precision == 'bf16').lower()}", f"--fp16={str(precision == 'fp16').lower()}"),
                *("--G", GROUP, "--max_steps", 1, "--max_grad_norm", 1e9, "--initial_entropy", 1),
                *("--entropy_filter", "off", "--output_dir", bench.work / file.stem),
            ]
            before = HALF if (variant, precision) == ("unsloth", "fp16") else ""
            bench.succeed(PARTS / "gradient.py", file, "train_gtpo.py", *argv, name=file.stem, before=before)
            prompt_ids = json.loads(file.with_suffix(".json").read_text())
            reference = reference or reference_gradient(str(model), prompt_ids, gamma=0.1)
            found = {key: load_file(file)[key].double() for key in reference}
            pairs = {key: (found[key].flatten(), g.flatten()) for key, g in reference.items()}
            cosines = {key: float(torch.cosine_similarity(*pair, dim=0)) for key, pair in pairs.items()}
            worst = min(cosines, key=cosines.__getitem__)
            norms = [math.sqrt(sum(float(g.square().sum()) for g in each.values())) for each in (found, reference)]
            norm = norms[0] / norms[1]
            bench.numbers[name] = {"cosine": cosines[worst], "matrix": worst, "norm": norm}
            if not (cosines[worst] >= LEAST_COSINE and 0.9 < norm < 1.1):
                low.append(f"{name}: cosine {cosines[worst]:.3f}, norm x {norm:.2f} in {worst}")
    if low:
        raise Fault("; ".join(low))
    return ", ".join(f"{name} {found['cosine']:.4f}" for name, found in bench.numbers.items()) + " (least cosine)"


VARIANTS_16_BIT = ("unsloth", "transformers")


def rollouts(bench: Bench) -> str:
    """Four steps on every backend: the sampler generates with the adapter, and a frozen one stops the run."""
    for variant in VARIANTS:
        if bench.device == "cpu" and variant != "unsloth":
            continue
        rows = metrics_of(bench.trained("gtpo", variant))
        numbers = {key: [row.get(key) for row in rows] for key in ("loss", "grad_norm", "entropy", "sampler_logp_gap")}
        bench.numbers[variant] = numbers
        if len(rows) != STEPS or not all(
            value is not None and math.isfinite(value) for value in numbers["loss"] + numbers["entropy"]
        ):
            raise Fault(f"{variant}: loss {numbers['loss']}, entropy {numbers['entropy']}")
        gaps = numbers["sampler_logp_gap"]
        if "--use_vllm=true" in VARIANTS[variant] and not all(gap is not None and gap < MAX_GAP for gap in gaps):
            raise Fault(f"{variant}: the sampler has another adapter: it differs by {gaps} nats per token")
    code, output = frozen_run(bench)
    if not (code == 1 and "rollouts do not come from the adapter" in output):
        raise Fault(f"an adapter that is never handed over to the sampler was not noticed (exit code {code})")
    of_vllm = {name: found["sampler_logp_gap"] for name, found in bench.numbers.items()}
    largest = ", ".join(f"{name} {max(gaps):.1e}" for name, gaps in of_vllm.items() if gaps[0] is not None)
    return f"trainer and sampler differ by {largest} nats per token; a frozen adapter stops the run"


def frozen_run(bench: Bench) -> tuple[int, str]:
    """One step more of the run on Unsloth, without handing over its adapter; a fresh one equals the base model."""
    run = bench.work / "frozen"
    shutil.copytree(bench.trained("gtpo", "unsloth"), run, dirs_exist_ok=True)
    settings = yaml.safe_load((run / "config.yaml").read_text()) | {"output_dir": str(run)}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    argv = ["--backend=unsloth", "--resume", run, "--max_steps", STEPS + 1]
    argv += ["--reward", f"{PARTS / 'reward.py'}:text_sum"]
    return bench.run(ROOT / "train_gtpo.py", *argv, name="frozen", before=FREEZE)


def head_dtype(bench: Bench) -> str:
    """How far trainer and sampler differ with the engine's own head, and with a float32 one (vllm#48390)."""
    for variant in ("unsloth", "transformers-vllm") if bench.device == "cuda" else ("unsloth",):
        for name, before in (("own", ""), ("float32", FLOAT32_HEAD)):
            run = bench.work / f"head-{variant}-{name}"
            argv = [*flags(bench.model("llama"), variant, bench.sizes, bench.device), "--overwrite=true"]
            bench.succeed(ROOT / "train_gtpo.py", *argv, "--output_dir", run, name=run.name, before=before)
            gaps = [row["sampler_logp_gap"] for row in metrics_of(run)]
            bench.numbers[f"{variant}, {name}"] = statistics.mean(gaps)
    return ", ".join(f"{name} head: {gap:.2e} nats" for name, gap in bench.numbers.items())


def learning(bench: Bench) -> str:
    """Thirty steps of GTPO and GRPO: the tiny base here and on the CPU, real weights where there are some."""
    precision = (
        [] if bench.device == "cpu" else ["--bf16=false", f"--{'bf16' if bench.about['bfloat16'] else 'fp16'}=true"]
    )
    verdicts = []
    for method in ("gtpo", "grpo"):
        gained = {}
        for device in dict.fromkeys((bench.device, "cpu")):
            argv = ["--config", ROOT / "configs" / method / "tiny.yaml", "--model", "tiny"]
            argv += ["--backend=unsloth", "--use_cpu=false", *precision] if device == "cuda" else []
            gained[device] = points_gained(bench, method, device, *argv, device=device)
        verdicts.append(f"{method} " + ", ".join(f"{gain:+.0f} points ({device})" for device, gain in gained.items()))
        if LEARNING_STEPS[bench.device] >= 30 and gained[bench.device] < gained["cpu"] / 2:
            raise Fault(f"{verdicts[-1]}: formatting and accuracy, last third minus first")
    if bench.real is not None:
        is_snapshot = bench.real.parent.name == "snapshots"  # of the Hub's cache
        name = (bench.real.parents[1] if is_snapshot else bench.real).name
        argv = ["--model", bench.real, "--dataset", "arithmetic", *VARIANTS["unsloth"], *precision]
        argv += ["--lora_rank", 16, "--learning_rate", 1e-5, f"--use_cpu={str(bench.device == 'cpu').lower()}"]
        argv += ["--max_prompt_length", 256, "--max_completion_length", 256, "--max_seq_length", 512]
        for method in ("gtpo", "grpo") if bench.device == "cuda" else ("gtpo",):
            verdicts.append(f"{method} {points_gained(bench, method, name, *argv):+.0f} points ({name})")
    return "; ".join(verdicts) + ": formatting and accuracy, last third minus first"


def points_gained(bench: Bench, method: str, name: str, *argv: object, device: str | None = None) -> float:
    """Formatting and accuracy of a run, last third minus first; its curves are stored under ``name``."""
    steps = LEARNING_STEPS[bench.device]
    run = bench.work / f"learning-{method}-{name}"
    argv += ("--G", 8, "--prompts_per_step", 1, "--lr_scheduler_type", "constant", "--max_steps", steps, "--seed", 1)
    argv += ("--logging_steps", 1, "--report_to", "none", "--overwrite=true", "--output_dir", run)
    bench.succeed(ROOT / f"train_{method}.py", *argv, name=run.name, device=device)
    rows = metrics_of(run)
    third = max(1, steps // 3)
    curves = "formatting", "accuracy", "entropy"
    bench.numbers[f"{method} {name}"] = {key: [row[key] for row in rows] for key in curves}
    scores = [row["formatting"] + row["accuracy"] for row in rows]
    return statistics.mean(scores[-third:]) - statistics.mean(scores[:third])


def real_weights(named: str | None, device: str) -> Path | None:
    """The directory of ``--model``, a directory or a Hub id; on a GPU that of REAL_MODEL if it can be had."""
    if (named is None and device == "cpu") or (named is not None and Path(named).is_dir()):
        return Path(named).absolute() if named else None
    from huggingface_hub import snapshot_download

    if named is None and not hub_is_reachable():
        print("learning: the tiny base alone, the Hub cannot be reached: --model DIR")
        return None
    try:
        return Path(snapshot_download(named or REAL_MODEL, allow_patterns=["*.json", "*.safetensors", "*.txt"]))
    except Exception as error:  # the Hub raises various errors
        if named is not None:
            raise
        print(f"learning: the tiny base alone, {REAL_MODEL} cannot be had ({type(error).__name__}): --model DIR")
        return None


def measured_step(
    bench: Bench,
    lengths: str = "longest",
    backend: str = "unsloth",
    trainer: str = "ours",
    micro_batch: int | str = 1,
    prompts: int = 1,  # that are generated together, for as many steps
    base: str = "4bit",  # or 16bit
) -> str:
    """Seconds by phase, tokens per second and memory of the longest step of the presets."""
    name = "llama"
    sizes = bench.sizes
    if "llama-8b" in sizes.shapes:
        disk = shutil.disk_usage(bench.work).free / GIB
        name = "llama-8b" if bench.about["memory_gib"] >= LEAST_GPU and disk >= LEAST_DISK else "qwen-3b"
    (prompt, completion), longest = sizes.lengths[lengths], sizes.lengths["longest"]
    bench.numbers |= {"model": name, "G": sizes.group, "prompt": prompt, "completion": completion}
    batch = sizes.group if micro_batch == "G" else micro_batch
    run = bench.work / f"step-{lengths}-{backend}-{trainer}-{batch}-{prompts}-{base}"
    argv = [
        *("--model", bench.model(name), "--dataset", long_prompts(bench.work, bench.model(name), prompt)),
        *("--G", sizes.group, "--prompts_per_step", 1, "--per_device_train_batch_size", batch),
        *("--gradient_checkpointing", "true", "--reward", f"{PARTS / 'reward.py'}:text_sum"),
        *("--max_prompt_length", longest[0], "--max_seq_length", sum(longest), "--max_completion_length", completion),
        *("--lora_rank", sizes.measured_rank, "--max_steps", 3 * prompts, "--save_steps", 100 * prompts),
        *("--steps_per_generation", prompts * sizes.group // int(batch), "--logging_steps", 1),
        *("--report_to", "none", "--log_completions", "false", "--output_dir", run, "--overwrite=true"),
        *VARIANTS[backend],
        *(("--load_in_4bit=false",) if base == "16bit" or (bench.device == "cpu" and backend != "unsloth") else ()),
        *(("--use_cpu=true",) if bench.device == "cpu" else ()),
    ]
    script, extra = ("gtpo", ("--initial_entropy", 1)) if trainer == "ours" else ("grpo", ("--library",))
    try:
        bench.succeed(PARTS / "timed_run.py", f"train_{script}.py", *argv, *extra, name=run.name)
    except Fault as fault:
        if (backend, trainer, micro_batch, prompts, base) == ("unsloth", "ours", 1, 1, "4bit"):  # others may not fit
            raise
        bench.numbers["failed"] = str(fault)
        return f"{name}: {fault}"
    bench.numbers |= timed(run, prompts)
    found = bench.numbers
    return (
        f"{name}, {prompt:,} + {completion:,} tokens: {found['seconds_of_a_step']:.1f} s a step, "
        f"{found['tokens_per_second']:.0f} tokens/s, {found['peak_gib'] or 0:.1f} GiB"
    )


def timed(run: Path, together: int = 1) -> dict[str, Any]:
    """Medians over the steps after the first, and the peak of the GPU's memory with the plan of ``--dry_run``.

    Of steps that share a generation, each with its part of it.
    """
    phases = json.loads((run / "phases.json").read_text())
    row = metrics_of(run)[-together]
    settings = yaml.safe_load((run / "config.yaml").read_text())
    steps = phases["steps"][together:]
    names = sorted({name for step in steps for name in step})
    groups = [steps[first : first + together] for first in range(0, len(steps), together)]
    means = [{name: sum(step.get(name, 0.0) for step in group) / together for name in names} for group in groups]
    seconds = statistics.median(sum(step.values()) for step in means)
    longest = statistics.median(phases["longest"][1:])
    return {
        "seconds": {name: statistics.median(step[name] for step in means) for name in names},
        "seconds_of_a_step": seconds,
        "longest": longest,
        "tokens_per_second": settings["num_generations"] * row.get("completion_length", longest) / seconds,
        "plan_gib": estimate(shape_of(settings["model"]), settings),
        "peak_gib": phases.get("used_gib"),
        "peak_gib_by_phase": phases["peak"],
    }


def evaluation(bench: Bench) -> str:
    """Samples per second of vLLM at k = 64, base and adapter, with and without a seed per request."""
    run = bench.trained("gtpo", "unsloth")
    problems, k = (30, 64) if bench.device == "cuda" else (2, 2)
    for name, before in (("with seeds", ""), ("without seeds", NO_SEEDS)):
        output = bench.work / f"evaluation-{name.split()[0]}"
        argv = ["--runs", "base", run, "--benchmarks", "arithmetic", "--limit", problems, "--k", k, "--backend=vllm"]
        argv += ["--max_new_tokens", bench.sizes.completion, "--output_dir", output, "--overwrite"]
        started = time.monotonic()
        bench.succeed(ROOT / "evaluate.py", *argv, name=output.name, before=before)
        seconds = time.monotonic() - started
        written = sorted(path.stat().st_mtime for path in output.glob("*/arithmetic.jsonl"))
        bench.numbers[name] = {"samples": 2 * problems * k, "seconds": seconds, "targets": len(written)}
        if len(written) != 2:
            raise Fault(f"{name}: {len(written)} of 2 targets have completions")
    if bench.device == "cuda":
        bench.numbers["equal to PEFT"] = share = equal_to_peft(bench, run / "adapter")
        if not share["adapter"] > share["base"]:
            raise Fault(f"vLLM does not use the adapter: {share}")
    with_seeds, without = (bench.numbers[name]["seconds"] for name in ("with seeds", "without seeds"))
    return (
        f"{with_seeds:.0f} s for {2 * problems * k} samples, {without:.0f} s without seeds per request, with the start"
    )


def equal_to_peft(bench: Bench, adapter: Path) -> dict[str, float]:
    """Shares of the first greedy tokens of vLLM with the adapter that PEFT has with it, and without."""
    tokens = {}
    for backend in ("transformers", "vllm"):
        file = bench.work / f"greedy-{backend}.json"
        bench.succeed(PARTS / "greedy.py", backend, bench.model("llama"), adapter, file, 4, name=file.stem)
        tokens[backend] = json.loads(file.read_text())
    sampled = tokens["vllm"]["adapter"]
    return {
        key: statistics.mean(a == b for a, b in zip(sampled, tokens["transformers"][key], strict=True))
        for key in ("adapter", "base")
    }


def hours(bench: Bench) -> str:
    """Hours of an epoch by the two measured lengths, and the rates for configs/experiments.yaml."""
    steps = [bench.results.get(name, {}) for name in ("step_gsm8k", "step_math")]
    if not all("seconds_of_a_step" in step for step in steps):
        raise Fault("no measured step: --stages step_gsm8k step_math hours")
    (seconds, tokens), (more_seconds, more_tokens) = ((step["seconds_of_a_step"], step["longest"]) for step in steps)
    model = steps[0]["model"]
    group = steps[0]["G"]
    per_token = (more_seconds - seconds) / (more_tokens - tokens)
    each = (seconds - tokens * per_token) / group
    epochs = paper_rates()["steps"]
    measured = {"seconds_per_token": {model: per_token}, "seconds_per_micro_batch": {model: each}}
    lengths = {"gsm8k": tokens, "math": more_tokens, "gsm8k, collapsed": bench.sizes.lengths["longest"][1]}
    bench.numbers["hours"] = {
        name: hours_of_steps(measured, model, group, length, epochs[name.partition(",")[0]])
        for name, length in lengths.items()
    }
    bench.numbers |= {"model": model, "seconds_per_token": per_token, "seconds_per_micro_batch": each}
    text = ", ".join(f"{name} {found:.0f} h" for name, found in bench.numbers["hours"].items())
    if model not in MEASURED_MODELS:
        return f"{text}; not for configs/experiments.yaml: the model is small"
    return (
        f"an epoch of {MEASURED_MODELS[model]}, G = {group}: {text}. In configs/experiments.yaml: seconds_per_token "
        f"{per_token:.3g}, seconds_per_micro_batch {each:.3g}, speedup 1, and this GPU's name"
    )


MEASURED_MODELS = {"llama-8b": "llama", "qwen-3b": "qwen"}


class Stage(NamedTuple):
    """A stage, the minutes that it takes on an H100, and whether its times count: then it runs alone."""

    run: Callable[[Bench], str]
    minutes: float
    is_timed: bool = True

    @property
    def limit(self) -> float:
        """Seconds after which it is stopped."""
        return 60 * 4 * self.minutes


STAGES = {  # in the order of information per minute
    "attention": Stage(attention, 1, is_timed=False),
    "gradient": Stage(gradient, 3.5, is_timed=False),
    "rollouts": Stage(rollouts, 5, is_timed=False),
    "learning": Stage(learning, 4, is_timed=False),
    "head_dtype": Stage(head_dtype, 4, is_timed=False),
    "step_gsm8k": Stage(partial(measured_step, lengths="gsm8k"), 3.5),
    "step_group": Stage(partial(measured_step, lengths="gsm8k", micro_batch="G"), 2.5),
    "step_16bit": Stage(partial(measured_step, lengths="gsm8k", micro_batch="G", base="16bit"), 3),
    "step_unsloth": Stage(partial(measured_step, lengths="gsm8k", trainer="library", micro_batch="G"), 6),
    "head": Stage(head, 3),
    "step_math": Stage(partial(measured_step, lengths="math"), 4),
    "hours": Stage(hours, 0.5),
    "evaluation": Stage(evaluation, 5),
    "step_longest": Stage(measured_step, 5),
    "step_prompts": Stage(partial(measured_step, micro_batch="G", prompts=4), 8),
    "step_transformers": Stage(partial(measured_step, backend="transformers"), 6),
    "step_handover": Stage(partial(measured_step, backend="transformers-4bit-vllm"), 6),
    "step_trl": Stage(partial(measured_step, backend="transformers", trainer="library"), 6),
}
WORKERS = 4  # stages side by side


def plan(names: Sequence[str], minutes: float) -> list[str]:
    """The stages that fit the minutes: those of correctness, which take as long as the longest, then one by one."""
    together = [name for name in names if not STAGES[name].is_timed and STAGES[name].minutes <= minutes]
    left = minutes - max((STAGES[name].minutes for name in together), default=0)
    alone = []
    for name in names:
        if not STAGES[name].is_timed:
            continue
        left -= STAGES[name].minutes
        if left < 0:
            break
        alone.append(name)
    return together + alone


def plan_lines(chosen: Sequence[str]) -> list[str]:
    """A plan as it is printed."""
    together = [name for name in chosen if not STAGES[name].is_timed]
    lines = []
    if together:
        longest = max(STAGES[name].minutes for name in together)
        lines.append(f"side by side, about {longest:g} minutes: {', '.join(together)}")
    for name in chosen:
        if STAGES[name].is_timed:
            lines.append(f"alone, about {STAGES[name].minutes:g} minutes: {name}")
    return lines


def run_stage(name: str, bench: Bench) -> dict[str, Any]:
    """The entry of a stage: outcome, verdict, seconds, numbers, revision, date."""
    stage = STAGES[name]
    started = time.monotonic()
    bench.deadline = started + stage.limit
    try:
        outcome = "passed"
        verdict = stage.run(bench)
    except Fault as fault:
        outcome = "FAILED"
        verdict = str(fault)
    except (TimeoutError, subprocess.TimeoutExpired):
        outcome = "timeout"
        verdict = f"stopped after {stage.limit / 60:.0f} minutes: --stages {name} runs it again"
    except Exception as error:
        outcome = "FAILED"
        verdict = f"{type(error).__name__}: {str(error)[:300]}"
    return {
        "outcome": outcome,
        "verdict": verdict,
        "seconds": time.monotonic() - started,
        "numbers": bench.numbers,
        "git_revision": bench.about["git_revision"],
        "date": time.strftime("%Y-%m-%d"),
    }


class Report:
    """The report of a GPU, written after each stage."""

    def __init__(self, path: Path, bench: Bench, say: Any) -> None:
        self.path, self.bench, self.say = path, bench, say
        self.content: dict[str, Any] = {"stages": {}}
        if path.is_file():
            self.content = json.loads(path.read_text(encoding="utf-8"))
        self.content["environment"] = bench.about
        self.stages = self.content["stages"]
        self.writing = threading.Lock()

    def passed(self, name: str) -> bool:
        return bool(self.stages.get(name, {}).get("outcome") == "passed")

    def run(self, name: str, place: Path | None = None) -> None:
        """Run a stage, and store it."""
        results = {other: entry["numbers"] for other, entry in self.stages.items()}
        self.say(f"{name}: about {STAGES[name].minutes:g} minutes")
        entry = run_stage(name, replace(self.bench, numbers={}, results=results, place=place))
        with self.writing:
            self.stages[name] = entry
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(self.content, indent=1, sort_keys=True) + os.linesep)
        self.say(f"{name}: {entry['outcome']} in {entry['seconds'] / 60:.1f} minutes: {entry['verdict']}")


def first_light(
    bench: Bench, path: Path, chosen: Sequence[str] = (), minutes: float = math.inf, say: Any = print
) -> Mapping[str, Any]:
    """Run the stages that are chosen, or those that the report lacks; what fails side by side is run again alone."""
    report = Report(path, bench, say)
    wanted = list(chosen)
    for name in () if chosen else STAGES:
        if report.passed(name):
            say(f"{name}: passed before: {report.stages[name]['verdict']}")
        else:
            wanted.append(name)
    planned = plan(wanted, minutes)
    for name in wanted:
        if name not in planned:
            say(f"{name}: not run, it does not fit {minutes:g} minutes")
    together = [name for name in planned if not STAGES[name].is_timed]
    if bench.device == "cuda" and bench.about["memory_gib"] >= LEAST_GPU and len(together) > 1:
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(lambda name: report.run(name, bench.work / "side-by-side" / name), together))
        together = [name for name in together if not report.passed(name)]
    for name in [*together, *(name for name in planned if STAGES[name].is_timed)]:
        report.run(name)
    return report.content


# docs/gpu.md


def measured_table(reports: Sequence[Mapping[str, Any]]) -> str:
    """What each report was made with, the verdicts by stage and GPU, and the measured steps."""
    if not reports:
        return "Nothing has been run on a GPU yet; `python benchmarks/first_light.py --help` lists the stages."
    lines = [made_with(report) for report in reports] + [""]
    names = [report["environment"]["gpu"] for report in reports]
    lines += [f"| stage | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    missing = []
    for name in STAGES:
        entries = [report["stages"].get(name) for report in reports]
        if not any(entries):
            missing.append(f"`{name}`")
            continue
        cells = [f"{entry['outcome']}: {entry['verdict']}" if entry else "not run" for entry in entries]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    if missing:
        lines += ["", f"Stages that no GPU has run: {', '.join(missing)}."]
    rows = [row for report in reports for row in measured_rows(report)]
    if rows:
        header = "| GPU | model | stage | tokens | seconds of a step | tokens/s | GiB used | estimated |"
        lines += ["", header, "|---" * 8 + "|", *rows]
    return "\n".join(lines)


def made_with(report: Mapping[str, Any]) -> str:
    """GPU, driver, revision and date of a report, and the versions that are not the pinned ones."""
    environment = report["environment"]
    dates = sorted({stage["date"] for stage in report["stages"].values()})
    text = (
        f"{environment['gpu']}, driver {environment['driver']}, revision {environment['git_revision'][:7]}, {dates[-1]}"
    )
    others = []
    for name, version in sorted(environment["packages"].items()):
        if name in PINS and version != PINS[name]:
            others.append(f"{name} {version} instead of {PINS[name]}")
    return f"{text}: {', '.join(others) or 'the pinned versions'}."


def pins() -> dict[str, str]:
    """The pinned version of each package."""
    lines = []
    for name in ("cpu", "gpu"):
        lines += (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


PINS = pins()


def measured_rows(report: Mapping[str, Any]) -> list[str]:
    """A row for each stage that measured a step."""
    rows = []
    for name in STAGES:
        found = report["stages"].get(name, {}).get("numbers", {})
        if "seconds_of_a_step" not in found:
            continue
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in found["seconds"].items())
        rows.append(
            f"| {report['environment']['gpu']} | {found['model']} | `{name}` | "
            f"{found['prompt']:,} + {found['completion']:,} | {found['seconds_of_a_step']:.1f} ({phases}) | "
            f"{found['tokens_per_second']:.0f} | {found['peak_gib']:.1f} | {sum(found['plan_gib'].values()):.1f} |"
        )
    return rows


def hours_table(rates: Mapping[str, Any]) -> str:
    """Hours of an epoch by the rates of configs/experiments.yaml, also where the policy collapses to 1,500 tokens."""
    measured = rates["measured"]
    gpu = rates["gpu"]
    other = measured["gpu"]
    lines = [
        f"| one epoch | {gpu}, G = 8 | {gpu}, G = 12 | {gpu}, G = 12, collapsed | {other}, G = 8 | {other}, G = 12 |",
        "|---" * 6 + "|",
    ]
    for model, (dataset, steps) in itertools.product(rates["seconds_per_token"], rates["steps"].items()):
        lengths = rates["longest_completion"][dataset]
        cells = []
        for group in (8, 12):
            most = hours_of_steps(rates, model, group, lengths[group], steps)
            cells.append(f"{most / rates['speedup'][model]:.0f} to {most:.0f} h")
        cells.append(f"{hours_of_steps(rates, model, 12, 1500, steps):.0f} h")
        for group in (8, 12):
            if model in measured["seconds_per_token"]:
                cells.append(f"{hours_of_steps(measured, model, group, lengths[group], steps):.0f} h")
            else:
                cells.append("")
        lines.append(f"| {model}, {dataset} | {' | '.join(cells)} |")
    least, most_on_t4 = (rates["steps"]["gsm8k"] * seconds / 3600 for seconds in rates["seconds_per_step_t4"])
    lines.append(f"| qwen, gsm8k on a T4 | {least:.0f} to {most_on_t4:.0f} h | | | | |")
    return "\n".join(lines)


def gpu_page(text: str, reports: Sequence[Mapping[str, Any]]) -> str:
    """docs/gpu.md with its tables of hours and of stages."""
    from study.page import fill

    return fill(fill(text, "hours", hours_table(paper_rates())), "measured", measured_table(reports))


def paper_rates() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "configs" / "experiments.yaml").read_text())["paper"])


def stored_reports() -> list[dict[str, Any]]:
    """Those of results/gpu/."""
    return [json.loads(path.read_text()) for path in sorted((ROOT / "results" / "gpu").glob("*.json"))]


def flags_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=[], help="run these, also if they have passed")
    parser.add_argument("--minutes", type=float, default=math.inf, help="run what is worth most in this time")
    parser.add_argument("--plan", action="store_true", help="print the stages and how long they take, and exit")
    parser.add_argument("--model", help=f"real weights for `learning`, a directory or a Hub id [{REAL_MODEL}]")
    parser.add_argument("--page", action="store_true", help="write the tables of docs/gpu.md, and exit")
    parser.add_argument("--miniature", action="store_true", help="small shapes on a CPU")
    parser.add_argument("--output", type=Path, help="directory of the report [results/gpu, or outputs/first-light]")
    parser.add_argument("--work", type=Path, help="directory of models, runs and logs, kept [a temporary one]")
    return parser.parse_args()


def main() -> None:
    args = flags_of()
    if args.page:
        page = ROOT / "docs" / "gpu.md"
        return write_atomically(page, gpu_page(page.read_text(), stored_reports()))
    planned = plan_lines(plan(args.stages or list(STAGES), args.minutes))
    print("\n".join(planned))
    if args.plan:
        return None
    import torch

    device = "cpu" if args.miniature or not torch.cuda.is_available() else "cuda"
    name = torch.cuda.get_device_name(0) if device == "cuda" else "cpu"
    directory = args.output or ROOT / ("results/gpu" if device == "cuda" else "outputs/first-light")
    report = directory / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
    with tempfile.TemporaryDirectory() as temporary:
        work = (args.work or Path(temporary)).absolute()
        bench = Bench(device, work, launch_process, real=real_weights(args.model, device))
        content = first_light(bench, report, args.stages, args.minutes)
    print(f"report: {report}")
    sys.exit(any(entry["outcome"] != "passed" for entry in content["stages"].values()))


if __name__ == "__main__":
    main()
