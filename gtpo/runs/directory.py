"""The run directory: names of its files and their readers; its checkpoints, each with a list of its files."""

import hashlib
import json
import logging
import re
import shlex
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from gtpo.arguments import Values, hub_name, name_of
from gtpo.errors import UsageError, command_again
from gtpo.files import OUTPUTS, apply_umask, read_regular, read_yaml, remove, write_atomically

logger = logging.getLogger(__name__)

MANIFEST = "files.json"
LAST = "last"  # the final weights among the checkpoints of a run
BEST = "best"
MAY_CHANGE = read_yaml(Path(__file__).parent / "resume.yaml")  # why -> names of settings
REMOTE_SETTINGS = MAY_CHANGE["remote"]
ROWS = {"rows", "held_out"}  # of which environment.json has hashes
_NOT_TRAINED = {"prompts_per_step", "seed", "data_seed", *ROWS}
for _why in ("place", "saving", "remote", "logging", "evaluation", "batch", "machine"):
    _NOT_TRAINED |= {*MAY_CHANGE[_why]} - {"backend", "use_cpu", "use_vllm"}
BEFORE_STEPS = {  # what a run may have that failed before its first step
    "run.lock", "config.yaml", "environment.json", "prompts.bin", "initial_entropy.json", "completions", "wandb",
    "wandb_id",
}  # fmt: skip
FILES = {  # what a run directory may have: the files that show it
    "settings": ("config.yaml",),
    "metrics": ("metrics.jsonl",),
    "weights": ("adapter/adapter_config.json", "model/config.json"),
}


def run_label(label: str) -> tuple[str, int | None]:
    """Name and seed of a run: ``gtpo-g8-s2`` is gtpo-g8 with seed 2, ``gtpo-g8-s2@best`` is gtpo-g8@best.

    The seed is None without ``-sN``.
    """
    match = re.fullmatch(r"(.+)-s(\d+)(@.*)?", label)
    if match is None:
        return label, None
    name, seed, checkpoint = match.groups("")
    return name + checkpoint, int(seed)


def label_of(directory: Path) -> str:
    """The label of a run: its path below outputs/, joined with dashes; elsewhere the name of the directory."""
    directory = directory.resolve()
    root = OUTPUTS.resolve()
    if directory.name == "adapter":
        directory = directory.parent
    return "-".join(directory.relative_to(root).parts) if directory.is_relative_to(root) else directory.name


