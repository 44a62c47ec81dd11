"""GTPO and GRPO on TRL's GRPOTrainer: the conflict mask of whole groups, and a loss without the (B, T, V) logits.

GTPO changes the objective and nothing else. What is measured and stored is in ``gtpo/training/record.py``.

Deliberately absent, each refused by name: TRL's entropy bonus, 80/20 rule, overlong filtering, tools, environments and
rollout functions.
"""

import inspect
import logging
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import trl
from peft import PeftModel
from torch import Tensor
from trl.models import unwrap_model_for_generation

from gtpo.arguments import GTPOArguments, fields_of
from gtpo.errors import UsageError
from gtpo.forward.dropout import disable_dropout, in_eval_mode
from gtpo.forward.generation import generate
from gtpo.forward.head import linear_logps_and_entropy
from gtpo.forward.hidden_states import NAMES, Route, completion_places, host_masks
from gtpo.forward.vllm_lora import ENGINES
from gtpo.grading.user_functions import CheckedReward, checked_reward
from gtpo.processes import gather_full_parameter, is_main_process, refuse_data_parallel
from gtpo.prompts import TAGS
from gtpo.runs.bars import PHASE, CompletionBar, TokenCounter, until_end
from gtpo.training.advantages import group_advantages
from gtpo.training.batch import Batch, Ids, LossInputs, Numbers, Row, Scores, gather_rollouts, padded, replace_last
from gtpo.training.checks import check_head, check_rollouts, next_check
from gtpo.training.diagnosis import clip_ratios
from gtpo.training.faults import check_rewards, non_finite_error
from gtpo.training.generations import EpochOrder, WholeGenerations
from gtpo.training.held_out import HeldOutEvaluation
from gtpo.training.hooks import call_advantages, call_objective, copy_of
from gtpo.training.initial_entropy import InitialEntropy
from gtpo.training.precision import keep_adapter_in_float32
from gtpo.training.record import Measured, Recorder
from gtpo.training.refusals import (
    check_arguments,
    check_grpo_settings,
    check_overrides,
    check_policy,
    deviations,
    logit_options,
    uses_unsloth,
)
from gtpo_loss import completion_entropy, conflict_weights, entropy_filter, grpo_loss, gtpo_loss

logger = logging.getLogger(__name__)

NAN_PROBABILITIES = ("probability tensor contains", "device-side assert")  # torch.multinomial on a CPU, on a GPU


