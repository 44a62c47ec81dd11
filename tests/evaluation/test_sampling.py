"""Sampling on the Transformers backend, value by value, and what vLLM is given. No network, no GPU."""

import importlib
import os
import shutil
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from helpers.files import read_json, write_json
from helpers.refusals import refused
from pytest import MonkeyPatch, fixture, raises
from transformers import AutoTokenizer

from gtpo.data.load import load_benchmark
from gtpo.evaluation import sampling
from gtpo.evaluation.arguments import EvaluationArguments
from gtpo.evaluation.sampling import (
    Request,
    Sampling,
    TransformersSampler,
    derived_seed,
    make_requests,
    plan_batches,
)
from gtpo.evaluation.storage import Key, keys_of
from gtpo.models.source import model_source
from gtpo.prompts import to_messages

ROWS = load_benchmark("arithmetic")[:7]  # prompts of 21 to 45 tokens
SETTINGS = Sampling(k=3, max_new_tokens=8, batch_size=4)
GREEDY = Sampling(k=1, temperature=0.0, max_new_tokens=12, batch_size=4)


def run_sampler(model: Path, settings: Sampling, adapter: Path | None = None, done: Collection[Key] = ()) -> dict:
    sampler = TransformersSampler(model_source(model), settings)
    batches = sampler.sample(make_requests(sampler, ROWS, settings), set(done), adapter)
    return {(row["id"], row["sample"]): row for batch in batches for row in batch}


def texts_of(completions: dict) -> set[str]:
    return {row["completion"] for row in completions.values()}


@fixture(scope="module")
def sampled(tiny: Path) -> dict:
    return run_sampler(tiny, SETTINGS)


# Transformers


def test_greedy_equals_generate_one_by_one_without_padding(
    tiny: Path, adapters: list[Path], ask_greedily: Callable
) -> None:
    """The base model, an adapter, and the base model again."""
    sampler = TransformersSampler(model_source(tiny), GREEDY)
    requests = make_requests(sampler, ROWS, GREEDY)
    assert len({len(request.prompt_ids) for request in requests}) > 3  # so that the batches are padded
    for adapter in (None, adapters[0], None):
        rows = [row for batch in sampler.sample(requests, set(), adapter) for row in batch]
        found = {row["id"]: (row["completion"], row["tokens"]) for row in rows}
        assert found == {problem.id: ask_greedily(to_messages(problem.question), adapter) for problem in ROWS}


def test_the_seed_determines_the_completions(tiny: Path, sampled: dict) -> None:
    assert sampled.keys() == keys_of(ROWS, 3)
    assert len(texts_of(sampled)) == 21  # no two samples agree
    torch.manual_seed(123)  # the random state does not matter, nor do holes in every batch
    done = {key for i, key in enumerate(sorted(sampled)) if i % 4 != 1}
    assert run_sampler(tiny, SETTINGS, done=done) == {key: row for key, row in sampled.items() if key not in done}
    assert not texts_of(run_sampler(tiny, replace(SETTINGS, seed=1))) & texts_of(sampled)


def test_generate_gets_the_settings_and_none_of_the_model(tiny: Path, tmp_path: Path, sampled: dict) -> None:
    """tests/forward/test_generation.py checks the distribution that follows from them."""
    defaults = {"do_sample": True, "top_k": 1, "top_p": 0.1, "temperature": 0.1, "repetition_penalty": 3.0}
    model = with_generation_config(tiny, tmp_path / "model", **defaults)
    assert run_sampler(model, SETTINGS) == sampled
    sampler = TransformersSampler(model_source(model), replace(SETTINGS, temperature=0.2, top_p=0.7))
    list(sampler.sample(make_requests(sampler, ROWS[:1], SETTINGS), set(), None))
    used = sampler.model.generation_config
    assert (used.do_sample, used.temperature, used.top_p, used.top_k) == (True, 0.2, 0.7, 0)


