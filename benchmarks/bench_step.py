"""Time of an optimizer step of GTPO, GRPO and TRL's GRPOTrainer.

    python benchmarks/bench_step.py                                # tiny and 30m: some minutes
    python benchmarks/bench_step.py --models tiny                  # only the tiny model: half a minute
    python benchmarks/bench_step.py --callbacks                    # what the callbacks for TRL's trainer add
    python benchmarks/bench_step.py --models smollm2-135m --length 64 --threads 2   # the phases of a step
    python benchmarks/bench_step.py --models smollm2-135m qwen2.5-0.5b --packing    # rows with prompts of their own
    python benchmarks/bench_step.py --markdown results/benchmarks/step_cpu.json   # the table of a run

tiny and 30m: a step on canned completions is what the trainer does for one batch, without generation and logging:
rewards and advantages, reference log-probabilities where beta is not 0, conflict mask, loss, backward pass, optimizer.

smollm2-135m and qwen2.5-0.5b, the architectures of the published models: generation, scoring without gradients (what
an old policy or a reference costs), forward and backward pass, and optimizer apart, GTPO beside TRL; peak memory of
forward and backward in addition to model and batch, each in a fresh process.

All models have random float32 weights and LoRA on every linear layer. Times are medians over interleaved rounds: CPU
seconds of one thread, or the wall time of several.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_loss import ROOT, medians, origin, provenance, status_kib

sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before TRL is imported: also disables its telemetry

import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Qwen2Config,
    TrainerCallback,
)
from transformers.utils.logging import disable_progress_bar

from examples.tiny_base import save_untrained_tiny
from gtpo import ConflictMetrics, RolloutCheck
from gtpo.arguments import GTPOArguments
from gtpo.forward.attention import share_keys
from gtpo.forward.hidden_states import hidden_states_packed, hidden_states_per_completion
from gtpo.training.checks import INTERVAL
from gtpo.training.initial_entropy import padded_batch
from gtpo.training.trainer import GRPOTrainer, GTPOTrainer
from gtpo_loss import conflict_mask

GROUP = 8
BETA = 0.04
SHAPES = {
    "tiny": {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3,
        "num_attention_heads": 4,
    },
    "30m": {
        "vocab_size": 20480, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8,
        "num_attention_heads": 6,
    },
}  # fmt: skip
REAL: dict[str, Callable[[], Any]] = {  # config.json of SmolLM2-135M-Instruct and Qwen2.5-0.5B-Instruct
    "smollm2-135m": lambda: LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=8192, rms_norm_eps=1e-5,
    ),
    "qwen2.5-0.5b": lambda: Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=32768, rms_norm_eps=1e-6,
    ),
}  # fmt: skip
PHASES = ("generation", "scoring", "forward and backward", "optimizer")
NAMES = {
    "gtpo": "GTPO",
    "grpo": "GRPO",
    "grpo kl": f"GRPO, beta = {BETA}",
    "trl": "TRL's GRPOTrainer",
    "trl kl": f"TRL's GRPOTrainer, beta = {BETA}",
}
CALLBACKS = {  # what they add to a step of TRL's GRPOTrainer: label, and steps from one measurement to the next
    "trl metrics": ("ConflictMetrics", 1),
    "trl check": (f"RolloutCheck, one step in {INTERVAL}", INTERVAL),
}


def canned_group(step: int, length: int) -> list[list[int]]:
    """Completions that share their first and last eighth; the seed is the step."""
    generator = random.Random(step)
    draw = [[generator.randrange(3, 500) for _ in range(generator.randint(length // 2, length))] for _ in range(GROUP)]
    shared = length // 8
    return [[*draw[0][:shared], *ids[shared:-shared], *draw[0][-shared:]] for ids in draw]


class Canned:
    """Mixin of a trainer: the canned completions take the place of generation."""

    length: int

    sampled: dict[int, Any] | None = (
        None  # by step, ln pi of the completions; the learning rate of 1e-6 hardly moves it
    )

    def _generate_single_turn(self: Any, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        group = canned_group(self.state.global_step // 2, self.length)[: len(prompt_ids)]
        if self.sampled is None:
            return group, None
        if self.state.global_step not in self.sampled:
            batch = padded_batch(prompt_ids, group, 0, self.accelerator.device)
            ids, mask = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
            with torch.no_grad():
                width = batch["completion_ids"].shape[1]
                logps, *_ = self._get_per_token_logps_and_entropies(self.model, ids, mask, width)
            rows = [row[: len(own)].tolist() for row, own in zip(logps, group, strict=True)]
            self.sampled[self.state.global_step] = rows
        return group, self.sampled[self.state.global_step]


class Stopwatch(TrainerCallback):
    """Seconds of each step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds: list[float] = []
        self._clock = clock

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._begin = self._clock()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(self._clock() - self._begin)


