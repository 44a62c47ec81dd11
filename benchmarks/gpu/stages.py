"""What only a GPU can show: the stages of `make first-light`, which is `pytest -m gpu`, with their limits.

Each stage measures into ``bench.numbers``, asserts what has to hold, and returns its verdict. Models have random
weights, but for the tiny base, which learns. On a CPU the stages run in miniature (tests/backends).
"""

import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

PARTS = Path(__file__).resolve().parent
ROOT = PARTS.parents[1]
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
)

from gtpo.evaluation.storage import read_completions  # noqa: E402
from gtpo.files import write_atomically  # noqa: E402
from gtpo.models.memory import GIB, estimate  # noqa: E402
from gtpo.models.shape import shape_of  # noqa: E402
from gtpo.models.source import model_source  # noqa: E402
from gtpo.runs.directory import RunDirectory  # noqa: E402

LEAST_COSINE = 0.98  # of the gradient of a LoRA matrix in 16 bits with that in float64
HEAD_ENTROPY = 3e-3  # nats, of the mean over rows; observed 4e-4 in bfloat16 on a CPU
MAX_GAP = 0.2  # nats per token between trainer and sampler; bfloat16 engines differ by a few hundredths
LEAST_GPU = 38.0  # GiB for the 8B shape in 16 bits, and the logits path of the head
LEAST_DISK = 20.0  # GiB for the 8B shape
PROMPTS = (4, 8, 2, 1)  # of a step; first as many as configs/gtpo/quick.yaml generates at once
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


