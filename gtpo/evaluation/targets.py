"""Which models are evaluated: adapters of training runs, and the base model that they were trained from."""

import logging
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gtpo.arguments import PromptArguments, Values, stored_prompt
from gtpo.errors import UsageError
from gtpo.evaluation.records import Sampling
from gtpo.models.backend import gpu_is_available, is_installed
from gtpo.models.hub import check_model_files
from gtpo.models.source import ModelSource, model_source, noted_in, rank_of, same_base
from gtpo.runs.directory import LAST, OUTPUTS, label_of, own_runs

logger = logging.getLogger(__name__)

BASE = "base"  # among --runs
Targets = Sequence[ModelSource]  # adapters of one base, and the base itself


@dataclass(frozen=True)
class Asked:
    """What is asked for: the targets by name, where their base is loaded from, its precision, and their prompt.

    ``load_in_4bit`` and the settings that ``prompt`` lacks are by default those of the training. ``slow``: whether the
    paper's models may be sampled on a CPU.
    """

    runs: Sequence[str] = ()
    model: str | None = None
    checkpoint: str = LAST
    load_in_4bit: bool | None = None
    prompt: Values = field(default_factory=dict)
    slow: bool = False


@dataclass(frozen=True)
class Target:
    """A row of the table: a model, the prompt that it is asked with, and its label."""

    model: ModelSource
    prompt: PromptArguments
    label: str

    @property
    def adapter(self) -> str | None:
        """Its directory."""
        return str(self.model.adapter) if self.model.adapter else None


@dataclass(frozen=True)
class Chosen:
    """Targets of one base.

    Attributes:
        base: What is loaded.
        weights: Its fingerprint, or its Hub id.
        load_in_4bit: Its precision.
        rows: In the order of ``--runs``.
    """

    base: ModelSource
    weights: str
    load_in_4bit: bool
    rows: list[Target]

    @property
    def lora_rank(self) -> int | None:
        """The largest rank of the adapters; None without adapters."""
        return max((rank_of(row.model.lora) for row in self.rows if row.model.adapter), default=None)

    def warn_of_sampling(self, how: Sampling) -> None:
        """Log where a policy is sampled otherwise than in its training; greedy samples are of no temperature."""
        for row in self.rows if how.temperature else ():
            trained = row.model.run.read_config()
            for name in ("temperature", "top_p"):
                now = getattr(how, name)
                if trained.get(name, now) != now:
                    text = "%s was trained with --%s %s, and is sampled with %s"
                    logger.warning(text, row.model.weights, name, trained[name], now)


def choose_targets(asked: Asked) -> Chosen:
    """The targets that are asked for; UsageError where they are of several bases, or files are not as in training."""
    models = find_targets(asked.runs, asked.model, asked.checkpoint, asked.slow)
    in_4bit = choose_4bit(asked.load_in_4bit, models)
    prompts = choose_prompts(asked.prompt, models)
    weights = check_base(models)
    rows = [Target(model, prompt, label_among(model, models)) for model, prompt in zip(models, prompts, strict=True)]
    return Chosen(replace(models[0], adapter=None), weights, in_4bit, rows)


def find_targets(
    names: Sequence[str], model: str | None, checkpoint: str = LAST, slow: bool = False
) -> list[ModelSource]:
    """The targets in the order of ``--runs``; without any, what ``--model`` names, or the newest run.

    All have one base, which is that of the adapters: next to them ``--model`` names where it is loaded from. Not the
    paper's models on a CPU, unless ``slow``.
    """
    if model is not None and not names:
        source = model_source(model, checkpoint)
        found = [source]
        elsewhere = None if source.adapter else source
    else:
        names = names or [_newest_run()]
        elsewhere = None if model is None else model_source(model)
        if elsewhere and elsewhere.adapter:
            raise UsageError(f"--model {model} has an adapter: name it with --runs.")
        found = [adapter_source(name, checkpoint) for name in names if name != BASE]
    adapters = [target for target in found if target.adapter]
    if not adapters and checkpoint != LAST:
        raise UsageError(f"--checkpoint {checkpoint}: the base model has no checkpoints, name a run with --runs.")
    if not adapters and not elsewhere:
        raise UsageError("--runs base alone does not name a base model: add a run, or --model tiny|smol|llama|qwen.")
    for target in adapters:
        check_model_files(target.weights)
    base = _shared_base(adapters, elsewhere, slow)
    if not names:
        return [target.on(base) for target in found]
    of_runs = iter(found)
    return [base if name == BASE else next(of_runs).on(base) for name in names]


