"""A step of the trainers: against TRL's, groups and masks, the initial entropy, the table of completions."""

import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from helpers import canned
from helpers.canned import GROUP, batch_of, canned_advantages, canned_group, make_trainer, trained_weights
from helpers.files import read_json, tables_of
from helpers.reference import naive_completion_entropy, naive_conflict_mask, unpad
from pytest import MonkeyPatch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HyperCLOVAXConfig,
    InklingTextConfig,
    LlamaForCausalLM,
    RecurrentGemmaConfig,
    TrainerCallback,
)
from trl import GRPOConfig

from gtpo.errors import RunError
from gtpo.forward import head as heads
from gtpo.training.batch import padded_batch
from gtpo.training.checks import check_head, sampler_metrics
from gtpo.training.initial_entropy import InitialEntropy
from gtpo.training.trainer import GRPOTrainer

TABLES = tables_of(__file__)

ATOL = 1e-6  # on weight updates at learning rate 0.03; observed 3e-8


def plain_logps_and_entropy(trainer: Any, batch: dict[str, torch.Tensor]) -> tuple[list, list]:
    """From the full logits of one completion at a time, without padding; float64 after the model."""
    logps, entropies = [], []
    prompts = unpad(batch["prompt_ids"], batch["prompt_mask"])
    for prompt, completion in zip(prompts, unpad(batch["completion_ids"], batch["completion_mask"]), strict=True):
        with torch.no_grad():
            logits = trainer.model(input_ids=torch.tensor([prompt + completion])).logits[0].double()
        log_pi = (logits[len(prompt) - 1 : -1] / trainer.temperature).log_softmax(-1)
        logps.append([log_pi[t, token].item() for t, token in enumerate(completion)])
        entropies.append((-(log_pi.exp() * log_pi).sum(-1)).tolist())
    return logps, entropies


