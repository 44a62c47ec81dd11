"""Faults that no other test noticed: put into the code by hand, one at a time, each fails a test here.

Each test asserts a value or a message that the fault changes. Sections follow the modules.
"""

import json
import math
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
import yaml
from datasets import Dataset
from filelock import FileLock
from helpers import canned
from helpers.canned import GROUP, canned_group, make_trainer, settings_of, trained_weights
from helpers.reference import naive_conflict_mask, unpad
from transformers import TrainerControl, TrainerState

from gtpo.arguments import DataArguments, GTPOArguments, ModelArguments, RunArguments, Settings
from gtpo.backend import load_backend
from gtpo.callbacks import BestAdapter, MetricsWriter
from gtpo.cli import parse, parse_evaluation
from gtpo.errors import UsageError
from gtpo.export import save_adapter
from gtpo.fault_tolerance import CompleteCheckpoints, StopOnSignal
from gtpo.groups import read_group
from gtpo.memory import plan
from gtpo.reward_functions import load_rewards
from gtpo.runs import MANIFEST, RunDirectory, check_run
from gtpo.trainer import GRPOTrainer
from rewards import accuracy_reward, format_reward

OURS = (DataArguments, ModelArguments, RunArguments)
CLASSES: dict[str, tuple[type, ...]] = {
    "gtpo": (*OURS, GTPOArguments, trl.GRPOConfig),
    "sft": (*OURS, trl.SFTConfig),
}


def parsed(*argv: str, method: str = "gtpo") -> Settings:
    return parse(method, CLASSES[method], list(argv))


def config_file(folder: Path, text: str) -> str:
    path = folder / "settings.yaml"
    path.write_text(text)
    return str(path)


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


# ---- gtpo/trainer.py ----


