"""Search the block sizes of vLLM's LoRA kernels on this GPU: ``python benchmarks/gpu/tune_lora.py --minutes 8``.

Writes ``<GPU>_SHRINK.json`` and ``<GPU>_EXPAND_TRUE.json`` in the form that vLLM reads (its page on multi-LoRA tuning)
and ``<GPU>.versions.json`` to ``gtpo/models/lora_kernels/<minor version of vLLM>``, which gtpo.models.backend hands to
vLLM. The shapes are those of the presets. From vLLM's own configuration one number is varied at a time; a candidate
counts if its output is as close to a float64 product as that of vLLM's. The rank and the rows of `--model llama --G 12`
come first, so that an interrupted search is of use.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path[:0] = [str(Path(__file__).parents[2])]

from gtpo.files import write_atomically  # noqa: E402
from gtpo.models.backend import TUNED_KERNELS, gpu_file_name, installed_version, minor_version  # noqa: E402
from gtpo.models.memory import KNOWN, Shape  # noqa: E402

Config = dict[str, Any]
RANKS = (128, 64, 32)  # llama, qwen, and the rank of most recipes
ROWS = (12, 8, 16, 24, 32, 48, 64)
MAX_LORAS = 2  # what vLLM calls it here: one adapter, and none
CANDIDATES = {
    "shrink": {
        "block_m": (16, 32, 64),
        "block_n": (16, 32, 64, 128),
        "block_k": (32, 64, 128, 256, 512),
        "split_k": (1, 2, 4, 8, 16, 32, 64),
        "num_warps": (2, 4, 8),
        "num_stages": (1, 2, 3, 4),
    },
    "expand": {
        "block_m": (16, 32, 64),
        "block_n": (16, 32, 64, 128, 256),
        "block_k": (16, 32, 64, 128),
        "num_warps": (2, 4, 8),
        "num_stages": (1, 2, 3, 4),
    },
}
CACHE_BYTES = 128 * 2**20  # more than the L2 cache of a GPU: in a model each layer's weights come from memory


class Case(NamedTuple):
    """A call of a kernel: ``rows`` (M, K) times the adapter's matrices (K, N), one for each slice."""

    op: str
    rows: int
    k: int
    outputs: tuple[int, ...]  # N by slice; a slice is a projection that vLLM computes together with others

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the files: max_loras, slices, m, k, n."""
        return tuple(map(str, (MAX_LORAS, len(self.outputs), self.rows, self.k, max(self.outputs))))


def cases_of(shape: Shape, rank: int, rows: int) -> list[Case]:
    """The calls of one layer: q, k and v together, o, gate and up together, down."""
    heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    linear = [
        (shape.hidden_size, (heads, kv, kv)),
        (heads, (shape.hidden_size,)),
        (shape.hidden_size, (shape.intermediate_size,) * 2),
        (shape.intermediate_size, (shape.hidden_size,)),
    ]
    cases = []
    for inputs, outputs in linear:
        cases.append(Case("shrink", rows, inputs, (rank,) * len(outputs)))
        cases.append(Case("expand", rows, rank, outputs))
    return cases


def all_cases() -> list[Case]:
    """Every call of the presets' models, without repetitions; the first rank and number of rows come first."""
    found: dict[Case, None] = {}
    for rank, rows, model in itertools.product(RANKS, ROWS, ("llama", "qwen")):
        found |= dict.fromkeys(cases_of(KNOWN[model], rank, rows))
    return list(found)


def search(case: Case, start: Config, milliseconds: Callable[[Config], float]) -> tuple[Config, float]:
    """The fastest configuration by varying one number at a time until nothing improves, and its time.

    ``milliseconds`` is infinite for a configuration that fails or whose output is wrong.
    """
    best, least = dict(start), milliseconds(start)
    improved = True
    while improved:
        improved = False
        for name, values in CANDIDATES[case.op].items():
            for value in values:
                if value == best[name]:
                    continue
                candidate = best | {name: value}
                if (found := milliseconds(candidate)) < least:
                    best, least, improved = candidate, found, True
    return best, least


def nested(configs: Mapping[Case, Config], op: str) -> dict[str, Any]:
    """``config[max_loras][slices][m][k][n]`` of an operation."""
    content: dict[str, Any] = {}
    for case, config in configs.items():
        if case.op != op:
            continue
        *outer, last = case.keys
        place = content
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = config
    return content


def write(directory: Path, gpu: str, configs: Mapping[Case, Config]) -> None:
    """The two files of a GPU."""
    directory.mkdir(parents=True, exist_ok=True)
    for op, name in (("shrink", "SHRINK"), ("expand", "EXPAND_TRUE")):
        write_atomically(directory / f"{gpu}_{name}.json", json.dumps(nested(configs, op), indent=1) + "\n")