@dataclass
class Bench:
    """Where the stages run: the device (cuda, or cpu for the miniature), and a directory of models and runs.

    ``launch`` runs a script, as :func:`launch_process`; ``before`` is Python source that every process executes before
    its script, a fault in a test. ``numbers`` are what the running stage has measured, stored even if it fails.
    ``finished`` are the runs that several stages read.
    """

    device: str
    work: Path
    launch: Callable[..., tuple[int, str]]
    before: str = ""
    deadline: float = math.inf
    numbers: dict[str, Any] = field(default_factory=dict)
    finished: set[Path] = field(default_factory=set)

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
                needs_packages=script.name == "sampler.py" or bool({"--backend=unsloth", "--backend=vllm"} & {*argv}),
                seconds=seconds,
            )
        except subprocess.TimeoutExpired as stopped:
            log.write_bytes(stopped.stdout or b"")  # how far it came
            raise
        log.write_text(output)
        return code, output

    def succeed(self, script: Path, *argv: object, name: str, **options: Any) -> str:
        """As :meth:`run`; the script has to end with code 0."""
        code, output = self.run(script, *argv, name=name, **options)
        lines = [line for line in output.splitlines() if line.strip()] or [""]
        assert code == 0, f"{name}: exit code {code}: {lines[-1][:300]}"
        return output

    def train(self, method: str, run: Path, *argv: object, **options: Any) -> None:
        """A run of a train script in a directory, which is emptied first."""
        directory = "--overwrite=true", "--output_dir", run
        self.succeed(ROOT / f"train_{method}.py", *argv, *directory, name=run.name, **options)

    def trained(self, method: str, variant: str) -> Path:
        """A run of four steps on a backend, made on first use."""
        run = self.work / f"{method}-{variant}"
        if run not in self.finished:
            self.train(method, run, *flags(self.model("llama"), variant, self.sizes, self.device))
            self.finished.add(run)
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
    """Time, memory and accuracy of the head next to the heads of TRL 1.16 and Liger."""
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
        assert not wrong, f"{shape} is off by {', '.join(wrong)}"
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
    assert not low, "; ".join(low)
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
        rows = metrics_of(bench.trained("gtpo", variant))
        numbers = {key: [row.get(key) for row in rows] for key in ("loss", "grad_norm", "entropy", "sampler_logp_gap")}
        bench.numbers[variant] = numbers
        measured = [value for value in numbers["loss"] + numbers["entropy"] if value is not None]
        is_finite = len(measured) == 2 * STEPS and all(map(math.isfinite, measured))
        assert is_finite, f"{variant}: loss {numbers['loss']}, entropy {numbers['entropy']}"
        gaps = numbers["sampler_logp_gap"]
        if "--use_vllm=true" in VARIANTS[variant]:
            is_close = all(gap is not None and gap < MAX_GAP for gap in gaps)
            assert is_close, f"{variant}: the sampler has another adapter: it differs by {gaps} nats per token"
    code, output = frozen_run(bench)
    was_noticed = code == 1 and "rollouts do not come from the adapter" in output
    assert was_noticed, f"an adapter that is never handed over to the sampler was not noticed (exit code {code})"
    largest = []
    for variant, numbers in bench.numbers.items():
        gaps = numbers["sampler_logp_gap"]
        if gaps[0] is not None:
            largest.append(f"{variant} {max(gaps):.1e}")
    return f"trainer and sampler differ by {', '.join(largest)} nats per token; a frozen adapter stops the run"


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The lines of its steps."""
    return RunDirectory(run).read_metrics()


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
        learned = LEARNING_STEPS[bench.device] < 30 or gained[bench.device] >= gained["cpu"] / 2
        assert learned, f"{verdicts[-1]}: formatting and accuracy, last third minus first"
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
    rows = metrics_of(run)
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
        prompts: Of a step, each with G completions.
    """

    lengths: str = "longest"
    backend: str = "unsloth"
    trainer: str = "ours"
    micro_batch: int | str = 1
    base: str = "4bit"
    prompts: int = 1

    def __call__(self, bench: Bench) -> str:
        bench.numbers |= self.measure(bench)
        found = bench.numbers
        return (
            f"{found['model']}, {found['prompt']:,} + {found['completion']:,} tokens: "
            f"{found['seconds_of_a_step']:.1f} s a step, {found['tokens_per_second']:.0f} tokens/s, "
            f"{found['peak_gib'] or 0:.1f} GiB"
        )

    def measure(self, bench: Bench) -> dict[str, Any]:
        """The numbers of a run of three steps."""
        name = self.model_of(bench)
        prompt, completion = bench.sizes.lengths[self.lengths]
        run = bench.work / f"step-{'-'.join(map(str, astuple(self)))}"
        script = "train_gtpo.py" if self.trainer == "ours" else "train_grpo.py"
        bench.succeed(PARTS / "timed_run.py", script, *self.argv(bench, name, run), name=run.name)
        about = {"model": name, "G": bench.sizes.group, "prompt": prompt, "completion": completion}
        return about | timed(run)

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
            *("--G", sizes.group, "--prompts_per_step", self.prompts, "--per_device_train_batch_size", batch),
            *("--gradient_checkpointing", "true", "--reward", f"{PARTS / 'reward.py'}:text_sum"),
            *("--max_prompt_length", most_of_prompt, "--max_completion_length", completion),
            *("--max_seq_length", most_of_prompt + most_of_completion),
            *("--lora_rank", sizes.measured_rank, "--max_steps", 3, "--save_steps", 100),
            *("--steps_per_generation", self.prompts * sizes.group // batch, "--logging_steps", 1),
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
    row = metrics_of(run)[-1]
    settings = yaml.safe_load((run / "config.yaml").read_text())
    steps = phases["steps"][1:]
    names = sorted({name for step in steps for name in step})
    seconds = statistics.median(sum(step.values()) for step in steps)
    longest = statistics.median(phases["longest"][1:])
    tokens = settings["prompts_per_step"] * settings["num_generations"] * row.get("completion_length", longest)
    return {
        "seconds": {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names},
        "seconds_of_a_step": seconds,
        "longest": longest,
        "tokens_per_second": tokens / seconds,
        "plan_gib": estimate(shape_of(model_source(settings["model"])), settings),
        "peak_gib": phases.get("used_gib"),
        "peak_gib_by_phase": phases["peak"],
    }


def step_prompts(bench: Bench) -> str:
    """The sampler alone in 16 bits, and whole steps in 4, with G completions of one, two, four and eight prompts."""
    group = bench.sizes.group
    prompt, completion = bench.sizes.lengths["gsm8k"]
    model = bench.model(Step().model_of(bench))
    file = bench.work / "sampler.json"
    sizes = bench.sizes.measured_rank, prompt, completion
    sequences = [group * prompts for prompts in sorted(PROMPTS)]
    file.unlink(missing_ok=True)  # of an earlier command
    try:
        bench.succeed(PARTS / "sampler.py", model, *sizes, file, *sequences, name=file.stem)
    finally:  # also what it had measured when it was stopped
        of_sampler = json.loads(file.read_text()) if file.is_file() else {}
        bench.numbers["ms a token of the sampler"] = of_sampler
    steps: dict[int, Any] = {}
    for prompts in PROMPTS:
        steps[prompts] = Step("gsm8k", micro_batch="G", prompts=prompts).measure(bench)
        bench.numbers[f"{prompts * group} sequences"] = steps[prompts]
    of_steps = [f"{steps[prompts]['seconds_of_a_step']:.1f}" for prompts in sorted(PROMPTS)]
    tokens = [f"{milliseconds:.1f}" for milliseconds in of_sampler.values()]
    return (
        f"{', '.join(map(str, sequences))} sequences: {', '.join(tokens)} ms a token of the sampler in 16 bits, "
        f"{', '.join(of_steps)} s a step in 4"
    )


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
    assert targets == 2, f"{targets} of 2 targets have completions"
    if bench.device == "cuda":
        share = equal_to_peft(bench, run)
        bench.numbers["equal to PEFT"] = share
        assert share["adapter"] > share["base"], f"vLLM does not use the adapter: {share}"
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
    "step_prompts": Stage(step_prompts, 10),
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


def run_stage(name: str, bench: Bench, report: Path) -> dict[str, Any]:
    """Run a stage, and store its entry: outcome, verdict, seconds, numbers, revision, date.

    A stage that Ctrl-C interrupts is stored with what it has measured.
    """
    stage = STAGES[name]
    started = time.monotonic()
    bench.deadline = started + stage.limit
    bench.numbers = {}
    outcome = "interrupted"
    verdict = "not finished"
    try:
        verdict = stage.run(bench)
        outcome = "passed"
    except (TimeoutError, subprocess.TimeoutExpired):
        outcome = "timeout"
        verdict = f"stopped after {stage.limit / 60:.0f} minutes"
    except Exception as error:
        outcome = "FAILED"
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        verdict = f"{kind}{str(error)[:300]}"
    finally:
        entry = {
            "outcome": outcome,
            "verdict": verdict,
            "seconds": time.monotonic() - started,
            "numbers": bench.numbers,
            "git_revision": bench.about["git_revision"],
            "date": time.strftime("%Y-%m-%d"),
        }
        content = {"environment": bench.about, "stages": stored(report) | {name: entry}}
        report.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(report, json.dumps(content, indent=1, sort_keys=True) + os.linesep)
    return entry


def stored(report: Path) -> dict[str, Any]:
    """The entries of a report by stage."""
    return dict(json.loads(report.read_text(encoding="utf-8"))["stages"]) if report.is_file() else {}
