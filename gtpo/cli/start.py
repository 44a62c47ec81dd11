"""Where a run starts: anew, at the checkpoint of a run that is resumed, from the adapter of another one."""

import logging
import shlex
from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gtpo.arguments import NOT_STORED, ModelArguments, Values, read_texts, stored_prompt
from gtpo.cli.derive import Earlier
from gtpo.cli.flags import Given, SettingsParser, has_late
from gtpo.errors import UsageError
from gtpo.files import read_yaml
from gtpo.models.source import ModelSource, model_source
from gtpo.processes import world_size
from gtpo.runs.directory import REMOTE_SETTINGS, RunDirectory, completions_of_step, existing_run, method_of, to_argv

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """What decides how everything else is read, before TRL is imported.

    Attributes:
        source: The model.
        run: The run that is resumed.
        config: The file of ``--config``, else that of the run.
        stored: What the file has, as YAML has it.
        file: The same, read, with the prompt of a run that is resumed, or from whose adapter the training starts.
        of_run: Whether a run has stored it, perhaps a stranger's.
        is_complete: Whether a run has stored every setting, or the file is a copy of such a one.
    """

    source: ModelSource
    run: RunDirectory | None
    config: str | None
    stored: Values
    file: Given
    of_run: bool
    is_complete: bool

    @cached_property
    def earlier(self) -> Earlier | None:
        """The run that is resumed, as its batches were."""
        if self.run is None:
            return None
        settings = self.run.read_config()
        processes = int(self.run.read_environment().get("world_size", world_size()))
        completions = completions_of_step(settings, {"world_size": processes})
        return Earlier(self.run.path, settings, completions, processes)


def find_start(method: str, parser: SettingsParser, given: Given) -> Start:
    """The run, the file of settings and the model that a command line names."""
    named = given.values
    run = find_run(method, named)
    config = named.get("config")
    of_run = config is None and run is not None
    if config is not None:
        beside = RunDirectory(Path(config).parent)
        of_run = beside.is_ours and beside.config == Path(config)
    elif run:
        config = str(run.config)
    stored = {} if config is None else read_yaml(config)
    _check_code(stored, config, given.names)
    with_late = has_late([*given.names, *(name for name, value in stored.items() if value is not None)])
    file = parser.read_file(config, stored, with_late)
    source = _source_of(file.values | named, is_new=run is None)
    saved = stored if of_run else source.settings if source.adapter else {}
    prompt = {name: value for name, value in stored_prompt(saved).items() if name not in named}
    ours = {name: value for name, value in file.values.items() if name not in {*named, *prompt}}
    file.values.update(read_texts(ours) | prompt)
    is_complete = parser.settings.keys() - NOT_STORED <= stored.keys()
    return Start(source, run, config, stored, file, of_run, is_complete)


def _source_of(given: Values, is_new: bool) -> ModelSource:
    """What is trained: ``--model``, and of a new run ``--initial_adapter``; one that is resumed has its checkpoint."""
    model = given.get("model", ModelArguments.model)
    if not is_new or "initial_adapter" not in given:
        return model_source(model)
    source = model_source(given["initial_adapter"])
    return source.on(model_source(model)) if "model" in given else source


def _check_code(stored: Values, config: str | None, named: Set[str]) -> None:
    """Refuse the code of a user that a file alone names: it may be a stranger's."""
    for name in sorted({"objective", "reward"} - named):
        words = stored.get(name) or []
        if isinstance(words, str):
            words = [words]
        code = [str(word) for word in words if word not in ("format", "accuracy")]
        if code:
            again = shlex.join([f"--{name}", *map(str, words)])
            raise UsageError(f"{config} names the {name} {code[0]}: if you trust its code, add {again}.")


def find_run(method: str, named: Values) -> RunDirectory | None:
    """The run that ``--resume`` names; alone that of ``--output_dir``, or of ``--config``. None: a new run."""
    if "resume" not in named:
        return None
    output_dir = named.get("output_dir")
    name = named["resume"]
    if name != "auto":
        run = existing_run(str(name))
        if output_dir and run.path != Path(output_dir):
            raise UsageError(f"--resume {run.path} writes to that run: remove --output_dir {output_dir}.")
    elif output_dir:
        run = RunDirectory(output_dir)
        if not run.config.is_file():
            return None  # the same command again, before the run has begun
    elif named.get("config"):
        return None
    else:
        raise UsageError("--resume names no run: add its directory, --resume outputs/RUN.")
    of = method_of(run)
    if of != method:
        raise UsageError(f"{run.path} is a run of train_{of}.py: --resume it with that script.")
    return run


def shape_of_adapter(source: ModelSource) -> Values:
    """The shape of an adapter, which a run that starts from it takes over."""
    source.check_base()
    logger.warning("training starts from the adapter %s of %s", source.adapter, source.name)
    if not source.settings:
        logger.warning("%s does not name its prompt: flags and the paper's are used", source.adapter)
    modules = source.lora["target_modules"]
    shape = {"lora_rank": source.lora["r"], "lora_target_modules": modules if isinstance(modules, list) else [modules]}
    return shape | {"initial_adapter": str(source.adapter)}


def without_remote_settings(file: Values, plain: Values, named: Set[str], config: str | None) -> Values:
    """What a run has stored, without the settings that send something elsewhere: they come from the command line."""
    sent = {name for name in REMOTE_SETTINGS if file.get(name) not in (None, False, "none", plain.get(name))}
    if left_out := {name: file[name] for name in REMOTE_SETTINGS if name in sent - named}:
        again = shlex.join(to_argv(left_out))
        if left_out.keys() & {"vllm_server_base_url", "vllm_server_host"}:
            raise UsageError(f"{config} names a vLLM server: if it is yours, add {again}.")
        logger.warning("not taken from %s: if the run is yours, add %s", config, again)
    return {name: value for name, value in file.items() if name not in sent}
