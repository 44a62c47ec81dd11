"""Completions on the Transformers backend, value by value, and the file that keeps them. No network, no GPU."""

import json
import math
import resource
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sampling
from config import UsageError
from data import load_benchmark
from prompts import to_messages
from sampling import (
    CompletionFile,
    Request,
    Sampling,
    TransformersSampler,
    choose_backend,
    complete,
    derived_seed,
    fingerprint,
    make_requests,
    plan_batches,
    read_completions,
)

ROWS = load_benchmark("arithmetic")[:7]  # prompts of 21 to 45 tokens
DRAW = Sampling(k=3, max_new_tokens=8, batch_size=4)
GREEDY = Sampling(k=1, temperature=0.0, max_new_tokens=12, batch_size=4)


def draw(model: Path, settings: Sampling, adapter: Path | None = None, done: set[sampling.Key] | None = None) -> dict:
    sampler = TransformersSampler(str(model), settings)
    batches = sampler.sample(make_requests(sampler, ROWS, settings), done or set(), adapter)
    rows = [row for batch in batches for row in batch]
    by_key = {(row["id"], row["sample"]): row for row in rows}
    assert len(by_key) == len(rows)
    return by_key


@pytest.fixture(scope="module")
def adapter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter with weights far from zero."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    lora = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    folder = tmp_path_factory.mktemp("adapter")
    get_peft_model(model, lora).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def drawn(tiny: Path) -> dict:
    return draw(tiny, DRAW)


# What is drawn


@pytest.mark.parametrize("with_adapter", [False, True], ids=["base", "adapter"])
def test_greedy_equals_generate_one_by_one_without_padding(tiny: Path, adapter: Path, with_adapter: bool) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    if with_adapter:
        model = PeftModel.from_pretrained(model, adapter)
    found = draw(tiny, GREEDY, adapter if with_adapter else None)
    lengths = set()
    for row in ROWS:
        ids = tokenizer.apply_chat_template(
            to_messages(row["question"]), add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        lengths.add(ids["input_ids"].shape[1])
        tokens = model.generate(**ids, do_sample=False, max_new_tokens=12)[0, ids["input_ids"].shape[1] :]
        expected = tokenizer.decode(tokens, skip_special_tokens=True)
        assert found[row["id"], 0]["completion"] == expected
        assert found[row["id"], 0]["tokens"] == len(tokens)
    assert len(lengths) > 3  # so that the batches are padded


def test_adapter_and_base_differ_and_the_base_is_back_afterwards(tiny: Path, adapter: Path) -> None:
    sampler = TransformersSampler(str(tiny), GREEDY)
    requests = make_requests(sampler, ROWS, GREEDY)
    before, with_adapter, after = (
        [row for batch in sampler.sample(requests, set(), which) for row in batch] for which in (None, adapter, None)
    )
    assert before == after
    assert all(a["completion"] != b["completion"] for a, b in zip(before, with_adapter, strict=True))


def test_every_sample_is_drawn_once_and_differs_from_the_others(drawn: dict) -> None:
    assert set(drawn) == {(row["id"], sample) for row in ROWS for sample in range(3)}
    assert len({row["completion"] for row in drawn.values()}) == len(drawn)


def test_the_seed_decides_the_completions(tiny: Path, drawn: dict) -> None:
    torch.manual_seed(123)  # whatever was drawn before
    assert draw(tiny, DRAW) == drawn
    other = draw(tiny, Sampling(k=3, max_new_tokens=8, batch_size=4, seed=1))
    assert not {row["completion"] for row in other.values()} & {row["completion"] for row in drawn.values()}


def test_what_is_missing_comes_out_as_it_would_have_without_a_stop(tiny: Path, drawn: dict) -> None:
    done = {key for i, key in enumerate(sorted(drawn)) if i % 4 != 1}  # holes in every batch
    assert draw(tiny, DRAW, done=done) == {key: row for key, row in drawn.items() if key not in done}


def test_temperature_and_top_p_shape_the_distribution(tiny: Path) -> None:
    sampler = TransformersSampler(str(tiny), DRAW)
    request = make_requests(sampler, ROWS[:1], Sampling(k=1, max_new_tokens=1))[0]
    with torch.inference_mode():
        logits = sampler.model(torch.tensor([request.prompt_ids])).logits[0, -1].double()
    size = 600
    texts = [sampler.tokenizer.decode([i], skip_special_tokens=True) for i in range(len(logits))]
    for temperature in (1.0, 0.2):
        settings = Sampling(k=size, temperature=temperature, max_new_tokens=1, batch_size=size)
        sampler.sampling = settings
        [rows] = sampler.sample(make_requests(sampler, ROWS[:1], settings), set(), None)
        probability: dict[str, float] = {}  # of a text: tokens that are not whole characters share one
        for text, p in zip(texts, torch.softmax(logits / temperature, dim=-1).tolist(), strict=True):
            probability[text] = probability.get(text, 0.0) + p
        mean = sum(p * math.log(p) for p in probability.values())
        spread = math.sqrt(sum(p * math.log(p) ** 2 for p in probability.values()) - mean**2)
        found = sum(math.log(probability[row["completion"]]) for row in rows) / size
        assert abs(found - mean) < 4 * spread / math.sqrt(size), temperature
    sampler.sampling = Sampling(k=20, top_p=1e-6, max_new_tokens=1, batch_size=20)
    [rows] = sampler.sample(make_requests(sampler, ROWS[:1], sampler.sampling), set(), None)
    assert {row["completion"] for row in rows} == {sampler.tokenizer.decode([int(logits.argmax())])}


def test_the_models_own_generation_defaults_are_not_used(tiny: Path, tmp_path: Path, drawn: dict) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    path = model / "generation_config.json"
    defaults = {"do_sample": True, "top_k": 1, "top_p": 0.1, "temperature": 0.1, "repetition_penalty": 3.0}
    path.write_text(json.dumps({**json.loads(path.read_text()), **defaults}))
    assert draw(model, DRAW) == drawn


def test_a_completion_ends_at_any_end_token_of_the_generation_config(tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    free = draw(tiny, GREEDY)
    first = ROWS[0]["id"], 0
    second_token = tokenizer.encode(free[first]["completion"], add_special_tokens=False)[1]
    model = shutil.copytree(tiny, tmp_path / "model")
    path = model / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [2, second_token]}))
    row = draw(model, GREEDY)[first]
    assert (row["tokens"], row["finished"]) == (2, True)
    assert (free[first]["tokens"], free[first]["finished"]) == (12, False)


