"""A step of the trainers: against TRL's, groups and masks, the initial entropy, the table of completions."""

import math
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from helpers.canned import GROUP, assert_same, batch_of, canned_group, make_trainer, weight_changes
from helpers.files import read_json, tables_of
from helpers.reference import naive_completion_entropy, naive_conflict_mask, unpad
from pytest import MonkeyPatch, approx
from torch.distributions import Categorical
from transformers import AutoModelForCausalLM, AutoTokenizer, HyperCLOVAXConfig, InklingTextConfig, LlamaForCausalLM

from gtpo.errors import RunError
from gtpo.forward.head import plain_logps_and_entropy as plain_head
from gtpo.training.batch import padded_batch
from gtpo.training.checks import check_head, sampler_metrics
from gtpo.training.initial_entropy import InitialEntropy
from gtpo.training.precision import keep_adapter_in_float32

TABLES = tables_of(__file__)


def plain_logps_and_entropy(trainer: Any, batch: dict[str, torch.Tensor]) -> tuple[list, list]:
    """From the full logits of one completion at a time, without padding; float64 after the model."""
    logps, entropies = [], []
    prompts = unpad(batch["prompt_ids"], batch["prompt_mask"])
    for prompt, completion in zip(prompts, unpad(batch["completion_ids"], batch["completion_mask"]), strict=True):
        with torch.no_grad():
            logits = trainer.model(input_ids=torch.tensor([prompt + completion])).logits[0].double()
        policy = Categorical(logits=logits[len(prompt) - 1 : -1] / trainer.temperature)
        logps.append(policy.log_prob(torch.tensor(completion)).tolist())
        entropies.append(policy.entropy().tolist())
    return logps, entropies