def test_the_plain_head_trains_the_same_weights(build: Any) -> None:
    trained, calls = {}, []

    def plain(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return heads.plain_logps_and_entropy(*args, **options)

    for name, head in (("tiles", heads.linear_logps_and_entropy), ("plain", plain)):
        trainer = build("gtpo", name)
        trainer.logps_and_entropy = head
        trained[name] = trained_weights(trainer)
    assert calls
    for name, weight in trained["plain"].items():
        torch.testing.assert_close(trained["tiles"][name], weight, atol=ATOL, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [{"beta": 0.04}, {"beta": 1e-6, "per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}],
    ids=["kl", "micro-batches"],
)
@pytest.mark.parametrize("iterations", [1, 2])
def test_grpo_matches_trl(settings: dict[str, Any], iterations: int, build: Any) -> None:
    trained = {}
    for method in ("grpo", "trl"):
        trainer = build(method, method, max_steps=2, num_iterations=iterations, **settings)
        trained[method] = trained_weights(trainer), trainer.state.log_history[:2]
    for name, weight in trained["trl"][0].items():
        torch.testing.assert_close(trained["grpo"][0][name], weight, atol=ATOL, rtol=0)
    for mine, other in zip(trained["grpo"][1], trained["trl"][1], strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5, abs=1e-6)
        if settings == {"beta": 0.04}:
            assert mine["kl"] == pytest.approx(other["kl"], rel=1e-5, abs=1e-6)
    assert trained["grpo"][1][1]["kl"] > 1e-6  # the adapter differs from the base model at the start


def test_micro_batches_do_not_change_the_logged_kl(build: Any) -> None:
    logged = []
    for size in (GROUP, GROUP // 3):
        cut = {"per_device_train_batch_size": size, "gradient_accumulation_steps": GROUP // size}
        trainer = build("grpo", str(size), beta=0.04, max_steps=2, **cut)
        trained_weights(trainer)
        logged.append(trainer.state.log_history[1]["kl"])
    assert logged[1] == pytest.approx(logged[0], rel=1e-3)


def test_a_non_finite_loss_stops_all_processes(build: Any, monkeypatch: MonkeyPatch) -> None:
    trainer = build("grpo")
    batch, gather = batch_of(trainer), trainer.accelerator.gather

    def with_a_failed_process(value: torch.Tensor) -> torch.Tensor:
        return torch.cat([value, value * torch.nan]) if value.dim() == 3 else gather(value)  # of the metrics

    monkeypatch.setattr(trainer.accelerator, "gather", with_a_failed_process)
    with pytest.raises(RunError, match="the loss is not finite"):
        trainer.compute_loss(trainer.model, batch)
    monkeypatch.setattr(trainer.accelerator, "gather", gather)
    monkeypatch.setattr("gtpo.training.trainer.completion_entropy", lambda *_: torch.full((GROUP,), math.inf))
    with pytest.raises(RunError, match="the entropy is not finite"):
        trainer.compute_loss(trainer.model, batch)


def test_a_completion_ends_at_its_first_end_token(build: Any, monkeypatch: MonkeyPatch) -> None:
    trainer = build("grpo")
    drawn = torch.tensor([[7, trainer.eos_token_ids[0], 7], [7, 7, 7]])
    monkeypatch.setattr("gtpo.training.trainer.generate", lambda model, ids, *rest: torch.cat([ids, drawn], 1))
    assert trainer._sample([[5, 6], [5]]) == [drawn[0, :2].tolist(), [7, 7, 7]]


def test_the_samplers_gap_is_of_the_sampling_weights(build: Any) -> None:
    trainer = build("grpo")
    batch = batch_of(trainer)
    sampled = trainer._logps_and_entropy(trainer.model, batch)[0].detach() - 1.0
    without_score = sampled.clone()
    without_score[0, 0] = math.nan  # vLLM gives none to some tokens
    for old in ({}, {"old_per_token_logps": sampled + 0.25}):
        trainer.compute_loss(trainer.model, batch | {"sampling_per_token_logps": without_score} | old)
    assert trainer._metrics["train"]["sampler_logp_gap"] == pytest.approx([1.0, 0.25], abs=1e-5)


def test_quantiles_of_the_gap_and_the_kept_mass(build: Any) -> None:
    """Against NumPy. top_p renormalizes what the sampler scores, so the ratio of the probabilities is the kept mass."""
    trainer = build("grpo")
    gap = torch.linspace(-0.5, 0.3, 12).view(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    batch = {"sampling_per_token_logps": -1.0 - gap, "completion_mask": mask}
    found = sampler_metrics(trainer, torch.full((2, 6), -1.0), batch)
    valid = np.abs(gap[mask.bool()].numpy())
    assert found["sampler_logp_gap"].item() == pytest.approx(valid.mean(), abs=1e-6)
    assert found["sampler_logp_gap_median"].item() == pytest.approx(np.median(valid), abs=1e-6)
    assert found["sampler_logp_gap_p99"].item() == pytest.approx(np.quantile(valid, 0.99), abs=1e-6)
    assert "sampler_kept_mass" not in found
    batch["sampling_per_token_logps"] = torch.full((2, 6), -1.0 - math.log(0.9))
    for name, value in (("top_p", 0.9), ("top_k", 5), ("min_p", 0.1)):
        cut = SimpleNamespace(**{"top_p": 1.0, "top_k": 0, "min_p": None, name: value})
        assert sampler_metrics(cut, torch.full((2, 6), -1.0), batch)["sampler_kept_mass"].item() == pytest.approx(0.9)


def test_unsloths_switch_is_on_in_the_loss_alone(build: Any, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.delenv("UNSLOTH_RETURN_HIDDEN_STATES", raising=False)
    trainer = build("grpo")
    seen = []
    decoder = trainer.causal_lm(trainer.model).get_decoder()
    decoder.register_forward_pre_hook(lambda *_: seen.append(os.environ["UNSLOTH_RETURN_HIDDEN_STATES"]))
    trainer._logps_and_entropy(trainer.model, batch_of(trainer))
    seen.clear()  # of the test of the route, which comes first
    trainer._logps_and_entropy(trainer.model, batch_of(trainer))
    assert set(seen) == {"1"}
    seen.clear()
    check_head(trainer, batch_of(trainer))  # needs the logits
    assert seen == ["0"]
    assert os.environ["UNSLOTH_RETURN_HIDDEN_STATES"] == "0"


# Models


@pytest.mark.parametrize("method", ["gtpo", "grpo"])
def test_the_adapter_of_a_quantized_base_stays_float32(method: str, build: Any, monkeypatch: MonkeyPatch) -> None:
    """TRL casts it to bfloat16, where an update of 1e-6 of a weight of 0.1 is rounded away."""
    monkeypatch.setattr(LlamaForCausalLM, "is_loaded_in_4bit", True, raising=False)
    trainer = build(method, learning_rate=1e-6, optim="adamw_torch")
    before = {name: w.detach().clone() for name, w in trainer.model.named_parameters() if w.requires_grad}
    after = trained_weights(trainer)
    assert {weight.dtype for weight in after.values()} == {torch.float32}
    moved = [(after[name] != weight).float().mean().item() for name, weight in before.items()]
    assert min(moved) > 0.9  # in bfloat16 at most 1 in 100 moves


def test_a_full_model_in_bfloat16_stays_in_bfloat16(tiny: Path, tmp_path: Path) -> None:
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16),
        reward_funcs=[lambda completions, **columns: [0.0] * len(completions)],
        args=GRPOConfig(output_dir=str(tmp_path), loss_type="grpo", bf16=False, use_cpu=True, report_to="none"),
        processing_class=AutoTokenizer.from_pretrained(tiny),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 8}),
    )
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.bfloat16}


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.2}


@pytest.mark.parametrize(
    "config",
    [
        HyperCLOVAXConfig(logits_scaling=8.0, **SIZES),  # multiplies where Granite divides
        RecurrentGemmaConfig(
            logits_soft_cap=0.1, attention_window_size=64, lru_width=64, w_init_variance_scale=1.0, **SIZES
        ),
        InklingTextConfig(unpadded_vocab_size=400, **SIZES),  # cuts the logits
    ],
    ids=lambda config: config.model_type,
)
def test_a_family_with_other_logits_is_refused(config: Any, tiny: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    config.update({"vocab_size": len(tokenizer), "pad_token_id": 0})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    for method in ("gtpo", "grpo"):
        trainer = make_trainer(method, tmp_path / "model", tmp_path / method, target_modules=None)
        with pytest.raises(RunError, match=f"{config.model_type} models compute their logits: ln pi"):
            trainer.train()
        assert trainer.state.global_step == 0


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1.02), (torch.bfloat16, 1.1)])
def test_the_check_of_the_head_allows_rounding(dtype: torch.dtype, scale: float, build: Any) -> None:
    trainer = build("grpo")
    trainer.model.to(dtype)
    batch = batch_of(trainer)
    check_head(trainer, batch)
    trainer._logit_options["logit_scale"] = scale
    with pytest.raises(RunError):
        check_head(trainer, batch)


