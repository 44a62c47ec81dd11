"""The experiment on a GPU that decides: does GRPO of LLaMA on GSM8K collapse in its first 1,500 steps, and GTPO not?

    python -m study collapse --scale paper --stage 1 --list     # GRPO, three seeds, 1,000 steps
    python -m study collapse --scale paper --stage 2 --gpus 0 1 # if two of three collapse: all four arms

The rate is constant after a warm-up of 37 steps. So the schedule does not depend on ``--max_steps``: a run of stage 1
stops at step 1,000, and stage 2 resumes it to 1,500 as if it had never stopped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gtpo.errors import UsageError
from gtpo.models.memory import hours_of_steps
from gtpo.runs.directory import RunDirectory
from paper.matrix import RUNS, Experiment, Matrix
from paper.results import Results, read_results
from paper.slurm import run_missing
from study.collapse import PAPER
from study.comparison import compare
from study.measures import SeedRuns, late

SEEDS, STEPS, GROUP, WINDOW = (3407, 1, 2), {1: 1000, 2: 1500}, 8, 100
MODELS = {"llama": ("llama", 1.0), "llama-1b": ("meta-llama/Llama-3.2-1B-Instruct", 0.2)}  # of LLaMA's hours: a guess
BETAS = {"adam0.9": ("0.9", "0.95"), "adam0.999999": ("0.999999", "0.999999")}
FIRST = ("grpo", "adam0.9")


@dataclass(frozen=True)
class Stage(Experiment):
    """A run that is finished at its last step; an earlier stage may have stopped before."""

    steps: int = 0

    @property
    def is_finished(self) -> bool:
        return self.run.is_finished and self.done >= self.steps

    @property
    def done(self) -> int:
        """The last logged step."""
        return int(self.run.read_metrics()[-1]["step"]) if self.run.metrics.is_file() else 0


def runs_of_stage(matrix: Matrix, stage: int, model: str) -> list[Stage]:
    """GRPO alone, or both objectives with both betas of Adam; the first seed of all before the second."""
    name, share = MODELS[model]
    arms = [FIRST] if stage == 1 else [(method, betas) for betas in BETAS for method in ("grpo", "gtpo")]
    usual, longest = (hours_of_steps(matrix["paper"], "llama", GROUP, tokens, share) for tokens in tokens_of(matrix))
    found = []
    for seed in SEEDS:
        for method, betas in arms:
            run = RunDirectory(RUNS / "paper" / f"{method}-first-{model}-{betas}-s{seed}")
            settings = {"config": f"configs/{method}/llama.yaml", "model": name, "dataset": "gsm8k", "G": GROUP}
            settings |= {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 37, "max_steps": STEPS[stage]}
            settings |= {"beta": "1e-6"} if method == "grpo" else {}
            settings |= dict(zip(("adam_beta1", "adam_beta2"), BETAS[betas], strict=True))
            flags = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
            argv = (f"train_{method}.py", *flags, "--seed", str(seed), "--output_dir", str(run.path))
            log = RUNS / "paper" / "logs" / f"{run.path.name}.log"
            of_run = Stage(run.path.name.rpartition("-s")[0], seed, "llama", argv, run, log, 0.0, steps=STEPS[stage])
            left = 0 if of_run.is_finished else STEPS[stage] - min(of_run.done, STEPS[stage])
            found.append(replace(of_run, cost=left * usual, collapsed=left * longest))
    return found


def tokens_of(matrix: Matrix) -> tuple[int, int]:
    """The longest completion of a step: usually, and after a collapse."""
    rates = matrix["paper"]
    return rates["longest_completion"]["gsm8k"][GROUP], rates["collapsed_completion"]


def hours_of_stage(matrix: Matrix, stage: int) -> tuple[int, float, float, float]:
    """Runs that a stage adds, and their GPU hours: the least, the most, and if all collapse from the first step on."""
    steps = len(SEEDS) * (STEPS[1] if stage == 1 else 4 * STEPS[2] - STEPS[1])
    usual, longest = (hours_of_steps(matrix["paper"], "llama", GROUP, tokens, steps) for tokens in tokens_of(matrix))
    return (1 if stage == 1 else 3) * len(SEEDS), usual / matrix["paper"]["speedup"]["llama"], usual, longest


def verdict(results: Results, runs: Sequence[Stage]) -> tuple[list[str], bool]:
    """A line per arm with its seeds that collapse; and whether so many of GRPO's do that stage 2 is called for."""
    lines, admitted = [], False
    formatting: dict[str, dict[int, float]] = {}
    for name in dict.fromkeys(run.name for run in runs):
        seeds = [seed for seed in SEEDS if (name, seed) in results.runs]
        found = [PAPER.judge(SeedRuns(results, seed, WINDOW), name) for seed in seeds]
        formatting[name] = {seed: late(results.curve(name, seed, "formatting")) for seed in seeds}
        lines.append(f"{name}: {sum(seed.is_lost for seed in found)} of {len(found)} seeds collapse")
        if (name.partition("-")[0], name.rpartition("-")[2]) == FIRST:
            admitted = PAPER.admits(found)
        if name.startswith("gtpo"):
            grpo = formatting[name.replace("gtpo", "grpo", 1)]
            row = compare([value - grpo[seed] for seed, value in formatting[name].items() if seed in grpo])
            if row["half_width"] is not None:
                lines.append(f"  minus GRPO: formatting {row['mean']:+.1f} ± {row['half_width']:.1f} points at the end")
    return lines, admitted


def run_stage(
    matrix: Matrix, stage: int, model: str, gpus: Sequence[str] | None, slurm: Sequence[str] | None
) -> tuple[list[str], list[str]]:
    """Do what is missing of a stage; the lines of the verdict, and a message for each failure."""
    runs = runs_of_stage(matrix, stage, model)
    if stage == 2 and not verdict(read_results([RUNS / "paper"]), runs_of_stage(matrix, 1, model))[1]:  # 50 GPU hours
        raise UsageError("--stage 2 is for the case that two of three seeds of GRPO collapse in --stage 1.")
    results, failures = run_missing("paper", runs, [], gpus=gpus, slurm=slurm)
    lines, admitted = verdict(results, runs)
    return [*lines, f"stage 2 is {'' if admitted else 'not '}called for (two of three seeds of GRPO)"], failures
