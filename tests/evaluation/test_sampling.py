"""Sampling on the Transformers backend, value by value, and what vLLM is given. No network, no GPU."""

import dataclasses
import importlib
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from helpers.files import read_json, write_json
from helpers.refusals import refused
from peft import PeftModel
from pytest import MonkeyPatch, fixture, raises, skip
from transformers import AutoModelForCausalLM, AutoTokenizer

from gtpo.data.load import load_benchmark
from gtpo.evaluation import sampling
from gtpo.evaluation.sampling import (
    Request,
    Sampling,
    TransformersSampler,
    choose_sampler,
    derived_seed,
    make_requests,
    plan_batches,
)
from gtpo.evaluation.storage import Key
from gtpo.models.backend import is_installed
from gtpo.prompts import to_messages

ROWS = load_benchmark("arithmetic")[:7]  # prompts of 21 to 45 tokens
SETTINGS = Sampling(k=3, max_new_tokens=8, batch_size=4)
GREEDY = Sampling(k=1, temperature=0.0, max_new_tokens=12, batch_size=4)


def run_sampler(model: Path, settings: Sampling, adapter: Path | None = None, done: set[Key] | None = None) -> dict:
    sampler = TransformersSampler(str(model), settings)
    batches = sampler.sample(make_requests(sampler, ROWS, settings), done or set(), adapter)
    rows = [row for batch in batches for row in batch]
    by_key = {(row["id"], row["sample"]): row for row in rows}
    assert len(by_key) == len(rows)
    return by_key


@fixture(scope="module")
def sampled(tiny: Path) -> dict:
    return run_sampler(tiny, SETTINGS)


# Transformers