# Groups and conflict masks


@pytest.mark.parametrize("method", ["gtpo", "gtpo_trl"])
def test_the_second_process_gets_its_own_rows(method: str, build: Any, monkeypatch: MonkeyPatch) -> None:
    """Both ranks one after the other: what the first one gathers comes first in what the second one does."""
    half = GROUP // 2
    settings = {"per_device_train_batch_size": half, "gradient_accumulation_steps": 2, "steps_per_generation": 2}
    trainer = build(method, **settings)
    trainer.model.train()
    trainer._is_first_batch = False  # the check of the head gathers flags
    own: list[torch.Tensor] = []
    rows = [trainer.train_dataset[0]] * half

    def joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        if first.dim() < 2:
            return torch.cat([first.reshape(-1), second.reshape(-1)])
        width = max(first.shape[1], second.shape[1])
        return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in (first, second)])

    def of_the_first(tensor: torch.Tensor) -> torch.Tensor:
        own.append(tensor)
        return joined(tensor, tensor)

    def gather_with(gather: Callable[[torch.Tensor], torch.Tensor]) -> None:
        monkeypatch.setattr(trainer.accelerator, "gather", gather)
        monkeypatch.setattr("trl.trainer.grpo_trainer.gather", gather)

    gather_with(of_the_first)
    trainer._generate_and_score_completions(rows)
    earlier = iter(own)
    gather_with(lambda tensor: joined(next(earlier), tensor))
    monkeypatch.setattr(Accelerator, "process_index", 1)
    batch = trainer._generate_and_score_completions(rows)
    completions = canned_group(0)
    advantages = canned_advantages()
    torch.testing.assert_close(batch["advantages"], advantages[half:])
    mask = naive_conflict_mask(completions, advantages.tolist(), GROUP)
    assert unpad(batch["conflict_mask"], batch["completion_mask"]) == mask[half:] != mask[:half]


