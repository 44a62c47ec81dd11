"""Where a run starts: anew, at the checkpoint of a run that is resumed, from the adapter of another one."""

import logging
import shlex
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from gtpo.arguments import ModelArguments, Values, name_of
from gtpo.cli.flags import Flags
from gtpo.errors import UsageError
from gtpo.files import read_yaml
from gtpo.models.source import ModelSource, model_source
from gtpo.runs.directory import REMOTE_SETTINGS, RunDirectory, existing_run, method_of, to_argv

logger = logging.getLogger(__name__)

TRUE = ["yes", "true", "t", "y", "1"]  # as HfArgumentParser
TEXTS = {"model", "dataset", "tags", "system_prompt", "chat_template", "output_dir", "run_name"}  # no list in a file


@dataclass(frozen=True)
class Start:
    """What decides how everything else is read, before TRL is imported.

    ``config`` is the file of ``--config``, else that of the resumed ``run``, with its ``settings``; ``of_run``: a run
    has stored it, perhaps a stranger's. ``use_cpu`` is None where neither file nor command line has it.
    """

    source: ModelSource
    backend: str
    use_cpu: bool | None
    dry_run: bool
    run: RunDirectory | None
    config: str | None
    settings: Values
    of_run: bool

    @property
    def stored(self) -> Values:
        """The settings of the run that is resumed, or from whose adapter the training starts, with its prompt."""
        if self.of_run:
            return self.settings
        return self.source.settings if self.source.adapter else {}


def find_start(method: str, flags: Flags) -> Start:
    """The run, the file of settings and the model that ``flags`` of :func:`gtpo.cli.flags.flags_on` name."""
    run = find_run(method, flags)
    config = flags.get("config")
    of_run = config is None and run is not None
    if config is not None:
        beside = RunDirectory(Path(config).parent)
        of_run = beside.is_ours and beside.config == Path(config)
    elif run:
        config = str(run.config)
    settings = {} if config is None else read_yaml(config)
    _check_texts(settings, config)
    _check_code(settings, config, flags)
    given = {name_of(name): value for name, value in {**settings, **flags}.items() if value is not None}
    objective = given.get("objective")
    if objective and method != "grpo":
        raise UsageError(f"train_{method}.py has its own objective: --objective {objective} is for train_grpo.py.")
    source = _source_of(given, is_new=run is None)
    backend = given.get("backend", ModelArguments.backend)
    use_cpu = _switch("use_cpu", flags, settings)
    dry_run = bool(_switch("dry_run", flags, {}))
    return Start(source, backend, use_cpu, dry_run, run, config, settings, of_run)


def _source_of(given: Values, is_new: bool) -> ModelSource:
    """What is trained: ``--model``, and of a new run ``--initial_adapter``; one that is resumed has its checkpoint."""
    model = given.get("model", ModelArguments.model)
    if not is_new or "initial_adapter" not in given:
        return model_source(model)
    source = model_source(given["initial_adapter"])
    return source.on(model_source(model)) if "model" in given else source


def _switch(name: str, flags: Flags, settings: Values) -> bool | None:
    """A setting that is true or false, of a command line, else of a file; None without it."""
    if name in flags:
        return (flags[name] or "yes").lower() in TRUE
    value = settings.get(name)
    return None if value is None else str(value).lower() in TRUE


def _check_texts(settings: Values, config: str | None) -> None:
    """Refuse a list where a file names one text."""
    for key, value in settings.items():
        if name_of(key) in TEXTS and isinstance(value, list | dict):
            raise UsageError(f"{config}: {key} is a {type(value).__name__}: expected one text.")


def _check_code(settings: Values, config: str | None, flags: Flags) -> None:
    """Refuse the code of a user that a file alone names: it may be a stranger's."""
    for name in sorted({"objective", "reward"} - flags.keys()):
        words = settings.get(name) or []
        if isinstance(words, str):
            words = [words]
        code = [word for word in words if word not in ("format", "accuracy")]
        if code:
            again = shlex.join([f"--{name}", *words])
            raise UsageError(f"{config} names the {name} {code[0]}: if you trust its code, add {again}.")


def find_run(method: str, flags: Flags) -> RunDirectory | None:
    """The run that ``--resume`` names; alone that of ``--output_dir``, or of ``--config``. None: a new run."""
    if "resume" not in flags:
        return None
    output_dir = flags.get("output_dir")
    name = flags["resume"]
    if name not in (None, "auto"):
        run = existing_run(str(name))
        if output_dir and run.path != Path(output_dir):
            raise UsageError(f"--resume {run.path} writes to that run: remove --output_dir {output_dir}.")
    elif output_dir:
        run = RunDirectory(output_dir)
        if not run.config.is_file():
            return None  # the same command again, before the run has begun
    elif flags.get("config"):
        return None
    else:
        raise UsageError("--resume names no run: add its directory, --resume outputs/RUN.")
    of = method_of(run)
    if of != method:
        raise UsageError(f"{run.path} is a run of train_{of}.py: --resume it with that script.")
    return run


def start_from(source: ModelSource, named: Set[str]) -> Values:
    """The shape of an adapter, which a run that starts from it takes over."""
    source.check_base()
    logger.warning("training starts from the adapter %s of %s", source.adapter, source.name)
    if not source.settings:
        logger.warning("%s does not name its prompt: flags and the paper's are used", source.adapter)
    modules = source.lora["target_modules"]
    shape = {"lora_rank": source.lora["r"], "lora_target_modules": modules if isinstance(modules, list) else [modules]}
    for name in named & shape.keys():
        raise UsageError(f"--{name} is that of the adapter {source.adapter}: remove it.")
    return shape | {"initial_adapter": str(source.adapter)}


def drop_remote_settings(stored: Values, plain: Values, named: Set[str], config: str) -> None:
    """Drop, in place, the settings of a run that send something elsewhere: they come from the command line."""
    left_out = {}
    for name in REMOTE_SETTINGS:
        if stored.get(name) not in (None, False, "none", plain.get(name)):
            value = stored.pop(name)
            if name not in named:
                left_out[name] = value
    if left_out:
        again = shlex.join(to_argv(left_out))
        if left_out.keys() & {"vllm_server_base_url", "vllm_server_host"}:
            raise UsageError(f"{config} names a vLLM server: if it is yours, add {again}.")
        logger.warning("not taken from %s: if the run is yours, add %s", config, again)
