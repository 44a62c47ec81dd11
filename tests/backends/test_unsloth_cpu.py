"""Our trainers on Unsloth's patched trainer and model classes, without a GPU (`make test-backend BACKEND=unsloth`).

Unsloth patches TRL for the whole process, so each backend runs in its own: this file as a script, which trains on
canned completions and writes its results. The tests compare them. What is replaced for lack of a GPU is in
tests/helpers/gpu_replacements.py.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.files import read_json, write_json
from helpers.scripts import ROOT
from safetensors.torch import load_file, save_file

installed = pytest.mark.skipif(
    importlib.util.find_spec("unsloth") is None or torch.cuda.is_available(),
    reason="Unsloth without a GPU is not installed: make test-backend BACKEND=unsloth",
)

STEPS: dict[str, tuple[str, dict[str, Any]]] = {  # name: method and settings, two optimizer steps each
    "gtpo": ("gtpo", {}),
    "gtpo, one completion per forward": (
        "gtpo",
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 12},
    ),
    "gtpo, four completions per forward": (
        "gtpo",
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3},
    ),
    "gtpo, two prompts": ("gtpo", {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 24}),
    "gtpo, two prompts, eight completions per forward": (
        "gtpo",
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 3},
    ),
    "grpo, beta 0": ("grpo", {}),
    "grpo, beta 0.04": ("grpo", {"beta": 0.04}),
    "grpo, beta 0.04, two prompts": ("grpo", {"beta": 0.04, "per_device_train_batch_size": 24}),
    "grpo, two iterations": ("grpo", {"num_iterations": 2}),
}
EXPLICIT = {"beta": 0.0, "weight_decay": 0.0, "max_steps": 2}  # Unsloth has other defaults than TRL
THRESHOLD = 5.25  # nats; entropies of the groups lie on both sides, none within 0.001
ATOL = 1e-6  # of a weight after updates at learning rate 0.03
# Settings of the presets that Unsloth resolves differently; none changes what is computed.
REENTRANT = {"gradient_checkpointing_kwargs": ("None", "{'use_reentrant': True}")}
RL_DIFFERS = REENTRANT | {"top_k": ("0", "-1")}  # both: every token
SFT_DIFFERS = REENTRANT | {"loss_type": ("chunked_nll", "nll")}
FOLDERS = ("baselines", "gtpo", "grpo", "paper", "sft")
CONFIGS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("configs/*/*.yaml") if path.parts[-2] in FOLDERS)
CONFIGS.append("configs/gtpo/qwen.yaml --loss_type=dapo")  # with epsilon_high it would be refused


def method_of(config: str) -> str:
    """gtpo, grpo or sft, of a config file."""
    folder, name = Path(config.partition(" ")[0]).parts[-2:]
    if folder == "baselines":
        return "gtpo" if name.startswith("gtpo") else "grpo"
    return name.partition("-")[0] if folder == "paper" else folder


@pytest.fixture(scope="module")
def seen(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The results of each backend: {"plain": ..., "unsloth": ...}."""
    results = {}
    for backend in ("plain", "unsloth"):
        directory = tmp_path_factory.mktemp(backend)
        completed = subprocess.run(
            [sys.executable, __file__, backend, str(tiny)],
            cwd=directory,  # Unsloth writes its compiled cache here
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
            capture_output=True,
            text=True,
        )
        assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-3000:]
        results[backend] = read_json(directory / "seen.json")
        for kind in ("weights", "gradients"):
            results[backend][kind] = {name: load_file(directory / f"{name} {kind}.safetensors") for name in STEPS}
    return results


@installed
def test_our_trainers_subclass_the_trainer_that_unsloth_generates(seen: dict[str, Any]) -> None:
    assert seen["unsloth"]["base"] == "UnslothGRPOTrainer"
    assert seen["plain"]["base"] == "GRPOTrainer"


@installed
@pytest.mark.parametrize("name", STEPS)
def test_steps_on_unsloth_equal_those_on_trl(name: str, seen: dict[str, Any]) -> None:
    plain = seen["plain"]["weights"][name]
    unsloth = seen["unsloth"]["weights"][name]
    assert plain.keys() == unsloth.keys()
    for weight in plain:
        torch.testing.assert_close(unsloth[weight], plain[weight], atol=ATOL, rtol=0)
    for mine, other in zip(seen["unsloth"]["logs"][name], seen["plain"]["logs"][name], strict=True):
        assert mine.keys() == other.keys()
        for key in mine.keys() - {"step_time"}:
            assert mine[key] == pytest.approx(other[key], abs=1e-5), key


