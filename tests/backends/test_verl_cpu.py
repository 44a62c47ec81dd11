"""examples/verl/ through verl's own code, a local Ray and the real TransferQueue (`make test-backend BACKEND=verl`)."""

import importlib.util
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.scripts import ROOT
from torch import Tensor

import gtpo_loss as gtpo
from gtpo.arguments import GTPOArguments, fields_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None, reason="verl is not installed: make test-backend BACKEND=verl"
)

P, G, T, VOCABULARY, PROMPT = 3, 4, 9, 4, 2
RTOL = 1e-6  # of loss and gradient in float64; verl adds 1e-8 to |o_i|
ENVIRONMENT = {  # of Ray's processes, too
    "VERL_USE_EXTERNAL_MODULES": "helpers.verl_cpu,gtpo_verl",
    "VERL_PLATFORM": "cpu",
    "PYTHONPATH": f"{ROOT}/examples/verl:{ROOT}:{ROOT}/tests",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
SMALL = (  # a composed configuration for the tests of the trainer without its workers
    "trainer.v1.trainer_mode=gtpo",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    f"actor_rollout_ref.rollout.n={G}",
    f"data.train_batch_size={P}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={P}",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
)


@pytest.fixture(scope="module", autouse=True)
def plugin() -> Iterator[Any]:
    """The module as verl imports it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.syspath_prepend(ROOT / "examples/verl")
        import verl  # noqa: F401  # imports the plugin

        yield importlib.import_module("gtpo_verl")


def compose(*overrides: str) -> Any:
    """The configuration of ``python -m verl.trainer.main_ppo`` with these options."""
    import hydra

    config = str(Path(importlib.util.find_spec("verl").origin).parent / "trainer/config")
    with hydra.initialize_config_dir(config, version_base=None):
        return hydra.compose("ppo_trainer", [*overrides])


@pytest.fixture(scope="module")
def queue() -> Iterator[Any]:
    """A TransferQueue in a local Ray."""
    import ray
    import transfer_queue

    ray.init(num_cpus=4, include_dashboard=False, configure_logging=False)
    config = compose(*SMALL).transfer_queue
    config.enable = True
    transfer_queue.init(config)
    yield transfer_queue
    transfer_queue.close()
    ray.shutdown()


def test_settings_are_those_of_the_command_line(plugin: Any) -> None:
    ours = fields_of([GTPOArguments])
    for name, field in fields_of([plugin.Settings]).items():
        assert field.default == ours[name].default, name
    for name in ours.keys() - fields_of([plugin.Settings]).keys():
        with pytest.raises(ValueError, match=rf"^trainer\.gtpo\.{name} is unknown"):
            plugin.read_settings(compose(*SMALL, f"+trainer.gtpo.{name}=1"))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("+trainer.gtpo.gama=0.2", r"trainer\.gtpo\.gama is unknown here: pick gamma, "),
        ("+trainer.gtpo.gamma=-0.1", r"trainer\.gtpo\.gamma = -0\.1: expected a finite number >= 0"),
        ("+trainer.gtpo.gamma=null", r"trainer\.gtpo\.gamma = None"),
        ("+trainer.gtpo.entropy_filter=never", r"trainer\.gtpo\.entropy_filter = 'never': expected one of \('auto'"),
        ("+trainer.gtpo.conflict_span=all", r"trainer\.gtpo\.conflict_span = 'all'"),
        ("+trainer.gtpo.zero_advantage=drop", r"trainer\.gtpo\.zero_advantage = 'drop'"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=1", r"ppo_mini_batch_size = 1, data\.train_batch_size = 3"),
        ("algorithm.filter_groups.enable=true", r"algorithm\.filter_groups\.enable = True .*initial_entropy"),
        ("algorithm.adv_estimator=gae", r"algorithm\.adv_estimator = 'gae'"),
        ("algorithm.use_kl_in_reward=true", r"algorithm\.use_kl_in_reward = True"),
        ("algorithm.rollout_correction.bypass_mode=true", r"algorithm\.rollout_correction\.bypass_mode = True"),
        ("algorithm.rollout_correction.rollout_rs=token_k1", r"algorithm\.rollout_correction\.rollout_rs = 'token_k1'"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", r"policy_loss\.loss_mode = 'gspo'"),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum", r"loss_agg_mode = 'seq-mean-token-sum'"),
        ("actor_rollout_ref.actor.clip_ratio=0.3", r"actor\.clip_ratio = 0\.3"),
        ("actor_rollout_ref.actor.clip_ratio_low=0.1", r"actor\.clip_ratio_low = 0\.1"),
        ("actor_rollout_ref.actor.clip_ratio_high=0.28", r"actor\.clip_ratio_high = 0\.28"),
        ("actor_rollout_ref.actor.clip_ratio_c=10", r"actor\.clip_ratio_c = 10"),
        ("actor_rollout_ref.actor.use_kl_loss=true", r"actor\.use_kl_loss = True"),
        ("actor_rollout_ref.actor.entropy_coeff=0.01", r"actor\.entropy_coeff = 0\.01"),
        ("actor_rollout_ref.actor.ppo_epochs=2", r"actor\.ppo_epochs = 2"),
        ("actor_rollout_ref.rollout.multi_turn.enable=true", r"multi_turn\.enable = True"),
        ("distillation.enabled=true", r"distillation\.enabled = True"),
    ],
)
def test_what_is_not_carried_is_refused_by_name(plugin: Any, option: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plugin.GTPOTrainer(compose(*SMALL, option))


def test_the_trainer_is_verls_synchronous_one(plugin: Any) -> None:
    from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    config = compose(*SMALL, "+trainer.gtpo.entropy_filter=off", "+trainer.gtpo.initial_entropy=0.4")
    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
    assert isinstance(trainer, PPOTrainerSync) and type(trainer.replay_buffer) is ReplayBuffer
    assert trainer.config.actor_rollout_ref.actor.policy_loss.loss_mode == "unclipped"
    assert (trainer.gtpo.entropy_filter, trainer.initial_entropy) == ("off", 0.4)


# Loss and gradient


class Rows:
    """Completions of P groups, the last one cut to three, in any order: what verl has after a generation."""

    def __init__(self, seed: int):
        draw = torch.Generator().manual_seed(seed)
        self.groups = np.repeat(np.arange(P), G)[: P * G - 1]
        B = len(self.groups)
        self.lengths = torch.randint(1, T + 1, (B,), generator=draw)
        self.mask = (torch.arange(T) < self.lengths[:, None]).long()
        self.responses = torch.randint(0, VOCABULARY, (B, T), generator=draw) * self.mask
        self.rewards = torch.randint(0, 3, (B,), generator=draw).double() * 0.1
        self.rewards[:G] = 0.1  # a group whose rewards are equal: A = 0
        old, drift, is_weights = (torch.rand((B, T), generator=draw, dtype=torch.float64) for _ in range(3))
        self.old = -old
        self.new = -old + (drift - 0.5) * 0.4
        self.is_weights = is_weights
        self.entropy = torch.rand((B, T), generator=draw, dtype=torch.float64) * 1.5
        self.order = torch.randperm(B, generator=draw)  # verl balances rows over its ranks

    def scores(self) -> Tensor:
        return torch.zeros(self.mask.shape).double().scatter(1, self.lengths[:, None] - 1, self.rewards[:, None])

    def nested(self, rows: Tensor) -> Tensor:
        """In verl's order, without padding."""
        parts = [rows[i, : self.lengths[i]] for i in self.order]
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    def model_values(self, rows: Tensor) -> Tensor:
        """As verl's engines return them: prompt and response together, shifted left by one."""
        parts = []
        for i in self.order:
            parts.append(torch.cat([rows.new_zeros(PROMPT - 1), rows[i, : self.lengths[i]], rows.new_zeros(1)]))
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def expected_loss(rows: Rows, kind: str, settings: Any, initial: float) -> tuple[Tensor, Tensor]:
    """gtpo_loss and its gradient, group by group where groups matter."""
    A = torch.zeros(len(rows.rewards), dtype=torch.float64)
    weights = torch.ones(rows.mask.shape, dtype=torch.float64)
    for name in range(P):
        of = np.flatnonzero(rows.groups == name)
        rewards = rows.rewards[of]
        if rewards.max() > rewards.min():
            A[of] = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            A[of] = A[of].masked_fill((rewards - rewards.mean()).abs() < 1e-9, 0.0)
        mask = gtpo.conflict_mask(rows.responses[of], rows.mask[of], A[of], len(of), settings.conflict_span)
        if settings.conflict_correction:
            weights[of] = gtpo.conflict_weights(mask, A[of], settings.conflict_positive_weight)
    logps = rows.new.clone().requires_grad_()
    mean = gtpo.completion_entropy(rows.entropy, rows.mask)
    skipped = (A == 0) & (settings.zero_advantage == "skip")
    loss, _ = gtpo.gtpo_loss(
        logps,
        mean,
        rows.mask,
        A,
        weights,
        gtpo.entropy_filter(mean, A, initial, settings.entropy_threshold, settings.entropy_filter),
        gamma=settings.gamma * (~skipped).double(),
        loss_type=kind,
        normalizer=None if kind == "grpo" else rows.mask.sum(),
        old_per_token_logps=rows.old,
        importance_weights=rows.is_weights,
    )
    if kind == "grpo":  # verl divides by the completions that were asked for
        loss = loss * len(A) / (P * G)
    loss.backward()
    return loss.detach(), logps.grad


CASES: dict[str, list[str]] = {
    "the paper": [],
    "auto, initially above ln 2": ["+trainer.gtpo.initial_entropy=0.8"],
    "filter on": ["+trainer.gtpo.entropy_filter=on", "+trainer.gtpo.initial_entropy=0.8"],
    "filter off": ["+trainer.gtpo.entropy_filter=off"],
    "negative_only": ["+trainer.gtpo.entropy_filter=negative_only"],
    "A = 0 skipped": ["+trainer.gtpo.zero_advantage=skip", "+trainer.gtpo.gamma=2.0"],
    "no correction": ["+trainer.gtpo.conflict_correction=false", "+trainer.gtpo.gamma=0.3"],
    "other values": [
        "+trainer.gtpo.conflict_span=common",
        "+trainer.gtpo.conflict_positive_weight=1.5",
        "+trainer.gtpo.entropy_threshold=0.9",
    ],
}


@pytest.mark.parametrize("kind", ["grpo", "dapo"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_gtpo_loss(plugin: Any, queue: Any, case: str, kind: str) -> None:
    """Through verl's ``_compute_advantage`` and ``ppo_loss``, rows in any order, in two micro-batches."""
    mode = {"grpo": "seq-mean-token-mean", "dapo": "token-mean"}[kind]
    has_initial = any("initial_entropy" in option for option in CASES[case])
    initial = [] if has_initial else ["+trainer.gtpo.initial_entropy=0.4"]
    config = compose(*SMALL, f"actor_rollout_ref.actor.loss_agg_mode={mode}", *CASES[case], *initial)
    trainer = plugin.GTPOTrainer(config)
    of_filter = {"on": 0, "conflict": 0, "zero": 0}
    for seed in range(4):
        rows = Rows(seed)
        expected, gradient = expected_loss(rows, kind, trainer.gtpo, trainer.initial_entropy)
        data, metrics = advantages_of(trainer, queue, rows)
        loss, found = loss_of(config, data, rows)
        assert loss == pytest.approx(expected.item(), rel=RTOL, abs=1e-12)
        torch.testing.assert_close(found, gradient, rtol=RTOL, atol=1e-12)
        assert gradient.abs().sum() > 0
        of_filter["on"] += metrics["gtpo/filtered_fraction"] > 0
        of_filter["conflict"] += metrics["gtpo/conflict_fraction"] > 0
        mean = gtpo.completion_entropy(rows.entropy, rows.mask).mean().item()
        assert metrics["gtpo/entropy"] == pytest.approx(mean)
    filters = "off" not in case and "above" not in case
    assert (of_filter["on"] > 0) == filters and of_filter["conflict"] > 0


def advantages_of(trainer: Any, queue: Any, rows: Rows) -> tuple[Any, dict[str, float]]:
    """The rows as the TransferQueue holds them after ``_compute_advantage``; the last one is padding."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import response_from_nested

    B = len(rows.order)
    lengths = rows.nested(rows.mask)
    fields = {
        "prompts": [torch.ones(PROMPT, dtype=torch.long)] * B,
        "responses": rows.nested(rows.responses).unbind(),
        "response_mask": lengths.unbind(),
        "rm_scores": rows.nested(rows.scores()).unbind(),
        "old_log_probs": rows.nested(rows.old).unbind(),
        "rollout_is_weights": rows.nested(rows.is_weights).unbind(),
        "entropy": response_from_nested(rows.model_values(rows.entropy), lengths).unbind(),
    }
    padding = {name: torch.zeros(1, dtype=values[0].dtype) for name, values in fields.items()} | {
        "prompts": torch.zeros(PROMPT, dtype=torch.long),
        "entropy": torch.full((1,), 5.0, dtype=torch.float64),
    }
    stored = TensorDict(
        {
            name: torch.nested.as_nested_tensor([*values, padding[name]], layout=torch.jagged)
            for name, values in fields.items()
        },
        batch_size=B + 1,
    )
    names = [*(f"u{rows.groups[i]}" for i in rows.order), "pad"]
    tu.assign_non_tensor_stack(stored, "uid", names)
    keys = [f"{name}_{row}_0" for row, name in enumerate(names)]
    tags = [{"seq_len": PROMPT, "is_padding": name == "pad"} for name in names]
    queue.kv_batch_put(keys=keys, partition_id="train", fields=stored, tags=tags)
    metrics: dict[str, float] = {}
    trainer._compute_advantage(queue.KVBatchMeta(keys=keys, partition_id="train", tags=tags), metrics)
    wanted = ["prompts", "responses", "response_mask", "old_log_probs", "advantages", "rollout_is_weights"]
    data = queue.kv_batch_get(keys=keys, partition_id="train", select_fields=wanted)
    queue.kv_clear(keys=keys, partition_id="train")
    assert data["advantages"].unbind()[B].tolist() == [0.0]
    return data, metrics


def loss_of(config: Any, data: Any, rows: Rows) -> tuple[float, Tensor]:
    """The sum of verl's ppo_loss over two micro-batches, and its gradient in the order of ``rows``."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils import losses

    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    logps = rows.new.clone().requires_grad_()
    total = 0.0
    values = rows.model_values(logps).unbind()
    for part in ([*range(5)], [*range(5, len(values))]):
        micro_batch = tu.index_select_tensor_dict(data, part)
        tu.assign_non_tensor(micro_batch, dp_size=1, batch_num_tokens=int(rows.mask.sum()), global_batch_size=P * G)
        log_probs = torch.nested.as_nested_tensor([values[i] for i in part], layout=torch.jagged)
        loss, _ = losses.ppo_loss(actor, {"log_probs": log_probs}, micro_batch)
        loss.backward(retain_graph=True)
        total += loss.item()
    return total, logps.grad


# <H>_ini: verl's data loader, replay buffer, padding and checkpoints. Sampler and actor need a GPU: stand-ins.


class Sampler:
    """Writes a completion of each prompt, as verl's agent loop does: its length is that of the prompt's number."""

    def __init__(self) -> None:
        self.questions: list[str] = []

    def generate_sequences(self, batch: Any) -> None:
        import transfer_queue
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        for i, uid in enumerate(batch["uid"]):
            question = batch["raw_prompt"][i][-1]["content"]
            self.questions.append(question)
            assert batch["__rollout_n__"][i] == 1
            number = int(question.split()[-1])
            responses = torch.full((number + 1,), number)
            row = {
                "uid": uid,
                "prompts": torch.ones(PROMPT, dtype=torch.long),
                "responses": responses,
                "input_ids": torch.cat([torch.ones(PROMPT, dtype=torch.long), responses]),
                "response_mask": torch.ones_like(responses),
                "rm_scores": torch.zeros(len(responses)),
                "rollout_log_probs": torch.zeros(len(responses)),
            }
            tag = {"status": "success", "seq_len": PROMPT + len(responses), "global_steps": 1}
            fields = list_of_dict_to_tensordict([row])
            transfer_queue.kv_batch_put(keys=[f"{uid}_0_0"], partition_id="train", fields=fields, tags=[tag])
            transfer_queue.kv_batch_put(keys=[uid], partition_id="train", tags=[{"status": "finished"}])


class Actor:
    """One rank whose entropy at a token is a tenth of its id, or 9 on the prompt and where verl pads."""

    _dispatch_info = {"actor": [0]}

    def compute_log_prob(self, batch: Any) -> Any:
        import transfer_queue
        from tensordict import TensorDict

        data = transfer_queue.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["input_ids", "response_mask"]
        )
        values = []
        for ids, mask in zip(data["input_ids"].unbind(), data["response_mask"].unbind(), strict=True):
            entropy = torch.full((len(ids),), 9.0)
            if mask.any():
                entropy[-len(mask) - 1 : -1] = ids[-len(mask) :] * 0.1  # an engine's value predicts the next token
            values.append(entropy)
        found = torch.nested.as_nested_tensor(values, layout=torch.jagged)
        fields = TensorDict({"entropy": found, "log_probs": found}, batch_size=len(values))
        return transfer_queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def save_checkpoint(self, path: str, *args: Any, **kwargs: Any) -> None:
        Path(path).mkdir(parents=True)

    def load_checkpoint(self, local_path: str, **kwargs: Any) -> None:
        assert Path(local_path).is_dir()


class Engines:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def sleep_replicas(self) -> None:
        self.calls.append("sleep")

    def update_weights(self, global_steps: int) -> None:
        self.calls.append(global_steps)


NUMBERS = range(1, 6)  # of the prompts


@pytest.fixture
def trainer_at(plugin: Any, queue: Any, tiny: Path, tmp_path: Path) -> Any:
    """``trainer_at(*overrides)``: a trainer with its data, before the first step, or after a checkpoint is loaded."""
    import pandas as pd

    rows = [{"data_source": "x", "prompt": [{"role": "user", "content": f"Question {i}"}]} for i in NUMBERS]
    pd.DataFrame(rows).to_parquet(tmp_path / "data.parquet")

    def build(*overrides: str) -> Any:
        files = f"{tmp_path}/data.parquet"
        config = compose(
            *SMALL,
            f"data.train_files={files}",
            f"data.val_files={files}",
            "data.dataloader_num_workers=0",
            "data.seed=11",
            f"actor_rollout_ref.model.path={tiny}",
            f"trainer.default_local_dir={tmp_path}/checkpoints",
            *overrides,
        )
        trainer = plugin.GTPOTrainer(config)
        trainer._init_tokenizer()
        trainer._init_dataloader()
        trainer.agent_loop_manager, trainer.actor_rollout_wg = Sampler(), Actor()
        trainer.checkpoint_manager, trainer.curr_step_profile = Engines(), False
        trainer._load_checkpoint()
        trainer.global_steps += 1
        trainer.on_train_begin()
        return trainer

    return build


def test_the_initial_entropy_is_measured_once_and_stored(
    trainer_at: Any, queue: Any, plugin: Any, tmp_path: Path
) -> None:
    trainer = trainer_at()
    # of completion n all tokens have the entropy n / 10
    assert trainer.initial_entropy == pytest.approx(sum(NUMBERS) / len(NUMBERS) / 10)
    asked = trainer.agent_loop_manager.questions
    assert sorted(asked) == [f"Question {i}" for i in NUMBERS]
    first = next(iter(trainer.train_dataloader))["raw_prompt"]  # the data loader starts where it would have
    assert [row[-1]["content"] for row in first] == asked[:P] != [f"Question {i}" for i in NUMBERS][:P]
    assert trainer.checkpoint_manager.calls == ["sleep", 0]
    assert not queue.kv_list("train").get("train")  # nothing is left for the first step

    trainer._save_checkpoint()
    folder = tmp_path / "checkpoints/global_step_1"
    assert json.loads((folder / plugin.STATE).read_text()) == {"initial_entropy": trainer.initial_entropy}
    for override in ([], ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}"]):
        resumed = trainer_at(*override)
        assert resumed.global_steps == 2 and resumed.initial_entropy == trainer.initial_entropy
        assert resumed.agent_loop_manager.questions == []
    with pytest.raises(ValueError, match=r"trainer\.gtpo\.initial_entropy = 0\.7: .*gtpo\.json has 0\.3"):
        trainer_at("+trainer.gtpo.initial_entropy=0.7")
    (folder / plugin.STATE).unlink()
    with pytest.raises(ValueError, match=r"gtpo\.json is missing: the checkpoint is not one of GTPO"):
        trainer_at()


def test_the_initial_entropy_is_that_of_the_first_prompts(
    trainer_at: Any, plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plugin.PROMPTS == 100
    monkeypatch.setattr(plugin, "PROMPTS", 2)
    trainer = trainer_at()
    numbers = [int(question.split()[-1]) for question in trainer.agent_loop_manager.questions]
    assert len(numbers) == 2 and trainer.initial_entropy == pytest.approx(sum(numbers) / 20)
    assert trainer_at("+trainer.gtpo.initial_entropy=0.7").agent_loop_manager.questions == []


def test_several_trajectories_of_a_completion_are_refused(plugin: Any, queue: Any) -> None:
    trainer = plugin.GTPOTrainer(compose(*SMALL))
    batch = queue.KVBatchMeta(keys=["u_0_0", "u_0_1"], partition_id="train", tags=[{}, {}])
    with pytest.raises(ValueError, match="u_0_1: a completion of several trajectories"):
        trainer._compute_advantage(batch, {})


# Scripts, data and rewards


def options_of(directory: Path, *argv: str) -> list[str]:
    """What a script of examples/verl passes to ``python -m verl.trainer.main_ppo``."""
    for name in ("python", "ray"):
        path = directory / name
        path.write_text(f'#!/bin/bash\nprintf "%s\\n" "{name}" "$VERL_USE_EXTERNAL_MODULES" "$PYTHONPATH" "$@"\n')
        path.chmod(0o755)
    path = f"{directory}:{os.environ['PATH']}"
    found = subprocess.run(argv, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=True)
    program, module, paths, *rest = found.stdout.splitlines()
    assert module == "gtpo_verl" and paths == f"{ROOT}/examples/verl:{ROOT}"
    if program == "python":
        assert rest[:2] == ["-m", "verl.trainer.main_ppo"]
        return rest[2:]
    return [program, *rest]


@pytest.mark.parametrize(
    ("script", "nodes", "prompts"),
    [(["one_node.sh"], 1, 8), (["two_nodes.sh", "train"], 2, 16)],
    ids=["one node", "two nodes"],
)
def test_hydra_composes_the_options_of_a_script(
    plugin: Any, tmp_path: Path, script: list[str], nodes: int, prompts: int
) -> None:
    from verl.utils.config import validate_config

    name, *argv = script
    options = options_of(tmp_path, str(ROOT / "examples/verl" / name), *argv, "trainer.total_training_steps=7")
    config = compose(*options)
    trainer = config.trainer
    assert (trainer.nnodes, trainer.n_gpus_per_node, trainer.total_training_steps) == (nodes, 8, 7)
    assert config.data.train_batch_size == prompts and config.actor_rollout_ref.rollout.n == 12
    assert config.ray_kwargs.ray_init.get("address") == (None if nodes == 1 else "auto")
    settings = plugin.read_settings(config)
    assert settings == plugin.Settings()  # the paper's
    validate_config(compose(*options, "actor_rollout_ref.model.lora_rank=0"), False, False)  # with LoRA it asks vLLM


def test_the_script_of_two_nodes_starts_ray(tmp_path: Path) -> None:
    script = str(ROOT / "examples/verl/two_nodes.sh")
    assert options_of(tmp_path, script, "head") == ["ray", "start", "--head", "--port=6379"]
    assert options_of(tmp_path, script, "worker", "10.0.0.1") == ["ray", "start", "--address=10.0.0.1:6379"]


def test_gsm8k_reaches_verls_data_set_and_reward_manager(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gsm8k_parquet
    from transformers import AutoTokenizer
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.trainer.ppo.utils import create_rl_dataset

    rows = [
        {"question": "What is 1,000 + 234?", "answer": "It is <<1000+234=1234>>1,234.\n#### 1,234"},
        {"question": "Half of 9?", "answer": "#### 4.5"},
    ]
    for split in ("train", "test"):
        (tmp_path / f"gsm8k_{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.setenv("GTPO_DATA_DIR", str(tmp_path))
    gsm8k_parquet.main(str(tmp_path / "verl"))
    reward = f"reward.custom_reward_function.path={ROOT}/examples/verl/paper_reward.py"
    config = compose(*SMALL, reward, f"data.train_files={tmp_path}/verl/train.parquet")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    found = create_rl_dataset(config.data.train_files, config.data, tokenizer, None)
    assert len(found) == 2
    first = found[0]
    system, question = first["raw_prompt"]
    assert system["content"].startswith("You are a helpful assistant for solving math problems.")
    assert question == {"role": "user", "content": "What is 1,000 + 234?"}
    assert first["reward_model"]["ground_truth"] == "1234" and found[1]["reward_model"]["ground_truth"] == "4.5"

    score = get_custom_reward_fn(config)
    texts = {
        "<reasoning>a</reasoning><answer>1,234</answer>": (20.0, 1.0, 1.0),
        "<reasoning>a</reasoning><answer>1,235</answer>": (10.0, 0.0, 1.0),
        "<answer>1234</answer>": (11.0, 1.0, 0.1),
        "1234": (0.0, 0.0, 0.0),
    }
    for text, expected in texts.items():
        given = score(data_source="openai/gsm8k", solution_str=text, ground_truth="1234", extra_info={})
        assert (given["score"], given["acc"], given["format"]) == expected, text


def test_a_row_without_an_answer_is_refused(plugin: Any) -> None:
    import gsm8k_parquet

    with pytest.raises(ValueError, match="row 7 of train has no answer after '#### '"):
        gsm8k_parquet.verl_row({"question": "?", "answer": "none"}, "train", 7)
