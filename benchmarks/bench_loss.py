"""Time, memory and accuracy of the head and the objective: ours, TRL's, Liger's, the authors', and bare matmuls.

    python benchmarks/bench_loss.py                                  # bfloat16, H = 512, V = 32,768: a minute or two
    python benchmarks/bench_loss.py --shapes bfloat16:512:32768 float32:512:32768 bfloat16:2048:32768
    python benchmarks/bench_loss.py --authors DIR                    # with a checkout of winstonsmith1897/GTPO
    python benchmarks/bench_loss.py --threads 1 2 4 --neighbour pinned
    python benchmarks/bench_loss.py --device cuda --shapes bfloat16:4096:128256 --group 12 --length 1500
    python benchmarks/bench_loss.py --mask 17d0dc5   # conflict_mask alone, next to that of an earlier revision
    python benchmarks/bench_loss.py --markdown results/benchmarks/loss_cpu.json   # the tables of a run

One step: conflict weights, log-probabilities, entropy, loss, and its gradient with respect to the hidden states. Each
peer runs its own code, imported from its package (`make bench`); for one that cannot run, the results have
the reason. Times are medians over interleaved rounds: CPU seconds of one thread, or the time between two CUDA events.
Each peak is the memory that one step adds, measured in a fresh process. Liger's loss returns no entropy. The limit is
the two matmuls of the head alone, tile by tile, with the best of several tile sizes and with ours.

On a CPU, ours, the logits path and the limit are then timed by the wall clock for each number of threads, alone and
beside a process that keeps one core busy. All numbers are of the first number of threads otherwise.
"""

import argparse
import ast
import contextlib
import datetime
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from gtpo.runs.script import limit_openmp_spinning  # noqa: E402

limit_openmp_spinning(os.environ)  # as the scripts do, before PyTorch is imported

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from gtpo.forward.head import TILES, linear_logps_and_entropy  # noqa: E402
from gtpo_loss import completion_entropy, conflict_mask, conflict_weights, entropy_filter, gtpo_loss  # noqa: E402

OURS = "ours"
LIMIT = "limit"
SAME_TILES = "limit, our tiles"
PEERS = {
    "trl logits": "TRL, logits path",
    "trl fused": "TRL, fused head",
    "liger": "Liger, fused linear GRPO",
    "authors": "authors' functions, eager",
}
NAMES = {OURS: "ours", **PEERS, LIMIT: "limit: two matmuls, best tiles", SAME_TILES: "limit: two matmuls, our tiles"}
CONFIDENT = 0.99
MASKS = ((4, 12, 1500, 200), (4, 64, 2048, 400), (4, 256, 2048, 400))  # groups, G, T, shared tokens
QUIET = "quiet"
NEIGHBOUR = "with a neighbour"


class Case(NamedTuple):
    """G completions of T tokens; about a third of the tokens have p > 0.99, the others less."""

    hidden: Tensor  # (G, T, H)
    weight: Tensor  # (V, H)
    ids: Tensor  # (G, T)
    mask: Tensor  # (G, T)
    advantages: Tensor  # (G,)


def make_case(shape: str, group: int, length: int, device: str) -> Case:
    dtype, width, vocabulary = parse_shape(shape)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocabulary, width, generator=generator).mul_(2 / width**0.5)
    ids = torch.randint(0, vocabulary, (group, length), generator=generator)
    lean = torch.rand(group, length, 1, generator=generator) * 6  # towards the head row of the sampled token
    hidden = torch.randn(group, length, width, generator=generator) + lean * weight[ids]
    advantages = torch.linspace(-1.5, 1.5, group)
    tensors = hidden.to(dtype), weight.to(dtype), ids, torch.ones_like(ids), advantages
    return Case(*(tensor.to(device) for tensor in tensors))


def parse_shape(shape: str) -> tuple[torch.dtype, int, int]:
    dtype, width, vocabulary = shape.split(":")
    return getattr(torch, dtype), int(width), int(vocabulary)


# Implementations: one step, from the hidden states to their gradient

Head = Callable[[Tensor, Case], tuple[Tensor, Tensor]]  # hidden (G, T, H) -> logps, entropy (G, T)