@installed
@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("gtpo, one completion per forward", ["gtpo, four completions per forward", "gtpo"]),
        ("gtpo, two prompts", ["gtpo, two prompts, eight completions per forward"]),  # of different lengths
    ],
)
def test_the_gradient_does_not_depend_on_the_micro_batch(name: str, others: list[str], seen: dict[str, Any]) -> None:
    """Unsloth drops the padding mask while it trains: rows padded on the right are exact all the same."""
    unsloth = seen["unsloth"]
    for other in others:
        assert unsloth["batch"][other][0] > unsloth["batch"][name][0] == 1
        for weight, gradient in unsloth["gradients"][name].items():
            assert gradient.abs().max() > 1e-3
            torch.testing.assert_close(unsloth["gradients"][other][weight], gradient, atol=ATOL, rtol=0)
        for mine, theirs in zip(unsloth["logs"][name], unsloth["logs"][other], strict=True):
            assert 0 < mine["filtered_fraction"] < 1
            keys = "loss", "grad_norm", "filtered_fraction"
            assert [theirs[key] for key in keys] == pytest.approx([mine[key] for key in keys], abs=1e-5)


@installed
def test_several_rows_are_packed_into_one_forward(seen: dict[str, Any]) -> None:
    """Their equality with the rows is what the other tests compare."""
    for name, (rows, _) in seen["unsloth"]["batch"].items():
        assert (seen["unsloth"]["packed"][name] > 0) == (rows > 1), name
        assert seen["plain"]["packed"][name] == 0


@installed
def test_unsloth_returns_hidden_states_and_the_variable_is_restored(seen: dict[str, Any]) -> None:
    assert seen["unsloth"]["width of logits"] == seen["unsloth"]["hidden size"]
    assert seen["unsloth"]["variable after"] == "before"
    for row, other in zip(seen["unsloth"]["scores"], seen["plain"]["scores"], strict=True):
        assert row == pytest.approx(other, abs=1e-5)


@installed
@pytest.mark.parametrize("config", CONFIGS)
def test_every_setting_is_what_trl_makes_of_the_config(config: str, seen: dict[str, Any]) -> None:
    plain = seen["plain"]["settings"][config]
    unsloth = seen["unsloth"]["settings"][config]
    differ = {key: (plain[key], unsloth.get(key)) for key in plain if unsloth.get(key) != plain[key]}
    differ.pop("dataset_num_proc", None)  # the number of cores
    expected = SFT_DIFFERS if method_of(config) == "sft" else RL_DIFFERS
    assert differ.items() <= expected.items()
    assert (method_of(config) == "sft") == ("max_seq_length" in unsloth)
    if "max_seq_length" in unsloth:  # ours, and a field of the SFTConfig that Unsloth generates
        assert unsloth["max_seq_length"] == seen["plain"]["stored"][config]["max_seq_length"]


# Run as a script: one backend


def _patch_with_unsloth() -> None:
    """Import Unsloth as on a GPU, and give its models to the canned trainers."""
    from types import SimpleNamespace

    from helpers import gpu_replacements

    unsloth = gpu_replacements.import_unsloth()

    from helpers import canned

    def load(path: str, dtype: torch.dtype) -> Any:
        return unsloth.FastLanguageModel.from_pretrained(
            path, max_seq_length=256, load_in_4bit=False, dtype=dtype, device_map="cpu"
        )[0]

    def wrap(model: Any, lora: Any) -> Any:
        return unsloth.FastLanguageModel.get_peft_model(
            model,
            r=lora.r,
            lora_alpha=lora.lora_alpha,
            target_modules=sorted(lora.target_modules),
            use_gradient_checkpointing=True,
        )

    canned.AutoModelForCausalLM = SimpleNamespace(from_pretrained=load)
    canned.get_peft_model = wrap


