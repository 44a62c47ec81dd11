"""The wandb run of a training run. Offline without a login or a connection."""

import logging
import os
import re
import shlex
import uuid
from pathlib import Path
from typing import Any

from gtpo.arguments import Settings, Values
from gtpo.files import remove, write_atomically
from gtpo.runs.directory import RunDirectory, run_label

logger = logging.getLogger(__name__)


def start_wandb(settings: Settings, run_directory: RunDirectory) -> Any:
    """The wandb run with the name and id of the run directory, the same one when the run is resumed. It never prompts.

    Runs whose names differ in a last -s1, -s2, ... form one wandb group, so that a panel can show mean and spread.
    """
    import wandb

    method = settings.method.upper()
    name = run_directory.path.name
    identity = run_directory.wandb_id
    mode = os.environ.get("WANDB_MODE")
    options: Values = {
        "tags": [method, Path(settings.model.model).name, settings.data.dataset, f"seed {settings.trainer.seed}"],
        "config": {"method": method} | settings.to_dict(),
        "project": os.environ.get("WANDB_PROJECT", "gtpo"),
        "name": name,
        "id": _stored_id(identity),
        "resume": "allow",
        "group": run_label(name)[0],
        "dir": str(run_directory.path),
        "settings": wandb.Settings(
            silent=True,
            use_dot_wandb=False,  # not .wandb/, which a stranger's run may have as a link
            finish_timeout=60,
            finish_timeout_raises=False,
            x_disable_meta=True,  # it contains the command line, possibly with a token; environment.json has the rest
        ),
    }
    run = None
    reason = "not logged in"
    try:
        if mode is not None or wandb.login(prompt=False):
            run = wandb.init(mode=mode, **options)
    except wandb.Error as error:
        reason = str(error).rstrip(".")
        options["id"] = _new_id(identity)  # the run that failed to start still holds the old one
    if run is None:
        how_to_sync = f"`wandb sync {shlex.quote(str(run_directory.wandb))}/offline-run-*` uploads it"
        logger.warning("wandb: %s, so this run is logged offline; %s.", reason, how_to_sync)
        run = wandb.init(mode="offline", **options)
    # TRL logs completions and timings in between, which advances wandb's own step: plot over the training step.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _stored_id(identity: Path) -> str:
    """The id of the wandb run of this directory; a new one where the file has none."""
    stored = identity.read_text(encoding="utf-8") if identity.is_file() and not identity.is_symlink() else ""
    if re.fullmatch("[0-9a-z]{8}", stored):  # of a stranger's run it could be a file of the user
        return stored
    remove(identity)
    return _new_id(identity)


def _new_id(identity: Path) -> str:
    new = uuid.uuid4().hex[:8]
    write_atomically(identity, new)
    return new