def _newest_run() -> str:
    runs = own_runs(having="weights")
    if not runs:
        raise UsageError(f"no finished run under {OUTPUTS}/: train one, name one with --runs, or add --model tiny.")
    newest = str(runs[-1].path)
    logger.warning("evaluating %s, the newest finished run; --runs selects others", newest)
    return newest


def adapter_source(name: str, checkpoint: str = LAST) -> ModelSource:
    """The adapter of a run at a checkpoint, or the adapter in the directory itself."""
    source = model_source(name, checkpoint, on_hub=False)
    if not source.adapter:
        again = shlex.quote(source.name)
        raise UsageError(f"{name} trained all weights and has no adapter: evaluate it with --model {again}.")
    return source


def _shared_base(adapters: Targets, asked: ModelSource | None, slow: bool) -> ModelSource:
    """The base that all adapters were trained from, or that ``asked`` names; without adapters, ``asked``.

    An adapter that was trained on another model's 4-bit copy is evaluated with a warning.
    """
    for target in adapters[1:]:
        first = adapters[0]
        if not same_base(first.base, target.base):
            raise UsageError(
                f"{first.adapter} was trained from {first.base}, {target.adapter} from {target.base}: use two commands."
            )
    base = asked or replace(adapters[0], asked=adapters[0].name, adapter=None, checkpoint=None)
    if base.is_large and not slow and not gpu_is_available():
        raise UsageError(f"{base.base} needs a GPU and PyTorch sees none: add --backend transformers (takes hours).")
    for target in adapters:
        loaded = noted_in(target.lora).get("loaded_from") or target.lora["base_model_name_or_path"]
        if loaded.endswith("bnb-4bit") and Path(loaded).name != Path(base.base).name:
            logger.warning(
                "%s was trained on the 4-bit weights of %s and is evaluated on others: add --model %s",
                *(target.adapter, loaded, loaded),
            )
    return base


def check_base(targets: Targets) -> str:
    """The fingerprint of the base model, or its Hub id; UsageError if an adapter was trained from other files."""
    first = targets[0]  # which reads the files of the base once
    for target in targets:
        first.check_base(target.weights)
    return first.fingerprint or first.base


def choose_4bit(asked: bool | None, targets: Targets) -> bool:
    """Whether the base model is loaded in 4 bits: as asked, or as it was when the adapters were trained.

    Without a GPU or bitsandbytes an adapter trained on 4-bit weights is evaluated on 16 or 32 bits, with a warning.
    """
    if asked is not None:
        return asked
    trained = {bool(target.settings.get("load_in_4bit")) for target in targets if target.adapter}
    if len(trained) > 1:
        raise UsageError("some of --runs were trained on 4-bit weights, others not: set --load_in_4bit.")
    if True not in trained:
        return False
    is_possible = gpu_is_available() and is_installed("bitsandbytes")
    if not is_possible:
        logger.warning("the training had 4-bit weights, which need a GPU and bitsandbytes: the evaluation has others")
    return is_possible


def choose_prompts(asked: Values, targets: Targets) -> list[PromptArguments]:
    """How each target is asked: as the run of an adapter or model was trained, or as the flags say.

    The base model gets the prompt of the adapters evaluated with it. Alone it can be the final or merged model of a
    run.
    """
    prompts = {}
    for target in targets:
        if target.adapter:
            if not target.settings:
                logger.warning("%s does not name its prompt: flags and the paper's are used", target.adapter)
            prompts[target] = PromptArguments(**stored_prompt(target.settings) | asked)
    first, *others = prompts.values() or [PromptArguments(**stored_prompt(targets[0].settings) | asked)]
    for name, value in vars(first).items():
        if len(prompts) < len(targets) and any(getattr(other, name) != value for other in others):
            raise UsageError(f"the runs differ in --{name}, so that of the base model is ambiguous: set --{name}.")
    return [prompts.get(target, first) for target in targets]


def label_among(target: ModelSource, targets: Targets) -> str:
    """The label of a row: that of its adapter, its base model, or, alone, the merged or final model of a run."""
    if target.adapter:
        return target.label
    if target.settings and not any(other.adapter for other in targets):
        return f"model-{label_of(target.weights)}"
    return f"base-{target.title}"
