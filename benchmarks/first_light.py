"""What only a GPU can show, in about an hour: `make first-light`.

    python benchmarks/first_light.py                           # every stage that results/gpu/<GPU>.json does not have
    python benchmarks/first_light.py --stages head gradient    # these, again
    python benchmarks/first_light.py --minutes 10              # what is worth most in that time
    python benchmarks/first_light.py --work DIR                # models, runs and logs on a fast disk, kept
    python benchmarks/first_light.py --page                    # the tables of docs/gpu.md, from results/gpu/
    python benchmarks/first_light.py --miniature               # on a CPU

Each stage has a time limit, prints one line, and is stored at once: an interrupted command continues with the stage
that was running. A stage whose result is wrong says FAILED and why, and the next one runs. Models have random weights,
but for the tiny base, which learns.
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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PARTS = ROOT / "benchmarks" / "gpu"
sys.path[:0] = [str(ROOT), str(PARTS), str(ROOT / "benchmarks")]

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
)
from timing import table  # noqa: E402

from gtpo.evaluation.storage import read_completions  # noqa: E402
from gtpo.files import write_atomically  # noqa: E402
from gtpo.models.memory import GIB, estimate, shape_of  # noqa: E402
from gtpo.runs.directory import RunDirectory  # noqa: E402

LEAST_COSINE = 0.98  # of the gradient of a LoRA matrix in 16 bits with that in float64
HEAD_ENTROPY = 3e-3  # nats, of the mean over rows; observed 4e-4 in bfloat16 on a CPU
MAX_GAP = 0.2  # nats per token between trainer and sampler; bfloat16 engines differ by a few hundredths
LEAST_GPU = 38.0  # GiB for the 8B shape in 16 bits, and the logits path of the head
LEAST_DISK = 20.0  # GiB for the 8B shape
LEARNING_STEPS = {"cuda": 30, "cpu": 2}
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


class Fault(Exception):
    """A stage whose result is wrong: the message is its verdict."""


@dataclass
class Bench:
    """Where the stages run: the device (cuda, or cpu for the miniature), and a directory of models and runs.

    ``launch`` runs a script, as :func:`launch_process`; ``before`` is Python source that every process executes before
    its script, a fault in a test. ``numbers`` are what the running stage has measured, stored even if it fails.
    """

    device: str
    work: Path
    launch: Callable[..., tuple[int, str]]
    before: str = ""
    deadline: float = math.inf
    numbers: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def about(self) -> dict[str, Any]:
        return describe(self.device)

    @property
    def sizes(self) -> Sizes:
        return SIZES[self.device]

    def model(self, name: str) -> Path:
        """The directory of a model of ``sizes.shapes``."""
        directory = self.work / "models" / name
        if not (directory / "config.json").is_file():
            unfinished = directory.with_suffix(".tmp")
            build_model(unfinished, name, self.sizes.shapes[name], self.device)
            unfinished.rename(directory)
        return directory

    def run(
        self, script: Path, *argv: object, name: str, before: str = "", device: str | None = None
    ) -> tuple[int, str]:
        """Run a script in its own process: (exit code, output), which is kept in ``work/name.txt``."""
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        self.work.mkdir(parents=True, exist_ok=True)
        log = self.work / f"{name}.txt"
        try:
            code, output = self.launch(
                self.work,
                script,
                *map(str, argv),
                before=self.before + before,
                device=device or self.device,
                needs_packages="--backend=unsloth" in argv or "--backend=vllm" in argv,
                seconds=seconds,
            )
        except subprocess.TimeoutExpired as stopped:
            log.write_bytes(stopped.stdout or b"")  # how far it came
            raise
        log.write_text(output)
        return code, output

    def succeed(self, script: Path, *argv: object, name: str, **options: Any) -> str:
        """As :meth:`run`; a script that fails is a fault of the stage."""
        code, output = self.run(script, *argv, name=name, **options)
        if code:
            lines = [line for line in output.splitlines() if line.strip()] or [""]
            raise Fault(f"{name}: exit code {code}: {lines[-1][:300]}")
        return output

    def train(self, method: str, run: Path, *argv: object, **options: Any) -> None:
        """A run of a train script in a directory, which is emptied first."""
        directory = "--overwrite=true", "--output_dir", run
        self.succeed(ROOT / f"train_{method}.py", *argv, *directory, name=run.name, **options)

    def trained(self, method: str, variant: str) -> Path:
        """A run of four steps on a backend, made on first use."""
        run = self.work / f"{method}-{variant}"
        if not (run / "adapter").is_dir():
            self.train(method, run, *flags(self.model("llama"), variant, self.sizes, self.device))
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


def head(bench: Bench) -> str:
    """Time, memory and accuracy of the head next to the limit of two matmuls and the heads of TRL 1.16 and Liger."""
    file = bench.work / "head.json"
    argv = ["--device", bench.device, *bench.sizes.benchmark, "--output", str(file)]
    if bench.device == "cuda":
        if bench.about["memory_gib"] < LEAST_GPU:  # for the logits path
            argv += ["--length", "300"]
        if not bench.about["bfloat16"]:
            argv = [word.replace("bfloat16", "float16") for word in argv]
    bench.succeed(ROOT / "benchmarks" / "bench_loss.py", *argv, name="head", before=TRL_1_16)
    bench.numbers |= json.loads(file.read_text())
    for shape, measured in bench.numbers["shapes"].items():
        errors = measured["accuracy"]["ours"]
        of_gradient = 1e-4 if shape.startswith("float32") else 0.03
        bounds = {"gradient": of_gradient, "gradient, confident": of_gradient, "entropy": HEAD_ENTROPY}
        wrong = []
        for name, most in bounds.items():
            if not errors[name] <= most:
                wrong.append(f"{name} {errors[name]:.1e}")
        if wrong:
            raise Fault(f"{shape} is off by {', '.join(wrong)}")
    measured = next(iter(bench.numbers["shapes"].values()))
    milliseconds = [f"{name} {1e3 * seconds:.0f}" for name, seconds in measured["seconds"].items()]
    error = measured["accuracy"]["ours"]["gradient"]
    return f"ms: {', '.join(milliseconds)}; {measured['peak_mib']['ours']:.0f} MiB, gradient off by {error:.1%}"


def gradient(bench: Bench) -> str:
    """The gradient of a whole step, by backend and precision, with that of a CPU in float64."""
    from gradient import reference_gradient
    from safetensors.torch import load_file

    model = bench.model("llama")
    precisions = ["bf16", "fp16"] if bench.device == "cuda" else ["bf16", "float32"]
    if bench.device == "cuda" and not bench.about["bfloat16"]:
        precisions.remove("bf16")
    reference: dict[str, Any] = {}
    low = []
    for variant, precision in itertools.product(VARIANTS_16_BIT, precisions):
        file = gradient_of_step(bench, model, variant, precision)
        prompt_ids = json.loads(file.with_suffix(".json").read_text())
        reference = reference or reference_gradient(str(model), prompt_ids, gamma=0.1)
        found = compare_gradients(load_file(file), reference)
        name = f"{variant} {precision}"
        bench.numbers[name] = found
        if not (found["cosine"] >= LEAST_COSINE and 0.9 < found["norm"] < 1.1):
            low.append(f"{name}: cosine {found['cosine']:.3f}, norm x {found['norm']:.2f} in {found['matrix']}")
    if low:
        raise Fault("; ".join(low))
    cosines = [f"{name} {found['cosine']:.4f}" for name, found in bench.numbers.items()]
    return f"{', '.join(cosines)} (least cosine)"


def gradient_of_step(bench: Bench, model: Path, variant: str, precision: str) -> Path:
    """The file with the gradient of a first step on given completions."""
    from gradient import GROUP

    file = bench.work / f"gradient-{variant}-{precision}.safetensors"
    argv = [
        *flags(model, variant, bench.sizes, bench.device),
        *("--load_in_4bit=false", "--use_vllm=false", "--optim=adamw_torch", "--overwrite=true"),
        *("--bf16", precision == "bf16", "--fp16", precision == "fp16"),
        *("--G", GROUP, "--max_steps", 1, "--max_grad_norm", 1e9, "--initial_entropy", 1),
        *("--entropy_filter", "off", "--output_dir", bench.work / file.stem),
    ]
    before = HALF if (variant, precision) == ("unsloth", "fp16") else ""
    bench.succeed(PARTS / "gradient.py", file, "train_gtpo.py", *argv, name=file.stem, before=before)
    return file


def compare_gradients(found: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """The least cosine of a matrix, its name, and the ratio of the norms of all."""
    import torch

    gradients = {name: found[name].double().flatten() for name in reference}
    expected = {name: gradient.flatten() for name, gradient in reference.items()}
    cosines = {name: float(torch.cosine_similarity(gradients[name], expected[name], dim=0)) for name in expected}
    worst = min(cosines, key=cosines.__getitem__)
    norm = torch.cat([*gradients.values()]).norm() / torch.cat([*expected.values()]).norm()
    return {"cosine": cosines[worst], "matrix": worst, "norm": float(norm)}


VARIANTS_16_BIT = ("unsloth", "transformers")


def rollouts(bench: Bench) -> str:
    """Four steps on every backend: the sampler generates with the adapter, and a frozen one stops the run."""
    for variant in VARIANTS if bench.device == "cuda" else ("unsloth",):
        rows = RunDirectory(bench.trained("gtpo", variant)).read_metrics()
        numbers = {key: [row.get(key) for row in rows] for key in ("loss", "grad_norm", "entropy", "sampler_logp_gap")}
        bench.numbers[variant] = numbers
        measured = [value for value in numbers["loss"] + numbers["entropy"] if value is not None]
        if len(measured) != 2 * STEPS or not all(map(math.isfinite, measured)):
            raise Fault(f"{variant}: loss {numbers['loss']}, entropy {numbers['entropy']}")
        gaps = numbers["sampler_logp_gap"]
        if "--use_vllm=true" in VARIANTS[variant] and not all(gap is not None and gap < MAX_GAP for gap in gaps):
            raise Fault(f"{variant}: the sampler has another adapter: it differs by {gaps} nats per token")
    code, output = frozen_run(bench)
    if not (code == 1 and "rollouts do not come from the adapter" in output):
        raise Fault(f"an adapter that is never handed over to the sampler was not noticed (exit code {code})")
    largest = []
    for variant, numbers in bench.numbers.items():
        gaps = numbers["sampler_logp_gap"]
        if gaps[0] is not None:
            largest.append(f"{variant} {max(gaps):.1e}")
    return f"trainer and sampler differ by {', '.join(largest)} nats per token; a frozen adapter stops the run"


def frozen_run(bench: Bench) -> tuple[int, str]:
    """One step more of the run on Unsloth, without handing over its adapter; a fresh one equals the base model."""
    run = bench.work / "frozen"
    shutil.copytree(bench.trained("gtpo", "unsloth"), run, dirs_exist_ok=True)
    config = run / "config.yaml"
    settings = yaml.safe_load(config.read_text())
    settings["output_dir"] = str(run)
    config.write_text(yaml.safe_dump(settings))
    reward = f"{PARTS / 'reward.py'}:text_sum"
    argv = ["--backend=unsloth", "--resume", run, "--max_steps", STEPS + 1, "--reward", reward]
    return bench.run(ROOT / "train_gtpo.py", *argv, name="frozen", before=FREEZE)


def learning(bench: Bench) -> str:
    """Thirty steps of GTPO and GRPO: the tiny base gains here at least half of what it gains on the CPU."""
    precision: list[str] = []
    if bench.device == "cuda":
        dtype = "bf16" if bench.about["bfloat16"] else "fp16"
        precision = ["--bf16=false", f"--{dtype}=true"]
    verdicts = []
    for method in ("gtpo", "grpo"):
        gained = {}
        for device in dict.fromkeys((bench.device, "cpu")):
            argv = ["--config", ROOT / "configs" / method / "tiny.yaml", "--model", "tiny"]
            if device == "cuda":
                argv += ["--backend=unsloth", "--use_cpu=false", *precision]
            gained[device] = points_gained(bench, method, device, *argv, device=device)
        gains = [f"{gain:+.0f} points ({device})" for device, gain in gained.items()]
        verdicts.append(f"{method} {', '.join(gains)}")
        if LEARNING_STEPS[bench.device] >= 30 and gained[bench.device] < gained["cpu"] / 2:
            raise Fault(f"{verdicts[-1]}: formatting and accuracy, last third minus first")
    return "; ".join(verdicts) + ": formatting and accuracy, last third minus first"


def points_gained(bench: Bench, method: str, name: str, *argv: object, device: str | None = None) -> float:
    """Formatting and accuracy of a run, last third minus first; its curves are stored under ``name``."""
    steps = LEARNING_STEPS[bench.device]
    run = bench.work / f"learning-{method}-{name}"
    argv = (
        *argv,
        *("--G", 8, "--prompts_per_step", 1, "--lr_scheduler_type", "constant"),
        *("--max_steps", steps, "--seed", 1, "--logging_steps", 1, "--report_to", "none"),
    )
    bench.train(method, run, *argv, device=device)
    rows = RunDirectory(run).read_metrics()
    curves = {key: [row[key] for row in rows] for key in ("formatting", "accuracy", "entropy")}
    bench.numbers[f"{method} {name}"] = curves
    scores = [row["formatting"] + row["accuracy"] for row in rows]
    third = max(1, steps // 3)
    return statistics.mean(scores[-third:]) - statistics.mean(scores[:third])


@dataclass(frozen=True)
class Step:
    """A stage: seconds by phase, tokens per second and memory of a step with the presets.

    Attributes:
        lengths: Of prompt and completion, a key of ``Sizes.lengths``.
        trainer: ours, or library for TRL's or Unsloth's own.
        micro_batch: Completions, G for a whole group.
        base: Weights of the base model, 4bit or 16bit.
    """

    lengths: str = "longest"
    backend: str = "unsloth"
    trainer: str = "ours"
    micro_batch: int | str = 1
    base: str = "4bit"

    def __call__(self, bench: Bench) -> str:
        name = self.model_of(bench)
        prompt, completion = bench.sizes.lengths[self.lengths]
        bench.numbers |= {"model": name, "G": bench.sizes.group, "prompt": prompt, "completion": completion}
        run = bench.work / f"step-{'-'.join(map(str, astuple(self)))}"
        script = "train_gtpo.py" if self.trainer == "ours" else "train_grpo.py"
        try:
            bench.succeed(PARTS / "timed_run.py", script, *self.argv(bench, name, run), name=run.name)
        except Fault as fault:
            if replace(self, lengths="longest") == Step():  # others may not fit
                raise
            bench.numbers["failed"] = str(fault)
            return f"{name}: {fault}"
        bench.numbers |= timed(run)
        found = bench.numbers
        return (
            f"{name}, {prompt:,} + {completion:,} tokens: {found['seconds_of_a_step']:.1f} s a step, "
            f"{found['tokens_per_second']:.0f} tokens/s, {found['peak_gib'] or 0:.1f} GiB"
        )

    def model_of(self, bench: Bench) -> str:
        """The largest shape that the machine has room for."""
        if "llama-8b" not in bench.sizes.shapes:
            return "llama"
        disk = shutil.disk_usage(bench.work).free / GIB
        has_room = bench.about["memory_gib"] >= LEAST_GPU and disk >= LEAST_DISK
        return "llama-8b" if has_room else "qwen-3b"

    def argv(self, bench: Bench, name: str, run: Path) -> list[object]:
        """The flags of the train script."""
        sizes = bench.sizes
        model = bench.model(name)
        batch = sizes.group if self.micro_batch == "G" else int(self.micro_batch)
        prompt, completion = sizes.lengths[self.lengths]
        most_of_prompt, most_of_completion = sizes.lengths["longest"]
        argv = [
            *("--model", model, "--dataset", long_prompts(bench.work, model, prompt)),
            *("--G", sizes.group, "--prompts_per_step", 1, "--per_device_train_batch_size", batch),
            *("--gradient_checkpointing", "true", "--reward", f"{PARTS / 'reward.py'}:text_sum"),
            *("--max_prompt_length", most_of_prompt, "--max_completion_length", completion),
            *("--max_seq_length", most_of_prompt + most_of_completion),
            *("--lora_rank", sizes.measured_rank, "--max_steps", 3, "--save_steps", 100),
            *("--steps_per_generation", sizes.group // batch, "--logging_steps", 1),
            *("--report_to", "none", "--log_completions", "false", "--output_dir", run, "--overwrite=true"),
            *VARIANTS[self.backend],
        ]
        if self.base == "16bit" or (bench.device == "cpu" and self.backend != "unsloth"):
            argv.append("--load_in_4bit=false")
        if bench.device == "cpu":
            argv.append("--use_cpu=true")
        argv += ["--initial_entropy", 1] if self.trainer == "ours" else ["--library"]
        return argv


def timed(run: Path) -> dict[str, Any]:
    """Medians over the steps after the first, and the peak of the GPU's memory with the plan of ``--dry_run``."""
    phases = json.loads((run / "phases.json").read_text())
    row = RunDirectory(run).read_metrics()[-1]
    settings = yaml.safe_load((run / "config.yaml").read_text())
    steps = phases["steps"][1:]
    names = sorted({name for step in steps for name in step})
    seconds = statistics.median(sum(step.values()) for step in steps)
    longest = statistics.median(phases["longest"][1:])
    tokens = settings["num_generations"] * row.get("completion_length", longest)
    return {
        "seconds": {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names},
        "seconds_of_a_step": seconds,
        "longest": longest,
        "tokens_per_second": tokens / seconds,
        "plan_gib": estimate(shape_of(settings["model"]), settings),
        "peak_gib": phases.get("used_gib"),
        "peak_gib_by_phase": phases["peak"],
    }