class Kernels:
    """vLLM's kernels with a configuration of our choice, which they read from a file."""

    def __init__(self, folder: Path) -> None:
        os.environ["VLLM_TUNED_CONFIG_FOLDER"] = str(folder)
        from vllm.lora.ops.triton_ops import LoRAKernelMeta, lora_expand, lora_shrink, utils

        self.folder, self.utils, self.meta_type = folder, utils, LoRAKernelMeta
        self.ops = {"shrink": lora_shrink, "expand": lora_expand}

    def default(self, case: Case) -> Config:
        """vLLM's own configuration."""
        self._choose(case, None)
        op, k = case.op, case.k
        hidden, rank = (k, case.outputs[0]) if op == "shrink" else (max(case.outputs), k)
        slices = len(case.outputs)
        found = self.utils.get_lora_op_configs(op, MAX_LORAS, case.rows, hidden, rank, slices, op == "expand" or None)
        return dict(found)

    def _choose(self, case: Case, config: Config | None) -> None:
        for path in self.folder.glob("*.json"):
            path.unlink()
        if config:
            write(self.folder, gpu_file_name(), {case: config})
        self.utils.load_lora_op_config.cache_clear()
        self.utils.get_lora_op_configs.cache_clear()

    @lru_cache(1)  # noqa: B019 (one object a process)
    def data(self, case: Case) -> tuple[list[Any], Any, Any]:
        """A call for each copy of the weights, the output of the first, and what it is in float64."""
        torch.manual_seed(0)
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        slices = len(case.outputs)
        copies = 1 + CACHE_BYTES // (2 * case.k * sum(case.outputs))
        meta = self.meta_type.make(MAX_LORAS - 1, case.rows, "cuda")
        meta.prepare_tensors(torch.zeros(case.rows, dtype=torch.int32, device="cuda"))
        args = meta.meta_args(case.rows, False)
        weights = [[torch.randn(1, n, case.k, **options) for n in case.outputs] for _ in range(copies)]
        first = [weight[0].double() for weight in weights[0]]
        if case.op == "shrink":
            inputs = torch.randn(case.rows, case.k, **options)
            output = torch.zeros(slices, case.rows, case.outputs[0], device="cuda")
            expected = torch.stack([inputs.double() @ weight.T for weight in first])
            calls = [partial(self.ops["shrink"], inputs, w, output, *args, 1.0) for w in weights]
            return calls, output, expected
        inputs = torch.randn(slices, case.rows, case.k, device="cuda")
        output = torch.zeros(case.rows, sum(case.outputs), **options)
        parts = [x.bfloat16().double() @ weight.T for x, weight in zip(inputs, first, strict=True)]
        calls = [partial(self.ops["expand"], inputs, w, output, *args, 0, True) for w in weights]
        return calls, output, torch.cat(parts, 1)

    def error(self, case: Case, config: Config) -> float:
        """The largest difference of an output from the float64 product."""
        self._choose(case, config)
        calls, output, expected = self.data(case)
        output.zero_()
        calls[0]()
        return float((output.double() - expected).abs().max())

    def milliseconds(self, case: Case, most_error: float, config: Config) -> float:
        """Of a call, in a CUDA graph, as vLLM decodes; infinite if it fails or is less accurate."""
        try:
            if not self.error(case, config) <= most_error:
                return float("inf")
            calls, _, _ = self.data(case)
            for call in calls:
                call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for call in calls:
                    call()
            times = []
            for _ in range(3):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(end))
            return min(times) / len(calls)
        except Exception as error:  # too much shared memory, an unsupported combination
            print(f"  {case.op} {config}: {type(error).__name__}", flush=True)
            return float("inf")


def tune(kernels: Any, cases: list[Case], deadline: float, store: Callable[[dict[Case, Config]], None]) -> None:
    """Search each case, and store after each; stops at the deadline."""
    configs: dict[Case, Config] = {}
    before = after = 0.0
    for case in cases:
        if time.monotonic() > deadline:
            break
        default = kernels.default(case)
        most_error = 1.5 * kernels.error(case, default)  # the order of a sum varies
        measure = partial(kernels.milliseconds, case, most_error)
        of_default = measure(default)
        configs[case], least = search(case, default, measure)
        before, after = before + of_default, after + least
        print(f"{case}: {1e3 * of_default:.1f} -> {1e3 * least:.1f} us {configs[case]}", flush=True)
        if len({(each.op, len(each.outputs)) for each in configs}) == 6:  # vLLM asks for 1, 2 and 3 slices
            store(configs)
    print(f"{len(configs)} of {len(cases)} shapes, a call of each: {before:.3f} -> {after:.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="stop after the shape that is being searched then")
    parser.add_argument("--output", type=Path, help="directory of the files [that of the package]")
    args = parser.parse_args()
    versions = {name: installed_version(name) for name in ("vllm", "torch", "triton")}
    directory = args.output or TUNED_KERNELS / minor_version(versions["vllm"] or "")
    with tempfile.TemporaryDirectory() as folder:
        store = partial(write, directory, gpu_file_name())
        tune(Kernels(Path(folder)), all_cases(), time.monotonic() + 60 * args.minutes, store)
    about = {"gpu": torch.cuda.get_device_name(), **versions}
    write_atomically(directory / f"{gpu_file_name()}.versions.json", json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