def is_observed(step: int) -> bool:
    """With, without, without, with: pairs of steps, whose order alternates."""
    return step % 4 in (0, 3)


def alternate(callback: Any) -> Any:
    """Let a callback measure one step of each pair."""

    def sometimes(method: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            if is_observed(callback.trainer.state.global_step):
                callback.next = 0  # of RolloutCheck: each time
                method(*args, **kwargs)

        return call

    callback.observers = {name: sometimes(method) for name, method in callback.observers.items()}
    return callback


def reward_parity(completions: Any, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(sum(ids) % 2) for ids in completion_ids]


def config_of(name: str, directory: Path, group: int, length: int, steps: int) -> trl.GRPOConfig:
    """The settings of a trainer by its name; one that ends with kl has a KL term."""
    return trl.GRPOConfig(
        output_dir=str(directory / name.replace(" ", "_")),
        per_device_train_batch_size=group,
        num_generations=group,
        max_steps=steps,
        beta=BETA if name.endswith("kl") else 0.0,
        loss_type="grpo",
        max_completion_length=length,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        use_bias_correction_kl=False,
        logging_steps=10**6,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def make_trainer(
    name: str,
    model: Any,
    directory: Path,
    group: int,
    length: int,
    steps: int,
    clock: Callable[[], float] = time.process_time,
) -> Any:
    """A trainer on canned completions: gtpo, grpo or trl, with what the rest of its name adds."""
    kind = {"gtpo": GTPOTrainer, "grpo": GRPOTrainer, "trl": trl.GRPOTrainer}[name.split()[0]]
    # With a given initial entropy nothing is measured before step 1; above ln 2 no completion is filtered.
    extra = {"gtpo": GTPOArguments(initial_entropy=1.0)} if name == "gtpo" else {}
    trainer = type(f"Canned{kind.__name__}", (Canned, kind), {"length": length})(
        model=model,
        reward_funcs=[reward_parity],
        args=config_of(name, directory, group, length, steps),
        processing_class=AutoTokenizer.from_pretrained(directory / "tokenizer"),
        train_dataset=Dataset.from_dict({"prompt": [f"Question {i}: how much is {i} + {i}?" for i in range(8)]}),
        callbacks=[Stopwatch(clock)],
        **extra,
    )
    trainer.remove_callback(PrinterCallback)
    if name == "trl metrics":
        trainer.add_callback(alternate(ConflictMetrics(trainer)))
    if name == "trl check":
        trainer.sampled = {}
        for key, weight in trainer.model.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(weight)  # far from the base model
        trainer.add_callback(alternate(RolloutCheck(trainer)))
    return trainer


def random_model(shape: str, layers: int | None = None) -> Any:
    """A model with random weights and a LoRA adapter that is not the identity."""
    torch.manual_seed(0)
    if shape in REAL:
        config = REAL[shape]()
        config.num_hidden_layers = layers or config.num_hidden_layers
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        model = LlamaForCausalLM(LlamaConfig(**SHAPES[shape], pad_token_id=0, bos_token_id=1, eos_token_id=2))
    return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", init_lora_weights=shape not in REAL))


def parameters_of(trainer: Any) -> int:
    return sum(weight.numel() for name, weight in trainer.model.named_parameters() if "lora_" not in name)


def time_steps(shape: str, directory: Path, length: int, rounds: int, steps: int) -> dict[str, Any]:
    """Median seconds of a step by trainer; the first step of each turn is not counted."""
    trainers = {name: make_trainer(name, random_model(shape), directory, GROUP, length, 1 + steps) for name in NAMES}
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn in range(1 + rounds):  # the first is a warm-up: libraries are loaded, caches filled
        for name, trainer in trainers.items():
            watch = next(x for x in trainer.callback_handler.callbacks if isinstance(x, Stopwatch))
            watch.seconds.clear()
            trainer.train()
            if turn:
                seconds[name] += watch.seconds[1:]
    medians_of = {name: statistics.median(times) for name, times in seconds.items()}
    return {"parameters": parameters_of(trainers["trl"]), "seconds": medians_of}


def time_callbacks(shape: str, directory: Path, length: int, pairs: int, threads: int) -> dict[str, float]:
    """Share of a step of TRL's trainer that each callback adds: the median over pairs of steps, with and without it.

    Both steps of a pair train on the same completions. CPU seconds of one thread, or the wall time of several.
    """
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    added = {}
    for name, (_, interval) in CALLBACKS.items():
        trainer = make_trainer(name, random_model(shape), directory, GROUP, length, 2 * (pairs + 2), clock)
        watch = next(x for x in trainer.callback_handler.callbacks if isinstance(x, Stopwatch))
        if trainer.sampled is not None:
            trainer.train()  # computes what the sampler returns
            watch.seconds.clear()
        trainer.train()
        ratios = []
        for step in range(4, len(watch.seconds), 2):  # two pairs warm up
            pair = watch.seconds[step : step + 2]
            observed, plain = pair if is_observed(step) else reversed(pair)
            ratios.append(observed / plain)
        added[name] = (statistics.median(ratios) - 1) / interval
    return added


def real_batch(group: int, prompt: int, length: int) -> dict[str, torch.Tensor]:
    """A scored batch: one prompt, completions of half to all of the length that share their first and last tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.linspace(length // 2, length, group).long()
    ids = torch.randint(3, 512, (group, length), generator=generator)
    ids[:, : length // 8] = ids[0, : length // 8]
    valid = (torch.arange(length) < lengths[:, None]).long()
    advantages = torch.tensor([1.0, -1.0]).repeat(group)[:group]
    return {
        "prompt_ids": torch.randint(3, 512, (1, prompt), generator=generator).repeat(group, 1),
        "prompt_mask": torch.ones(group, prompt, dtype=torch.long),
        "completion_ids": ids * valid,
        "completion_mask": valid,
        "advantages": advantages,
        "conflict_mask": conflict_mask(ids, valid, advantages, group),
        "num_items_in_batch": valid.sum(),
        "row": torch.arange(group),
    }


def phases_of(trainer: Any, batch: dict[str, torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """What a step consists of, each to be called by itself."""
    group, length = batch["completion_ids"].shape
    ids, mask = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer.create_optimizer()

    def generate() -> None:
        super(Canned, trainer)._generate_single_turn(batch["prompt_ids"].tolist(), None, {}, num_generations=group)

    def score() -> None:
        with torch.no_grad():
            trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length, batch_size=group)

    def train() -> None:
        trainer.model.zero_grad()
        trainer.compute_loss(trainer.model, dict(batch)).backward()

    return dict(zip(PHASES, (generate, score, train, trainer.optimizer.step), strict=True))


def gradient_of(trainer: Any) -> torch.Tensor:
    return torch.cat([w.grad.flatten() for w in trainer.model.parameters() if w.grad is not None])


def time_phases(shape: str, directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Median seconds of each phase by trainer, and the gradient's distance to that of whole rows."""
    batch = real_batch(args.group, args.prompt, args.length)
    names = ("gtpo", "trl")
    peaks = {name: peak_in_own_process(name, shape, args) for name in names}  # while this process is small
    model = random_model(shape)  # one for both: neither is faster by its place in memory
    trainers = {name: make_trainer(name, model, directory, args.group, args.length, 1) for name in names}
    phases = {name: phases_of(trainer, batch) for name, trainer in trainers.items()}
    ours = trainers["gtpo"]
    gradients = []
    for may_share in (False, True):
        ours._route.may_share = may_share
        phases["gtpo"]["forward and backward"]()
        gradients.append(gradient_of(ours))
    assert ours._route.is_verified, "the model's first batch was refused"
    error = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    seconds = medians({f"{x}/{name}": phases[name][x] for x in PHASES for name in names}, args.rounds, "cpu")
    return {
        "parameters": parameters_of(ours),
        "seconds": {x: {name: seconds[f"{x}/{name}"] for name in names} for x in PHASES},
        "gradient_error": error.item(),
        "peak_mib": peaks,
    }


def time_packing(shape: str, rounds: int) -> dict[str, Any]:
    """Median seconds of forward and backward through one layer, for rows that share no prompt.

    120 to 180 tokens of a prompt, 30 to 400 of a completion. *Packed*: one row, which Transformers' masks split where
    the positions start again.
    """
    model = random_model(shape, layers=1).train()
    generator = torch.Generator().manual_seed(0)
    share_keys(model.get_base_model())
    forward = partial(model, logits_to_keep=1)
    decoder = model.get_base_model().get_decoder()
    batch = {}
    for part, least, most in (("prompt", 120, 180), ("completion", 30, 400)):
        lengths = torch.randint(least, most + 1, (GROUP, 1), generator=generator)
        batch[f"{part}_ids"] = torch.randint(3, 512, (GROUP, int(lengths.max())), generator=generator)
        batch[f"{part}_mask"] = (torch.arange(int(lengths.max())) < lengths).long()
    rows = [{name: part[row : row + 1] for name, part in batch.items()} for row in range(GROUP)]
    ways = {
        "padded": lambda: hidden_states_per_completion(forward, decoder, batch),
        "packed": lambda: hidden_states_packed(forward, decoder, batch),
        "one by one": lambda: torch.cat([hidden_states_per_completion(forward, decoder, row) for row in rows]),
    }
    gradients = {}

    def step(name: str) -> None:
        model.zero_grad()
        states = ways[name]()  # normalized: the sum of their squares has no gradient
        states.backward(torch.linspace(-1, 1, states.numel()).view_as(states))
        gradients[name] = torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None])

    seconds = medians({name: partial(step, name) for name in ways}, rounds, "cpu")
    error = (gradients["packed"] - gradients["one by one"]).norm() / gradients["one by one"].norm()
    tokens = sum(int(batch[f"{part}_mask"].sum()) for part in ("prompt", "completion"))
    return {"tokens": tokens, "seconds": seconds, "gradient_error": error.item()}