class RunDirectory:
    """The files of one training run, by its ``output_dir`` (docs/metrics.md, "The run directory")."""

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        self.lock = path / "run.lock"
        self.config = path / "config.yaml"  # every setting, resolved
        self.environment = path / "environment.json"  # versions, git revision, hardware
        self.initial_entropy = path / "initial_entropy.json"
        self.prompts = path / "prompts.bin"  # 8 bytes of a hash of each training prompt
        self.metrics = path / "metrics.jsonl"  # one JSON line per logged step
        self.completions = path / "completions"  # one parquet table per logged step
        self.report = path / "report.html"
        self.wandb = path / "wandb"
        self.wandb_id = path / "wandb_id"
        self.adapter = path / "adapter"  # the final one
        self.model = path / "model"  # the final model of a run that trained all weights
        self.best = path / "best"  # the adapter, or model, of the best evaluation on held-out rows or the best accuracy
        self.merged = path / "merged"  # base model and adapter as one standalone model

    def checkpoint(self, step: int | str) -> Path:
        return self.path / f"checkpoint-{step}"

    @property
    def is_ours(self) -> bool:
        """Whether a script of ours made the directory (gtpo/runs/start.py); a copy may lack the lock."""
        return self.lock.exists() or (self.config.is_file() and self.environment.is_file())

    @property
    def is_finished(self) -> bool:
        """Whether there are final weights; a run that is resumed with more steps has none until it ends again."""
        return has_weights(self.weights())

    @property
    def has_checkpoint(self) -> bool:  # complete when it was written
        return any(self.path.glob(f"checkpoint-*/{MANIFEST}"))

    @property
    def has_content(self) -> bool:
        """Whether there is more than a run leaves that failed before its first step."""
        names = {path.name.removesuffix(".tmp") for path in self.path.glob("*")}
        is_early = self.is_ours and names <= BEFORE_STEPS and not self.completion_tables()
        return bool(names) and not is_early

    def weights(self, checkpoint: str = LAST) -> Path:
        """Where the adapter or model of a checkpoint is: last, best or the number of a step."""
        last = self.model if has_weights(self.model) else self.adapter
        return {LAST: last, BEST: self.best}.get(checkpoint, self.checkpoint(checkpoint))

    def set_aside(self, step: int) -> None:
        """Rename the final weights to ``adapter-step-N``: the run goes on after this step."""
        for weights in (self.adapter, self.model, self.merged):
            if weights.exists():
                earlier = weights.with_name(f"{weights.name}-step-{step}")
                remove(earlier)
                weights.rename(earlier)

    def earlier_weights(self) -> list[Path]:
        """What :meth:`set_aside` renamed; the next end deletes it."""
        return [path for name in ("adapter", "model", "merged") for path in self.path.glob(f"{name}-step-*")]

    def completion_tables(self) -> list[Path]:
        """The logged completions, one parquet table per logged step, oldest first."""
        return sorted(self.completions.glob("*.parquet"))

    def read_config(self) -> Values:
        """The settings as stored, empty without the file; raises as :func:`read_yaml`."""
        return read_yaml(self.config) if self.config.exists() else {}

    def check_settings(self, expected: Values) -> None:
        """UsageError if the run has been made with other settings: it would be kept, and resumed, as it is."""
        stored = self.read_config()
        for name, value in expected.items():
            found = stored.get(name_of(name), value)
            if found != value:
                raise UsageError(
                    f"{self.path} was made with {name} {found}, which is {value} now: restore the configuration, or "
                    "move the run."
                )

    def read_environment(self) -> Values:
        """Versions, revision, hardware, and in ``made_from`` hashes of rows and rewards; empty without the file."""
        return _read_json(self.environment)

    def read_prompts(self) -> set[bytes]:
        """The hashes of the training prompts, of :func:`gtpo.runs.provenance.prompt_keys`; empty without the file."""
        stored = read_regular(self.prompts) if self.prompts.exists() else b""
        return {stored[start : start + 8] for start in range(0, len(stored), 8)}

    def read_metrics(self) -> list[Values]:
        """The lines of ``metrics.jsonl``, oldest first; a last line truncated by a kill is skipped.

        If a step was logged twice, the last line counts.
        """
        rows: dict[Any, Values] = {}  # by step and kind: training, or an evaluation on held-out rows
        for line in read_regular(self.metrics).split(b"\n")[:-1]:
            row = dict(json.loads(line))
            rows[row.get("step"), is_held_out(row)] = row
        if not rows:
            raise UsageError(f"{self.metrics} is empty: the run has not logged a step yet.")
        return list(rows.values())

    def read_best(self) -> Values:
        """``best/best.json``: step and metric of the best adapter, ``accuracy`` or a held-out one; empty without it."""
        return _read_json(self.best / "best.json")


def is_held_out(metrics: Values) -> bool:
    """Whether a line of the metrics is that of an evaluation on held-out rows; the others are of training steps."""
    return "eval_runtime" in metrics


def _read_json(path: Path) -> Values:
    return dict(json.loads(read_regular(path))) if path.is_file() else {}


def run_around(weights: str | Path) -> RunDirectory:
    """The run that an adapter, a model or a checkpoint lies in; of others a directory without its files."""
    return RunDirectory(Path(weights).parent)


def find_runs(directories: Iterable[Path], having: str = "settings") -> list[RunDirectory]:
    """The runs below some directories that have a key of ``FILES``, least recently written first."""
    written = {}
    for directory in directories:
        for name in FILES[having]:
            for path in directory.rglob(name):
                written[path.parents[name.count("/")]] = path.stat().st_mtime
    return [RunDirectory(path) for path in sorted(written, key=written.__getitem__)]


def own_runs(having: str = "settings") -> list[RunDirectory]:
    """The runs below outputs/ as :func:`find_runs`, without those of ``reproduce.py`` and of the study."""
    studies = {OUTPUTS / "reproduce", OUTPUTS / "study"}
    return [run for run in find_runs([OUTPUTS], having) if not studies & {*run.path.parents}]


def existing_run(path: str | Path, having: str = "settings") -> RunDirectory:
    """The run in a directory that has a key of ``FILES``; UsageError, which says what is there instead."""
    run = RunDirectory(path)
    [name] = FILES[having]
    if not (run.path / name).is_file():
        raise _not_a_run(run.path, f"a run with {name}")
    return run