def evaluation(bench: Bench) -> str:
    """Samples per second of vLLM at k = 64, base and adapter, and whether the adapter is used."""
    run = bench.trained("gtpo", "unsloth")
    problems, k = (30, 64) if bench.device == "cuda" else (2, 2)
    output = bench.work / "evaluation"
    argv = [
        *("--runs", "base", run, "--benchmarks", "arithmetic", "--limit", problems, "--k", k, "--backend=vllm"),
        *("--max_new_tokens", bench.sizes.completion, "--output_dir", output, "--overwrite"),
    ]
    started = time.monotonic()
    bench.succeed(ROOT / "evaluate.py", *argv, name=output.name)
    seconds = time.monotonic() - started
    samples = 2 * problems * k  # of the base and of the run
    targets = len([*output.glob("*/arithmetic.jsonl")])
    bench.numbers |= {"samples": samples, "seconds": seconds, "targets": targets}
    if targets != 2:
        raise Fault(f"{targets} of 2 targets have completions")
    if bench.device == "cuda":
        share = equal_to_peft(bench, run)
        bench.numbers["equal to PEFT"] = share
        if not share["adapter"] > share["base"]:
            raise Fault(f"vLLM does not use the adapter: {share}")
    return f"{seconds:.0f} s for {samples} samples, with the start"


