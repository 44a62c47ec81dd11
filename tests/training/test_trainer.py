"""The trainers against TRL's, against the naive references, and with the group split into micro-batches."""

import itertools
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest
import torch
import trl
from datasets import Dataset
from helpers import canned
from helpers.canned import GROUP, canned_group, make_trainer, trained_weights
from helpers.reference import (
    naive_completion_entropy,
    naive_conflict_mask,
    naive_conflict_weights,
    naive_entropy_filter,
    naive_gtpo_loss,
    unpad,
)
from pyarrow.parquet import read_table
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TrainerCallback,
)
from transformers.trainer_utils import IntervalStrategy
from trl import GRPOConfig

from gtpo.errors import RunError, UsageError
from gtpo.training.initial_entropy import padded_batch
from gtpo.training.rollout_check import check_rollouts
from gtpo.training.trainer import GRPOTrainer

ATOL = 1e-6  # on weight updates at learning rate 0.03; observed 3e-8


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=ATOL, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


@pytest.fixture(scope="module")
def full_batch(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Weights after one GTPO step with the complete group in one micro-batch."""
    return trained_weights(make_trainer("gtpo", tiny, tmp_path_factory.mktemp("full_batch")))


def test_a_step_changes_the_weights_and_filters_some_completions(
    tiny: Path, tmp_path: Path, full_batch: dict[str, torch.Tensor]
) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path, learning_rate=0.0)
    initial = trained_weights(trainer)
    assert max((full_batch[name] - initial[name]).abs().max().item() for name in full_batch) > 100 * ATOL
    assert 0 < trainer.state.log_history[0]["filtered_fraction"] < 1


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 6])
def test_micro_batches_do_not_change_the_update(
    micro_batch: int, tiny: Path, tmp_path: Path, full_batch: dict[str, torch.Tensor]
) -> None:
    split = make_trainer(
        "gtpo",
        tiny,
        tmp_path,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=GROUP // micro_batch,
    )
    assert_same(trained_weights(split), full_batch)


def test_gtpo_with_all_parts_disabled_is_grpo(tiny: Path, tmp_path: Path) -> None:
    plain = {"gamma": 0.0, "entropy_filter": "off", "conflict_correction": False}
    gtpo = make_trainer("gtpo", tiny, tmp_path / "gtpo", gtpo=plain, max_steps=3)
    grpo = make_trainer("grpo", tiny, tmp_path / "grpo", max_steps=3)
    assert_same(trained_weights(gtpo), trained_weights(grpo))


@pytest.mark.parametrize("beta", [0.0, 1e-6, 0.04])
def test_grpo_matches_trl(beta: float, tiny: Path, tmp_path: Path) -> None:
    settings = {"beta": beta, "max_steps": 2, "per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
    ours = make_trainer("grpo", tiny, tmp_path / "ours", **settings)
    theirs = make_trainer("trl", tiny, tmp_path / "theirs", **settings)
    assert_same(trained_weights(ours), trained_weights(theirs))
    for mine, other in zip(ours.state.log_history[:2], theirs.state.log_history[:2], strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert mine["reward"] == other["reward"]
        assert ("kl" in mine) == (beta != 0)


def test_kl_matches_trl(tiny: Path, tmp_path: Path) -> None:
    logs = []
    for method in ("grpo", "trl"):
        trainer = make_trainer(method, tiny, tmp_path / method, beta=0.04, max_steps=2)
        trained_weights(trainer)
        logs.append([row["kl"] for row in trainer.state.log_history[:2]])
    assert logs[0][1] > 1e-6  # the adapter differs from the base model at the start
    assert logs[0] == pytest.approx(logs[1], abs=1e-6)


def test_off_policy_iterations_use_the_old_log_probabilities(tiny: Path, tmp_path: Path) -> None:
    settings = {"num_iterations": 2, "max_steps": 2}
    ours = make_trainer("grpo", tiny, tmp_path / "ours", **settings)
    theirs = make_trainer("trl", tiny, tmp_path / "theirs", **settings)
    assert_same(trained_weights(ours), trained_weights(theirs))


def batch_of(trainer: Any) -> dict[str, torch.Tensor]:
    """The scored batch of the first step, before TRL shuffles and splits it."""
    trainer.model.train()
    rows = [trainer.train_dataset[0]] * GROUP
    return trainer._generate_and_score_completions(rows)


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


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_loss_is_equation_11_on_the_plain_logits(temperature: float, tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path, temperature=temperature)
    batch = batch_of(trainer)
    completions, advantages = canned_group(0), batch["advantages"].tolist()
    mask = naive_conflict_mask(completions, advantages, GROUP)
    assert unpad(batch["conflict_mask"], batch["completion_mask"]) == mask
    logps, entropies = plain_logps_and_entropy(trainer, batch)
    means = naive_completion_entropy(entropies)
    threshold = sum(sorted(means)[GROUP // 2 - 1 : GROUP // 2 + 1]) / 2  # filter half of the group
    trainer.gtpo.entropy_threshold = threshold
    delta = naive_entropy_filter(means, advantages, 0.1, threshold, "auto")
    expected, _ = naive_gtpo_loss(
        logps,
        advantages,
        weights=naive_conflict_weights(mask, advantages),
        token_entropy=entropies,
        gamma=0.1,
        delta=delta,
    )
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.compute_loss(trainer.model, batch)
    assert loss.item() == pytest.approx(expected, abs=1e-5)
    logged = trainer._metrics["train"]
    assert logged["entropy"][-1] == pytest.approx(sum(means) / GROUP, abs=1e-4)
    assert logged["filtered_fraction"][-1] == pytest.approx(delta.count(0.0) / GROUP) == pytest.approx(0.5)


def test_conflict_metrics_count_completion_tokens(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tiny, tmp_path)  # logged for GRPO too: the paper uses it as a diagnostic
    batch = batch_of(trainer)
    lengths = [len(ids) for ids in canned_group(0)]
    conflicts = sum(map(sum, batch["conflict_mask"].int().tolist()))
    logged = trainer._metrics["train"]
    assert conflicts > 0
    assert logged["conflict_tokens"][-1] == pytest.approx(conflicts / GROUP)
    assert logged["conflict_fraction"][-1] == pytest.approx(conflicts / sum(lengths))
    assert logged["completion_length"][-1] == pytest.approx(sum(lengths) / GROUP)


def test_no_table_of_completions_is_written_after_the_last_checkpoint(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill while a table is written truncates it; a resumed run repeats the steps after its checkpoint, no others."""
    events = []
    write = pandas.DataFrame.to_parquet
    monkeypatch.setattr(
        pandas.DataFrame, "to_parquet", lambda table, path: (events.append(Path(path).name), write(table, path))
    )
    shown = {"log_completions": True, "num_completions_to_print": 0, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer("gtpo", tiny, tmp_path, max_steps=2, **shown)
    save = trainer._save_checkpoint
    monkeypatch.setattr(trainer, "_save_checkpoint", lambda *args: (events.append("checkpoint"), save(*args)))
    trainer.train()
    assert events == ["completions_00001.parquet", "checkpoint", "completions_00002.parquet", "checkpoint"]
    assert trainer.log_completions and "train_runtime" in trainer.state.log_history[-1]


@pytest.mark.slow
def test_wandb_gets_a_bounded_number_of_tables(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb writes a file per table; the run directory has the table of every step."""
    logged: list[dict[str, int]] = []
    wandb = SimpleNamespace(run=True, Table=lambda dataframe: dataframe["step"][0], log=lambda row: logged.append(row))
    monkeypatch.setattr("trl.trainer.grpo_trainer.wandb", wandb, raising=False)
    monkeypatch.setattr("gtpo.training.trainer.WANDB_TABLES", 2)
    trainer = make_trainer("gtpo", tiny, tmp_path, max_steps=5, log_completions=True, num_completions_to_print=0)
    trainer.args.report_to = ["wandb"]
    trainer.train()
    assert [row["completions"] for row in logged if "completions" in row] == [2, 5]
    assert len(list((tmp_path / "completions").iterdir())) == 5
    assert trainer.args.report_to == ["wandb"]


@pytest.mark.slow
def test_wandb_that_died_gets_no_more_tables(tiny: Path, tmp_path: Path) -> None:
    class Dies(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
            args.report_to = []  # as MetricsWriter

    trainer = make_trainer("gtpo", tiny, tmp_path, max_steps=1)
    trainer.add_callback(Dies())
    trainer.args.report_to, trainer.state.max_steps, trainer.state.global_step = ["wandb"], 1000, 1
    trainer.log({"loss": 0.0})
    assert trainer.args.report_to == []


def test_the_initial_entropy_is_measured_before_training_and_stored(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path, gtpo={"initial_entropy": None})
    untrained = make_trainer("gtpo", tiny, tmp_path / "other")
    prompts = untrained.train_dataset["prompt"]
    prompt_ids = untrained.processing_class(list(prompts))["input_ids"]
    batch = padded_batch(prompt_ids, canned_group(1000, len(prompts)), 0, untrained.accelerator.device)
    means = naive_completion_entropy(plain_logps_and_entropy(untrained, batch)[1])
    trainer.train()
    stored = json.loads((tmp_path / "initial_entropy.json").read_text())
    assert stored["prompts"] == len(prompts)
    assert stored["initial_entropy"] == pytest.approx(sum(means) / len(means), abs=1e-4)
    assert trainer.initial_entropy.value == stored["initial_entropy"]


def test_measuring_the_initial_entropy_does_not_change_the_random_state(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path, gtpo={"initial_entropy": None})
    before = torch.random.get_rng_state()
    trainer.initial_entropy._read_or_measure()
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_initial_entropy_is_scored_in_micro_batches(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scored at once, the 12 completions of a generation batch need up to 6.8 GiB with Llama-3.1-8B."""
    measured, largest = {}, {}
    for rows in (GROUP, 3):
        settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": GROUP // rows}
        trainer = make_trainer("gtpo", tiny, tmp_path / str(rows), gtpo={"initial_entropy": None}, **settings)
        seen: list[int] = []
        trainer.model.register_forward_pre_hook(
            lambda module, args, inputs, seen=seen: seen.append(len(inputs["input_ids"])), with_kwargs=True
        )
        torch.manual_seed(1)
        measured[rows] = trainer.initial_entropy.sampled_entropies(list(trainer.train_dataset))
        largest[rows] = max(seen), len(seen), torch.random.get_rng_state().sum().item()
    assert largest[GROUP][:2] == (8, 1) and largest[3][:2] == (3, 3)  # 8 prompts
    assert measured[3] == pytest.approx(measured[GROUP], abs=1e-6)
    assert largest[3][2] == largest[GROUP][2]  # the random state


@pytest.mark.parametrize(("use_vllm", "calls"), [(False, [25, 5]), (True, [30])])
def test_vllm_samples_the_initial_entropy_in_one_call(
    use_vllm: bool, calls: list[int], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path, gtpo={"initial_entropy": None})
    trainer.args.use_vllm = use_vllm
    seen: list[int] = []
    generate = trainer._generate_single_turn

    def generated(prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(prompt_ids))
        return generate(prompt_ids, *args, **kwargs)

    monkeypatch.setattr(trainer, "_generate_single_turn", generated)
    entropies = trainer.initial_entropy.sampled_entropies(list(trainer.train_dataset) * 3 + [{"prompt": "Why?"}] * 6)
    assert seen == calls and len(entropies) == 30


def test_a_resumed_run_reads_the_initial_entropy_and_never_measures_a_trained_policy(
    tiny: Path, tmp_path: Path
) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path, gtpo={"initial_entropy": None})
    trainer.state.global_step = 7
    with pytest.raises(ValueError, match="can only be measured before training"):
        trainer.initial_entropy._read_or_measure()
    (tmp_path / "initial_entropy.json").write_text('{"initial_entropy": 0.25}')
    assert trainer.initial_entropy._read_or_measure() == 0.25


def test_a_given_initial_entropy_is_stored_in_the_run_directory(tiny: Path, tmp_path: Path) -> None:
    assert make_trainer("gtpo", tiny, tmp_path, gtpo={"initial_entropy": 0.5}).initial_entropy.value == 0.5
    assert json.loads((tmp_path / "initial_entropy.json").read_text()) == {
        "initial_entropy": 0.5,
        "given": True,
        "filter_on": True,
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_iterations": 0}, "num_iterations is 0: expected at least 1"),
        ({"beta": 0.04}, "GTPO has no KL term"),
        (
            {"loss_type": "cispo"},
            "loss_type = 'cispo' is not supported: expected 'grpo' or 'dr_grpo' or 'dapo' or 'bnpo'",
        ),
        ({"entropy_coef": 0.1}, "entropy_coef not supported: TRL's GRPOTrainer has it"),
        ({"use_adaptive_entropy": True}, "use_adaptive_entropy not supported"),
        ({"top_entropy_quantile": 0.5}, "top_entropy_quantile not supported"),
        ({"mask_truncated_completions": True}, "mask_truncated_completions not supported"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level"),
        ({"epsilon": 0.3}, "GTPO has no clipping"),
        ({"epsilon_high": 0.28}, "GTPO has no clipping"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_change_the_objective_are_refused(
    settings: dict[str, Any], message: str, tiny: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer("gtpo", tiny, tmp_path, **settings)


def test_lora_on_the_head_and_scaled_logits_are_refused(tiny: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    def build(model: Any) -> None:
        GRPOTrainer(
            model=model,
            reward_funcs=[lambda completions, **kwargs: [0.0] * len(completions)],
            args=GRPOConfig(output_dir=str(tmp_path), loss_type="grpo", bf16=False, use_cpu=True, report_to="none"),
            processing_class=AutoTokenizer.from_pretrained(tiny),
            train_dataset=make_trainer("grpo", tiny, tmp_path).train_dataset,
        )

    model = AutoModelForCausalLM.from_pretrained(tiny)
    with pytest.raises(ValueError, match="LoRA on lm_head is not supported"):
        build(get_peft_model(model, LoraConfig(target_modules=["lm_head"])))
    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.config.lm_head_multiplier = 2.0
    with pytest.raises(ValueError, match="lm_head_multiplier"):
        build(model)


def test_images_are_refused(tmp_path: Path) -> None:
    args = GRPOConfig(output_dir=str(tmp_path), loss_type="grpo", bf16=False, use_cpu=True, report_to="none")
    rows = Dataset.from_dict({"prompt": ["What is this?"], "image": ["a.png"]})
    with pytest.raises(ValueError, match="a dataset has images, which are not supported"):
        GRPOTrainer(model="no model is loaded", reward_funcs=[], args=args, train_dataset=rows)


def test_several_gpus_in_one_process_are_refused(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GRPOConfig, "n_gpu", 2)
    with pytest.raises(ValueError, match="2 GPUs are visible to one process and DataParallel is not supported"):
        make_trainer("grpo", tiny, tmp_path)


def test_a_router_loss_is_refused(tmp_path: Path, tiny: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen3MoeConfig(
        vocab_size=519, moe_intermediate_size=16, num_experts=2, num_experts_per_tok=1, decoder_sparse_step=1, **sizes
    )
    settings = {"loss_type": "grpo", "bf16": False, "use_cpu": True, "report_to": "none"}
    for coefficient, message in ((0.001, "qwen3_moe models add a router loss"), (0.0, None)):
        options = {
            "model": Qwen3MoeForCausalLM(config),
            "reward_funcs": [lambda completions, **columns: [0.0] * len(completions)],
            "args": GRPOConfig(output_dir=str(tmp_path), router_aux_loss_coef=coefficient, **settings),
            "processing_class": AutoTokenizer.from_pretrained(tiny),
            "train_dataset": Dataset.from_dict({"prompt": ["a"] * 8}),
        }
        if message is None:
            assert not GRPOTrainer(**options).aux_loss_enabled
        else:
            with pytest.raises(ValueError, match=message):
                GRPOTrainer(**options)


@pytest.mark.parametrize("method", ["gtpo", "grpo"])
def test_the_adapter_of_a_quantized_base_stays_float32(
    method: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL casts it to bfloat16, where an update of 1e-6 of a weight of 0.1 is rounded away."""
    monkeypatch.setattr(LlamaForCausalLM, "is_loaded_in_4bit", True, raising=False)
    trainer = make_trainer(method, tiny, tmp_path, learning_rate=1e-6, optim="adamw_torch")
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
    ("config", "options"),
    [
        (Gemma2Config, {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 32}),  # caps the logits
        (CohereConfig, {"logit_scale": 0.25}),  # multiplies them
        (GraniteConfig, {"logits_scaling": 3.0}),  # divides them
    ],
)
def test_the_head_applies_the_logit_scale_and_softcap_of_the_model(
    config: Any, options: dict[str, Any], tiny: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(vocab_size=len(tokenizer), pad_token_id=0, **SIZES, **options))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    trainer = make_trainer("grpo", tmp_path / "model", tmp_path / "run", temperature=0.8)
    batch = batch_of(trainer)
    logps, entropies = plain_logps_and_entropy(trainer, batch)
    found_logps, found_entropy = trainer._logps_and_entropy(trainer.model, batch)
    for found, expected in ((found_logps, logps), (found_entropy, entropies)):
        rows = unpad(found, batch["completion_mask"])
        assert len(rows) == GROUP
        for row, plain in zip(rows, expected, strict=True):
            assert row == pytest.approx(plain, abs=1e-4)
    uniform = torch.tensor(len(tokenizer)).log().item()
    assert abs(entropies[0][0] - uniform) > 0.005  # not uniform, so the scaling has an effect


def batch_of_prompts(trainer: Any, *prompts: int) -> dict[str, torch.Tensor]:
    """The scored batch of a step on these rows of the data, equally many completions each."""
    rows = [trainer.train_dataset[prompt] for prompt in prompts or (0,) for _ in range(GROUP // max(1, len(prompts)))]
    return trainer._generate_and_score_completions(rows)


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        ("anchored", [[1, 1, 1, 0, 1], [0, 0, 0, 0, 1], [1, 0, 0, 0, 1]]),
        ("first_run", [[1, 1, 1, 0, 1], [0, 1, 1, 0, 1], [1, 0, 0, 0, 1]]),
        ("common", [[0, 0, 0, 0, 1]] * 3),
    ],
)
def test_the_conflict_mask_has_the_span_of_the_settings(
    span: str, expected: list[list[int]], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    #  + 301 302 303 304 305
    #  - 306 302 303 301 305
    #  - 301 307 307 307 305     and each of them four times
    group = [[301, 302, 303, 304, 305], [306, 302, 303, 301, 305], [301, 307, 307, 307, 305]] * (GROUP // 3)
    monkeypatch.setattr(canned, "canned_group", lambda step, size=GROUP: group)
    trainer = make_trainer("gtpo", tiny, tmp_path, gtpo={"conflict_span": span})
    trainer.reward_funcs = [lambda completions, **kwargs: [1.0, 0.0, 0.0] * (GROUP // 3)]
    trainer.model.train()
    assert batch_of_prompts(trainer)["conflict_mask"].int().tolist() == expected * (GROUP // 3)


@pytest.mark.parametrize("is_training", [True, False], ids=["train", "eval"])
def test_a_step_on_two_prompts_has_two_conflict_masks(is_training: bool, tiny: Path, tmp_path: Path) -> None:
    """Training takes G from num_generations, evaluation from num_generations_eval."""
    sizes = {"num_generations": GROUP // 2} if is_training else {"num_generations_eval": GROUP // 2}
    trainer = make_trainer("gtpo", tiny, tmp_path, **sizes)
    trainer.model.train(is_training)
    batch = batch_of_prompts(trainer, 0, 1)
    completions, advantages = canned_group(0), batch["advantages"].tolist()
    mask = unpad(batch["conflict_mask"], batch["completion_mask"])
    assert mask == naive_conflict_mask(completions, advantages, GROUP // 2)
    assert mask != naive_conflict_mask(completions, advantages, GROUP)


@pytest.mark.parametrize("shuffles", [True, False])
def test_the_initial_entropy_is_measured_on_the_first_100_prompts_of_training(
    shuffles: bool, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path, gtpo={"initial_entropy": None}, shuffle_dataset=shuffles, seed=7)
    trainer.train_dataset = Dataset.from_dict({"prompt": [f"Question {i}?" for i in range(120)]})
    asked: list[str] = []
    monkeypatch.setattr(
        trainer.initial_entropy,
        "sampled_entropies",
        lambda rows: asked.extend(row["prompt"] for row in rows) or [0.5] * len(rows),
    )
    assert trainer.initial_entropy._read_or_measure() == 0.5
    trained = [f"Question {i}?" for i in dict.fromkeys(trainer._get_train_sampler())]
    assert asked == trained[:100]
    assert (asked == [f"Question {i}?" for i in range(100)]) is not shuffles
    assert json.loads((tmp_path / "initial_entropy.json").read_text())["prompts"] == 100


@pytest.mark.parametrize(
    ("gtpo", "is_on", "line"),
    [
        ({"initial_entropy": None}, True, "Initial entropy 0.50 nats (8 prompts), entropy filter on"),
        ({"initial_entropy": 0.31}, True, "Initial entropy 0.31 nats (given), entropy filter on"),
        ({"initial_entropy": 0.7}, False, "Initial entropy 0.70 nats (given), entropy filter off"),
        (
            {"initial_entropy": 0.31, "entropy_filter": "off"},
            False,
            "Initial entropy 0.31 nats (given), entropy filter off",
        ),
        (
            {"initial_entropy": 0.7, "entropy_filter": "negative_only"},
            True,
            "Initial entropy 0.70 nats (given), entropy filter on",
        ),
    ],
    ids=["measured", "given", "high", "off", "negative_only"],
)
def test_the_branch_of_the_entropy_filter_is_shown_and_stored(
    gtpo: dict[str, Any],
    is_on: bool,
    line: str,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path, gtpo=gtpo)
    monkeypatch.setattr(trainer.initial_entropy, "sampled_entropies", lambda prompts: [0.5] * len(prompts))
    trainer.initial_entropy._read_or_measure()
    assert json.loads((tmp_path / "initial_entropy.json").read_text())["filter_on"] is is_on
    trainer.gtpo.initial_entropy, trainer.state.global_step = None, 3  # resumed
    trainer.initial_entropy._read_or_measure()
    assert caplog.messages == [line, line]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "cannot be read"),
        ('{"initial_entropy": 0.', "cannot be read"),  # torn
        ("[0.5]", "cannot be read"),
        ('{"prompts": 100}', "cannot be read"),
        ('{"initial_entropy": "0.5"}', "cannot be read"),
        ('{"initial_entropy": NaN}', "cannot be read"),
    ],
)
def test_an_unreadable_initial_entropy_is_refused(text: str, what: str, tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path, gtpo={"initial_entropy": None})
    trainer.state.global_step = 7
    (tmp_path / "initial_entropy.json").write_text(text)
    with pytest.raises(UsageError, match=rf"initial_entropy.json {what}: .*at step 7. Set --initial_entropy\.$"):
        trainer.initial_entropy._read_or_measure()


def test_an_initial_entropy_that_is_not_finite_stops_the_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path, gtpo={"initial_entropy": None})
    monkeypatch.setattr(trainer.initial_entropy, "sampled_entropies", lambda prompts: [0.5, math.nan])
    with pytest.raises(RunError, match="the initial entropy is not finite in step 1"):
        trainer.initial_entropy._read_or_measure()
    assert not (tmp_path / "initial_entropy.json").exists()


@pytest.mark.parametrize("settings", [{}, {"num_iterations": 2}], ids=["one-iteration", "between-iterations"])
@pytest.mark.parametrize("method", ["gtpo", "grpo"])
def test_evaluation_leaves_the_table_of_training_completions_alone(
    method: str, settings: dict[str, Any], tiny: Path, tmp_path: Path
) -> None:
    """As without an evaluation: the rows of the step, with their conflicts, entropy and delta."""
    shown = {"log_completions": True, "num_completions_to_print": 0, "max_steps": 3, **settings}
    shown |= {"eval_steps": 1, "num_generations_eval": GROUP // 3, "per_device_eval_batch_size": GROUP // 3}
    tables = []
    for strategy in (IntervalStrategy.NO, IntervalStrategy.STEPS):
        trainer = make_trainer(method, tiny, tmp_path / strategy, **shown)
        trainer.args.eval_strategy = strategy
        trainer.eval_dataset = Dataset.from_dict({"prompt": ["Evaluation?"] * 2})
        trained_weights(trainer)
        tables.append([read_table(path).to_pylist() for path in sorted((tmp_path / strategy).rglob("*.parquet"))])
        assert any("eval_reward" in row for row in trainer.state.log_history) == (strategy == "steps")
    assert [len(table) for table in tables[0]] == [len(table) for table in tables[1]] == [GROUP] * 3
    for plain, evaluated in zip(itertools.chain(*tables[0]), itertools.chain(*tables[1]), strict=True):
        # an evaluation draws random numbers: the rows of a step are summed in another order
        assert evaluated.pop("entropy") == pytest.approx(plain.pop("entropy"), abs=1e-3)
        assert evaluated == plain


@pytest.mark.parametrize("is_training", [True, False])
def test_inspect_group_restores_train_and_eval_mode(is_training: bool, tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path)
    trainer.model.train(is_training)
    trainer.inspect_group(0)
    assert trainer.model.training is is_training


def test_gtpo_weights_a_later_iteration_by_the_ratio_to_the_old_policy(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = batch_of_prompts(trainer)
    first = trainer.compute_loss(trainer.model, batch).item()
    old = trainer._logps_and_entropy(trainer.model, batch)[0].detach() - 0.5  # every ratio is exp(0.5)
    later = trainer.compute_loss(trainer.model, batch | {"old_per_token_logps": old}).item()
    assert abs(first) > 1e-3
    assert later == pytest.approx(math.exp(0.5) * first, rel=1e-4)


def gradient_norm(trainer: Any, batch: dict[str, torch.Tensor]) -> float:
    trainer.current_gradient_accumulation_steps = 1
    trainer.compute_loss(trainer.model, batch).backward()
    gradients = [weight.grad.flatten() for weight in trainer.model.parameters() if weight.grad is not None]
    return torch.cat(gradients).norm().item()


@pytest.mark.parametrize(
    ("method", "settings", "learns"),
    [
        ("gtpo", {}, True),  # the entropy penalty
        ("grpo", {"beta": 0.04}, True),  # the KL term
        ("grpo", {}, False),
    ],
    ids=["gtpo", "grpo-with-kl", "grpo"],
)
def test_completions_of_advantage_zero_learn_from_penalty_and_kl(
    method: str, settings: dict[str, Any], learns: bool, tiny: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(method, tiny, tmp_path, **settings)
    trainer.model.train()
    batch = batch_of_prompts(trainer)
    batch["advantages"] = torch.zeros(GROUP)
    if "ref_per_token_logps" in batch:
        batch["ref_per_token_logps"] = batch["ref_per_token_logps"] + 1.0  # a reference that differs from the policy
    assert (gradient_norm(trainer, batch) > 1e-6) is learns


def test_micro_batches_do_not_change_the_logged_kl(tiny: Path, tmp_path: Path) -> None:
    logged = []
    for size in (GROUP, GROUP // 3):
        cut = {"per_device_train_batch_size": size, "gradient_accumulation_steps": GROUP // size}
        trainer = make_trainer("grpo", tiny, tmp_path / str(size), beta=0.04, max_steps=2, **cut)
        trained_weights(trainer)
        logged.append(trainer.state.log_history[1]["kl"])
    assert logged[0] > 1e-6
    assert logged[1] == pytest.approx(logged[0], rel=1e-3)


def grpo_config(folder: Path, **values: Any) -> trl.GRPOConfig:
    """A config whose values TRL itself has not checked."""
    args = trl.GRPOConfig(
        output_dir=str(folder), loss_type="grpo", use_bias_correction_kl=False, bf16=False, use_cpu=True, beta=0.04
    )
    for name, value in values.items():
        setattr(args, name, value)
    return args


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss_type", "sapo"),
        ("importance_sampling_level", "sequence"),
        ("scale_rewards", "std"),
        ("multi_objective_aggregation", "sum"),
        ("delta", 2.0),
        ("off_policy_mask_threshold", 0.5),
        ("use_bias_correction_kl", True),
        ("use_liger_kernel", True),
    ],
)
def test_every_setting_that_changes_the_loss_is_refused(name: str, value: object, tmp_path: Path) -> None:
    GRPOTrainer.check_settings(grpo_config(tmp_path))
    with pytest.raises(UsageError, match=f"{name} = {value!r} is not supported: expected"):
        GRPOTrainer.check_settings(grpo_config(tmp_path, **{name: value}))


def test_the_kl_correction_does_not_matter_without_a_kl_term(tmp_path: Path) -> None:
    GRPOTrainer.check_settings(grpo_config(tmp_path, use_bias_correction_kl=True, beta=0.0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0: expected a value above 0"),
        ({"max_completion_length": 0}, "max_completion_length is 0: expected at least 1"),
        ({"beta": -0.1}, "beta is -0.1: expected at least 0"),
        ({"epsilon": -0.1}, "epsilon is -0.1: expected at least 0"),
        ({"epsilon_high": math.nan}, "epsilon_high is nan: expected at least 0"),
    ],
    ids=[
        "temperature",
        "max_completion_length",
        "beta",
        "epsilon",
        "epsilon_high",
    ],
)
def test_a_setting_out_of_range_is_refused_by_the_trainer(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        GRPOTrainer.check_settings(grpo_config(tmp_path, **values))


def test_a_loss_that_is_not_finite_on_another_process_stops_this_one(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer("grpo", tiny, tmp_path)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch, gather = batch_of_prompts(trainer), trainer.accelerator.gather

    def with_a_failed_process(value: torch.Tensor) -> torch.Tensor:
        return torch.cat([value.reshape(1), torch.tensor([False])]) if value.dtype == torch.bool else gather(value)

    monkeypatch.setattr(trainer.accelerator, "gather", with_a_failed_process)
    with pytest.raises(RunError, match="is not finite"):
        trainer.compute_loss(trainer.model, batch)


def test_only_the_loss_of_training_is_divided_by_the_accumulation_steps(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path)
    trainer.model.train()
    batch = batch_of_prompts(trainer)
    losses = {}
    for steps in (1, 4):
        trainer.current_gradient_accumulation_steps = steps
        for is_training in (True, False):
            trainer.model.train(is_training)
            losses[steps, is_training] = trainer.compute_loss(trainer.model, batch).item()
    assert losses[1, False] == losses[4, False] == losses[1, True]
    assert losses[4, True] == pytest.approx(losses[1, True] / 4, rel=1e-6)


@pytest.mark.parametrize(
    ("policy_gap", "base_gap", "stops"),
    [(0.05, 0.05, False), (0.05, 0.02, True), (0.35, 1.0, True), (math.nan, 0.05, True)],
    ids=["rounding", "the base model", "neither", "no scores"],
)
def test_rollouts_that_do_not_come_from_the_adapter_stop_the_run(
    policy_gap: float, base_gap: float, stops: bool, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer("grpo", tiny, tmp_path)
    batch = batch_of_prompts(trainer) | {"sampling_per_token_logps": torch.zeros(1)}
    gaps = iter([policy_gap, base_gap])
    monkeypatch.setattr("gtpo.training.rollout_check.sampler_gap", lambda logps, batch: torch.tensor(next(gaps)))
    trainer.state.global_step = 40
    if stops:
        with pytest.raises(RunError, match="rollouts do not come from the adapter at step 40"):
            check_rollouts(trainer, batch)
    else:
        check_rollouts(trainer, batch)
    assert not list(gaps)


def test_rollouts_are_checked_often_at_first_and_then_every_20_steps(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer("grpo", tiny, tmp_path)
    trainer.model.train()
    score = trl.GRPOTrainer._generate_and_score_completions
    checked: list[int] = []
    monkeypatch.setattr(
        trl.GRPOTrainer,
        "_generate_and_score_completions",
        lambda self, inputs: score(self, inputs) | {"sampling_per_token_logps": torch.zeros(1)},
    )
    monkeypatch.setattr(
        "gtpo.training.trainer.check_rollouts", lambda trainer, batch: checked.append(trainer.state.global_step)
    )
    for step in (40, 41, 59, 60):  # from a resumed run
        trainer.state.global_step = step
        trainer._generate_and_score_completions([trainer.train_dataset[0]] * GROUP)
    assert checked == [40, 60]
    checked.clear()
    trainer._next_rollout_check = 0
    for step in range(60):
        trainer.state.global_step = step
        trainer._generate_and_score_completions([trainer.train_dataset[0]] * GROUP)
    assert checked == [0, 1, 2, 4, 8, 16, 32, 52]


def test_rollouts_of_the_base_model_stop_the_run_and_those_of_the_policy_do_not(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tiny, tmp_path)
    batch = batch_of_prompts(trainer)
    with torch.no_grad():
        of_policy = trainer._logps_and_entropy(trainer.model, batch)[0]
        with trainer.model.disable_adapter():
            of_base = trainer._logps_and_entropy(trainer.model, batch)[0]
    check_rollouts(trainer, batch | {"sampling_per_token_logps": of_policy})
    trainer._next_rollout_check = 0
    with pytest.raises(RunError, match=r"vLLM's log-prob.*from the base model's by 0: install the versions"):
        check_rollouts(trainer, batch | {"sampling_per_token_logps": of_base})


def test_the_gap_to_the_sampler_is_that_of_the_weights_that_sampled(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tiny, tmp_path)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = batch_of_prompts(trainer)
    sampled = trainer._logps_and_entropy(trainer.model, batch)[0].detach() - 1.0
    without_score = sampled.clone()
    without_score[0, 0] = math.nan  # vLLM gives none to some tokens
    for old in ({}, {"old_per_token_logps": sampled + 0.25}):
        trainer.compute_loss(trainer.model, batch | {"sampling_per_token_logps": without_score} | old)
    assert trainer._metrics["train"]["sampler_logp_gap"] == pytest.approx([1.0, 0.25], abs=1e-5)


def test_the_switch_of_unsloth_is_restored(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNSLOTH_RETURN_HIDDEN_STATES", raising=False)
    trainer = make_trainer("grpo", tiny, tmp_path)
    trainer._logps_and_entropy(trainer.model, batch_of_prompts(trainer))
    assert os.environ["UNSLOTH_RETURN_HIDDEN_STATES"] == "0"


def test_sampling_for_the_initial_entropy_does_not_change_the_random_state(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path, gtpo={"initial_entropy": None})
    canned_turn, drawn = trainer._generate_single_turn, []

    def draw(*args: Any, **kwargs: Any) -> Any:
        drawn.append(torch.rand(3))
        return canned_turn(*args, **kwargs)

    monkeypatch.setattr(trainer, "_generate_single_turn", draw)
    before = torch.random.get_rng_state()
    trainer.initial_entropy._read_or_measure()
    assert drawn and torch.equal(before, torch.random.get_rng_state())
