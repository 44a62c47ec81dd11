"""The README's command line, Unsloth with a 4-bit model and vLLM, on a CPU (`make test-backend BACKEND=unsloth-vllm`).

Everything that is replaced for lack of a GPU is in tests/helpers/gpu_replacements.py. A run takes four optimizer steps
of a random model; the trainer's log-probabilities are compared with those of the engine that sampled.
"""

import functools
import importlib.util
import math
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.files import read_json, read_lines, read_settings, write_settings
from helpers.scripts import ROOT, Ended, RunScript, ScriptServer
from helpers.weights import adapter_of, same_weights
from safetensors.torch import load_file

from gtpo.evaluation.storage import read_completions

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("unsloth", "vllm")) or torch.cuda.is_available(),
    reason="Unsloth and vLLM without a GPU are not installed: make test-backend BACKEND=unsloth-vllm",
)

IMPORTS = f"""
sys.path += {[str(ROOT), str(ROOT / "tests")]}
from helpers import gpu_replacements
gpu_replacements.replace()
"""
REWARD = f"--reward={ROOT / 'benchmarks/gpu/reward.py'}:text_sum"
STEPS = 4  # with a checkpoint after half of them
FLAGS = [
    *("--backend=unsloth", "--load_in_4bit=true", "--use_vllm=true", "--optim=adamw_8bit", "--use_cpu=true"),
    *("--dataset=arithmetic", REWARD, "--seed=1", "--G=4"),
    *("--per_device_train_batch_size=2", "--lora_rank=32", f"--max_steps={STEPS}", f"--save_steps={STEPS // 2}"),
    *("--max_seq_length=512", "--max_prompt_length=256", "--max_completion_length=24"),
    *("--learning_rate=5e-3", "--lr_scheduler_type=constant", "--warmup_steps=0"),
]
EVERYTHING = ["--report_to=wandb", "--merge=16bit"]  # and the initial entropy is measured
BRIEF = ["--report_to=none", "--initial_entropy=1"]
LLAMA = ("llama", "float32")
QWEN = ("qwen", "float32")
PREQUANTIZED = ("llama-bnb-4bit", "float32")
DYNAMIC = ("llama-unsloth-bnb-4bit", "float32")
CASES = {  # a model and the precision of the computation: further flags
    LLAMA: EVERYTHING,
    QWEN: EVERYTHING,
    PREQUANTIZED: BRIEF,
    DYNAMIC: BRIEF,
    ("llama-unsloth-bnb-4bit", "bfloat16"): BRIEF,
    ("qwen", "bfloat16"): BRIEF,
}
MAX_GAP = {"float32": 1e-4, "bfloat16": 0.2}  # nats per token; observed 7e-7 and 0.009
TIMINGS = ("step_time", "tokens_per_second")

Case = tuple[str, str]
Train = Callable[[Case], Path]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunScript]:
    """Run a script where Unsloth and vLLM find what they need; see ``ScriptServer.run``."""
    server = ScriptServer(tmp_path_factory.mktemp("logs"), imports=IMPORTS, seconds=500)
    yield server.run
    server.close()