def equal_to_peft(bench: Bench, run: Path) -> dict[str, float]:
    """Shares of the first greedy tokens of vLLM with the adapter that PEFT has with it, and without."""
    texts = {}
    for backend in ("transformers", "vllm"):
        output = bench.work / f"greedy-{backend}"
        argv = [
            *("--runs", "base", run, "--benchmarks", "arithmetic", "--limit", 8, "--k", 1, "--temperature", 0),
            *("--max_new_tokens", 4, "--load_in_4bit", "false", "--gpu_memory_utilization", 0.4),
            *(f"--backend={backend}", "--output_dir", output, "--overwrite"),
        ]
        bench.succeed(ROOT / "evaluate.py", *argv, name=output.name)
        for path in output.glob("*/arithmetic.jsonl"):
            _, rows = read_completions(path)
            key = "base" if path.parent.name.startswith("base-") else "adapter"
            texts[backend, key] = [row["completion"] for row in sorted(rows, key=itemgetter("id"))]
    sampled = texts["vllm", "adapter"]
    shares = {}
    for key in ("adapter", "base"):
        pairs = zip(sampled, texts["transformers", key], strict=True)
        shares[key] = statistics.mean(a == b for a, b in pairs)
    return shares


class Stage(NamedTuple):
    """A stage, and the minutes that it takes on an H100."""

    run: Callable[[Bench], str]
    minutes: float

    @property
    def limit(self) -> float:
        """Seconds after which it is stopped."""
        return 60 * 4 * self.minutes


