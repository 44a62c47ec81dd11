"""Run a train script and measure time and memory of its phases: ``python timed_run.py train_gtpo.py ...``.

With ``--library`` after ``train_grpo.py``, the trainer is that of TRL, or Unsloth's version of it, in place of ours.
Writes ``phases.json`` into the run directory after each step and, until the first one ends, at every change of phase: a
run that is stopped leaves the phase that it was in. Time and memory are assigned to the innermost phase, so the phases
of a step add up to its time. The device is synchronized at every change of phase.
"""

import json
import runpy
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[0] = str(ROOT)

from gtpo.cli.parse import load_backend_of, read_command_line  # noqa: E402
from gtpo.files import write_atomically  # noqa: E402
from gtpo.runs.script import log_to_stderr  # noqa: E402
from train_gtpo import SETTINGS  # noqa: E402

log_to_stderr()  # before Unsloth, which would set up the logs
if library := "--library" in sys.argv:
    sys.argv.remove("--library")
load_backend_of(read_command_line("gtpo", SETTINGS, sys.argv[2:]))  # before transformers is imported, as in the script

import torch  # noqa: E402
import trl  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from gtpo.training import trainer  # noqa: E402

GIB = 2**30


class Phases:
    """Seconds of each step by phase; peak memory of each phase in GiB, after step 1."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[dict[str, float]] = []
        self.seconds: dict[str, float] = defaultdict(float)
        self.peak: dict[str, float] = {}
        self.open: list[str] = []
        self.longest: list[int] = []  # tokens of the longest completion of each step
        self.since = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def enter(self, name: str) -> None:
        self.account()
        self.open.append(name)
        if not self.steps:
            self.write()

    def leave(self) -> None:
        self.account()
        self.open.pop()

    def write(self) -> None:
        """phases.json; ``open`` has the phases that have not ended, ``started`` the seconds of the unfinished step."""
        report: dict[str, Any] = {name: getattr(self, name) for name in ("steps", "longest", "peak", "open")}
        report["started"] = dict(self.seconds)
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            report["used_gib"] = (total - free) / GIB  # of all processes, with CUDA contexts and vLLM
        write_atomically(self.path, json.dumps(report))

    def account(self) -> None:
        """Add the time since the last change of phase to the innermost open phase."""
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self.open:
            name = self.open[-1]
            self.seconds[name] += now - self.since
            if on_gpu and self.steps:  # the first step is a warm-up: kernels are compiled, caches filled
                self.peak[name] = max(self.peak.get(name, 0.0), torch.cuda.max_memory_allocated() / GIB)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self.since = now


class StepPhases(TrainerCallback):
    """Phases of a step outside the trainer's methods; writes phases.json at its end."""

    def __init__(self, phases: Phases) -> None:
        self.phases = phases

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.phases.enter("other")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.phases.enter("optimizer")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.phases.leave()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.phases.leave()
        self.phases.steps.append(dict(self.phases.seconds))
        self.phases.seconds.clear()
        self.phases.write()


def timed(base: type) -> type:
    """The trainer class with timed phases."""

    class Timed(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.phases = Phases(Path(self.args.output_dir) / "phases.json")
            self.add_callback(StepPhases(self.phases))

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            with self.phases("scoring"):  # rewards, advantages, conflict mask, and the reference model if there is one
                return super()._generate_and_score_completions(inputs)

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            with self.phases("generation"):
                result = super()._generate_single_turn(*args, **kwargs)
            if self.model.training:  # not the measurement of the initial entropy
                self.phases.longest.append(max(map(len, result[0])))
            return result

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            with self.phases("loss"):  # forward of the policy, and the head with its gradient
                return super().compute_loss(*args, **kwargs)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            with self.phases("backward"):  # the rest of the step; with gradient checkpointing a second forward
                return super().training_step(*args, **kwargs)

    return Timed


class Library(trl.GRPOTrainer):
    """The library's own trainer with what the script asks of ours."""

    check_settings = staticmethod(lambda args: None)

    def __init__(self, *args: Any, settings: object = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


if __name__ == "__main__":
    trainer.GTPOTrainer = timed(trainer.GTPOTrainer)  # type: ignore[misc, assignment]
    trainer.GRPOTrainer = timed(Library if library else trainer.GRPOTrainer)  # type: ignore[misc, assignment]
    sys.argv = [str(ROOT / sys.argv[1]), *sys.argv[2:]]
    runpy.run_path(sys.argv[0], run_name="__main__")