def _same_adapter(model: Any, fresh: bool) -> None:
    """Set the same adapter weights on every backend; a fresh adapter has B = 0."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if "lora_" in name and ".ref." not in name:
                weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
                weight.mul_(0.0 if fresh and "lora_B" in name else 1.0)
            elif "lora_B.ref" in name:
                weight.zero_()


def _train_each(tiny: str) -> dict[str, Any]:
    import functools

    from helpers import canned
    from transformers import TrainerCallback

    class KeepGradients(TrainerCallback):
        """Those of the last step."""

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            named = kwargs["model"].named_parameters()
            self.gradients = {name: weight.grad.clone() for name, weight in named if weight.grad is not None}

    seen: dict[str, Any] = {"logs": {}, "batch": {}, "packed": {}}
    for name, (method, settings) in STEPS.items():
        batch, steps = (settings.get(key, 1) for key in ("per_device_train_batch_size", "gradient_accumulation_steps"))
        size = max(batch * steps, canned.GROUP)
        group = canned.canned_group
        canned.canned_group = functools.partial(group, size=size)
        trainer = canned.make_trainer(
            method, tiny, "run", gtpo={"entropy_threshold": THRESHOLD}, **(EXPLICIT | settings)
        )
        # Unsloth's reference is the base model, TRL's a copy of the adapter: equal if the adapter is fresh.
        _same_adapter(trainer.model, fresh="beta" in settings)
        trainer.add_callback(callback := KeepGradients())
        for kind, tensors in (("weights", canned.trained_weights(trainer)), ("gradients", callback.gradients)):
            kept = {key: tensor.contiguous() for key, tensor in tensors.items() if ".ref." not in key}
            save_file(kept, f"{name} {kind}.safetensors")
        canned.canned_group = group
        seen["logs"][name] = trainer.state.log_history[:2]
        seen["packed"][name] = int(trainer._route.packing.verified)
        seen["batch"][name] = [trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps]
    return seen


def _score(tiny: str) -> dict[str, Any]:
    """ln pi and H of one batch, the width of the model's logits, and Unsloth's environment variable afterwards."""
    from helpers import canned

    trainer = canned.make_trainer("gtpo", tiny, "run", **EXPLICIT)
    _same_adapter(trainer.model, fresh=False)
    trainer.model.train()
    widths = []
    hook = trainer.model.register_forward_hook(lambda module, args, output: widths.append(output.logits.shape[-1]))
    from gtpo.training.batch import padded_batch

    prompts = [[5, 6, 7], [5, 6, 7, 8, 9, 10]]
    batch = padded_batch(prompts, canned.canned_group(0, size=2), 0, trainer.accelerator.device)
    os.environ["UNSLOTH_RETURN_HIDDEN_STATES"] = "before"
    with torch.no_grad():
        logps, entropy = trainer._logps_and_entropy(trainer.model, batch)
    hook.remove()
    return {
        "scores": [*logps.tolist(), *entropy.tolist()],
        "hidden size": trainer.model.config.hidden_size,
        "width of logits": widths[0],
        "variable after": os.environ.pop("UNSLOTH_RETURN_HIDDEN_STATES"),
    }


def _settings() -> dict[str, Any]:
    """Of each config: every field of TRL's config that it becomes, and what the run directory stores of them."""
    import trl

    from gtpo.cli import build, presets
    from gtpo.cli import parse as cli
    from gtpo.training.trainer import GTPOTrainer

    cli.gpu_is_available = presets.gpu_is_available = build.gpu_is_available = lambda: True
    seen: dict[str, Any] = {"settings": {}, "stored": {}}
    for config in CONFIGS:
        file, *flags = config.split()
        method = method_of(config)
        classes = importlib.import_module(f"train_{method}").SETTINGS
        # Without use_cpu, bf16 of the presets is refused on a machine without a GPU.
        argv = ["--config", str(ROOT / file), *flags, "--run_name", "x", "--use_cpu", "true"]
        argv += ["--model", "qwen"] if "/baselines/" in file else []
        line = cli.read_command_line(method, classes, argv)
        settings = cli.parse(line, [trl.SFTConfig if method == "sft" else trl.GRPOConfig])
        if method == "gtpo":
            GTPOTrainer.check_settings(settings.trainer)
        fields = {field.name for field in dataclasses.fields(settings.trainer)}
        seen["settings"][config] = {name: str(getattr(settings.trainer, name)) for name in sorted(fields)}
        seen["stored"][config] = {name: str(value) for name, value in settings.to_dict().items()}
    return seen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("backend", choices=["plain", "unsloth"])
    parser.add_argument("tiny")
    arguments = parser.parse_args()
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    if arguments.backend == "unsloth":
        _patch_with_unsloth()
    import trl

    seen = {"base": trl.GRPOTrainer.__name__} | _train_each(arguments.tiny) | _score(arguments.tiny)
    seen |= _settings()
    write_json(Path("seen.json"), seen)


if __name__ == "__main__":
    main()