def batch_of(trainer: Any, *prompts: int) -> dict[str, torch.Tensor]:
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
    assert batch_of(trainer)["conflict_mask"].int().tolist() == expected * (GROUP // 3)


@pytest.mark.parametrize("is_training", [True, False], ids=["train", "eval"])
def test_a_step_on_two_prompts_has_two_conflict_masks(is_training: bool, tiny: Path, tmp_path: Path) -> None:
    """Training takes G from num_generations, evaluation from num_generations_eval."""
    sizes = {"num_generations": GROUP // 2} if is_training else {"num_generations_eval": GROUP // 2}
    trainer = make_trainer("gtpo", tiny, tmp_path, **sizes)
    trainer.model.train(is_training)
    batch = batch_of(trainer, 0, 1)
    completions, advantages = canned_group(0), batch["advantages"].tolist()
    mask = unpad(batch["conflict_mask"], batch["completion_mask"])
    assert mask == naive_conflict_mask(completions, advantages, GROUP // 2)
    assert mask != naive_conflict_mask(completions, advantages, GROUP)


def test_the_initial_entropy_is_measured_on_the_first_100_prompts(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path, gtpo={"initial_entropy": None})
    trainer.train_dataset = Dataset.from_dict({"prompt": [f"Question {i}?" for i in range(120)]})
    asked: list[str] = []
    monkeypatch.setattr(trainer, "_sampled_entropies", lambda prompts: asked.extend(prompts) or [0.5] * len(prompts))
    assert trainer._read_or_measure_initial_entropy() == 0.5
    assert asked == [f"Question {i}?" for i in range(100)]
    assert json.loads((tmp_path / "initial_entropy.json").read_text())["prompts"] == 100


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
    batch = batch_of(trainer)
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
    batch = batch_of(trainer)
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
        ("loss_type", "dapo"),
        ("importance_sampling_level", "sequence"),
        ("scale_rewards", "batch"),
        ("multi_objective_aggregation", "normalize_then_sum"),
        ("top_entropy_quantile", 0.5),
        ("entropy_coef", 0.1),
        ("use_adaptive_entropy", True),
        ("delta", 2.0),
        ("off_policy_mask_threshold", 0.5),
        ("use_bias_correction_kl", True),
        ("mask_truncated_completions", True),
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
        (
            {"use_vllm": True, "vllm_importance_sampling_correction": True},
            "vllm_importance_sampling_correction changes the paper's loss: set it to false",
        ),
    ],
    ids=["temperature", "max_completion_length", "beta", "vllm_importance_sampling_correction"],
)
def test_a_setting_out_of_range_is_refused_by_the_trainer(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        GRPOTrainer.check_settings(grpo_config(tmp_path, **values))


# ---- gtpo/cli.py ----


def test_the_config_file_overrides_what_the_machine_sets(tmp_path: Path) -> None:
    """TRL with vLLM gets 16-bit weights by default; a file that switches vLLM off can keep 4-bit weights."""
    large = ["--model", "llama", "--backend", "transformers", "--dry_run"]
    file = config_file(tmp_path, "load_in_4bit: true\nuse_vllm: false\n")
    assert parsed(*large).model.load_in_4bit is False
    assert parsed(*large, "--config", file).model.load_in_4bit is True


def test_without_vllm_the_weights_stay_in_4_bits() -> None:
    """Supervised fine-tuning syncs no weights to vLLM."""
    large = ["--model", "llama", "--backend", "transformers", "--dry_run"]
    assert parsed(*large, method="sft").model.load_in_4bit is True


def test_the_alias_g_may_be_written_with_an_equals_sign() -> None:
    assert parsed("--G=8").trainer.num_generations == 8


def test_an_empty_list_in_a_file_keeps_an_empty_default(tmp_path: Path) -> None:
    arguments = parse_evaluation(["--config", config_file(tmp_path, "adapter: []\nk: 3\n")])
    assert (arguments.adapter, arguments.k) == ([], 3)


def test_resume_of_a_run_by_its_name_takes_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("outputs/gtpo-tiny-arithmetic-a")
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(parsed("--run_name", "a", "--gamma", "0.25").to_dict()))
    resumed = parsed("--run_name", "a", "--resume")
    assert (resumed.gtpo.gamma, resumed.output_dir) == (0.25, run)


def test_a_step_is_divided_over_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(UsageError, match=r"x 5 process\(es\) = .* completions"):
        parsed("--G", "12", "--prompts_per_step", "1")


# ---- gtpo/arguments.py ----


def test_steps_per_generation_is_stored_where_it_differs_from_the_default(tmp_path: Path) -> None:
    stored = parsed("--steps_per_generation", "2").to_dict()
    assert stored["steps_per_generation"] == 2
    again = parsed("--config", config_file(tmp_path, yaml.safe_dump(stored)))
    assert again.trainer.steps_per_generation == 2
    assert parsed().to_dict()["steps_per_generation"] is None


# ---- gtpo/runs.py ----


def run_with_checkpoint(path: Path, config: str) -> Path:
    """A run directory with this config.yaml and a complete checkpoint-5."""
    (path / "checkpoint-5").mkdir(parents=True)
    (path / "config.yaml").write_text(config)
    (path / "environment.json").write_text("{}")
    (path / "checkpoint-5" / "trainer_state.json").write_text("{}")
    (path / "checkpoint-5" / MANIFEST).write_text('{"trainer_state.json": 2}')
    return path


def test_a_run_in_use_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    run = run_with_checkpoint(tmp_path / "run", "gamma: 0.1\n")
    settings = parsed("--output_dir", str(run))
    settings.run.resume = "auto"
    with FileLock(run / "run.lock"), pytest.raises(UsageError, match="run is in use by another process: wait for it"):
        check_run(settings, rows=10)


@pytest.mark.parametrize("name", ["config.yaml", "environment.json"])
def test_overwrite_spares_the_directory_of_another_program(name: str, tmp_path: Path) -> None:
    """A run has both files; a directory with one of them is somebody else's."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("{}")
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match=r"mine is not a run .*--overwrite does not delete it"):
        check_run(parsed("--output_dir", str(tmp_path / "mine"), "--overwrite"), rows=10)


@pytest.mark.parametrize("stored", ["qwen", "Qwen/Qwen2.5-3B-Instruct"])
def test_alias_and_hub_id_are_the_same_policy(stored: str, tmp_path: Path) -> None:
    run = run_with_checkpoint(tmp_path / "run", f"model: {stored}\n")
    settings = parsed("--output_dir", str(tmp_path / "other"))
    settings.trainer.output_dir, settings.run.resume = str(run), "auto"
    for model in ("qwen", "Qwen/Qwen2.5-3B-Instruct"):
        settings.model.model = model
        assert check_run(settings, rows=10) == str(run / "checkpoint-5")
    settings.model.model = "llama"
    with pytest.raises(UsageError, match=f"was trained with --model {stored}"):
        check_run(settings, rows=10)


# ---- gtpo/callbacks.py ----


def test_a_best_adapter_of_a_later_step_than_the_checkpoint_is_measured_again(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    for step, known in ((2, {"accuracy": 30.0, "step": 2}), (5, {"accuracy": -1.0, "step": 0})):
        (tmp_path / "best" / "best.json").write_text(json.dumps({"accuracy": 30.0, "step": step}))
        callback = BestAdapter(RunDirectory(tmp_path), tokenizer=None)
        callback.on_train_begin(None, TrainerState(global_step=2), TrainerControl())
        assert callback.best == known


def test_tokens_per_second_counts_every_process(tmp_path: Path) -> None:
    """30 tokens per completion x 6 per batch x 2 batches x 3 processes, in 0.5 s."""
    writer = MetricsWriter(RunDirectory(tmp_path))
    args = SimpleNamespace(per_device_train_batch_size=6, gradient_accumulation_steps=2, world_size=3)
    logs = {"completion_length": 30.0, "step_time": 0.5}
    writer.on_log(args, TrainerState(global_step=1), TrainerControl(), logs=logs)
    assert json.loads(writer.path.read_text())["tokens_per_second"] == 2160.0


# ---- gtpo/fault_tolerance.py ----


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_last_step_does_not_stop_a_finished_run(number: int, code: int, tmp_path: Path) -> None:
    callback = StopOnSignal()
    callback.received = number
    args = SimpleNamespace(device=torch.device("cpu"), output_dir=str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        callback.on_train_end(args, TrainerState(global_step=4, max_steps=5), TrainerControl())
    assert ended.value.code == code
    callback.on_train_end(args, TrainerState(global_step=5, max_steps=5), TrainerControl())


def test_the_token_count_of_a_resumed_run_continues() -> None:
    trainer = SimpleNamespace()
    rows = [{"num_tokens": 200.0}, {"num_tokens": 408.0}, {"train_loss": 0.5}]
    state = TrainerState(global_step=2, log_history=rows)
    CompleteCheckpoints(trainer).on_train_begin(SimpleNamespace(), state, TrainerControl())
    assert trainer._total_train_tokens == 408


# ---- gtpo/reward_functions.py and rewards.py ----


def test_a_reward_gets_the_prompts_by_the_name_of_trl() -> None:
    """The column is called `prompt`; TRL passes it as `prompts`."""

    def by_column(completions: list[str], prompt: list[str]) -> list[float]:
        return [0.0] * len(completions)

    def by_trl(completions: list[str], prompts: list[str]) -> list[float]:
        return [0.0] * len(completions)

    assert load_rewards(["mine"], {"mine": by_trl}, ["prompt"]) == [by_trl]
    with pytest.raises(UsageError, match="the mine reward needs a column 'prompt'"):
        load_rewards(["mine"], {"mine": by_column}, ["prompt", "completion"])


def test_rewards_are_logged_as_a_mean_in_percent_of_the_maximum() -> None:
    logged: dict[str, float] = {}
    good = "<reasoning>9 + 9 = 18</reasoning>\n<answer>18</answer>"
    format_reward([good, "<answer>18</answer>", "18", ""], log_metric=logged.__setitem__)  # 10, 1, 0, 0
    accuracy_reward([good, "<answer>18</answer>", "18", good], answer=["18"] * 4, log_metric=logged.__setitem__)
    assert logged == {"formatting": 27.5, "accuracy": 75.0, "grader_timeouts": 0.0}


# ---- gtpo/export.py ----


def test_the_reference_adapter_of_the_kl_term_is_not_published(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tiny, tmp_path / "run", beta=0.04)
    trainer.save_model(str(tmp_path / "as_trl_saves"))
    assert (tmp_path / "as_trl_saves" / "ref").is_dir()
    save_adapter(trainer, settings_of(trainer))
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "run" / "adapter" / "ref").exists()


@pytest.mark.parametrize("private", [None, True, False])
def test_a_private_repository_is_created_private(
    private: bool | None, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = []

    class Hub:
        def create_repo(self, name: str, private: bool | None, exist_ok: bool) -> Any:
            created.append((name, private, exist_ok))
            return SimpleNamespace(repo_id=f"me/{name}")

        def upload_folder(self, **options: Any) -> None:
            pass

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    trainer = make_trainer("gtpo", tiny, tmp_path / "run", hub_private_repo=private)
    settings = settings_of(trainer)
    settings.run.push_to_hub = True
    save_adapter(trainer, settings)
    assert created == [("run", private, True)]


# ---- gtpo/groups.py ----


def test_a_stored_table_with_two_groups_shows_the_first(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    row = {"step": 7, "prompt": "1 + 1?", "completion": "abcd", "entropy": 0.5, "delta": 1.0, "conflicts": [[1, 3]]}
    rows = [row | {"advantage": advantage, "format": float(i)} for i, advantage in enumerate((1.0, -1.0, 0.0, 0.5))]
    write_table(pyarrow.Table.from_pylist(rows), tmp_path / "table.parquet")
    step, group = read_group(tmp_path / "table.parquet", 2, ["format"])
    assert (step, group.advantages, group.rewards) == (7, [1.0, -1.0], {"format": [0.0, 1.0]})
    assert group.tokens == [["a", "bc", "d"]] * 2
    assert group.weights == [[1.0, 2.0, 1.0], [1.0, 0.0, 1.0]]
    assert read_group(tmp_path / "table.parquet", 4, ["format"])[1].weights[2] == [1.0, 1.0, 1.0]  # A = 0


# ---- gtpo/memory.py ----


def test_trls_vllm_holds_weights_of_16_bits_and_not_the_float32_base() -> None:
    """32 GiB for vLLM minus 15 GiB of weights leave room for 12 completions of 0.67 GiB; minus 30 GiB for 3."""
    settings = parsed("--model", "llama", "--backend", "transformers", "--dry_run")
    last = plan(settings, rows=1, gpus=[("H", 80.0)]).splitlines()[-1]
    assert last.startswith("# H: vLLM") and "12 of 12 completions" in last


# ---- gtpo/backend.py ----


@pytest.mark.parametrize("package", ["trl", "transformers", "peft"])
def test_each_package_that_unsloth_patches_is_named_if_imported_early(
    package: str, unsloth: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in {"unsloth", "trl", "transformers", "peft"} - {package}:
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(UsageError, match=f"{package} was imported before Unsloth"):
        load_backend("unsloth", "llama")
