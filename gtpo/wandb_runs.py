"""wandb runs: that of a training run, and the results of evaluations in it. Offline without a login or a connection."""

import logging
import os
import re
import shlex
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gtpo.arguments import Settings
from gtpo.files import write_atomically
from gtpo.runs import RunDirectory

logger = logging.getLogger(__name__)


def start_wandb(settings: Settings) -> Any:
    """The wandb run of a training run, the same one when the run is resumed.

    Runs whose names differ in a last -s1, -s2, ... form one wandb group, so that a panel can show mean and spread.
    """
    method = settings.method.upper()
    return _open_run(
        RunDirectory(settings.output_dir),
        tags=[method, Path(settings.model.model).name, settings.data.dataset, f"seed {settings.trainer.seed}"],
        config={"method": method} | settings.to_dict(),
    )


def log_evaluations(entries: Sequence[Mapping[str, Any]], output_dir: Path) -> list[Path]:
    """Add the scores of evaluations to the wandb run of their training run: a table, and a summary of every score.

    An adapter outside a run and a base model have a wandb run of their own, in the directory of their completions.

    Args:
        entries: Entries of ``results.json``.
        output_dir: Where they are stored.

    Returns:
        The directories of the runs.
    """
    import wandb

    by_run: dict[Path, list[Mapping[str, Any]]] = {}
    for entry in entries:
        trained = RunDirectory(Path(entry["adapter"]).parent) if entry["adapter"] else None
        place = trained.path if trained and trained.config.is_file() else output_dir / entry["label"]
        by_run.setdefault(place, []).append(entry)
    for directory, scored in by_run.items():
        run = _open_run(RunDirectory(directory))
        table = wandb.Table(columns=list(_COLUMNS), data=[row for entry in scored for row in _rows(entry)])
        run.log({"evaluation/scores": table})
        run.summary.update({name: score for entry in scored for name, score in _summary(entry).items()})
        run.finish()
    return list(by_run)


_COLUMNS = ("benchmark", "checkpoint", "problems", "samples", "score", "k", "percent", "low", "high")


def _rows(entry: Mapping[str, Any]) -> list[list[Any]]:
    """The scores of an entry as rows of the table; only some have an interval."""
    about = [entry["benchmark"], entry["checkpoint"], entry["problems"], entry["k"]]
    rows = []
    for name, by_k in entry["scores"].items():
        for k, value in by_k.items() if isinstance(by_k, dict) else [(None, by_k)]:
            low, high = entry["intervals"].get(name, {}).get(k, (None, None))
            rows.append([*about, name, None if k is None else int(k), value, low, high])
    return rows


def _summary(entry: Mapping[str, Any]) -> dict[str, float]:
    """``evaluation/gsm8k/pass@8`` -> percent; other checkpoints than the last: ``evaluation/gsm8k@best/pass@8``."""
    suffix = "" if entry["checkpoint"] in (None, "last") else f"@{entry['checkpoint']}"
    return {
        f"evaluation/{entry['benchmark']}{suffix}/{name}" + ("" if k is None else f"@{k}"): value
        for *_, name, k, value, _, _ in _rows(entry)
    }


def _open_run(run_directory: RunDirectory, **options: Any) -> Any:
    """A wandb run with the name and id of a directory; offline without a login or a connection. It never prompts."""
    import wandb

    name, identity, mode = run_directory.path.name, run_directory.wandb_id, os.environ.get("WANDB_MODE")
    if not identity.is_file():
        write_atomically(identity, uuid.uuid4().hex[:8])
    options |= {
        "project": os.environ.get("WANDB_PROJECT", "gtpo"),
        "name": name,
        "id": identity.read_text(),
        "resume": "allow",
        "group": re.sub(r"-s(eed)?\d+$", "", name),
        "dir": str(run_directory.path),
        "settings": wandb.Settings(
            silent=True,
            finish_timeout=60,
            finish_timeout_raises=False,
            x_disable_meta=True,  # it contains the command line, possibly with a token; environment.json has the rest
        ),
    }
    run, reason = None, "not logged in"
    try:
        if mode is not None or wandb.login(prompt=False):
            run = wandb.init(mode=mode, **options)
    except wandb.Error as error:
        reason = str(error).rstrip(".")
        options["id"] = uuid.uuid4().hex[:8]  # the run that failed to start still holds the old id
        write_atomically(identity, str(options["id"]))
    if run is None:
        how_to_sync = f"`wandb sync {shlex.quote(str(run_directory.path / 'wandb'))}/offline-run-*` uploads it"
        logger.warning("wandb: %s, so this run is logged offline; %s.", reason, how_to_sync)
        run = wandb.init(mode="offline", **options)
    # TRL logs completions and timings in between, which advances wandb's own step: plot over the training step.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run