def peak_in_own_process(name: str, shape: str, args: argparse.Namespace) -> float:
    """MiB that forward and backward add, measured in a fresh process."""
    command = [sys.executable, __file__, "--peak", name, "--models", shape, "--group", str(args.group)]
    command += ["--prompt", str(args.prompt), "--length", str(args.length), "--threads", str(args.threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def peak(name: str, shape: str, directory: Path, args: argparse.Namespace) -> float:
    trainer = make_trainer(name, random_model(shape), directory, args.group, args.length, 1)
    phases_of(trainer, real_batch(args.group, 8, 8))["forward and backward"]()  # loads libraries
    step = phases_of(trainer, real_batch(args.group, args.prompt, args.length))["forward and backward"]
    if name == "gtpo":
        trainer._route.is_verified = True  # without the test of the first batch, which runs whole rows
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the high-water mark
    before = status_kib("VmRSS")
    step()
    return (status_kib("VmHWM") - before) / 2**10


def markdown(result: dict[str, Any]) -> str:
    """The table of a results file: milliseconds of a step and relative to GTPO's, or seconds of its phases."""
    models = result["models"]
    if models.keys() <= REAL.keys():
        return phases_markdown(result)
    if all("callbacks" in entry for entry in models.values()):
        return callbacks_markdown(result)
    titles = [f"{name}, {entry['parameters'] / 1e6:.1f} M parameters, ms | x GTPO" for name, entry in models.items()]
    lines = [f"| | {' | '.join(titles)} |", "|---" * (1 + 2 * len(models)) + "|"]
    for name, label in NAMES.items():
        cells = []
        for entry in models.values():
            seconds = entry["seconds"]
            cells += [f"{seconds[name] * 1e3:,.0f}", f"{seconds[name] / seconds['gtpo']:.2f}"]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    lines += ["", f"{GROUP} completions of {result['length'] // 2} to {result['length']} tokens. {origin(result)}"]
    return "\n".join(lines)


def callbacks_markdown(result: dict[str, Any]) -> str:
    lines = [f"| % of a step of TRL's GRPOTrainer | {' | '.join(result['models'])} |"]
    lines.append("|---" * (1 + len(result["models"])) + "|")
    entries = [entry["callbacks"] for entry in result["models"].values()]
    for name, (label, _) in CALLBACKS.items():
        for threads in entries[0]:
            cells = [f"{100 * entry[threads][name]:+.1f}" for entry in entries]
            lines.append(f"| {label}, {threads} thread{'s' if int(threads) > 1 else ''} | {' | '.join(cells)} |")
    lines += ["", f"{GROUP} completions of {result['length'] // 2} to {result['length']} tokens; median of "]
    lines[-1] += f"{result['pairs']} pairs of steps, without generation. {origin(result)}"
    return "\n".join(lines)


def phases_markdown(result: dict[str, Any]) -> str:
    titles = [f"{name}, GTPO, s | TRL, s | ratio" for name in result["models"]]
    lines = [f"| | {' | '.join(titles)} |", "|---" * (1 + 3 * len(titles)) + "|"]
    rows: list[tuple[str, list[tuple[float, float]], str]] = []
    entries = list(result["models"].values())
    for phase in PHASES:
        rows.append((phase, [(e["seconds"][phase]["gtpo"], e["seconds"][phase]["trl"]) for e in entries], ".2f"))
    totals = [tuple(sum(e["seconds"][x][name] for x in PHASES) for name in ("gtpo", "trl")) for e in entries]
    rows.append(("sum", [(a, b) for a, b in totals], ".2f"))
    rows.append(("peak, MiB", [(e["peak_mib"]["gtpo"], e["peak_mib"]["trl"]) for e in entries], ",.0f"))
    for label, pairs, style in rows:
        cells = [f"{ours:{style}} | {theirs:{style}} | {theirs / ours:.2f}" for ours, theirs in pairs]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    errors = ", ".join(f"{entry['gradient_error']:.1e}" for entry in entries)
    lines += [
        "",
        f"{result['group']} completions of {result['length'] // 2} to {result['length']} tokens after a prompt of "
        f"{result['prompt']}; generation of {result['length']}. Distance of the gradient to that of whole rows: "
        f"{errors}. {origin(result)}",
    ]
    return "\n".join(lines)


def flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*SHAPES, *REAL], default=list(SHAPES))
    parser.add_argument("--length", type=int, default=128, help="T, tokens of the longest completions")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="measured steps per trainer and round (tiny, 30m)")
    parser.add_argument("--callbacks", action="store_true", help="only what the callbacks add (tiny, 30m)")
    parser.add_argument("--pairs", type=int, default=30, help="measured pairs of steps with and without a callback")
    parser.add_argument("--group", type=int, default=GROUP, help="G, completions of a prompt (real shapes)")
    parser.add_argument("--prompt", type=int, default=180, help="P, tokens of the prompt (real shapes)")
    parser.add_argument("--threads", type=int, default=1, help="threads (real shapes)")
    parser.add_argument("--packing", action="store_true", help="only padded and packed rows, one layer (real shapes)")
    parser.add_argument("--output", type=Path, help="file for the results, JSON")
    parser.add_argument("--markdown", type=Path, metavar="JSON", help="print the table of a results file and exit")
    parser.add_argument("--peak", choices=NAMES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    real = set(args.models) <= set(REAL)
    if not real and set(args.models) & set(REAL):
        parser.error("--models: tiny and 30m have another table than the real shapes; run one of the two")
    if args.packing and not real:
        parser.error("--packing: expected smollm2-135m or qwen2.5-0.5b")
    if args.callbacks and real:
        parser.error("--callbacks: expected tiny or 30m")
    if not real and args.threads != 1:
        parser.error("--threads: tiny and 30m are measured in CPU seconds of one thread")
    return args


def measure(shape: str, directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What the flags ask of a shape."""
    if args.packing:
        return time_packing(shape, args.rounds)
    if shape in REAL:
        return time_phases(shape, directory, args)
    if not args.callbacks:
        return time_steps(shape, directory, args.length, args.rounds, args.steps)
    added = {}
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        added[str(threads)] = time_callbacks(shape, directory, args.length, args.pairs, threads)
    return {"parameters": random_model(shape).get_base_model().num_parameters(), "callbacks": added}


def main() -> None:
    args = flags()
    if args.markdown:
        print(markdown(json.loads(args.markdown.read_text())))
        return
    torch.set_num_threads(args.threads)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        save_untrained_tiny(directory / "tokenizer")
        if args.peak:
            print(peak(args.peak, args.models[0], directory, args))
            return
        result = provenance("cpu", ("torch", "trl", "transformers", "peft")) | {"length": args.length, "models": {}}
        if args.packing:
            result = {name: value for name, value in result.items() if name != "length"} | {"group": GROUP}
        elif args.models[0] in REAL:
            result |= {"group": args.group, "prompt": args.prompt}
        if args.callbacks:
            result |= {"pairs": args.pairs}
        for shape in args.models:
            result["models"][shape] = measure(shape, directory, args)
    print(json.dumps(result["models"], indent=1) if args.packing else markdown(result))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + os.linesep)


if __name__ == "__main__":
    main()