def test_batches_hold_every_request_once_longest_first() -> None:
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
    sampler = TransformersSampler(str(tiny), DRAW)
    with pytest.raises(UsageError, match=r"arithmetic/0 .* over the model's context of 4096: lower --max_new_tokens"):
        make_requests(sampler, ROWS, Sampling(max_new_tokens=4090))


def test_an_adapter_of_another_model_is_refused(tiny: Path, adapter: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    wide = shutil.copytree(adapter, tmp_path / "wide")
    weights = load_file(wide / "adapter_model.safetensors")
    save_file({k: torch.cat([v, v], dim=1) for k, v in weights.items()}, wide / "adapter_model.safetensors")
    with pytest.raises(UsageError, match=r"wide does not fit .*: .*size mismatch"):
        draw(tiny, GREEDY, wide)
    shallow = shutil.copytree(adapter, tmp_path / "shallow")
    save_file({k: v for k, v in weights.items() if "layers.1" not in k}, shallow / "adapter_model.safetensors")
    with pytest.raises(UsageError, match=r"shallow does not fit .*: Found missing adapter keys"):
        draw(tiny, GREEDY, shallow)


# The file

SETTINGS = {"benchmark": "arithmetic", "k": 3, "temperature": 1.0}


class Canned:
    """A sampler that answers with the request's own name, two at a time."""

    context_length = 100
    tokenizer = SimpleNamespace(apply_chat_template=lambda messages, **_: [1, 2, 3])

    def sample(
        self, requests: Sequence[Request], done: set[sampling.Key], adapter: Path | None
    ) -> Iterator[list[dict]]:
        missing = [request for request in requests if request.key not in done]
        for start in range(0, len(missing), 2):
            yield [
                {"id": r.id, "sample": r.sample, "completion": f"{r.id} é", "tokens": 1, "finished": True}
                for r in missing[start : start + 2]
            ]


def fill(path: Path, settings: dict = SETTINGS, load: type = Canned, **options: bool) -> bytes:
    complete(path, settings, {"model": "canned"}, ROWS, Sampling(k=3, max_new_tokens=9), None, load, "test", **options)
    return path.read_bytes()


def never() -> Canned:
    raise AssertionError("the model was loaded")


def test_a_finished_file_needs_no_model_and_stays_as_it_is(tmp_path: Path) -> None:
    whole = fill(tmp_path / "new" / "a.jsonl")
    assert whole.count(b"\n") == 1 + 7 * 3
    assert fill(tmp_path / "new" / "a.jsonl", load=never) == whole
    head, rows = read_completions(tmp_path / "new" / "a.jsonl")
    assert head == {"settings": SETTINGS, "about": {"model": "canned"}}
    assert rows[0] == {"id": "arithmetic/0", "sample": 0, "completion": "arithmetic/0 é", "tokens": 1, "finished": True}


@pytest.mark.parametrize("cut", [1, 40, 200, 500, 1000, -1])
def test_a_file_cut_anywhere_is_completed_to_the_same_bytes(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.jsonl"
    whole = fill(path)
    path.write_bytes(whole[:cut])
    assert fill(path) == whole


def test_changed_settings_are_refused_by_name_and_overwrite_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    whole = fill(path)
    changed = {**SETTINGS, "temperature": 0.5, "seed": 1}
    with pytest.raises(UsageError, match=r"temperature was 1.0, is 0.5, seed was None, is 1.*--overwrite"):
        fill(path, changed)
    assert path.read_bytes() == whole
    assert fill(path, changed, overwrite=True).split(b"\n")[1:] == whole.split(b"\n")[1:]
    assert read_completions(path)[0]["settings"] == changed


def test_one_process_writes_a_file(tmp_path: Path) -> None:
    with CompletionFile(tmp_path / "a.jsonl", SETTINGS, {}), pytest.raises(UsageError, match="another evaluation"):
        fill(tmp_path / "a.jsonl")
    fill(tmp_path / "a.jsonl")


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    whole = fill(tmp_path / "a.jsonl")
    path = tmp_path / "b.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, before[1]))  # in the middle of a line
    try:
        with pytest.raises(UsageError, match=r"cannot write .*b\.jsonl: File too large.*run the same command again"):
            fill(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert 0 < path.stat().st_size <= 700
    assert fill(path) == whole


def test_a_write_that_the_system_cuts_short_goes_on(tmp_path: Path) -> None:
    whole = fill(tmp_path / "a.jsonl")
    with CompletionFile(tmp_path / "b.jsonl", SETTINGS, {"model": "canned"}) as file:
        raw = file._file
        file._file = SimpleNamespace(write=lambda data: raw.write(data[:7]), close=raw.close)  # type: ignore[assignment]
        file.append(read_completions(tmp_path / "a.jsonl")[1])
    assert (tmp_path / "b.jsonl").read_bytes() == whole


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [lines[0], b'{"id": "arith', *lines[2:]], "line 2 is broken"),
        (lambda lines: [lines[0], b"[]", *lines[2:]], "line 2 is broken"),
        (lambda lines: [*lines[:3], lines[2], *lines[3:]], "1 completions twice"),
        (lambda lines: lines[1:], "its first line holds no settings"),
        (lambda lines: [b"id,completion", *lines[1:]], "line 1 is broken"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "a.jsonl"
    whole = fill(path)
    path.write_bytes(b"\n".join(damage(whole.split(b"\n"))))
    with pytest.raises(UsageError, match=message):
        fill(path)


def test_a_path_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write .*file/a\.jsonl.*--output_dir"):
        fill(tmp_path / "file" / "a.jsonl")


def test_fingerprint_sees_any_changed_byte(tmp_path: Path) -> None:
    content = bytearray(300_000)
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    seen = {fingerprint(tmp_path)}
    for position in (0, 65_536, 150_001, 299_999):
        changed = bytearray(content)
        changed[position] = 1
        path.write_bytes(changed)
        seen.add(fingerprint(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    seen.add(fingerprint(tmp_path))
    (tmp_path / "README.md").write_text("not a weight")
    assert fingerprint(tmp_path) in seen
    assert len(seen) == 6
    assert fingerprint("Qwen/Qwen2.5-3B-Instruct") is None


# vLLM


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    if choose_backend_finds_vllm():
        pytest.skip("vllm is installed here")


def choose_backend_finds_vllm() -> bool:
    import importlib.util

    return importlib.util.find_spec("vllm") is not None


def test_auto_is_transformers_without_a_gpu_and_for_the_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "gpu_is_available", lambda: False)
    assert choose_backend("auto", tiny=False) == "transformers"
    monkeypatch.setattr(sampling, "gpu_is_available", lambda: True)
    assert choose_backend("auto", tiny=True) == "transformers"


def test_missing_vllm_is_named(no_vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "gpu_is_available", lambda: True)
    for choice in ("auto", "vllm"):
        with pytest.raises(UsageError, match=r"vllm is not installed: `pip install -r requirements.txt`, or --backend"):
            choose_backend(choice, tiny=False)


def test_another_version_of_vllm_is_named(no_vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    metadata = tmp_path / "vllm-0.1.2.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.1.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"vllm 0\.1\.2 is installed, 0\.27\.1 is needed"):
        choose_backend("vllm", tiny=False)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.27.1\n")
    assert choose_backend("vllm", tiny=False) == "vllm"


def test_vllm_gets_one_batch_of_requests_with_a_seed_each(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reaches vLLM, and that completions are handed on as they finish; tests/vllm runs the real engine."""
    started: list[dict] = []
    submitted: list[dict] = []

    class Engine:
        def __init__(self) -> None:
            self.waiting: list[str] = []

        def has_unfinished_requests(self) -> bool:
            return bool(self.waiting)

        def step(self) -> list[SimpleNamespace]:
            number = self.waiting.pop()  # last in, first out: vLLM keeps no order either
            text = SimpleNamespace(token_ids=(7, 2), finish_reason="stop" if int(number) % 2 else "length")
            unfinished = SimpleNamespace(request_id="0", finished=False, outputs=[])
            return [unfinished, SimpleNamespace(request_id=number, finished=True, outputs=[text])]

    class LLM:
        def __init__(self, **options: object) -> None:
            started.append(options)
            self.llm_engine = Engine()

        def enqueue(self, prompts: list, params: list, lora_request: object, use_tqdm: bool) -> list[str]:
            submitted.append({"prompts": prompts, "params": params, "lora": lora_request})
            self.llm_engine.waiting = [str(i) for i in range(len(prompts))]
            return [f"{number}-1a2b3c4d" for number in self.llm_engine.waiting]

    vllm = SimpleNamespace(LLM=LLM, SamplingParams=SimpleNamespace)
    lora = SimpleNamespace(LoRARequest=lambda name, number, path: (name, number, path))
    for name, module in {"vllm": vllm, "vllm.lora": SimpleNamespace(), "vllm.lora.request": lora}.items():
        monkeypatch.setitem(sys.modules, name, module)

    settings = Sampling(k=2, temperature=0.7, top_p=0.9, seed=5, max_new_tokens=11)
    sampler = sampling.VLLMSampler(str(tiny), settings, lora_rank=12)
    assert started[0]["max_lora_rank"] == 16  # vLLM takes 8 and 16, nothing between
    assert started[0]["max_model_len"] == 4096
    assert started[0]["generation_config"] == "vllm"
    requests = make_requests(sampler, ROWS, settings)
    done = {("arithmetic/0", 0), ("arithmetic/3", 1)}
    stream = sampler.sample(requests, done, Path("some/adapter"))
    assert len(next(stream)) == 1  # the first is out while the others wait
    rest = [row for batch in stream for row in batch]
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
    with pytest.raises(UsageError, match="rank 1000 and vLLM takes up to 512"):
        sampling.VLLMSampler(str(tiny), settings, lora_rank=1000)