def with_generation_config(tiny: Path, model: Path, **changes: object) -> Path:
    path = shutil.copytree(tiny, model) / "generation_config.json"
    write_json(path, {**read_json(path), **changes})
    return model


def test_any_end_token_ends_a_completion(tiny: Path, tmp_path: Path) -> None:
    first = (ROWS[0].id, 0)
    free = run_sampler(tiny, GREEDY)[first]
    second_token = AutoTokenizer.from_pretrained(tiny).encode(free["completion"], add_special_tokens=False)[1]
    model = with_generation_config(tiny, tmp_path / "model", eos_token_id=[2, second_token])
    row = run_sampler(model, GREEDY)[first]
    assert (row["tokens"], row["finished"]) == (2, True)
    assert free["tokens"] > 2


def test_batches_contain_every_request_once_longest_first() -> None:
    requests = [Request(f"a/{i}", 0, [0] * (10 + i % 4)) for i in range(10)]
    ids = [[request.id for request in batch] for batch in plan_batches(requests, 4)]
    assert ids == [["a/3", "a/7", "a/2", "a/6"], ["a/1", "a/5", "a/9", "a/0"], ["a/4", "a/8"]]


def test_the_defaults_of_sampling_are_those_of_the_command() -> None:
    flags = vars(EvaluationArguments())
    shared = {name: value for name, value in vars(Sampling()).items() if name in flags and name != "batch_size"}
    assert len(shared) == 6 and {name: flags[name] for name in shared} | {"load_in_4bit": False} == shared


def test_derived_seeds_do_not_change_between_versions() -> None:
    # int.from_bytes(sha256(b"0\ngsm8k/0\n1").digest()[:8], "big") >> 1
    assert derived_seed(0, "gsm8k/0", 1) == 8991293689312610971