def our_head(hidden: Tensor, case: Case, grad_rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    outputs = linear_logps_and_entropy(hidden.flatten(0, 1), case.weight, case.ids.flatten(), grad_rows=grad_rows)
    logps, entropy = (output.view_as(case.ids) for output in outputs)
    return logps, entropy


def trl_logits_head(hidden: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    # GRPOTrainer calls it on the model's logits where the head is not fused: the default up to TRL 1.14.
    from trl.trainer.utils import selective_log_softmax_and_entropy

    logits = F.linear(F.pad(hidden, (0, 0, 0, 1)), case.weight)  # its model call returns one position more than is used
    logits = logits[:, :-1, :]
    return selective_log_softmax_and_entropy(logits, case.ids, entropy_requires_grad=False, row_mask=case.mask)


def trl_fused_head(hidden: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    # GRPOTrainer's patched forward calls it on the hidden states of the completion tokens.
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    rows = hidden.flatten(0, 1)
    targets = case.ids.flatten()
    settings = 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("entropy",)
    logps, entropy, *_ = ChunkedLogProbFunction.apply(rows, case.weight, None, targets, *settings)
    return logps.view_as(case.ids), entropy.detach().view_as(case.ids)


def gtpo_step(head: Head, case: Case) -> Tensor:
    hidden = case.hidden.detach().requires_grad_()
    weights = conflict_weights(conflict_mask(case.ids, case.mask, case.advantages, len(case.ids)), case.advantages)
    if head is our_head:
        logps, entropy = our_head(hidden, case, grad_rows=(weights != 0).flatten())
    else:
        logps, entropy = head(hidden, case)
    mean_entropy = completion_entropy(entropy, case.mask)
    keep = entropy_filter(mean_entropy, case.advantages, None, mode="off")
    loss, _ = gtpo_loss(logps, mean_entropy, case.mask, case.advantages, weights, keep)
    loss.backward()
    return hidden.grad


def liger_step(case: Case, advantages: Tensor | None = None) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    hidden = case.hidden.detach().requires_grad_()
    compiled = case.hidden.is_cuda  # only its (G, T) loss; on a CPU that needs a C++ compiler
    grpo = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="grpo", compiled=compiled)
    loss, _ = grpo(hidden, case.weight, case.ids, case.mask, case.advantages if advantages is None else advantages)
    loss.backward()
    return hidden.grad


def authors_module(checkout: str) -> types.SimpleNamespace:
    """The functions of their gtpo/gtpo_training.py, without its imports: TRL no longer has some of the names."""
    source = (Path(checkout) / "gtpo" / "gtpo_training.py").read_text()
    wanted = {"compute_completion_stats", "build_conflict_mask", "gtpo_compute_loss", "UnslothEfficientGTPO"}
    body = [
        node
        for node in ast.parse(source).body
        if getattr(node, "name", None) in wanted
        or (isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Constant))
    ]
    names: dict[str, Any] = {"torch": torch, "Tuple": tuple, "wandb": types.SimpleNamespace(run=None)}
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    module = ast.fix_missing_locations(ast.Module([future, *body], []))
    exec(compile(module, "gtpo_training.py", "exec"), names)
    return types.SimpleNamespace(**names)


def authors_step(case: Case, authors: Any) -> Tensor:
    """On L + 1 hidden states, as their trainer passes them; the reference's hidden states are given, its logits not."""
    hidden = F.pad(case.hidden.detach(), (0, 0, 0, 1)).requires_grad_()
    with contextlib.redirect_stdout(io.StringIO()):  # it prints every mask
        loss, *_ = authors.UnslothEfficientGTPO.apply(
            hidden[None], hidden[None].detach(), case.weight, case.ids[None], case.mask[None], case.advantages,
            case.advantages, 0.0, None, 1,
        )  # fmt: skip
        # Its backward returns 13 gradients for 10 inputs, which current PyTorch refuses: read its saved tensor instead.
        return loss.grad_fn.saved_tensors[0][0, :, :-1]


def limit_step(case: Case, tile: tuple[int, int]) -> Tensor:
    hidden = case.hidden.flatten(0, 1)
    weight = case.weight
    gradient = torch.empty_like(hidden)
    for rows in zip(hidden.split(tile[0]), gradient.split(tile[0]), strict=True):
        for columns in weight.split(tile[1]):
            torch.mm(rows[0] @ columns.T, columns, out=rows[1])
    return gradient


def limit_tiles(device: str) -> list[tuple[int, int]]:
    """(rows, columns) to try; the first is the tile size of our head."""
    return [TILES[device], *([(8192, 16384)] if device == "cuda" else [(2048, 2048), (2048, 1024)])]


def implementations(
    case: Case, authors: str | None, only: str | None = None
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """Steps by name, and the reason for those that cannot run."""
    steps: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: gtpo_step(our_head, case),
        "trl logits": lambda: gtpo_step(trl_logits_head, case),
        "trl fused": lambda: gtpo_step(trl_fused_head, case),
        "liger": lambda: liger_step(case),
    }
    reasons = {}
    if authors is None:
        reasons["authors"] = "no --authors DIR: their code is not a package"
    else:
        module = authors_module(authors)
        steps["authors"] = lambda: authors_step(case, module)
    small = Case(case.hidden[:2, :4], case.weight[:64], case.ids[:2, :4] % 64, case.mask[:2, :4], case.advantages[:2])
    tries = {
        "trl logits": lambda: gtpo_step(trl_logits_head, small),
        "trl fused": lambda: gtpo_step(trl_fused_head, small),
        "liger": lambda: liger_step(small),
    }
    for name, attempt in tries.items():
        if only not in (None, name):
            continue
        try:
            attempt()
        except Exception as error:
            reasons[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            del steps[name]
    return steps, reasons


# Time


Clock = Callable[[], float]


def seconds_of(step: Callable[[], object], device: str, clock: Clock | None = None) -> float:
    if device == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / 1e3
    clock = clock or (time.process_time if torch.get_num_threads() == 1 else time.perf_counter)
    begin = clock()
    step()
    return clock() - begin


def medians(
    steps: Mapping[str, Callable[[], object]], rounds: int, device: str, clock: Clock | None = None
) -> dict[str, float]:
    for step in steps.values():
        step()  # warm-up: libraries are loaded, kernels compiled
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name].append(seconds_of(step, device, clock))
    return {name: statistics.median(values) for name, values in seconds.items()}


def time_shape(
    case: Case, steps: dict[str, Callable[[], Tensor]], rounds: int, device: str, clock: Clock | None = None
) -> dict[str, float]:
    tiles = {f"{LIMIT} {rows}x{columns}": (rows, columns) for rows, columns in limit_tiles(device)}
    limits = {name: partial(limit_step, case, tile) for name, tile in tiles.items()}
    seconds = medians({**steps, **limits}, rounds, device, clock)
    same, *_ = (seconds[name] for name in limits)
    best = min(seconds[name] for name in limits)
    return {name: seconds[name] for name in steps} | {LIMIT: best, SAME_TILES: same}


def time_threads(case: Case, steps: dict[str, Callable[[], Tensor]], args: argparse.Namespace) -> dict[str, Any]:
    """Seconds by number of threads, quiet and beside a busy process, by the wall clock."""
    compared = {name: step for name, step in steps.items() if name in (OURS, "trl logits")}
    seconds: dict[str, Any] = {}
    for threads in args.threads:
        torch.set_num_threads(threads)
        seconds[str(threads)] = {}
        for state, company in ((QUIET, contextlib.nullcontext()), (NEIGHBOUR, busy_neighbour(args.neighbour))):
            with company:
                seconds[str(threads)][state] = time_shape(case, compared, args.rounds, "cpu", time.perf_counter)
    torch.set_num_threads(args.threads[0])
    return seconds


@contextlib.contextmanager
def busy_neighbour(placed: str) -> Iterator[None]:
    """A process that keeps one core busy: where the scheduler puts it, or "pinned" to one of our cores."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        if placed == "pinned":
            os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
        yield
    finally:
        process.kill()
        process.wait()


def scaling(shape: str, group: int, length: int, rounds: int, device: str) -> dict[str, float]:
    """Factor by which our step's time grows when T, V or G doubles."""
    dtype, width, vocabulary = shape.split(":")
    cases = {
        "1": make_case(shape, group, length, device),
        "T": make_case(shape, group, 2 * length, device),
        "V": make_case(f"{dtype}:{width}:{2 * int(vocabulary)}", group, length, device),
        "G": make_case(shape, 2 * group, length, device),
    }
    steps = {name: partial(gtpo_step, our_head, case) for name, case in cases.items()}
    seconds = medians(steps, rounds, device)
    return {name: seconds[name] / seconds["1"] for name in ("T", "V", "G")}


def conflict_inputs(device: str) -> tuple[Tensor, Tensor, Tensor, int]:
    group = 12
    length = 1500
    vocabulary = 128256
    ids = torch.randint(0, vocabulary, (group, length), generator=torch.Generator().manual_seed(0))
    ids[:, :100], ids[:, -100:] = ids[0, :100], ids[0, -100:]
    return ids.to(device), torch.ones_like(ids).to(device), torch.linspace(-1, 1, group).to(device), group


def mask_case(groups: int, group: int, length: int, shared: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Completions of T/2 to T tokens; half of the shared tokens are the first ones of a group, half the last ones."""
    generator = torch.Generator().manual_seed(0)
    rows = groups * group
    half = shared // 2
    ids = torch.randint(0, 128256, (groups, group, length), generator=generator)
    lengths = torch.randint(length // 2, length + 1, (groups, group, 1), generator=generator)
    end = ids[:, :1, -half:].repeat(1, group, 1)
    columns = torch.arange(half)
    ids[:, :, :half] = ids[:, :1, :half]
    ids.scatter_(2, lengths - half + columns, end)
    mask = (torch.arange(length) < lengths).long()
    return ids.view(rows, -1), mask.view(rows, -1), torch.randn(rows, generator=generator), group


def compare_masks(revision: str, rounds: int, threads: list[int]) -> dict[str, Any]:
    """Seconds of :func:`conflict_mask` and of that of a revision, in interleaved rounds."""
    shown = subprocess.run(["git", "show", f"{revision}:gtpo_loss.py"], cwd=ROOT, capture_output=True, check=True)
    earlier = types.ModuleType("earlier")
    exec(compile(shown.stdout, "gtpo_loss.py", "exec"), vars(earlier))
    cases: dict[str, Any] = {}
    for groups, group, length, shared in MASKS:
        inputs = mask_case(groups, group, length, shared)
        steps = {"before": partial(earlier.conflict_mask, *inputs), "now": partial(conflict_mask, *inputs)}
        assert torch.equal(*(step() for step in steps.values()))
        entry = cases.setdefault(f"{groups} x {group} x {length}, {shared} shared", {})
        for count in threads:
            torch.set_num_threads(count)
            seconds = medians(steps, rounds, "cpu")
            entry[str(count)] = seconds | {"ratio": seconds["before"] / seconds["now"]}
            print(f"{groups} x {group}, {count} thread(s): {entry[str(count)]}", file=sys.stderr)
    return provenance("cpu", ("torch",)) | {"before": revision, "rounds": rounds, "conflict_mask": cases}


# Memory


def peak_in_own_process(name: str, shape: str, args: argparse.Namespace) -> float:
    """MiB that one step adds, measured in a fresh process."""
    command = [sys.executable, __file__, "--peak", name, "--shapes", shape, "--device", args.device]
    command += ["--group", str(args.group), "--length", str(args.length), "--threads", str(args.threads[0])]
    command += ["--authors", args.authors] if args.authors else []
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def peak(name: str, shape: str, args: argparse.Namespace) -> float:
    if name == "conflict_mask":
        inputs = conflict_inputs(args.device)

        def step() -> Tensor:
            return conflict_mask(*inputs)

        conflict_mask(inputs[0][:, :8], inputs[1][:, :8], inputs[2], inputs[3])
    else:
        case = make_case(shape, args.group, args.length, args.device)
        few = Case(case.hidden[:2, :4], case.weight, case.ids[:2, :4], case.mask[:2, :4], case.advantages[:2])
        implementations(few, args.authors, only=name)[0][name]()  # loads libraries before the measurement
        step = implementations(case, args.authors, only=name)[0][name]
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = step()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the high-water mark
    before = status_kib("VmRSS")
    kept = step()
    grown = status_kib("VmHWM") - before
    del kept
    return grown / 2**10


def status_kib(key: str) -> int:
    return next(
        int(line.split()[1])
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        if line.startswith(key)
    )


# Accuracy


def accuracy(case: Case, names: list[str]) -> dict[str, dict[str, float]]:
    """Relative error of d logp / d hidden over all rows and over those with p > 0.99; error of the entropy, nats."""
    hidden = case.hidden.flatten(0, 1)
    ids = case.ids.flatten()
    truth, logps, entropies = (torch.cat(parts) for parts in zip(*exact(hidden, case.weight, ids), strict=True))
    sure = logps > torch.tensor(CONFIDENT).log()
    heads = {OURS: our_head, "trl logits": trl_logits_head, "trl fused": trl_fused_head}
    errors = {}
    for name in names:
        entropy = None
        if name in heads:
            leaf = case.hidden.detach().requires_grad_()
            logp, entropy = heads[name](leaf, case)
            logp.float().sum().backward()
            gradient = leaf.grad.flatten(0, 1).double()
        elif name == "liger":  # with A = 1 its gradient is that of minus the mean log-probability
            gradient = -len(ids) * liger_step(case, torch.ones_like(case.advantages)).flatten(0, 1).double()
        else:
            continue
        error = gradient - truth
        errors[name] = {
            "gradient": (error.norm() / truth.norm()).item(),
            "gradient, confident": (error[sure].norm() / truth[sure].norm()).item(),
        }
        if entropy is not None:
            difference = (entropy.flatten().double() - entropies).abs()
            errors[name] |= {"entropy": difference.mean().item(), "entropy, largest": difference.max().item()}
    return errors


def exact(hidden: Tensor, weight: Tensor, ids: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """d logp / d hidden, logp and entropy in float64, 256 rows at a time."""
    weight = weight.double()
    for states, targets in zip(hidden.double().split(256), ids.split(256), strict=True):
        log_pi = (states @ weight.T).log_softmax(-1)
        pi = log_pi.exp()
        logps = log_pi.gather(1, targets[:, None])
        entropy = -(pi * log_pi).sum(-1)
        grad_logits = pi.neg().scatter_(1, targets[:, None], -torch.expm1(logps))
        yield grad_logits @ weight, logps.squeeze(1), entropy


# Results and tables


def provenance(device: str, packages: tuple[str, ...], hidden: str | None = None) -> dict[str, Any]:
    """Command (with DIR in place of ``hidden``, a local directory), date, revision, machine and versions of a run."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    def version(package: str) -> str | None:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
        return None

    argv = ("DIR" if argument == hidden else argument for argument in sys.argv[1:])
    model = [x for x in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if x.startswith("model name")]
    amx = ", AMX" if torch.cpu._is_amx_tile_supported() else ""
    return {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *argv]),
        "date": datetime.date.today().isoformat(),
        "revision": git("rev-parse", "--short", "HEAD") + ("-dirty" if git("status", "--porcelain") else ""),
        "machine": torch.cuda.get_device_name() if device == "cuda" else f"{model[0].split(': ')[1]}{amx}",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def origin(result: Mapping[str, Any]) -> str:
    """The line below a table: machine, versions, date, revision and command."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    return (
        f"{result['machine']}, {result['threads']} thread(s); {versions}; {result['date']}, revision "
        f"{result['revision']}: `{result['command']}`"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    sources = provenance(args.device, ("torch", "trl", "liger-kernel", "transformers"), hidden=args.authors)
    result: dict[str, Any] = {**sources, "group": args.group, "length": args.length, "shapes": {}}
    for shape in args.shapes:
        _, width, vocabulary = parse_shape(shape)
        case = make_case(shape, args.group, args.length, args.device)
        steps, reasons = implementations(case, args.authors)
        entry: dict[str, Any] = {"seconds": time_shape(case, steps, args.rounds, args.device), "reasons": reasons}
        work = 4 * args.group * args.length * width * vocabulary  # two matmuls
        if args.device == "cpu":
            entry["threads"] = time_threads(case, steps, args)
        entry["tflops"] = {name: work / entry["seconds"][name] / 1e12 for name in (OURS, LIMIT)}
        few = Case(case.hidden[:2], case.weight, case.ids[:2], case.mask[:2], case.advantages[:2])
        entry["accuracy"] = accuracy(few, list(steps))
        entry["peak_mib"] = {name: peak_in_own_process(name, shape, args) for name in steps}
        result["shapes"][shape] = entry
        print(f"{shape}: {entry}", file=sys.stderr)
    shape = args.shapes[0]
    result["scaling"] = scaling(shape, args.group, args.length, args.rounds, args.device)
    wide = shape.rsplit(":", 1)[0] + ":128256"
    result["peak_mib at V = 128256"] = {OURS: peak_in_own_process(OURS, wide, args)}
    inputs = conflict_inputs(args.device)
    seconds = medians({"mask": lambda: conflict_mask(*inputs)}, 25, args.device)["mask"]
    result["conflict_mask"] = {"ms": 1e3 * seconds, "peak_mib": peak_in_own_process("conflict_mask", shape, args)}
    return result


def markdown(result: dict[str, Any]) -> str:
    """The tables of a results file: time, time relative to ours, memory and errors."""
    lines = []
    for shape, entry in result["shapes"].items():
        dtype, width, vocabulary = shape.split(":")
        seconds = entry["seconds"]
        ours = entry["seconds"][OURS]
        lines += [
            f"{dtype}, H = {int(width):,}, V = {int(vocabulary):,}, {result['group']} completions of "
            f"{result['length']} tokens",
            "",
            "| | ms | x ours | peak extra, MiB | gradient error | where p > 0.99 | entropy error, nats | largest |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for name, label in NAMES.items():
            if name not in seconds:
                lines.append(f"| {label} | {entry['reasons'].get(name, '')} | | | | | | |")
                continue
            errors = entry["accuracy"].get(name, {})
            memory = entry["peak_mib"].get(name)
            cells = [f"{seconds[name] * 1e3:,.0f}", f"{seconds[name] / ours:.2f}"]
            cells.append("" if memory is None else f"{memory:,.0f}")
            cells += [percent(errors.get(key)) for key in ("gradient", "gradient, confident")]
            cells += [f"{errors[key]:.1e}" if key in errors else "" for key in ("entropy", "entropy, largest")]
            lines.append(f"| {label} | {' | '.join(cells)} |")
        lines.append("")
        if "threads" in entry:
            lines += [*threads_table(entry["threads"]), ""]
    grown = result["scaling"]
    wide = result["peak_mib at V = 128256"][OURS]
    mask = result["conflict_mask"]
    lines += [
        f"Twice the tokens of a completion take {grown['T']:.2f} times as long, twice the vocabulary {grown['V']:.2f}, "
        f"twice the completions {grown['G']:.2f}. Peak at V = 128,256: {wide:.0f} MiB. `conflict_mask`, 12 completions "
        f"of 1,500 tokens: {mask['ms']:.1f} ms, {mask['peak_mib']:.0f} MiB.",
        "",
        origin(result),
    ]
    return "\n".join(lines)


def threads_table(seconds: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    head = "| threads | | ours, ms | limit, ms | ours / limit | TRL, logits path, ms | ours / TRL |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for threads, states in seconds.items():
        for state, entry in states.items():
            ours = entry[OURS]
            limit = entry[LIMIT]
            logits = entry.get("trl logits")
            cells = [f"{ours * 1e3:,.0f}", f"{limit * 1e3:,.0f}", f"{ours / limit:.2f}"]
            cells += ["", ""] if logits is None else [f"{logits * 1e3:,.0f}", f"{ours / logits:.2f}"]
            lines.append(f"| {threads} | {state} | {' | '.join(cells)} |")
    return lines


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2g} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["bfloat16:512:32768"], metavar="DTYPE:H:V")
    parser.add_argument("--group", type=int, default=8, help="G, completions")
    parser.add_argument("--length", type=int, default=256, help="T, tokens of a completion")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    every = sorted({1, torch.get_num_threads()})
    parser.add_argument("--threads", type=int, nargs="+", default=every, metavar="N", help="on a CPU [1 and all]")
    parser.add_argument(
        "--neighbour", choices=["free", "pinned"], default="free", help="whether the busy process stays on one core"
    )
    parser.add_argument("--authors", metavar="DIR", help="checkout of github.com/winstonsmith1897/GTPO")
    parser.add_argument("--mask", metavar="REVISION", help="time conflict_mask next to that of a git revision")
    parser.add_argument("--output", type=Path, help="file for the results, JSON")
    parser.add_argument("--markdown", type=Path, metavar="JSON", help="print the tables of a results file and exit")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.markdown:
        print(markdown(json.loads(args.markdown.read_text())))
        return
    torch.set_num_threads(args.threads[0])
    if args.authors:
        torch.compiler.set_stance("force_eager")
    if args.peak:
        print(peak(args.peak, args.shapes[0], args))
        return
    result = compare_masks(args.mask, args.rounds, args.threads) if args.mask else run(args)
    print(json.dumps(result, indent=1) if args.mask else markdown(result))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + os.linesep)


if __name__ == "__main__":
    main()
