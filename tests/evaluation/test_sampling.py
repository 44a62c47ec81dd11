"""Sampling on the Transformers backend, value by value, and what vLLM is given. No network, no GPU."""

import dataclasses
import json
import math
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gtpo.data.load import load_benchmark
from gtpo.errors import UsageError
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
from gtpo.prompts import SYSTEM_PROMPT, to_messages

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


@pytest.fixture(scope="module")
def sampled(tiny: Path) -> dict:
    return run_sampler(tiny, SETTINGS)


# Transformers


@pytest.mark.parametrize("with_adapter", [False, True], ids=["base", "adapter"])
def test_greedy_equals_generate_one_by_one_without_padding(
    tiny: Path, adapters: list[Path], with_adapter: bool
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    if with_adapter:
        model = PeftModel.from_pretrained(model, adapters[0])
    found = run_sampler(tiny, GREEDY, adapters[0] if with_adapter else None)
    lengths = set()
    for problem in ROWS:
        ids = tokenizer.apply_chat_template(
            to_messages(problem.question), add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        lengths.add(ids["input_ids"].shape[1])
        tokens = model.generate(**ids, do_sample=False, max_new_tokens=12)[0, ids["input_ids"].shape[1] :]
        expected = tokenizer.decode(tokens, skip_special_tokens=True)
        assert found[problem.id, 0]["completion"] == expected
        assert found[problem.id, 0]["tokens"] == len(tokens)
    assert len(lengths) > 3  # so that the batches are padded


def test_adapter_and_base_differ_and_the_base_is_restored(tiny: Path, adapters: list[Path]) -> None:
    sampler = TransformersSampler(str(tiny), GREEDY)
    requests = make_requests(sampler, ROWS, GREEDY)
    before, with_adapter, after = (
        [row for batch in sampler.sample(requests, set(), which) for row in batch]
        for which in (None, adapters[0], None)
    )
    assert before == after
    assert any(a["completion"] != b["completion"] for a, b in zip(before, with_adapter, strict=True))


def test_every_request_is_sampled_once_and_no_two_samples_agree(sampled: dict) -> None:
    assert set(sampled) == {(problem.id, sample) for problem in ROWS for sample in range(3)}
    assert len({row["completion"] for row in sampled.values()}) == len(sampled)


def test_the_seed_determines_the_completions(tiny: Path, sampled: dict) -> None:
    torch.manual_seed(123)  # the random state does not matter
    assert run_sampler(tiny, SETTINGS) == sampled
    other = run_sampler(tiny, Sampling(k=3, max_new_tokens=8, batch_size=4, seed=1))
    assert not {row["completion"] for row in other.values()} & {row["completion"] for row in sampled.values()}


def test_missing_samples_do_not_depend_on_what_is_done(tiny: Path, sampled: dict) -> None:
    done = {key for i, key in enumerate(sorted(sampled)) if i % 4 != 1}  # holes in every batch
    assert run_sampler(tiny, SETTINGS, done=done) == {key: row for key, row in sampled.items() if key not in done}


def test_temperature_and_top_p_shape_the_distribution(tiny: Path) -> None:
    sampler = TransformersSampler(str(tiny), SETTINGS)
    request = make_requests(sampler, ROWS[:1], Sampling(k=1, max_new_tokens=1))[0]
    with torch.inference_mode():
        logits = sampler.model(torch.tensor([request.prompt_ids])).logits[0, -1].double()
    size = 600
    texts = [sampler.tokenizer.decode([i], skip_special_tokens=True) for i in range(len(logits))]
    for temperature in (1.0, 0.2):
        settings = Sampling(k=size, temperature=temperature, max_new_tokens=1, batch_size=size)
        sampler.sampling = settings
        [rows] = sampler.sample(make_requests(sampler, ROWS[:1], settings), set(), None)
        probability: dict[str, float] = {}  # of a text: tokens that are not complete characters share one
        for text, p in zip(texts, torch.softmax(logits / temperature, dim=-1).tolist(), strict=True):
            probability[text] = probability.get(text, 0.0) + p
        mean = sum(p * math.log(p) for p in probability.values())
        spread = math.sqrt(sum(p * math.log(p) ** 2 for p in probability.values()) - mean**2)
        found = sum(math.log(probability[row["completion"]]) for row in rows) / size
        assert abs(found - mean) < 4 * spread / math.sqrt(size), temperature
    sampler.sampling = Sampling(k=20, top_p=1e-6, max_new_tokens=1, batch_size=20)
    [rows] = sampler.sample(make_requests(sampler, ROWS[:1], sampler.sampling), set(), None)
    assert {row["completion"] for row in rows} == {sampler.tokenizer.decode([int(logits.argmax())])}


def test_the_generation_defaults_of_the_model_are_not_used(tiny: Path, tmp_path: Path, sampled: dict) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    path = model / "generation_config.json"
    defaults = {"do_sample": True, "top_k": 1, "top_p": 0.1, "temperature": 0.1, "repetition_penalty": 3.0}
    path.write_text(json.dumps({**json.loads(path.read_text()), **defaults}))
    assert run_sampler(model, SETTINGS) == sampled


def test_a_completion_ends_at_any_end_token_of_the_generation_config(tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    free = run_sampler(tiny, GREEDY)
    first = ROWS[0].id, 0
    second_token = tokenizer.encode(free[first]["completion"], add_special_tokens=False)[1]
    model = shutil.copytree(tiny, tmp_path / "model")
    path = model / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [2, second_token]}))
    row = run_sampler(model, GREEDY)[first]
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