def test_an_adapter_of_a_deeper_model_is_refused(tiny: Path, adapters: list[Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    other = shutil.copytree(adapters[0], tmp_path / "other")
    weights = load_file(other / "adapter_model.safetensors")
    kept = {name: weight for name, weight in weights.items() if "layers.1" not in name}
    save_file(kept, other / "adapter_model.safetensors")
    with raises(UserWarning, match="missing adapter keys"):
        run_sampler(tiny, GREEDY, other)


def test_tokens_are_counted_while_they_are_generated(tiny: Path, tmp_path: Path) -> None:
    """Those of the completions that are needed, up to the end of each: the sum is that of the stored rows."""
    ends = [2, *range(100, 150)]  # so that completions end at different lengths
    sampler = TransformersSampler(
        model_source(with_generation_config(tiny, tmp_path / "model", eos_token_id=ends)), SETTINGS
    )
    requests = make_requests(sampler, ROWS, SETTINGS)
    counts: list[int] = []
    for rows in sampler.sample(requests, {requests[0].key, requests[5].key}, None, counts.append):
        assert sum(counts) == sum(row["tokens"] for row in rows)
        assert 1 < len(counts) <= SETTINGS.max_new_tokens  # one call per step
        counts.clear()


def test_a_prompt_that_does_not_fit_is_refused(tiny: Path) -> None:
    with refused("--max_new_tokens"):
        make_requests(TransformersSampler(model_source(tiny), SETTINGS), ROWS, Sampling(max_new_tokens=4090))


# vLLM


def test_vllm_gets_one_batch_with_seeds(tiny: Path, monkeypatch: MonkeyPatch) -> None:
    """On a fake engine; tests/backends/test_vllm_cpu.py runs the real one. Completions are returned as they finish."""
    started: list[dict] = []
    submitted: list[tuple] = []

    class LLM:
        def __init__(self, **options: object) -> None:
            started.append(options | {"flashinfer": os.environ["VLLM_USE_FLASHINFER_SAMPLER"]})
            self.llm_engine = self

        def enqueue(self, prompts: list, params: list, lora_request: object, use_tqdm: bool) -> list[str]:
            submitted.append((prompts, params, lora_request))
            self.waiting = [str(i) for i in range(len(prompts))]
            return [f"{number}-1a2b3c4d" for number in self.waiting]

        def has_unfinished_requests(self) -> bool:
            return bool(self.waiting)

        def step(self) -> list[SimpleNamespace]:
            number = self.waiting.pop()  # last in, first out: vLLM does not keep the order either
            text = SimpleNamespace(token_ids=(7, 2), finish_reason="stop" if int(number) % 2 else "length")
            running = [SimpleNamespace(token_ids=(7,))]  # what it has generated so far
            others = [SimpleNamespace(request_id=name, finished=False, outputs=running) for name in self.waiting]
            return [*others, SimpleNamespace(request_id=number, finished=True, outputs=[text])]

    importlib.import_module("gtpo.forward.vllm_lora")  # TRL looks for vllm, before that is replaced
    lora = SimpleNamespace(LoRARequest=lambda *of_adapter: of_adapter)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM, SamplingParams=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "vllm.lora", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.lora.request", lora)
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "")  # restored after the test
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER")

    settings = Sampling(k=2, temperature=0.7, top_p=0.9, seed=5, max_new_tokens=11)
    expected = {"max_lora_rank": 16, "max_model_len": 4096, "generation_config": "vllm"}  # it accepts ranks 8 and 16
    expected["flashinfer"] = "0"  # its kernels are compiled at the start, which needs nvcc and ninja
    for in_4bit, quantization in ((True, "bitsandbytes"), (False, None)):
        sampler = sampling.VLLMSampler(model_source(tiny), replace(settings, load_in_4bit=in_4bit), lora_rank=12)
        assert started[-1] | expected | {"quantization": quantization} == started[-1]
    assert (started[-1]["dtype"], started[-1]["seed"], started[-1]["gpu_memory_utilization"]) == ("float32", 5, 0.9)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (8, 0))
    for bf16, dtype in ((True, "bfloat16"), (False, "float16")):  # every GPU emulates bfloat16, slowly
        with monkeypatch.context() as patch:
            patch.setattr("torch.cuda.is_available", lambda: True)
            patch.setattr(
                "torch.cuda.is_bf16_supported", lambda including_emulation=True, b=bf16: b or including_emulation
            )
            sampling.VLLMSampler(model_source(tiny), settings, None, 0.25)
        assert (started[-1]["dtype"], started[-1]["gpu_memory_utilization"]) == (dtype, 0.25)
        assert "enable_lora" not in started[-1]
    requests = make_requests(sampler, ROWS, settings)
    done = {("arithmetic/0", 0), ("arithmetic/3", 1)}
    missing = [request for request in requests if request.key not in done]
    counts: list[int] = []
    stream = sampler.sample(requests, done, Path("some/adapter"), counts.append)
    assert len(next(stream)) == 1  # the first is returned while the others wait
    rest = [row for batch in stream for row in batch]
    assert sum(counts) == 2 * len(missing)
    assert [(row["id"], row["sample"]) for row in rest] == [request.key for request in missing[-2::-1]]
    assert [row["finished"] for row in rest] == [i % 2 == 1 for i in range(len(rest) - 1, -1, -1)]
    [(prompts, params, adapter)] = submitted
    assert prompts == [{"prompt_token_ids": request.prompt_ids} for request in missing]
    assert [each.seed for each in params] == [derived_seed(5, *request.key) for request in missing]
    used = params[0]
    assert (used.temperature, used.top_p, used.max_tokens, used.stop_token_ids) == (0.7, 0.9, 11, [2])
    assert adapter == ("adapter-1", 1, "some/adapter")
    for name in (None, "other/adapter", "some/adapter"):
        list(sampler.sample(requests, set(), name and Path(name)))
    expected_ = [None, ("adapter-2", 2, "other/adapter"), ("adapter-1", 1, "some/adapter")]
    assert [lora for _, _, lora in submitted[1:]] == expected_