STAGES = {  # in the order of information per minute
    "gradient": Stage(gradient, 3.5),
    "rollouts": Stage(rollouts, 8),
    "learning": Stage(learning, 4),
    "step_gsm8k": Stage(Step("gsm8k"), 3.5),
    "step_group": Stage(Step("gsm8k", micro_batch="G"), 2.5),
    "step_16bit": Stage(Step("gsm8k", micro_batch="G", base="16bit"), 3),
    "head": Stage(head, 3),
    "step_math": Stage(Step("math"), 4),
    "evaluation": Stage(evaluation, 5),
    "step_longest": Stage(Step(), 5),
    "step_transformers": Stage(Step(backend="transformers"), 6),
    "step_handover": Stage(Step(backend="transformers-4bit-vllm"), 6),
    "step_trl": Stage(Step(backend="transformers", trainer="library"), 6),
}


def plan(names: Sequence[str], minutes: float) -> list[str]:
    """The stages that fit the minutes, in their order."""
    planned = []
    for name in names:
        if STAGES[name].minutes <= minutes:
            minutes -= STAGES[name].minutes
            planned.append(name)
    return planned


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

    def passed(self, name: str) -> bool:
        return bool(self.stages.get(name, {}).get("outcome") == "passed")

    def run(self, name: str) -> None:
        """Run a stage, and store it."""
        self.say(f"{name}: about {STAGES[name].minutes:g} minutes")
        self.stages[name] = entry = run_stage(name, replace(self.bench, numbers={}))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(self.content, indent=1, sort_keys=True) + os.linesep)
        minutes = entry["seconds"] / 60
        self.say(f"{name}: {entry['outcome']} in {minutes:.1f} minutes: {entry['verdict']}")


