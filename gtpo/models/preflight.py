"""Checks of a GPU machine before anything is downloaded.

A train script runs them before it loads the model, ``--dry_run`` prints them, and so does

    python -m gtpo.models.preflight --model llama

for 4-bit weights, also before any package is installed: what needs a missing package is left out then.
"""

import argparse
import logging
import shutil
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from gtpo.arguments import Settings, hub_name
from gtpo.errors import UsageError
from gtpo.models.backend import check_compute_capability, check_driver, gpu_is_available, is_installed
from gtpo.models.hub import check_access, check_upload, may_need_access
from gtpo.processes import is_main_process, refuse_data_parallel
from gtpo.runs.script import run_script

logger = logging.getLogger(__name__)


class Check(NamedTuple):
    """The result of one check: ``fault`` is None, or the sentence; a fatal fault makes the run impossible."""

    name: str
    fault: str | None
    fatal: bool = True


def check_machine(settings: Settings, backend: str) -> None:
    """Run the checks before anything is downloaded: a fatal fault is raised, others are logged; not for a CPU."""
    if settings.run.dry_run:
        return
    if getattr(settings.trainer, "use_vllm", False) and not is_installed("vllm"):
        raise UsageError("--use_vllm needs vLLM: `pip install -r requirements.txt` on a GPU, or --use_vllm false.")
    found = list(checks(settings, backend))
    if found and backend == "transformers":  # Unsloth uses one GPU
        refuse_data_parallel(settings.trainer)
    for check in found:
        if check.fault and check.fatal:
            raise UsageError(check.fault)
        if check.fault and is_main_process():
            logger.warning("warning: %s", check.fault)
    if found and is_main_process():
        from gtpo.models.memory import gpu_memory, saved_in_16_bits

        if saved := saved_in_16_bits(settings, gpu_memory()):
            logger.warning("%s", saved)


def describe_dry_run(settings: Settings, backend: str, rows: int) -> str:
    """What ``--dry_run`` prints, as YAML: the checks, the plan and the changed settings; ``rows`` may be unknown, 0."""
    from gtpo.models.memory import describe_plan

    return "".join(f"# {line}\n" for line in _lines(checks(settings, backend))) + describe_plan(settings, rows)


def describe_first_row(settings: Settings, rows: Any) -> str:
    """For ``--dry_run``, as comments: the first prompt as rendered, and a completion of it with its scores."""
    from gtpo.data.load import scored_by
    from gtpo.data.preview import look
    from gtpo.models.load import load_tokenizer, resolve_model

    path = resolve_model(settings.model.model)
    if not rows.column_names or not rows[0]["prompt"]:
        return "# The rows are on the Hub, and a dry run does not read them.\n"
    try:
        tokenizer, _ = load_tokenizer(path, {"local_files_only": True}, settings.prompt)
    except UsageError:
        return f"# The tokenizer of {path} is not on this machine, so no prompt is shown.\n"
    row = rows[0]
    seen = look(tokenizer, row["prompt"], row.get("answer"), settings.prompt, scored_by(settings))
    return "".join(f"# {line}".rstrip() + "\n" for line in ["", *seen.lines()])


def checks(settings: Settings, backend: str) -> Iterator[Check]:
    """The checks of a run: the Hub for an upload; on a GPU driver, GPU, its memory and access to the model."""
    if settings.given.get("push_to_hub"):
        yield Check("upload", check_upload())
    if settings.to_dict()["use_cpu"] or not gpu_is_available():
        return
    import torch

    from gtpo.models.memory import GIB, estimate, known_shape, verdict

    yield from checks_of_machine()
    model = hub_name(settings.model.model)
    values = settings.to_dict()
    if shape := known_shape(model):
        free, total = (size / GIB for size in torch.cuda.mem_get_info())  # of this process's GPU
        if fault := verdict(shape, values, free, total):
            fault += f"; {free:.1f} of {total:.1f} GiB of GPU memory are free, `nvidia-smi` lists the processes."
        yield Check("GPU memory", fault, fatal=estimate(shape, values)["weights"] > free)
    if may_need_access(model):
        copy = backend == "unsloth" and settings.model.load_in_4bit
        yield Check("access to the model", check_access(model, copy), fatal=not copy)


def checks_of_machine() -> Iterator[Check]:
    """The checks that need neither a package nor the settings of a run, and those of PyTorch where it is installed."""
    yield Check("driver", check_driver())
    if is_installed("torch") and gpu_is_available():
        yield Check("compute capability", check_compute_capability())


def main() -> None:
    """Print the checks of a model in 4 bits; exit code 2 if the run is impossible."""
    parser = argparse.ArgumentParser(
        prog="python -m gtpo.models.preflight", description="Check a GPU machine before anything is downloaded."
    )
    parser.add_argument("--model", default="llama", help="llama, qwen, a Hub id or a local path.")
    model = hub_name(parser.parse_args().model)
    if not (shutil.which("nvidia-smi") or (is_installed("torch") and gpu_is_available())):
        raise UsageError("this machine has no NVIDIA GPU: run the checks on the machine that trains.")
    found = list(checks_of_machine())
    if is_installed("huggingface_hub") and may_need_access(model):
        found.append(Check("access to the model", check_access(model, copy=True), fatal=False))
    print("\n".join(_lines(found)))
    if any(check.fault and check.fatal for check in found):
        sys.exit(2)


def _lines(found: Iterable[Check]) -> list[str]:
    found = list(found)
    passed = ", ".join(check.name for check in found if not check.fault)
    faults = [f"{'error' if check.fatal else 'warning'}: {check.fault}" for check in found if check.fault]
    return [*([f"ok: {passed}"] if passed else []), *faults]


if __name__ == "__main__":
    run_script(main)