class GRPOTrainer(HeldOutEvaluation):
    """GRPO (Eq. 1 and 2) with the conflict and entropy metrics of the paper.

    Arguments are those of TRL's GRPOTrainer; the paper has ``args`` with ``loss_type="grpo"``. UsageError for settings
    that change the loss and are not implemented, each named. Somebody else's objective overrides :meth:`objective` or
    :meth:`advantages`.

    Overridden methods of TRL's trainer, plain or as Unsloth rewrites it:

    * ``_generate_and_score_completions``: the one place where every process sees whole groups. The (B, T) conflict mask
      stays in the batch while TRL shuffles the rows and splits them into micro-batches.
    * ``_generate_single_turn``: ``gtpo/forward/generation.py`` where Transformers generates, in eval mode; stops at NaN
      probabilities.
    * ``_calculate_rewards``: stops at rewards that are not finite; keeps those of all processes for ``advantages``.
    * ``log``: the table of completions has what the loss has used, or comes later.
    * ``compute_loss``: ``gtpo/forward/hidden_states.py``, ``gtpo/forward/head.py``, then ``gtpo_loss.py``.
    * ``_get_per_token_logps_and_entropies``: the same head for the old policy and the reference.
    * ``_get_train_sampler``: the order of an epoch is that of its number in a resumed run too.
    * ``_load_from_checkpoint``: loads the trained adapter alongside KL's reference adapter.
    * ``evaluate``, ``predict``, ``evaluation_loop``, ``prediction_step``, ``get_eval_dataloader`` and
      ``get_test_dataloader`` in ``gtpo/training/held_out.py``: held-out rows count once, and training goes on as
      without.

    Private attributes of TRL's that are used, because it has no public way to them: ``_logs`` (rows of the table of
    completions), ``_metrics`` (a step's metrics, and the weight of a held-out batch), ``_tokenize_prompts`` (the
    initial entropy has the prompts of training), ``_step`` (where a resumed run is in its generation),
    ``_last_loaded_step`` (the weights of an engine of ours).
    """

    reward_funcs: list[Any]  # these two are TRL's
    log_completions: bool
    _next_rollout_check = 0
    _is_first_batch = True  # of this process: the head is checked
    _bar: CompletionBar | None = None  # of the phase that generates, if it has one
    gtpo = GTPOArguments(conflict_correction=False, gamma=0.0)  # without its parts; the rest is for the metrics
    logps_and_entropy = staticmethod(linear_logps_and_entropy)  # plain_logps_and_entropy is its readable twin

    _config = trl.GRPOConfig  # of a trainer without args
    Settings: Any = object  # of a subclass a dataclass, whose values are `self.settings`
    fixed: Mapping[str, Any] = {}  # settings of TRL that the objective does not read, with the only accepted value

    def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None, *positional: Any, **kwargs: Any) -> None:
        if args is None:
            source = model if isinstance(model, str) else model.config._name_or_path
            args = self._config(f"{source.rpartition('/')[2]}-{self._name}")
        self.check_settings(args)
        self.settings = kwargs.pop("settings", None) or self.Settings()
        of_config = getattr(args, "tags", "").split()  # a GTPOConfig has them
        self.tags: Sequence[str] = kwargs.pop("tags", of_config or TAGS)  # of conflict_tokens "tags"
        names = [*inspect.signature(trl.GRPOTrainer).parameters][3:]  # of Unsloth's class none: it hides them
        given = {"model": model, "args": args, **dict(zip(names, positional, strict=False)), **kwargs}
        check_arguments(given)
        check_overrides(type(self), __class__)  # type: ignore[name-defined]  # this class, under any name
        if not uses_unsloth():  # which uses one GPU
            refuse_data_parallel(args)
        self._says_gradient = says_gradient(type(self))
        self.recorder = Recorder(self)
        has_adapter = isinstance(model, PeftModel) or given.get("peft_config") is not None
        hands_over = has_adapter and args.use_vllm and not uses_unsloth()
        args.use_vllm &= not hands_over  # TRL's engine, or server, would get merged weights
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        if hands_over:
            self._attach_engine()
        self.reward_funcs = [deferring(function) for function in self.reward_funcs]
        self.add_callback(WholeGenerations(self))
        keep_adapter_in_float32(self.model)
        if args.disable_dropout:
            self._disable_dropout()
        self._prepare_forward()
        other = deviations(args, self.causal_lm(self.model).generation_config)
        if other and is_main_process():
            logger.warning("Not the paper's objective: %s", other)

    def _attach_engine(self) -> None:
        """vLLM, colocated or a server, that gets the adapter itself."""
        self.args.use_vllm = self.use_vllm = True
        self.vllm_generation = ENGINES[self.args.vllm_mode](self)
        self._last_loaded_step = -1

    def _disable_dropout(self) -> None:
        """TRL sets that of modules to 0; in Llama, Qwen and others it is a number."""
        found = disable_dropout(self.model)
        if self.ref_model is not None:
            disable_dropout(self.ref_model)
        if found and is_main_process():
            values = ", ".join(f"{name} {value}" for name, value in found.items())
            logger.warning("The dropout of the base is off (%s): --disable_dropout false trains with it", values)

    def _prepare_forward(self) -> None:
        """How the model is called and scales its logits; UsageError for a model that the loss does not carry."""
        causal_lm = self.causal_lm(self.model)
        check_policy(causal_lm, self.processing_class)
        if not hasattr(self, "model_kwarg_keys"):  # removed in TRL 1.15
            self.model_kwarg_keys = inspect.signature(type(causal_lm).forward).parameters
        self._route = Route(self.model_kwarg_keys, self._calls_transformers(), uses_unsloth())
        self._logit_options = logit_options(causal_lm.config, self.args.router_aux_loss_coef)

    @classmethod
    def check_settings(cls, args: Any) -> None:
        """UsageError for the first setting of TRL that changes its loss and not this one."""
        for name, value in cls.fixed.items():
            found = getattr(args, name)
            if found != value:
                raise UsageError(f"{name} = {found!r}: {cls.__name__} does not use it, expected {value!r}.")
        check_grpo_settings(args)

    # Rollouts, rewards, conflict mask

    def _get_train_sampler(self, dataset: Any = None) -> EpochOrder:
        return EpochOrder(super()._get_train_sampler(dataset), self)

    @property
    def micro_batches_of_generation(self) -> int:
        """Micro-batches that a process trains for each batch that it samples."""
        return int(self.args.steps_per_generation * self.num_iterations)

    @property
    def generation(self) -> int:
        """The number of the generation that is trained on."""
        return int(self._step // self.micro_batches_of_generation)

    @property
    def generation_is_used_up(self) -> bool:
        """Whether the next micro-batch is of another generation."""
        return self._step % self.micro_batches_of_generation == 0

    def _generate_and_score_completions(self, inputs: list[Row]) -> Batch:
        is_first, self._is_first_batch = self._is_first_batch, False
        batch = super()._generate_and_score_completions(inputs)
        if is_first:
            check_head(self, batch)
        if batch.get("sampling_per_token_logps") is not None and self.state.global_step >= self._next_rollout_check:
            self._next_rollout_check = next_check(self.state.global_step)
            check_rollouts(self, batch)
        rows, width = batch["completion_ids"].shape
        row = self.accelerator.process_index * rows + torch.arange(rows, device=self.accelerator.device)
        batch["row"] = row  # follows TRL's shuffle
        batch["has_reward"] = ~self._rewards[row].isnan().all(1)
        group_size = self.num_generations if self.model.training else self.num_generations_eval
        batch["advantages"] = call_advantages(self, self._rewards, group_size)[row]
        advantages = self.accelerator.gather(batch["advantages"])  # also where a hook draws random numbers
        replace_last(self._logs["advantages"], advantages.tolist())
        whole = gather_rollouts(self, batch, advantages, group_size)
        forward, backward = whole.spans
        batch["conflict_mask"] = (forward | backward)[row, :width]
        batch["host_masks"] = host_masks(batch)  # the loss then finds every token without waiting for the device
        self.recorder.rollouts(inputs, whole)
        return batch

    def _generate_single_turn(self, prompt_ids: Ids, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        samples_itself = not self.use_vllm and not uses_unsloth()  # which has modes of its own
        try:
            with in_eval_mode(self.model) if samples_itself else nullcontext():
                if self._generates_with_transformers():
                    return self._sample(prompt_ids), None
                return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        except RuntimeError as error:
            if not any(text in str(error) for text in NAN_PROBABILITIES):
                raise
            rows = [{"prompt": text} for text in self.processing_class.batch_decode(prompt_ids)]
            raise non_finite_error("the probability of a sampled token", self, rows=rows) from error

    def _generates_with_transformers(self) -> bool:
        """Whether ``gtpo/forward/generation.py`` generates: no engine, no beams, and weights that are not sharded."""
        beams = (self.args.generation_kwargs or {}).get("num_beams", 1)
        engine = self.use_vllm or self.use_transformers_continuous_batching
        return self._calls_transformers() and not engine and beams == 1

    def _calls_transformers(self) -> bool:
        """Whether the model may be called in any way; that of Unsloth, FSDP and DeepSpeed once per micro-batch."""
        return not uses_unsloth() and self.accelerator.distributed_type in ("NO", "MULTI_CPU", "MULTI_GPU")

    def _sample(self, prompt_ids: Ids) -> Ids:
        """A completion of each prompt, up to its first end token."""
        ids, mask = padded(prompt_ids, "left", self.processing_class.pad_token_id, self.accelerator.device)
        with (
            self.open_bar("generating", len(prompt_ids)) as bar,
            unwrap_model_for_generation(
                self.model_wrapped, self.accelerator, generation_kwargs=self.generation_kwargs
            ) as policy,
        ):
            rows = generate(
                self.causal_lm(policy),
                ids,
                mask,
                self.generation_config,
                TokenCounter([True] * len(ids), self.eos_token_ids, bar.count_tokens),
            )
        completions = rows[:, ids.shape[1] :].tolist()
        return [until_end(tokens, self.eos_token_ids)[0] for tokens in completions]

    @contextmanager
    def open_bar(self, title: str, completions: int) -> Iterator[CompletionBar]:
        """A bar for these completions; inside another one that one."""
        if self._bar is not None:
            yield self._bar
            return
        hidden = not is_main_process()
        with CompletionBar(title, completions, 0, self.max_completion_length, disable=hidden, **PHASE) as self._bar:
            try:
                yield self._bar
            finally:
                self._bar = None

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        self._rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        check_rewards(self, self._rewards, prompts, completions)
        return self._rewards

    def advantages(self, rewards: Tensor, group_size: int) -> Tensor:
        """A_i of all completions of a step, in all processes: TRL's here. Override it for other advantages.

        It takes ``scale_rewards`` and ``multi_objective_aggregation`` from the settings. The conflict mask is that of
        what it returns. A completion without a reward has A_i = 0: the value returned for it is not used.

        Args:
            rewards: One column for each reward function, NaN where it has no reward (None). Their weights are
                ``self.reward_weights``, shape (K,). Shape (B, K).
            group_size: G; rows k*G to (k+1)*G-1 are the completions of one prompt.

        Returns:
            Shape (B,). RunError on all processes for another shape, and for a value that is not finite.
        """
        weights = self.reward_weights.to(rewards.device)
        return group_advantages(rewards, weights, group_size, self.scale_rewards, self.args.multi_objective_aggregation)

    def log(self, logs: Numbers, start_time: float | None = None) -> None:
        """TRL's, but a table of completions is written when the loss has used all of them, or the run ends."""
        shown = self.log_completions
        is_last = self.state.global_step >= self.state.max_steps
        self.log_completions = shown and (is_last or self.recorder.table_is_complete)
        try:
            super().log(logs, start_time)
        finally:
            self.log_completions = shown

    # The objective

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        if return_outputs or "conflict_mask" not in inputs:
            raise UsageError(
                "compute_loss takes a micro-batch of _prepare_inputs, and returns its loss without outputs."
            )
        grad_rows = self.needs_gradient(copy_of(inputs)) if self._says_gradient else None
        logps, token_entropy = self._logps_and_entropy(model, inputs, grad_rows)  # (B, T) each
        loss, measured = call_objective(self, logps, token_entropy, inputs)
        self.recorder.loss(loss, measured, logps, token_entropy, inputs)
        if not self.model.training:
            return loss
        return loss / self.current_gradient_accumulation_steps

    def objective(self, logps: Tensor, token_entropy: Tensor, inputs: Any) -> tuple[Tensor, Measured]:
        """The loss of a micro-batch of b rows, and what it used: Eq. 1 and 2 here. Override it for another objective.

        The rows are a random part of the step's completions: what needs whole groups is in ``advantages`` and
        ``conflict_mask``. The losses of micro-batches and processes are averaged. All tokens may have a gradient
        unless the class has a :meth:`needs_gradient` of its own.

        Args:
            logps: ln pi of the completion tokens at the sampling temperature, 0 on padding. Shape (b, T).
            token_entropy: H over the full vocabulary in nats, 0 on padding; carries no gradient. Shape (b, T).
            inputs: A dict: :class:`~gtpo.training.batch.LossInputs` has its keys and their shapes.

        Returns:
            The loss, shape (), and :class:`Measured`. RunError for anything else.
        """
        mask, options = inputs["completion_mask"], self._of_trl(inputs)  # (b, T)
        entropy = completion_entropy(token_entropy, mask)  # (b,), measured alone
        loss, metrics = grpo_loss(
            logps,
            mask,
            inputs["advantages"],
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            beta=self.beta,
            ref_per_token_logps=inputs.get("ref_per_token_logps"),
            **options,
        )
        old = options["old_per_token_logps"]
        ratio = torch.ones_like(logps) if old is None else (logps.detach() - old).exp()  # (b, T)
        metrics |= clip_ratios(ratio, mask, inputs["advantages"], self.epsilon_low, self.epsilon_high)
        return loss, Measured(entropy, metrics=metrics)

    def needs_gradient(self, inputs: LossInputs) -> Tensor:
        """The tokens whose ln pi may have a gradient in :meth:`objective` of the same class; the head skips the others.

        A class that overrides :meth:`objective` alone has a gradient on all tokens. Bool, shape (b, T).
        """
        mask, advantages = inputs["conflict_mask"], inputs["advantages"][:, None]  # (b, T), (b, 1)
        return ((advantages != 0) | bool(self.beta)).expand_as(mask)

    def losses(self) -> int:
        """Losses that are averaged: of the micro-batches of a generation, in all processes."""
        micro_batches = self.args.steps_per_generation if self.model.training else 1
        return int(self.accelerator.num_processes * micro_batches)

    def _of_trl(self, inputs: LossInputs) -> Row:
        """What TRL sets for any objective: how tokens are averaged, the old policy, and the sampler's correction."""
        mask = inputs["completion_mask"]
        normalizer: Any = None  # the losses of micro-batches and processes are averaged
        if self.loss_type == "dr_grpo":
            normalizer = len(mask) * int(self.max_completion_length)
        elif self.loss_type == "bnpo":  # of this micro-batch alone
            normalizer = mask.sum().clamp(min=1)
        elif self.loss_type == "dapo":
            normalizer = inputs["num_items_in_batch"].clamp(min=1) / self.losses()
        return {
            "loss_type": self.loss_type,
            "normalizer": normalizer,
            "old_per_token_logps": inputs.get("old_per_token_logps"),
            "importance_weights": inputs.get("importance_sampling_ratio"),
        }

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, None]:
        """ln pi and H under the old policy or the reference, with the head of the loss. Shape (B, T) each.

        TRL's computes the logits; Unsloth's packs rows by the pad id, and shifts them where prompts differ in length.
        """
        rows = batch_size or len(input_ids)
        widths = [input_ids.shape[1] - logits_to_keep, logits_to_keep]
        (prompt, completion), (prompt_mask, mask) = (x.split(widths, 1) for x in (input_ids, attention_mask))
        batch = dict(zip(NAMES, (prompt, prompt_mask, completion, mask), strict=True))
        return *self.scores(model, batch, rows), None

    def scores(self, model: Any, batch: Batch, rows: int) -> Scores:
        """ln pi and H of the completion tokens, by micro-batches of ``rows``. Shape (B, T) each."""
        logps = []
        entropies = []
        for part in zip(*(batch[name].split(rows) for name in NAMES), strict=True):
            inputs = dict(zip(NAMES, part, strict=True))
            logp, entropy = self._logps_and_entropy(model, inputs)
            logps.append(logp)
            entropies.append(entropy)
        return torch.cat(logps), torch.cat(entropies)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        policy = self.accelerator.unwrap_model(self.model)
        if model is None and len(getattr(policy, "peft_config", ())) > 1:
            # With KL's adapter "ref" in a subdirectory, Transformers does not load the trained one.
            policy.load_adapter(resume_from_checkpoint, "default", is_trainable=True)

    def _logps_and_entropy(self, model: Any, inputs: Batch, grad_rows: Tensor | None = None) -> Scores:
        """ln pi and H of the completion tokens at the sampling temperature, 0 on all others. Shape (B, T) each."""
        mask = inputs["completion_mask"].bool()
        causal_lm = self.causal_lm(model)
        hidden = self._route.states(model, causal_lm, inputs)  # (N, H), each predicts its token
        tokens = completion_places(inputs)  # (N,)
        targets = inputs["completion_ids"].flatten()[tokens]
        if grad_rows is not None:
            grad_rows = grad_rows.flatten()[tokens]
        logps, entropy = self.head(causal_lm, hidden, targets, grad_rows)
        blank = torch.zeros(mask.shape, dtype=logps.dtype, device=logps.device)
        return blank.masked_scatter(mask, logps), blank.masked_scatter(mask, entropy)

    def head(self, causal_lm: Any, hidden: Tensor, targets: Tensor, grad_rows: Tensor | None = None) -> Scores:
        """ln pi of the targets and H, from the hidden states (N, H) that predict them. Shape (N,) each."""
        head = causal_lm.get_output_embeddings()
        return self.logps_and_entropy(
            hidden,
            gather_full_parameter(head.weight),
            targets,
            temperature=self.temperature,
            bias=gather_full_parameter(getattr(head, "bias", None)),
            grad_rows=grad_rows,
            **self._logit_options,
        )

    def causal_lm(self, model: Any) -> Any:
        """The CausalLM without the wrappers of DDP and PEFT."""
        model = self.accelerator.unwrap_model(model)
        return model.get_base_model() if hasattr(model, "get_base_model") else model


def deferring(reward: Any) -> Any:
    """A reward function, or model, whose errors :func:`check_rewards` raises in all processes."""
    checked = reward if isinstance(reward, CheckedReward | torch.nn.Module) else checked_reward(reward)
    checked.defers = True
    return checked


def says_gradient(trainer: type[GRPOTrainer]) -> bool:
    """Whether the class that has the objective also has ``needs_gradient``.

    An objective that ``functools.wraps`` another one has a gradient at the same tokens: the class of that one counts.
    """
    for cls in trainer.__mro__:
        own = vars(cls)
        if "needs_gradient" in own:
            return True
        if "objective" in own and not hasattr(own["objective"], "__wrapped__"):
            return False
    return False


@dataclass(init=False)
class GTPOConfig(GTPOArguments, trl.GRPOConfig):
    """The fields of GRPOConfig and of GTPOArguments, which are documented there; the defaults are the paper's.

    ``trl.GRPOConfig`` may be Unsloth's, whose own ``__init__`` a generated one would bypass.
    """

    loss_type: str = field(default="grpo", metadata={"help": "The 1/|o_i| of Eq. 11."})
    disable_dropout: bool = field(default=True, metadata={"help": "Completions are sampled without dropout."})
    tags: str = field(default=" ".join(TAGS), metadata={"help": "Of conflict_tokens tags."})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.tags = kwargs.pop("tags", " ".join(TAGS))
        names = fields_of([GTPOArguments]).keys() & kwargs
        own = GTPOArguments(**{name: kwargs.pop(name) for name in names})
        self.__dict__.update(vars(own))
        kwargs.setdefault("loss_type", "grpo")
        kwargs.setdefault("disable_dropout", True)
        trl.GRPOConfig.__init__(self, *args, **kwargs)

    def __post_init__(self) -> None:
        trl.GRPOConfig.__post_init__(self)


class GTPOTrainer(GRPOTrainer):
    """GTPO (arXiv 2508.03772): GRPOTrainer with the objective of Eq. 11; no KL term, no reference model, no clipping.

    ``args`` is a GTPOConfig, or a GRPOConfig next to ``gtpo``, the settings of the method; the paper's by default.
    UsageError if ``beta`` is not 0.
    """

    _tag_names = ["trl", "gtpo"]
    _name = "GTPO"
    _paper = {
        "title": "GTPO: Stabilizing Group Relative Policy Optimization via Gradient and Entropy Control",
        "id": "2508.03772",
        "citation": textwrap.dedent("""\
            @article{simoni2025gtpo,
                title   = {{GTPO: Stabilizing Group Relative Policy Optimization via Gradient and Entropy Control}},
                author  = {Marco Simoni and Aleksandar Fontana and Giulio Rossolini and Andrea Saracino and Paolo Mori},
                year    = 2025,
                eprint  = {arXiv:2508.03772},
            }"""),
    }

    fixed = {"beta": 0.0, "epsilon": 0.2, "epsilon_high": None}  # no KL term, no clipping
    _config = GTPOConfig

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *positional: Any,
        gtpo: GTPOArguments | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(args, GTPOConfig):
            if gtpo is not None:
                raise UsageError("args is a GTPOConfig, which has the settings of gtpo: pass one of them.")
            gtpo = args
        self.gtpo = gtpo or GTPOArguments()
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        self.initial_entropy = InitialEntropy(self)
        self.add_callback(self.initial_entropy)

    def objective(self, logps: Tensor, token_entropy: Tensor, inputs: Any) -> tuple[Tensor, Measured]:
        """Eq. 9 to 11."""
        mask, advantages, settings = inputs["completion_mask"], inputs["advantages"].float(), self.gtpo  # (b, T), (b,)
        # GTPO change 1: lambda of Eq. 9 on the tokens that completions of both signs share
        conflicts = inputs["conflict_mask"] & settings.conflict_correction  # (b, T)
        weights = conflict_weights(conflicts, advantages, settings.conflict_positive_weight)  # (b, T)
        # GTPO change 2: delta of Eq. 10 and the penalty gamma <H>_i of Eq. 11
        entropy = completion_entropy(token_entropy, mask)  # (b,)
        threshold, mode = settings.entropy_threshold, settings.entropy_filter
        keep = entropy_filter(entropy, advantages, self.initial_entropy.measure(), threshold, mode)  # (b,)
        has_penalty = inputs["has_reward"]  # (b,)
        if settings.zero_advantage == "skip":  # Eq. 27 and 28: neither in G+ nor in G-
            has_penalty = has_penalty & (advantages != 0)
        gamma = settings.gamma * has_penalty  # (b,)
        loss, metrics = gtpo_loss(logps, entropy, mask, advantages, weights, keep, gamma=gamma, **self._of_trl(inputs))
        return loss, Measured(entropy, weights, keep, metrics)

    def needs_gradient(self, inputs: LossInputs) -> Tensor:
        """All but conflict tokens with A < 0, where lambda = 0, and without lambda those whose A and gamma are 0."""
        mask, advantages = inputs["conflict_mask"], inputs["advantages"][:, None]  # (b, T), (b, 1)
        if self.gtpo.conflict_correction:
            return ~mask | (advantages >= 0)
        has_penalty = self.gtpo.gamma > 0 and self.gtpo.zero_advantage == "entropy"
        return ((advantages != 0) | has_penalty).expand_as(mask)