def first_light(
    bench: Bench, path: Path, chosen: Sequence[str] = (), minutes: float = math.inf, say: Any = print
) -> Mapping[str, Any]:
    """Run the stages that are chosen, or those that the report lacks."""
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
    for name in planned:
        report.run(name)
    return report.content


# docs/gpu.md


def measured_table(reports: Sequence[Mapping[str, Any]]) -> str:
    """What each report was made with, the verdicts by stage and GPU, and the measured steps."""
    names = dict.fromkeys(name for stages in (STAGES, *(report["stages"] for report in reports)) for name in stages)
    ran = {name: [report for report in reports if name in report["stages"]] for name in names}
    steps = []
    for report in reports:
        for name in STAGES:
            numbers = report["stages"].get(name, {}).get("numbers", {})
            if "seconds_of_a_step" in numbers:
                steps.append((name, report["environment"]["gpu"], numbers))
    measured = [name for name, *_ in steps]
    values = {
        "reports": reports,
        "verdicts": [name for name in names if ran[name] and measured.count(name) < len(reports)],
        "steps": steps,
        "missing": [name for name in names if not ran[name]],
        "stages": STAGES,
        "pins": pins(),
    }
    return table("gpu.md.jinja", values)


def pins() -> dict[str, str]:
    """The pinned version of each package."""
    lines = []
    for name in ("cpu", "gpu"):
        lines += (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def gpu_page(text: str, reports: Sequence[Mapping[str, Any]]) -> str:
    """docs/gpu.md with its tables of stages, between ``<!-- measured -->`` and ``<!-- end -->``.

    Raises:
        ValueError: If the page lacks one of these comments.
    """
    content = measured_table(reports)
    pattern = r"(?<=<!-- measured -->\n).*?(?=<!-- end -->)"
    filled, count = re.subn(pattern, lambda _: f"{content}\n", text, flags=re.DOTALL)
    if not count:
        raise ValueError("no `<!-- measured -->` followed by `<!-- end -->`: add both comments")
    return filled


def stored_reports() -> list[dict[str, Any]]:
    """Those of results/gpu/."""
    paths = (ROOT / "results" / "gpu").glob("*.json")
    return [json.loads(path.read_text()) for path in sorted(paths)]


def flags_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=[], help="run these, also if they have passed")
    parser.add_argument("--minutes", type=float, default=math.inf, help="run what is worth most in this time")
    parser.add_argument("--page", action="store_true", help="write the tables of docs/gpu.md, and exit")
    parser.add_argument("--miniature", action="store_true", help="small shapes on a CPU")
    parser.add_argument("--work", type=Path, help="directory of models, runs and logs, kept [a temporary one]")
    return parser.parse_args()


def main() -> None:
    args = flags_of()
    if args.page:
        page = ROOT / "docs" / "gpu.md"
        return write_atomically(page, gpu_page(page.read_text(), stored_reports()))
    import torch

    is_cpu = args.miniature or not torch.cuda.is_available()
    name = "cpu" if is_cpu else torch.cuda.get_device_name(0)
    directory = ROOT / ("outputs/first-light" if is_cpu else "results/gpu")
    report = directory / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
    with tempfile.TemporaryDirectory() as temporary:
        work = (args.work or Path(temporary)).absolute()
        bench = Bench("cpu" if is_cpu else "cuda", work, launch_process)
        content = first_light(bench, report, args.stages, args.minutes)
    print(f"report: {report}")
    sys.exit(any(entry["outcome"] != "passed" for entry in content["stages"].values()))


if __name__ == "__main__":
    main()
