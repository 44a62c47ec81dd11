"""Run a train script with its trainer's phases timed and their memory read: ``python timed_run.py train_gtpo.py ...``.

Writes ``phases.json`` into the run directory. Time and memory belong to the innermost phase, so the seconds of a step
add up to it. The device is synchronised at every change of phase.
"""

import json
import runpy
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[0] = str(ROOT)

from models import load_backend  # noqa: E402

load_backend(sys.argv[2:])  # before transformers, as in the script itself

import torch  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

import trainer  # noqa: E402

GIB = 2**30


class Phases:
    """Seconds of each step by phase; for each phase, memory (GiB) at its first start and its peak after step 1."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.seconds: Counter[str] = Counter()
        self.start: dict[str, float] = {}
        self.peak: dict[str, float] = {}
        self.open: list[str] = []
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
        if torch.cuda.is_available() and self.steps:
            self.start.setdefault(name, torch.cuda.memory_allocated() / GIB)

    def leave(self) -> None:
        self.account()
        self.open.pop()

    def account(self) -> None:
        """Give the time since the last change of phase to the phase that ends or is interrupted now."""
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self.open:
            name = self.open[-1]
            self.seconds[name] += now - self.since
            if on_gpu and self.steps:  # the first step warms up: kernels are compiled, caches are filled
                self.peak[name] = max(self.peak.get(name, 0.0), torch.cuda.max_memory_allocated() / GIB)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self.since = now


class StepPhases(TrainerCallback):
    """A step from its first micro-batch to its end, the optimizer in it; writes the file when training ends."""

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

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        report: dict[str, Any] = {"steps": self.phases.steps, "start": self.phases.start, "peak": self.phases.peak}
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            report["used_on_the_card"] = (total - free) / GIB  # by every process, CUDA itself and vLLM included
        (Path(args.output_dir) / "phases.json").write_text(json.dumps(report))


def timed(base: type) -> type:
    """The trainer class with its phases timed."""

    class Timed(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.phases = Phases()
            self.add_callback(StepPhases(self.phases))

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            with self.phases("scoring"):  # rewards, advantages, conflict mask; the reference model if there is one
                return super()._generate_and_score_completions(inputs)

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            with self.phases("generation"):
                return super()._generate_single_turn(*args, **kwargs)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            with self.phases("loss"):  # forward of the policy, and the head with its gradient
                return super().compute_loss(*args, **kwargs)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            with self.phases("backward"):  # what is left of it; with checkpointing the forward once more
                return super().training_step(*args, **kwargs)

    return Timed


if __name__ == "__main__":
    trainer.GTPOTrainer = timed(trainer.GTPOTrainer)  # type: ignore[misc]
    trainer.GRPOTrainer = timed(trainer.GRPOTrainer)  # type: ignore[misc]
    sys.argv = [str(ROOT / sys.argv[1]), *sys.argv[2:]]
    runpy.run_path(sys.argv[0], run_name="__main__")