def micro_batches(size: int) -> dict[str, int]:
    return {"per_device_train_batch_size": size, "gradient_accumulation_steps": GROUP // size}


def test_the_plain_head_trains_the_same_weights(build: Any) -> None:
    expected = weight_changes(build("gtpo", "tiles"))
    trainer = build("gtpo", "plain")
    trainer.logps_and_entropy = Mock(wraps=plain_head)
    assert_same(weight_changes(trainer), expected)
    assert trainer.logps_and_entropy.called


@pytest.mark.parametrize("size", [GROUP, GROUP // 3])
@pytest.mark.parametrize("iterations", [1, 2])
def test_grpo_matches_trl_for_any_micro_batch(iterations: int, size: int, build: Any) -> None:
    """TRL's batch is whole: its KL is then a mean over tokens."""
    settings = {"beta": 0.04, "max_steps": 2, "num_iterations": iterations}
    mine = build("grpo", "mine", **settings, **micro_batches(size))
    changes = weight_changes(mine)
    theirs = build("trl", "trl", **settings)
    assert_same(changes, weight_changes(theirs))
    for ours, other in zip(mine.state.log_history[:2], theirs.state.log_history[:2], strict=True):
        assert [ours["loss"], ours["kl"]] == approx([other["loss"], other["kl"]], rel=1e-5, abs=1e-6)
    assert ours["kl"] > 1e-6  # the adapter differs from the base model at the start


def test_a_non_finite_loss_stops_all_processes(build: Any, monkeypatch: MonkeyPatch) -> None:
    trainer = build("grpo")
    batch = batch_of(trainer)
    with monkeypatch.context() as patch:
        patch.setattr(trainer.accelerator, "gather", lambda mine: torch.cat([mine, mine * torch.nan]))
        with pytest.raises(RunError, match="the loss is not finite"):
            trainer.compute_loss(trainer.model, batch)
    monkeypatch.setattr("gtpo.training.trainer.completion_entropy", lambda *_: torch.full((GROUP,), math.inf))
    with pytest.raises(RunError, match="the entropy is not finite"):
        trainer.compute_loss(trainer.model, batch)


def test_a_completion_ends_at_its_first_end_token(build: Any, monkeypatch: MonkeyPatch) -> None:
    trainer = build("grpo")
    end = trainer.eos_token_ids[0]
    drawn = torch.tensor([[7, end, 7], [7, 7, 7]])
    monkeypatch.setattr("gtpo.training.trainer.generate", lambda model, ids, *rest: torch.cat([ids, drawn], 1))
    assert trainer._sample([[5, 6], [5]]) == [[7, end], [7, 7, 7]]


def test_the_samplers_gap_is_of_the_sampling_weights(build: Any) -> None:
    trainer = build("grpo")
    batch = batch_of(trainer)
    sampled = trainer._logps_and_entropy(trainer.model, batch)[0].detach() - 1.0
    without_score = sampled.clone()
    without_score[0, 0] = math.nan  # vLLM gives none to some tokens
    for old in ({}, {"old_per_token_logps": sampled + 0.25}):
        trainer.compute_loss(trainer.model, batch | {"sampling_per_token_logps": without_score} | old)
    assert trainer._metrics["train"]["sampler_logp_gap"] == pytest.approx([1.0, 0.25], abs=1e-5)


def test_quantiles_of_the_gap_and_the_kept_mass() -> None:
    """Against NumPy. top_p renormalizes what the sampler scores, so the ratio of the probabilities is the kept mass."""
    whole = {"top_p": 1.0, "top_k": 0, "min_p": None}
    logps = torch.full((2, 6), -1.0)
    gap = torch.linspace(-0.5, 0.3, 12).view(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    batch = {"sampling_per_token_logps": logps - gap, "completion_mask": mask}
    found = sampler_metrics(SimpleNamespace(**whole), logps, batch)
    valid = np.abs(gap[mask.bool()].numpy())
    mean, median, highest = valid.mean(), np.median(valid), np.quantile(valid, 0.99)
    expected = {"sampler_logp_gap": mean, "sampler_logp_gap_median": median, "sampler_logp_gap_p99": highest}
    assert {name: value.item() for name, value in found.items()} == approx(expected, abs=1e-6)
    batch["sampling_per_token_logps"] = logps - math.log(0.9)
    for cut in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        found = sampler_metrics(SimpleNamespace(**whole | cut), logps, batch)
        assert found["sampler_kept_mass"].item() == approx(0.9)


def test_unsloths_switch_is_on_in_the_loss_alone(build: Any) -> None:
    trainer = build("grpo")
    batch = batch_of(trainer)
    trainer._logps_and_entropy(trainer.model, batch)  # the first one tests the route
    seen = []
    decoder = trainer.causal_lm(trainer.model).get_decoder()
    decoder.register_forward_pre_hook(lambda *_: seen.append(os.environ["UNSLOTH_RETURN_HIDDEN_STATES"]))
    trainer._logps_and_entropy(trainer.model, batch)
    in_loss = len(seen)
    check_head(trainer, batch)  # needs the logits
    assert seen == ["1"] * in_loss + ["0"] and in_loss
    assert os.environ["UNSLOTH_RETURN_HIDDEN_STATES"] == "0"


# Models


def test_the_adapter_of_a_quantized_base_stays_float32(build: Any, monkeypatch: MonkeyPatch) -> None:
    """TRL casts it to bfloat16, where an update of 1e-6 of a weight of 0.1 is rounded away."""
    monkeypatch.setattr(LlamaForCausalLM, "is_loaded_in_4bit", True, raising=False)
    changes = weight_changes(build("grpo", learning_rate=1e-6, optim="adamw_torch"))
    assert changes.dtype == torch.float32
    assert (changes != 0).float().mean() > 0.9  # in bfloat16 at most 1 in 100 moves


def test_a_full_model_in_bfloat16_stays_in_bfloat16(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    keep_adapter_in_float32(model)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.2}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}  # by default 256 wide ones


@pytest.mark.parametrize(
    "config",
    [
        HyperCLOVAXConfig(logits_scaling=8.0, **SIZES),  # multiplies where Granite divides
        InklingTextConfig(unpadded_vocab_size=400, **SIZES, **EXPERTS),  # cuts the logits
    ],
    ids=lambda config: config.model_type,
)
def test_a_family_with_other_logits_is_refused(config: Any, tiny: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    config.update({"vocab_size": len(tokenizer), "pad_token_id": 0})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    trainer = make_trainer("gtpo", tmp_path, tmp_path / "run", target_modules=None)
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
    """The first process has its rows in reverse order."""
    half = GROUP // 2
    trainer = build(method, steps_per_generation=2, **micro_batches(half))
    trainer._is_first_batch = False  # the check of the head gathers flags

    def gather(mine: torch.Tensor) -> torch.Tensor:
        rows = torch.atleast_1d(mine)
        return torch.cat([rows.flip(0), rows])

    monkeypatch.setattr(trainer.accelerator, "gather", gather)
    monkeypatch.setattr("trl.trainer.grpo_trainer.gather", gather)
    monkeypatch.setattr(Accelerator, "process_index", 1)
    batch = batch_of(trainer, size=half)
    mine, advantages = canned_group(0)[half:], batch["advantages"].tolist()
    assert [advantage > 0 for advantage in advantages] == [sum(ids) % 3 > 1 for ids in mine]
    masks = naive_conflict_mask(mine[::-1] + mine, advantages[::-1] + advantages, GROUP)
    assert unpad(batch["conflict_mask"], batch["completion_mask"]) == masks[half:] != masks[:half]


@pytest.mark.parametrize("scaled", ["group", "none"])
@pytest.mark.parametrize("method", ["gtpo", "gtpo_trl"])
def test_rewards_in_another_unit_give_the_same_groups(method: str, scaled: str, build: Any) -> None:
    """0.6 is the mean of the group, but not in float32."""
    rewards = [3, 6, 9, 6, 1, 11, 6, 2, 10, 6, 5, 7]
    masks = []
    for unit, offset in ((1, 0), (10, 0), (1, 100), (10, 100)):
        changed = [reward / unit + offset for reward in rewards]
        trainer = build(method, f"{unit}-{offset}", scale_rewards=scaled, rewards=[Mock(return_value=changed)])
        batch = batch_of(trainer)
        assert (batch["advantages"] == 0).tolist() == [reward == 6 for reward in rewards]
        masks.append(batch["conflict_mask"])
    assert masks[0].any() and all(torch.equal(mask, masks[0]) for mask in masks)


@pytest.mark.parametrize("way", ["sum_then_normalize", "normalize_then_sum"])
def test_the_file_and_the_package_have_the_same_advantages(way: str, build: Any) -> None:
    """Row 0 is at the mean of the weighted sums but for rounding, row 5 has no reward, row 7 one of two."""
    columns = [[0.0] * (GROUP - 1) + [3.3], [0.15] + [0.0] * (GROUP - 2) + [-0.15]]
    columns[0][5] = columns[1][5] = columns[1][7] = None
    found = []
    for method in ("gtpo_trl", "gtpo"):
        rewards = [lambda values=values, **_: values for values in columns]
        trainer = build(method, method, rewards=rewards, reward_weights=[1.0, 2.0], multi_objective_aggregation=way)
        found.append(batch_of(trainer)["advantages"])
    assert torch.equal(*found)
    assert (found[0] == 0).nonzero().flatten().tolist() == ([0, 5] if way == "sum_then_normalize" else [5])


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


# <H>_ini


@pytest.fixture
def unmeasured(build: Any) -> Any:
    """A GTPO trainer that has not measured <H>_ini."""
    return lambda name="", **settings: build("gtpo", name, gtpo={"initial_entropy": None}, **settings)


def test_the_initial_entropy_is_measured_before_training(unmeasured: Any, tmp_path: Path) -> None:
    trainer = unmeasured()
    trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
    stored = read_json(tmp_path / "initial_entropy.json")
    prompts = list(trainer.train_dataset["prompt"])
    prompt_ids = trainer.processing_class(prompts)["input_ids"]
    batch = padded_batch(prompt_ids, canned_group(1000, len(prompts)), 0, trainer.accelerator.device)
    means = naive_completion_entropy(plain_logps_and_entropy(trainer, batch)[1])
    assert stored["prompts"] == len(prompts)
    assert stored["initial_entropy"] == approx(sum(means) / len(means), abs=1e-4)
    assert trainer.initial_entropy.value == stored["initial_entropy"]


def test_the_initial_entropy_is_of_the_first_prompts(unmeasured: Any) -> None:
    """As training draws them; in the order of the data, and of a stream: test_gtpo_trl.py."""
    trainer = unmeasured(shuffle_dataset=True, seed=7)
    trainer.train_dataset = Dataset.from_dict({"prompt": list(map(str, range(120)))})
    trainer.initial_entropy.sampled_entropies = Mock(return_value=[0.5])
    assert [trainer.initial_entropy.measure() for _ in range(2)] == [0.5, 0.5]
    assert trainer.initial_entropy.sampled_entropies.call_count == 1
    order = dict.fromkeys(trainer._get_train_sampler())
    asked = trainer.initial_entropy.sampled_entropies.call_args.args[0]
    assert [int(row["prompt"]) for row in asked] == [*order][:100]


def test_the_initial_entropy_is_scored_in_micro_batches(unmeasured: Any) -> None:
    """Scored at once, the 12 completions of a generation batch need up to 6.8 GiB with Llama-3.1-8B."""
    trainer = unmeasured(**micro_batches(3))
    sizes = []
    count = lambda module, args, inputs: sizes.append(len(inputs["input_ids"]))  # noqa: E731
    trainer.model.register_forward_pre_hook(count, with_kwargs=True)
    trainer.initial_entropy.sampled_entropies(list(trainer.train_dataset))
    assert sizes == [3, 3, 2]


def test_processes_share_the_prompts_of_the_initial_entropy(unmeasured: Any, monkeypatch: MonkeyPatch) -> None:
    """Eight prompts, three processes: the last prompt is sampled twice, and counts once."""
    trainer, module = unmeasured(seed=7), "gtpo.training.initial_entropy"
    seeds, gathered = [], []
    monkeypatch.setattr(f"{module}.isolated_rng", lambda seed, device: seeds.append(seed) or nullcontext())
    monkeypatch.setattr(f"{module}.gather_object", lambda own: gathered.extend(own) or gathered)
    monkeypatch.setattr(Accelerator, "num_processes", 3)
    for rank in range(3):
        monkeypatch.setattr(Accelerator, "process_index", rank)
        entropies = trainer.initial_entropy.sampled_entropies(list(trainer.train_dataset))
    assert seeds == [7, 8, 9] and len(gathered) == 9 and entropies == gathered[:8]


@pytest.mark.parametrize(("use_vllm", "calls"), [(False, [25, 5]), (True, [30])])
def test_vllm_samples_the_initial_entropy_in_one_call(use_vllm: bool, calls: list[int], unmeasured: Any) -> None:
    trainer = unmeasured()
    trainer.args.use_vllm = use_vllm
    trainer._generate_single_turn = Mock(wraps=trainer._generate_single_turn)
    entropies = trainer.initial_entropy.sampled_entropies([{"prompt": "Why?"}] * 30)
    assert [len(call.args[0]) for call in trainer._generate_single_turn.call_args_list] == calls
    assert len(entropies) == 30


def test_a_resumed_run_reads_the_initial_entropy(unmeasured: Any, tmp_path: Path) -> None:
    trainer = unmeasured()
    trainer.state.global_step = 1
    with pytest.raises(FileNotFoundError, match="initial_entropy"):
        trainer.initial_entropy.measure()
    for text in ("", '{"initial_entropy": 0.', "[0.5]", '{"prompts": 100}'):
        (tmp_path / "initial_entropy.json").write_text(text)
        with pytest.raises((ValueError, TypeError, KeyError)):
            trainer.initial_entropy.measure()
    (tmp_path / "initial_entropy.json").write_text('{"initial_entropy": 0.25}')
    assert trainer.initial_entropy.measure() == 0.25


@pytest.mark.parametrize(("gtpo", "is_on"), TABLES["the_branch_of_the_entropy_filter_is_stored_and_shown"])
def test_the_branch_of_the_filter_is_stored(
    gtpo: dict[str, Any], is_on: bool, build: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, given = build("gtpo", gtpo=gtpo), gtpo["initial_entropy"]
    trainer.initial_entropy.sampled_entropies = Mock(return_value=[0.5])
    assert trainer.initial_entropy.measure() == (given or 0.5)
    stored = read_json(tmp_path / "initial_entropy.json")
    assert stored["filter_on"] is is_on and stored["initial_entropy"] == (given or 0.5)
    assert ("given" in stored) is (given is not None)
    trainer.gtpo.initial_entropy, trainer.state.global_step = None, 3  # resumed
    InitialEntropy(trainer).measure()
    first, second = caplog.messages
    assert first == second and first.endswith("on" if is_on else "off")


def test_a_non_finite_initial_entropy_stops_the_run(unmeasured: Any, tmp_path: Path) -> None:
    trainer = unmeasured()
    trainer.initial_entropy.sampled_entropies = Mock(return_value=[0.5, math.nan])
    with pytest.raises(RunError):
        trainer.initial_entropy.measure()
    assert not (tmp_path / "initial_entropy.json").exists()


def test_packing_reads_the_sliding_window_of_the_models_config(build: Any) -> None:
    trainer = build("grpo")
    trainer._route.may_share = False
    trainer._route.packing.hidden_states = lambda *arguments: arguments[-1]
    causal_lm = trainer.causal_lm(trainer.model)
    assert trainer._route.states(lambda **_: None, causal_lm, {}) is causal_lm.config


@pytest.mark.parametrize(("given", "samples"), [({"num_beams": 2}, False), ({"num_beams": 1}, True), (None, True)])
def test_beams_are_searched_by_trl(given: dict[str, int] | None, samples: bool, build: Any) -> None:
    """A bar counts the tokens of a row as they are sampled, which beams do not have."""
    assert build("gtpo", generation_kwargs=given)._generates_with_transformers() is samples