def test_a_prompt_that_does_not_fit_is_refused(tiny: Path) -> None:
    sampler = TransformersSampler(str(tiny), SETTINGS)
    with pytest.raises(UsageError, match="--max_new_tokens"):
        make_requests(sampler, ROWS, Sampling(max_new_tokens=4090))


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
        with pytest.raises((RuntimeError, UserWarning), match=message):
            run_sampler(tiny, GREEDY, other)


def test_tokens_are_counted_while_they_are_generated(tiny: Path, tmp_path: Path) -> None:
    """Those of the completions that are needed, up to the end of each: the sum is that of the stored rows."""
    model = shutil.copytree(tiny, tmp_path / "model")
    path = model / "generation_config.json"
    ends = [2, *range(100, 150)]  # so that completions end at different lengths
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ends}))
    sampler = TransformersSampler(str(model), SETTINGS)
    requests = make_requests(sampler, ROWS, SETTINGS)
    done = {requests[0].key, requests[5].key}
    counts: list[int] = []
    seen = 0
    for rows in sampler.sample(requests, done, None, counts.append):
        assert sum(counts[seen:]) == sum(row["tokens"] for row in rows)
        assert 1 < len(counts) - seen <= SETTINGS.max_new_tokens  # one call per step
        seen = len(counts)
    assert len(set(counts)) > 2


def test_a_chat_template_that_raises_on_the_system_prompt_gets_it_in_the_question(tiny: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    (model / "chat_template.jinja").write_text(template + "{{ messages[0]['content'] }}")
    sampler = TransformersSampler(str(model), GREEDY)
    request = make_requests(sampler, ROWS, GREEDY)[0]
    assert sampler.tokenizer.decode(request.prompt_ids) == f"{SYSTEM_PROMPT}\n\n{ROWS[0].question}"


# vLLM


def test_the_backend_follows_from_gpu_model_and_version_of_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_installed("vllm"):
        pytest.skip("vllm is installed here")
    for gpu, tiny in ((False, False), (True, True)):
        monkeypatch.setattr(sampling, "gpu_is_available", lambda gpu=gpu: gpu)
        assert choose_sampler("auto", tiny) == "transformers"
        with pytest.raises(UsageError, match="--tensor_parallel_size"):
            choose_sampler("auto", tiny, gpus=2)
    for choice in ("auto", "vllm"):
        with pytest.raises(UsageError, match=r"vllm .* installed is none"):
            choose_sampler(choice, tiny=False)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    metadata = tmp_path / "vllm-0.1.2.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.1.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"vllm .* installed is 0.1.2"):
        choose_sampler("vllm", tiny=False)
    monkeypatch.setenv("GTPO_ALLOW_VERSIONS", "1")
    assert choose_sampler("vllm", tiny=False) == choose_sampler("auto", tiny=False, gpus=2) == "vllm"


def test_vllm_gets_one_batch_of_requests_with_a_seed_each(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    vllm = SimpleNamespace(LLM=LLM, SamplingParams=SimpleNamespace)
    lora = SimpleNamespace(LoRARequest=lambda name, number, path: (name, number, path))
    for name, module in {"vllm": vllm, "vllm.lora": SimpleNamespace(), "vllm.lora.request": lora}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "")  # restored after the test
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER")

    settings = Sampling(k=2, temperature=0.7, top_p=0.9, seed=5, max_new_tokens=11)
    sampler = sampling.VLLMSampler(str(tiny), settings, lora_rank=12)
    assert started[0]["max_lora_rank"] == 16  # vLLM accepts 8 and 16, nothing between
    assert started[0]["max_model_len"] == 4096
    assert started[0]["generation_config"] == "vllm"
    assert started[0]["quantization"] is None
    assert started[0]["tensor_parallel_size"] == 1
    four_bit = dataclasses.replace(settings, load_in_4bit=True)
    sampling.VLLMSampler(str(tiny), four_bit, lora_rank=12, tensor_parallel_size=2)
    assert started[-1]["quantization"] == "bitsandbytes" and started.pop()["tensor_parallel_size"] == 2
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


@pytest.mark.parametrize("four_bit", [True, False])
def test_transformers_load_the_base_in_the_precision_of_the_settings(
    four_bit: bool, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[tuple[str, bool]] = []
    load_base = sampling.load_base
    monkeypatch.setattr(sampling, "load_base", lambda path, bits, **_: loaded.append((path, bits)) or load_base(path))
    TransformersSampler(str(tiny), dataclasses.replace(SETTINGS, load_in_4bit=four_bit))
    assert loaded == [(str(tiny), four_bit)]