def find_weights(path: str | Path, checkpoint: str = LAST, as_model: bool = False) -> Path:
    """The directory of the adapter or model of a run at a checkpoint: last, best or the number of a step.

    UsageError if it does not exist: the runs below the directory, the checkpoints, or how the run can go on.
    ``as_model``: the directory is named by ``--model``.
    """
    run = RunDirectory(path)
    weights = run.weights(checkpoint)
    if has_weights(weights):
        return weights
    steps = _steps(run)
    if not (run.is_ours or steps or run.is_finished):
        raise _not_a_run(run.path, "a model or a run")
    if checkpoint != LAST:
        known = [name for name in (*map(str, steps), BEST, LAST) if has_weights(run.weights(name))]
        raise UsageError(f"{path} has no checkpoint {checkpoint}: pick one of {', '.join(known) or 'none'}.")
    state = "is not finished"
    for earlier in run.earlier_weights()[:1]:
        state += f" ({earlier} is from before it was resumed)"
    if not steps:
        raise UsageError(f"{path} {state} and has no checkpoint: start it again with `--overwrite`.")
    newest = f"--model {run.checkpoint(steps[-1])}" if as_model else f"--checkpoint {steps[-1]}"
    raise UsageError(f"{path} {state}: {'`--resume` it, or ' if run.is_ours else ''}take `{newest}`.")


def has_weights(directory: Path) -> bool:
    """Whether a directory has an adapter or a model."""
    return is_adapter(directory) or (directory / "config.json").is_file()


def is_adapter(directory: Path) -> bool:
    return (directory / "adapter_config.json").is_file()


def _steps(run: RunDirectory) -> list[int]:
    """The steps of the checkpoints with weights; of a script of ours only complete ones."""
    found = filter(has_weights, sorted_checkpoints(run.path))
    return [step_of(path) for path in found if not run.is_ours or (path / MANIFEST).is_file()]


def _not_a_run(path: Path, expected: str) -> UsageError:
    """Names the newest runs below the directory, or below outputs/."""
    below = [run for run in find_runs([path]) if run.path != path]
    newest = ", ".join(str(run.path) for run in (below or own_runs())[-3:])
    return UsageError(f"{path} is not {expected}; the newest runs: {newest or 'none'}.")


def method_of(run: RunDirectory) -> str | None:
    """gtpo, grpo or sft, by the settings of a run; None if they are not those of a run."""
    settings = run.read_config()
    if "model" not in settings:
        return None
    return "gtpo" if "gamma" in settings else "grpo" if "num_generations" in settings else "sft"


def completions_of_step(settings: Values, environment: Values) -> int:
    """Completions of an optimizer step, in all processes, of a stored run; 0 if it is not known."""
    completions = settings.get("per_device_train_batch_size", 0) * settings.get("gradient_accumulation_steps", 1)
    return int(completions * environment.get("world_size", 1))


def completions_of_generation(settings: Values, of_step: int) -> int:
    """Completions that are sampled at once, in all processes, by the settings as stored; ``of_step``: of a step."""
    steps = settings.get("steps_per_generation") or settings.get("gradient_accumulation_steps", 1)
    accumulation = settings.get("gradient_accumulation_steps", 1)
    return int(settings.get("generation_batch_size") or of_step * steps // accumulation)


def trained_differently(runs: Iterable[RunDirectory], ignored: Collection[str] = ()) -> str:
    """The settings in which some runs differ besides their seed, with their values; not those in ``ignored``.

    ``method`` is one of them, and the file of each reward. Machine and micro-batches do not count, the size of a step
    does. Empty if nothing differs, or is not known.
    """
    stored = []
    for run in runs:
        settings = run.read_config()
        if "model" in settings:
            environment = run.read_environment()
            settings |= environment.get("made_from", {})
            settings["method"] = method_of(run)
            settings["completions of a step"] = completions_of_step(settings, environment)
            stored.append(settings)
    common = set.intersection(*map(set, stored)) if stored else set()
    texts = []
    for name in sorted(common - _NOT_TRAINED - {*ignored}):
        values = dict.fromkeys(hub_name(str(settings[name])) for settings in stored)
        if len(values) > 1:
            texts.append(f"{name} ({', '.join(values)})")
    return ", ".join(texts)


def check_seeds(runs: Iterable[tuple[str, int, RunDirectory]]) -> None:
    """Log what is not one run per name and seed: two directories of one, and seeds of a name with other settings."""
    by_name: dict[str, dict[int, RunDirectory]] = {}
    for name, seed, run in runs:
        seeds = by_name.setdefault(name, {})
        other = seeds.setdefault(seed, run).path
        if other.resolve() != run.path.resolve():
            logger.warning("%s and %s have one name and seed: the newer results are used", other, run.path)
        seeds[seed] = run
    for name, seeds in by_name.items():
        if differing := trained_differently(seeds.values()):
            logger.warning("the runs of %s are not seeds of one: they differ in %s", name, differing)


def to_argv(settings: Values) -> list[str]:
    """Settings as the words of a command line."""
    words: list[str] = []
    for name, value in settings.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name}", *(v if isinstance(v, str) else json.dumps(v) for v in values)]
    return words