@pytest.mark.parametrize("scaled", ["group", "none"])
@pytest.mark.parametrize("method", ["gtpo", "gtpo_trl"])
def test_rewards_in_another_unit_give_the_same_groups(method: str, scaled: str, build: Any) -> None:
    """0.6 is the mean of the group, but not in float32."""
    rewards = [3, 6, 9, 6, 1, 11, 6, 2, 10, 6, 5, 7]
    changes: list[Callable[[int], float]] = [float, lambda r: r / 10, lambda r: r + 100, lambda r: r / 10 + 100]
    masks = []
    for number, change in enumerate(changes):
        trainer = build(method, str(number), scale_rewards=scaled)
        trainer.reward_funcs = [lambda change=change, **kwargs: [change(reward) for reward in rewards]]
        batch = batch_of(trainer)
        assert (batch["advantages"] == 0).tolist() == [reward == 6 for reward in rewards]
        masks.append(batch["conflict_mask"])
    assert masks[0].any() and all(torch.equal(mask, masks[0]) for mask in masks)


@pytest.mark.parametrize("method", ["gtpo", "gtpo_trl"])
def test_a_groups_mean_is_of_weighted_rewards(method: str, build: Any) -> None:
    def rising(**kwargs: Any) -> list[float]:
        return [1.0, 2.0, 3.0] * (GROUP // 3)

    def falling(**kwargs: Any) -> list[float]:
        return [1.0, 0.0, -1.0] * (GROUP // 3)

    trainer = build(method, rewards=[rising, falling], reward_weights=[1.0, 2.0])
    advantages = batch_of(trainer)["advantages"]
    assert advantages.sign().tolist() == [1, 0, -1] * (GROUP // 3)


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        ("anchored", [[1, 1, 1, 0, 1], [0, 0, 0, 0, 1], [1, 0, 0, 0, 1]]),
        ("first_run", [[1, 1, 1, 0, 1], [0, 1, 1, 0, 1], [1, 0, 0, 0, 1]]),
        ("common", [[0, 0, 0, 0, 1]] * 3),
    ],
)
def test_the_conflict_mask_has_the_span_of_the_settings(
    span: str, expected: list[list[int]], build: Any, monkeypatch: MonkeyPatch
) -> None:
    #  + 301 302 303 304 305
    #  - 306 302 303 301 305
    #  - 301 307 307 307 305     and each of them four times
    group = [[301, 302, 303, 304, 305], [306, 302, 303, 301, 305], [301, 307, 307, 307, 305]] * (GROUP // 3)
    monkeypatch.setattr(canned, "canned_group", lambda step, size=GROUP: group)
    trainer = build("gtpo", gtpo={"conflict_span": span})
    trainer.reward_funcs = [lambda completions, **kwargs: [1.0, 0.0, 0.0] * (GROUP // 3)]
    assert batch_of(trainer)["conflict_mask"].int().tolist() == expected * (GROUP // 3)


@pytest.mark.parametrize("method", ["gtpo", "gtpo_trl"])
@pytest.mark.parametrize("is_training", [True, False], ids=["train", "eval"])
def test_a_step_on_two_prompts_has_two_conflict_masks(is_training: bool, method: str, build: Any) -> None:
    """Training takes G from num_generations, evaluation from num_generations_eval."""
    sizes = {"num_generations": GROUP // 2} if is_training else {"num_generations_eval": GROUP // 2}
    trainer = build(method, **sizes)
    batch = batch_of(trainer, 0, 1, training=is_training)
    completions, advantages = canned_group(0), batch["advantages"].tolist()
    mask = unpad(batch["conflict_mask"], batch["completion_mask"])
    assert mask == naive_conflict_mask(completions, advantages, GROUP // 2)
    assert mask != naive_conflict_mask(completions, advantages, GROUP)


@pytest.mark.parametrize("method", ["grpo", "gtpo", "gtpo_trl"])
def test_without_a_reward_other_advantages_stay(method: str, build: Any) -> None:
    """With None as 0 the mean of the other rewards, 4/3, would be 1, and two of them at the mean."""

    def reward(completions: Any, **kwargs: Any) -> list[float | None]:
        return [None, 1.0, 1.0, 2.0] * (GROUP // 4)

    def other(completions: Any, **kwargs: Any) -> list[float | None]:
        return [None, 0.0, None, 0.0] * (GROUP // 4)

    found = [batch_of(build(name, name, rewards=[reward, other]))["advantages"] for name in (method, "trl")]
    assert torch.equal(*found) and found[0].sign().tolist() == [0, -1, -1, 1] * (GROUP // 4)


@pytest.mark.parametrize("method", ["gtpo", "gtpo_trl"])
@pytest.mark.parametrize("way", ["sum_then_normalize", "normalize_then_sum"])
def test_summed_rewards_at_the_mean_have_no_advantage(way: str, method: str, build: Any) -> None:
    """The sum of the first completion is the mean of the sums; each of its two rewards is not a mean."""
    columns = [0.0] * (GROUP - 1) + [3.6], [0.3, *[0.0] * (GROUP - 2), -0.3]  # 3e-8 from it, rounded
    rewards = [lambda completions, values=values, **_: values for values in columns]
    batch = batch_of(build(method, rewards=rewards, multi_objective_aggregation=way))
    assert (batch["advantages"][0].item() == 0) is (way == "sum_then_normalize")


# <H>_ini


@pytest.fixture
def unmeasured(build: Any) -> Any:
    """A GTPO trainer that has not measured <H>_ini."""
    return lambda name="", **settings: build("gtpo", name, gtpo={"initial_entropy": None}, **settings)


def test_the_initial_entropy_is_measured_before_training_and_stored(
    build: Any, unmeasured: Any, tmp_path: Path
) -> None:
    trainer, untrained = unmeasured(), build("gtpo", "other")
    prompts = untrained.train_dataset["prompt"]
    prompt_ids = untrained.processing_class(list(prompts))["input_ids"]
    batch = padded_batch(prompt_ids, canned_group(1000, len(prompts)), 0, untrained.accelerator.device)
    means = naive_completion_entropy(plain_logps_and_entropy(untrained, batch)[1])
    before: list[bool] = []

    class Note(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            before.append((tmp_path / "initial_entropy.json").is_file())

    trainer.add_callback(Note())
    trainer.train()
    assert all(before)
    stored = read_json(tmp_path / "initial_entropy.json")
    assert stored["prompts"] == len(prompts)
    assert stored["initial_entropy"] == pytest.approx(sum(means) / len(means), abs=1e-4)
    assert trainer.initial_entropy.value == stored["initial_entropy"]


@pytest.mark.parametrize("shuffles", [True, False])
def test_the_initial_entropy_is_of_the_first_prompts(
    shuffles: bool, unmeasured: Any, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    trainer = unmeasured(shuffle_dataset=shuffles, seed=7)
    trainer.train_dataset = Dataset.from_dict({"prompt": [f"Question {i}?" for i in range(120)]})
    asked: list[str] = []
    monkeypatch.setattr(
        trainer.initial_entropy,
        "sampled_entropies",
        lambda rows: asked.extend(row["prompt"] for row in rows) or [0.5] * len(rows),
    )
    assert trainer.initial_entropy.value == 0.5
    assert asked == [f"Question {i}?" for i in dict.fromkeys(trainer._get_train_sampler())][:100]
    assert (asked == [f"Question {i}?" for i in range(100)]) is not shuffles
    assert read_json(tmp_path / "initial_entropy.json")["prompts"] == 100


def test_the_initial_entropy_is_scored_in_micro_batches(unmeasured: Any) -> None:
    """Scored at once, the 12 completions of a generation batch need up to 6.8 GiB with Llama-3.1-8B."""
    measured, calls = {}, {}
    for rows in (GROUP, 3):
        settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": GROUP // rows}
        trainer = unmeasured(str(rows), **settings)
        calls[rows] = []
        trainer.model.register_forward_pre_hook(
            lambda module, args, inputs, seen=calls[rows]: seen.append(len(inputs["input_ids"])), with_kwargs=True
        )
        measured[rows] = trainer.initial_entropy.sampled_entropies(list(trainer.train_dataset))
    assert calls == {GROUP: [8], 3: [3, 3, 2]}  # 8 prompts
    assert measured[3] == pytest.approx(measured[GROUP], abs=1e-6)


def test_processes_share_the_prompts_of_the_initial_entropy(unmeasured: Any, monkeypatch: MonkeyPatch) -> None:
    """Eight prompts, three processes: the last prompt is sampled twice, and counts once."""
    trainer, module = unmeasured(seed=7), "gtpo.training.initial_entropy"
    seeds: list[int] = []
    gathered: list[float] = []
    monkeypatch.setattr(f"{module}.isolated_rng", lambda seed, device: seeds.append(seed) or nullcontext())
    monkeypatch.setattr(f"{module}.gather_object", lambda own: gathered.extend(own) or gathered)
    monkeypatch.setattr(Accelerator, "num_processes", 3)
    for rank in range(3):
        monkeypatch.setattr(Accelerator, "process_index", rank)
        entropies = trainer.initial_entropy.sampled_entropies(list(trainer.train_dataset))
    assert seeds == [7, 8, 9] and len(gathered) == 9 and entropies == gathered[:8]


@pytest.mark.parametrize(("use_vllm", "calls"), [(False, [25, 5]), (True, [30])])
def test_vllm_samples_the_initial_entropy_in_one_call(
    use_vllm: bool, calls: list[int], unmeasured: Any, monkeypatch: MonkeyPatch
) -> None:
    trainer = unmeasured()
    trainer.args.use_vllm = use_vllm
    seen, generate = [], trainer._generate_single_turn
    monkeypatch.setattr(
        trainer, "_generate_single_turn", lambda ids, *args, **kwargs: seen.append(len(ids)) or generate(ids, **kwargs)
    )
    entropies = trainer.initial_entropy.sampled_entropies(list(trainer.train_dataset) * 3 + [{"prompt": "Why?"}] * 6)
    assert seen == calls and len(entropies) == 30


@pytest.mark.parametrize("text", ["", '{"initial_entropy": 0.', "[0.5]", '{"prompts": 100}'])
def test_a_resumed_run_reads_the_initial_entropy(text: str, unmeasured: Any, tmp_path: Path) -> None:
    trainer = unmeasured()
    trainer.state.global_step = 1
    with pytest.raises(FileNotFoundError, match="initial_entropy"):
        _ = trainer.initial_entropy.value
    (tmp_path / "initial_entropy.json").write_text(text)
    with pytest.raises((ValueError, TypeError, KeyError)):
        _ = trainer.initial_entropy.value
    (tmp_path / "initial_entropy.json").write_text('{"initial_entropy": 0.25}')
    assert trainer.initial_entropy.value == 0.25


@pytest.mark.parametrize(
    ("gtpo", "is_on"),
    TABLES["the_branch_of_the_entropy_filter_is_stored_and_shown"],
)
def test_the_branch_of_the_filter_is_stored(
    gtpo: dict[str, Any],
    is_on: bool,
    build: Any,
    tmp_path: Path,
    monkeypatch: MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = build("gtpo", gtpo=gtpo)
    monkeypatch.setattr(trainer.initial_entropy, "sampled_entropies", lambda prompts: [0.5] * len(prompts))
    _ = trainer.initial_entropy.value
    stored = read_json(tmp_path / "initial_entropy.json")
    assert stored["filter_on"] is is_on and stored["initial_entropy"] == (gtpo["initial_entropy"] or 0.5)
    assert stored.get("given", False) is (gtpo["initial_entropy"] is not None)
    trainer.gtpo.initial_entropy, trainer.state.global_step = None, 3  # resumed
    _ = InitialEntropy(trainer).value
    first, second = caplog.messages
    assert first == second and first.endswith("on" if is_on else "off")


def test_a_non_finite_initial_entropy_stops_the_run(unmeasured: Any, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    trainer = unmeasured()
    monkeypatch.setattr(trainer.initial_entropy, "sampled_entropies", lambda prompts: [0.5, math.nan])
    with pytest.raises(RunError):
        _ = trainer.initial_entropy.value
    assert not (tmp_path / "initial_entropy.json").exists()


def test_packing_reads_the_sliding_window_of_the_models_config(build: Any, monkeypatch: MonkeyPatch) -> None:
    trainer = build("grpo")
    trainer._route.may_share = False
    monkeypatch.setattr(trainer._route.packing, "hidden_states", lambda *arguments: arguments[-1])
    causal_lm = trainer.causal_lm(trainer.model)
    assert trainer._route.states(lambda **_: None, causal_lm, {}) is causal_lm.config