def test_greedy_equals_generate_one_by_one_without_padding(tiny: Path, adapters: list[Path]) -> None:
    """The base model, an adapter, and the base model again."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    sampler = TransformersSampler(str(tiny), GREEDY)
    requests = make_requests(sampler, ROWS, GREEDY)
    assert len({len(request.prompt_ids) for request in requests}) > 3  # so that the batches are padded
    completions = []
    for adapter in (None, adapters[0], None):
        model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
        model = PeftModel.from_pretrained(model, adapter) if adapter else model
        found = {row["id"]: row for batch in sampler.sample(requests, set(), adapter) for row in batch}
        for problem in ROWS:
            ids = tokenizer.apply_chat_template(
                to_messages(problem.question), add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
            tokens = model.generate(**ids, do_sample=False, max_new_tokens=12)[0, ids["input_ids"].shape[1] :]
            expected = tokenizer.decode(tokens, skip_special_tokens=True)
            assert (found[problem.id]["completion"], found[problem.id]["tokens"]) == (expected, len(tokens))
        completions.append([row["completion"] for row in found.values()])
    assert completions[0] != completions[1]


def test_the_seed_determines_the_completions(tiny: Path, sampled: dict) -> None:
    assert set(sampled) == {(problem.id, sample) for problem in ROWS for sample in range(3)}
    assert len({row["completion"] for row in sampled.values()}) == len(sampled)  # no two samples agree
    torch.manual_seed(123)  # the random state does not matter, nor do holes in every batch
    done = {key for i, key in enumerate(sorted(sampled)) if i % 4 != 1}
    assert run_sampler(tiny, SETTINGS, done=done) == {key: row for key, row in sampled.items() if key not in done}
    halves = run_sampler(tiny, dataclasses.replace(SETTINGS, k=4, batch_size=2))  # two batches of each problem
    assert len({row["completion"] for row in halves.values()}) == len(halves)
    other = run_sampler(tiny, dataclasses.replace(SETTINGS, seed=1))
    assert not {row["completion"] for row in other.values()} & {row["completion"] for row in sampled.values()}


def test_generate_gets_the_settings_and_none_of_the_model(tiny: Path, tmp_path: Path, sampled: dict) -> None:
    """tests/forward/test_generation.py checks the distribution that follows from them."""
    defaults = {"do_sample": True, "top_k": 1, "top_p": 0.1, "temperature": 0.1, "repetition_penalty": 3.0}
    model = with_generation_config(tiny, tmp_path / "model", **defaults)
    assert run_sampler(model, SETTINGS) == sampled
    sampler = TransformersSampler(str(model), dataclasses.replace(SETTINGS, temperature=0.2, top_p=0.7))
    requests = make_requests(sampler, ROWS[:1], SETTINGS)
    list(sampler.sample(requests, set(), None))
    used = sampler.model.generation_config
    assert (used.do_sample, used.temperature, used.top_p, used.top_k) == (True, 0.2, 0.7, 0)
    sampler.sampling = dataclasses.replace(SETTINGS, top_p=1e-6)
    [rows] = sampler.sample(requests, set(), None)
    [greedy] = TransformersSampler(str(tiny), dataclasses.replace(SETTINGS, temperature=0.0)).sample(
        requests, set(), None
    )
    assert [row["completion"] for row in rows] == [row["completion"] for row in greedy]


def with_generation_config(tiny: Path, model: Path, **changes: object) -> Path:
    path = shutil.copytree(tiny, model) / "generation_config.json"
    write_json(path, {**read_json(path), **changes})
    return model


def test_any_end_token_ends_a_completion(tiny: Path, tmp_path: Path) -> None:
    free = run_sampler(tiny, GREEDY)
    first = (ROWS[0].id, 0)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    second_token = tokenizer.encode(free[first]["completion"], add_special_tokens=False)[1]
    row = run_sampler(with_generation_config(tiny, tmp_path / "b", eos_token_id=[2, second_token]), GREEDY)[first]
    assert (row["tokens"], row["finished"]) == (2, True)
    assert free[first]["tokens"] > 2


def test_batches_contain_every_request_once_longest_first() -> None:
    requests = [Request(f"a/{i}", 0, [0] * (10 + i % 4)) for i in range(10)]
    batches = plan_batches(requests, 4)
    assert [len(batch) for batch in batches] == [4, 4, 2]
    flat = [request for batch in batches for request in batch]
    assert [len(request.prompt_ids) for request in flat] == [13, 13, 12, 12, 11, 11, 11, 10, 10, 10]
    assert [request.id for request in flat][:4] == ["a/3", "a/7", "a/2", "a/6"]


def test_derived_seeds_do_not_change_between_versions() -> None:
    # int.from_bytes(sha256(b"0\ngsm8k/0\n1").digest()[:8], "big") >> 1
    assert derived_seed(0, "gsm8k/0", 1) == 8991293689312610971
    assert len({derived_seed(s, f"p/{i}", j) for s in range(2) for i in range(50) for j in range(50)}) == 5000


def test_an_adapter_of_another_model_is_refused(tiny: Path, adapters: list[Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(adapters[0] / "adapter_model.safetensors")
    others = {
        "size mismatch": {k: torch.cat([v, v], dim=1) for k, v in weights.items()},
        "missing adapter keys": {k: v for k, v in weights.items() if "layers.1" not in k},
    }
    for message, changed in others.items():
        other = shutil.copytree(adapters[0], tmp_path / message)
        save_file(changed, other / "adapter_model.safetensors")
        with raises((RuntimeError, UserWarning), match=message):
            run_sampler(tiny, GREEDY, other)


def test_tokens_are_counted_while_they_are_generated(tiny: Path, tmp_path: Path) -> None:
    """Those of the completions that are needed, up to the end of each: the sum is that of the stored rows."""
    ends = [2, *range(100, 150)]  # so that completions end at different lengths
    sampler = TransformersSampler(str(with_generation_config(tiny, tmp_path / "model", eos_token_id=ends)), SETTINGS)
    requests = make_requests(sampler, ROWS, SETTINGS)
    done = {requests[0].key, requests[5].key}
    counts = []
    seen = 0
    for rows in sampler.sample(requests, done, None, counts.append):
        assert sum(counts[seen:]) == sum(row["tokens"] for row in rows)
        assert 1 < len(counts) - seen <= SETTINGS.max_new_tokens  # one call per step
        seen = len(counts)
    assert len(set(counts)) > 2


def test_a_prompt_that_does_not_fit_is_refused(tiny: Path) -> None:
    with refused("--max_new_tokens"):
        make_requests(TransformersSampler(str(tiny), SETTINGS), ROWS, Sampling(max_new_tokens=4090))


# vLLM


def test_the_backend_follows_from_gpu_and_model(monkeypatch: MonkeyPatch) -> None:
    if is_installed("vllm"):
        skip("vllm is installed here")
    for gpu, tiny in ((False, False), (True, True)):
        monkeypatch.setattr(sampling, "gpu_is_available", lambda gpu=gpu: gpu)
        assert choose_sampler("auto", tiny) == "transformers"
    for choice in ("auto", "vllm"):
        with refused("vllm"):
            choose_sampler(choice, tiny=False)
    monkeypatch.setattr(sampling, "check_version", lambda package: None)
    assert choose_sampler("vllm", tiny=False) == choose_sampler("auto", tiny=False) == "vllm"


def test_vllm_gets_one_batch_with_seeds(tiny: Path, monkeypatch: MonkeyPatch) -> None:
    """On a fake engine; tests/backends/test_vllm_cpu.py runs the real one. Completions are returned as they finish."""
    started: list[dict] = []
    submitted: list[dict] = []

    class Engine:
        def __init__(self) -> None:
            self.waiting: list[str] = []

        def has_unfinished_requests(self) -> bool:
            return bool(self.waiting)

        def step(self) -> list[SimpleNamespace]:
            number = self.waiting.pop()  # last in, first out: vLLM does not keep the order either
            text = SimpleNamespace(token_ids=(7, 2), finish_reason="stop" if int(number) % 2 else "length")
            running = [SimpleNamespace(token_ids=(7,))]  # what it has generated so far
            others = [SimpleNamespace(request_id=name, finished=False, outputs=running) for name in self.waiting]
            return [*others, SimpleNamespace(request_id=number, finished=True, outputs=[text])]

    class LLM:
        def __init__(self, **options: object) -> None:
            started.append(options | {"flashinfer": os.environ["VLLM_USE_FLASHINFER_SAMPLER"]})
            self.llm_engine = Engine()

        def enqueue(self, prompts: list, params: list, lora_request: object, use_tqdm: bool) -> list[str]:
            submitted.append({"prompts": prompts, "params": params, "lora": lora_request})
            self.llm_engine.waiting = [str(i) for i in range(len(prompts))]
            return [f"{number}-1a2b3c4d" for number in self.llm_engine.waiting]

    importlib.import_module("gtpo.forward.vllm_lora")  # TRL looks for vllm, before that is replaced
    vllm = SimpleNamespace(LLM=LLM, SamplingParams=SimpleNamespace)
    lora = SimpleNamespace(LoRARequest=lambda name, number, path: (name, number, path))
    for name, module in {"vllm": vllm, "vllm.lora": SimpleNamespace(), "vllm.lora.request": lora}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "")  # restored after the test
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER")

    settings = Sampling(k=2, temperature=0.7, top_p=0.9, seed=5, max_new_tokens=11)
    sampler = sampling.VLLMSampler(str(tiny), settings, lora_rank=12)
    expected = {"max_lora_rank": 16, "max_model_len": 4096, "generation_config": "vllm"}  # it accepts ranks 8 and 16
    expected |= {"quantization": None}
    assert started[0] | expected == started[0]
    four_bit = dataclasses.replace(settings, load_in_4bit=True)
    sampling.VLLMSampler(str(tiny), four_bit, lora_rank=12)
    assert started.pop()["quantization"] == "bitsandbytes"
    assert started[0]["flashinfer"] == "0"  # its kernels are compiled at the start, which needs nvcc and ninja
    requests = make_requests(sampler, ROWS, settings)
    done = {("arithmetic/0", 0), ("arithmetic/3", 1)}
    counts: list[int] = []
    stream = sampler.sample(requests, done, Path("some/adapter"), counts.append)
    assert len(next(stream)) == 1  # the first is returned while the others wait
    rest = [row for batch in stream for row in batch]
    assert sum(counts) == 2 * (len(rest) + 1)
    [call] = submitted
    missing = [request for request in requests if request.key not in done]
    assert [prompt["prompt_token_ids"] for prompt in call["prompts"]] == [request.prompt_ids for request in missing]
    assert [p.seed for p in call["params"]] == [derived_seed(5, *request.key) for request in missing]
    assert {(p.temperature, p.top_p, p.max_tokens, tuple(p.stop_token_ids)) for p in call["params"]} == {
        (0.7, 0.9, 11, (2,))
    }
    assert call["lora"] == ("adapter-1", 1, "some/adapter")
    assert [(row["id"], row["sample"]) for row in rest] == [request.key for request in missing[-2::-1]]
    assert [row["finished"] for row in rest] == [i % 2 == 1 for i in range(len(rest) - 1, -1, -1)]
    list(sampler.sample(requests, set(), None))
    assert submitted[1]["lora"] is None