def command_of(run: RunDirectory, *flags: str) -> str:
    """A command for the script of a run; it names the user's code and where the run sends something."""
    if not run.config.is_file():  # of another program that uses the trainer
        return shlex.join(flags)
    script = f"train_{method_of(run)}.py"
    settings = run.read_config()
    nowhere = (None, False, "none", "0.0.0.0")  # the host that TRL takes by default
    again = {name: settings[name] for name in (*REMOTE_SETTINGS, "objective") if settings.get(name) not in nowhere}
    if ":" in "".join(settings.get("reward", [])):
        again["reward"] = settings["reward"]
    if Path(sys.argv[0]).name == script:
        script = sys.argv[0]
    return shlex.join(["python", script, *flags, *to_argv(again)])


def how_to_continue(run: RunDirectory | None, *flags: str) -> str:
    """The command after a run has stopped: ``--resume`` with more flags, or the same one again if none has begun."""
    if run and not (run.lock.exists() or run.config.exists()):  # of a library script, which has no flags
        return "start again, or from a checkpoint"
    if run and run.has_checkpoint:
        return command_of(run, "--resume", str(run.path), *flags)
    replaces = run and run.has_content and "--overwrite" not in sys.argv
    return command_again(*["--overwrite"] if replaces else [])


def write_manifest(checkpoint: Path) -> None:
    """List the files of a checkpoint with their sizes and hashes, once all are written."""
    apply_umask(checkpoint)
    paths = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST]
    files = {str(path.relative_to(checkpoint)): [path.stat().st_size, _hash_of(path)] for path in paths}
    write_atomically(checkpoint / MANIFEST, json.dumps(files, sort_keys=True).replace("], ", "],\n "))


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damage(checkpoint: Path, contents: bool = True) -> str | None:
    """Which file of its manifest a checkpoint, or best/, lacks; None if it is complete.

    Without ``contents`` the sizes count alone, as in a manifest of an earlier revision, which has no hashes of these.
    """
    try:
        files = dict(json.loads(read_regular(checkpoint / MANIFEST)))
    except (OSError, ValueError, TypeError):
        return f"{MANIFEST} is missing or unreadable"
    for name, stored in files.items():
        size, digest = stored if isinstance(stored, list) else (stored, None)
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if isinstance(size, int) and path.stat().st_size != size:  # version 0.1.0 has hashes of other contents
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if contents and digest and _hash_of(path) != digest:
            return f"{name} is not as it was written"
    return None if files else f"{MANIFEST} is empty"


def sorted_checkpoints(run: Path) -> list[Path]:
    """The checkpoint directories of a run, oldest step first, complete or not."""
    return sorted((path for path in run.glob("checkpoint-*") if step_of(path) >= 0), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint; -1 for another directory."""
    step = checkpoint.name.removeprefix("checkpoint-")
    return int(step) if step.isdecimal() else -1


def latest_complete(run: Path) -> Path | None:
    """The newest complete checkpoint of a run; newer ones are skipped with a warning that names the damage."""
    for checkpoint in reversed(sorted_checkpoints(run)):
        reason = damage(checkpoint)
        if reason is None:
            return checkpoint
        logger.warning("%s is incomplete or damaged (%s) and is skipped", checkpoint, reason)
    return None


def steps_are_done(checkpoint: Path, max_steps: int) -> bool:
    """Whether a run has no step left after a complete checkpoint; ``max_steps`` is below 1 for whole epochs."""
    state = json.loads((checkpoint / "trainer_state.json").read_bytes())
    return state["global_step"] >= (max_steps if max_steps > 0 else state["max_steps"])


def rotate(run: Path, limit: int) -> None:
    """Delete the checkpoints before the ``limit`` newest complete ones, and damaged ones among these.

    The age is the step of the name: file times are those of a copy, or of a clock that was set back.
    """
    kept = 0
    for checkpoint in reversed(sorted_checkpoints(run)):
        if kept < limit and damage(checkpoint, contents=False) is None:
            kept += 1
        elif kept:  # nothing is deleted before a complete one is found
            delete(checkpoint)


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint, its manifest first: killed in between, it is incomplete and not resumed."""
    if checkpoint.is_dir() and not checkpoint.is_symlink():
        (checkpoint / MANIFEST).unlink(missing_ok=True)
    remove(checkpoint)