@pytest.fixture(scope="module")
def models(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of random models with the properties of Llama-3.1 and Qwen2.5, and 4-bit copies of the first."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, LlamaConfig, Qwen2Config

    directory = tmp_path_factory.mktemp("models")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    shape = {
        "vocab_size": len(tokenizer) + 30,  # rows that no token has, as in Qwen2.5
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    rope = {  # as Llama-3.1 has it, for shorter prompts
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    configs = {
        "llama": LlamaConfig(**shape, tie_word_embeddings=False, rope_parameters=rope),
        "qwen": Qwen2Config(**shape, tie_word_embeddings=True),  # with biases on q, k and v
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(6)  # with small initial weights the policy is almost uniform
            for key, weight in model.named_parameters():
                if key.endswith("bias"):
                    weight.normal_(std=0.3)
                elif key.endswith("proj.weight"):
                    weight.mul_(3)
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    for (name, _), kept in (
        (PREQUANTIZED, ["lm_head"]),
        (DYNAMIC, ["lm_head", "model.layers.1.mlp", "model.layers.0.self_attn"]),  # some layers in 16 bits
    ):
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            llm_int8_skip_modules=kept,
        )
        options = {"quantization_config": quantization, "dtype": torch.float32, "device_map": "cpu"}
        AutoModelForCausalLM.from_pretrained(directory / "llama", **options).save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    return directory


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory in which the scripts run."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def start(script: RunScript, models: Path, work: Path) -> RunScript:
    """Start ``train_gtpo.py`` into a directory, for a case, with further flags; options as of ``ScriptServer.run``."""

    def start(run: Path, case: Case, *flags: str, **options: Any) -> Ended:
        argv = [f"--model={models / case[0]}", f"--output_dir={run}", f"--bf16={str(case[1] == 'bfloat16').lower()}"]
        return script(work, "train_gtpo.py", *argv, *FLAGS, *flags, **options)

    return start


@pytest.fixture(scope="module")
def train(start: RunScript, work: Path) -> Train:
    """The run directory of a case; each is trained once."""

    @functools.cache
    def trained(case: Case) -> Path:
        run = work / "-".join(case)
        done = start(run, case, *CASES[case])
        run.with_suffix(".log").write_text(done.stdout + done.stderr)
        return run

    return trained


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` without what the clock determines."""
    rows = read_lines(run / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key not in TIMINGS} for row in rows]


def gaps_of(run: Path) -> list[float]:
    return [row["sampler_logp_gap"] for row in metrics_of(run)]


# Training


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_rollouts_follow_the_adapter(case: Case, train: Train) -> None:
    run = train(case)
    rows = metrics_of(run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
    assert all(0 < gap <= MAX_GAP[case[1]] for gap in gaps_of(run)), gaps_of(run)
    before = adapter_of(run / f"checkpoint-{STEPS // 2}")
    after = adapter_of(run / "adapter")
    assert all(
        weight.dtype == torch.float32 and not torch.equal(weight, before[name]) for name, weight in after.items()
    )


def test_16_bit_weights_train_by_one_flag(start: RunScript, work: Path) -> None:
    """In 16 bits trainer and sampler differ as in 4; in float32 by rounding."""
    for case, flags in ((LLAMA, BRIEF), (("llama", "bfloat16"), BRIEF)):
        run = work / f"16-bit-{case[1]}"
        start(run, case, *flags, "--load_in_4bit=false")
        assert all(0 < gap <= MAX_GAP[case[1]] for gap in gaps_of(run)), gaps_of(run)
        assert read_settings(run / "config.yaml")["load_in_4bit"] is False
        before = adapter_of(run / f"checkpoint-{STEPS // 2}")
        after = adapter_of(run / "adapter")
        assert not same_weights(before, after)


def test_a_prequantized_model_trains_the_same(train: Train) -> None:
    assert metrics_of(train(PREQUANTIZED)) == metrics_of(train(LLAMA))
    assert metrics_of(train(DYNAMIC))[1:] != metrics_of(train(LLAMA))[1:]


def test_a_run_leaves_everything(train: Train) -> None:
    run = train(LLAMA)
    assert len(read_json(run / "initial_entropy.json")["per_prompt"]) == 100
    assert list(run.glob("wandb/offline-run-*/*.wandb"))
    best = max(metrics_of(run), key=lambda line: line["reward"])["step"]  # the first of equally good ones
    assert read_json(run / "best" / "best.json")["step"] == best
    assert same_weights(adapter_of(run / "best"), adapter_of(run / "adapter")) == (best == STEPS)


@pytest.mark.parametrize("case", [LLAMA, QWEN], ids="-".join)
def test_the_merged_model_is_base_plus_adapter(case: Case, train: Train, models: Path) -> None:
    run = train(case)
    base, merged = (load_file(path / "model.safetensors") for path in (models / case[0], run / "merged"))
    adapter = adapter_of(run / "adapter")
    assert merged.keys() == base.keys()
    for name, weight in base.items():
        expected = weight.bfloat16().float()
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in adapter:  # alpha = rank
            update = adapter[f"{prefix}.lora_B.weight"] @ adapter[f"{prefix}.lora_A.weight"]
            assert update.norm() > 0.02 * expected.norm()
            expected = expected + update
        torch.testing.assert_close(merged[name].float(), expected, rtol=2**-8, atol=2**-9)


# Interruption


KILL = f"""
import os, trl
step = trl.GRPOTrainer.training_step
def kill(self, *args, **kwargs):
    if self.state.global_step == {STEPS - 1}:
        os.kill(os.getpid(), 9)
    return step(self, *args, **kwargs)
trl.GRPOTrainer.training_step = kill
"""


@pytest.fixture(scope="module")
def killed(start: RunScript, work: Path) -> Path:
    """A run killed in its last step, after the checkpoint of half of them."""
    run = work / "killed"
    start(run, LLAMA, *BRIEF, before=KILL, code=-signal.SIGKILL)
    return run


@pytest.fixture
def resume(killed: Path, work: Path, script: RunScript, tmp_path: Path) -> Callable[..., tuple[Path, Ended]]:
    """Resume a copy of the killed run; options as of ``ScriptServer.run``."""

    def resume(**options: Any) -> tuple[Path, Ended]:
        run = tmp_path / "resumed"
        shutil.copytree(killed, run)
        config = read_settings(run / "config.yaml")
        write_settings(run / "config.yaml", config | {"output_dir": str(run)})
        return run, script(work, "train_gtpo.py", "--resume", str(run), REWARD, **options)

    return resume


Resume = Callable[..., tuple[Path, Ended]]


def test_a_killed_run_resumes_to_the_same_bits(train: Train, resume: Resume) -> None:
    run, _ = resume()
    assert metrics_of(run) == metrics_of(train(LLAMA))
    assert same_weights(adapter_of(run / "adapter"), adapter_of(train(LLAMA) / "adapter"))


def test_an_adapter_not_handed_over_stops_the_run(resume: Resume) -> None:
    loads_nothing = "from unsloth_zoo import vllm_utils\nvllm_utils.load_lora = lambda *args, **kwargs: None"
    run, done = resume(before=loads_nothing, code=1)
    assert "rollouts do not come from the adapter at step 2" in done.stderr.splitlines()[-1]
    assert not (run / "adapter").exists()


# Evaluation


def test_evaluation_on_the_4_bit_base(train: Train, script: RunScript, run_script: RunScript, tmp_path: Path) -> None:
    """vLLM, with the replacements, completes as Transformers and PEFT do, without any.

    vLLM computes the 4-bit layers in bfloat16: greedy tokens differ where two of them are almost equally likely.
    """
    run = train(DYNAMIC)
    texts = {}
    argv = ["--benchmarks=arithmetic", "--limit=12", "--k=1", "--temperature=0", "--max_new_tokens=8"]
    for backend, evaluate in (("vllm", script), ("transformers", run_script)):
        flags = [*argv, f"--backend={backend}", f"--output_dir={backend}"]
        evaluate(tmp_path, "evaluate.py", *flags, "--runs", "base", str(run))
        for path in (tmp_path / backend).glob("*/*.jsonl"):
            model = "base" if path.parent.name.startswith("base") else "adapter"
            rows = sorted(read_completions(path)[1], key=lambda row: row["id"])
            texts[backend, model] = [row["completion"] for row in rows]

    def equal(one: tuple[str, str], other: tuple[str, str]) -> int:
        return sum(a == b for a, b in zip(texts[one], texts[other], strict=True))

    for model in ("base", "adapter"):
        assert equal(("vllm", model), ("transformers", model)) >= 8, texts
    assert equal(("vllm", "base"), ("vllm", "adapter")) <= 1


# First light: benchmarks/gpu/stages.py in miniature


def test_every_stage_runs_in_miniature(
    script: RunScript, run_script: RunScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks/gpu")
    from stages import STAGES, Bench, run_stage, stored

    def launch(directory: Path, path: Path, *argv: str, before: str, needs_packages: bool, **_: Any) -> tuple[int, str]:
        done = (script if needs_packages else run_script)(directory, str(path), *argv, before=before, code=None)
        return done.code, done.stdout + done.stderr

    report = tmp_path / "report" / "cpu.json"
    bench = Bench("cpu", tmp_path, launch)
    stages = {name: run_stage(name, bench, report) for name in STAGES}
    assert {name: entry["outcome"] for name, entry in stages.items()} == dict.fromkeys(STAGES, "passed"), stages
    assert stored(report) == stages
    assert stages["step_prompts"]["numbers"].keys() == {
        "ms a token of the sampler",
        *(f"{count} sequences" for count in (4, 8, 16, 32)),
    }
    assert [*stages["step_prompts"]["numbers"]["ms a token of the sampler"]] == ["4", "8", "16", "32"]
    cosines = {name: found["cosine"] for name, found in stages["gradient"]["numbers"].items()}
    assert cosines.keys() == {f"{one} {two}" for one in ("unsloth", "transformers") for two in ("bf16", "float32")}
    assert min(cosines["unsloth float32"], cosines["transformers float32"]) > 1 - 1e-6
    assert all(gap < MAX_GAP["float32"] for gap in stages["rollouts"]["numbers"]["unsloth"]["sampler_logp_gap"])
    assert stages["learning"]["numbers"].keys() == {"gtpo cpu", "grpo cpu"}
    assert all(len(curve) == 2 for run in stages["learning"]["numbers"].values() for curve in run.values())
    lengths = {"gsm8k": 6, "math": 10, "longest": 12, "group": 6, "transformers": 12, "trl": 12}
    assert {name: stages[f"step_{name}"]["numbers"]["longest"] for name in lengths} == lengths
    assert stages["evaluation"]["numbers"]["targets"] == 2
