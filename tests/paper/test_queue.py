"""The whole matrix of the paper in a simulated queue: jobs are preempted and killed."""

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import submitit
from fake_runs import write_checkpoint

from gtpo.paper import slurm as module
from gtpo.paper.matrix import Evaluation, evaluations_of, experiments_of, figure_names, load_matrix
from gtpo.paper.slurm import Cluster, run_jobs
from gtpo.runs.directory import RunDirectory

MATRIX = load_matrix()
STEPS = 3


class Preempted(BaseException):
    """SIGUSR2 in the middle of a script."""


class Killed(BaseException):
    """SIGKILL of a job."""


class Simulation:
    """Slurm and the scripts, in this process; one job after the other, in random order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.jobs: dict[str, SimulatedJob] = {}
        self.arrays = itertools.count(1)
        self.fails = ""  # label of a run
        self.completed: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.rest = 0.0  # chance that a step is preempted, or killed

    def tick(self, seconds: float) -> None:
        """Start one of the jobs that wait for no other."""
        ready = [
            job
            for job in self.jobs.values()
            if job.state == "PENDING" and all(self.jobs[other].done() for other in job.after)
        ]
        assert ready, "the command waits, and nothing is left to run"
        owners = Counter(job.function.work.label for job in self.jobs.values() if not job.done())
        assert set(owners.values()) == {1}
        self.run(self.random.choice(ready))

    def run(self, job: "SimulatedJob") -> None:
        try:
            job.result_value = job.function()
            job.state = "COMPLETED"
            job.paths.result_pickle.touch()
        except Preempted:
            self.events["preempted"] += 1
            job.function = job.function.checkpoint().function  # what submitit pickles before it requeues the job
        except Killed:
            self.events["killed"] += 1
            job.state = "NODE_FAIL"

    def hazard(self) -> None:
        luck = self.random.random()
        if luck < self.rest:
            raise Preempted
        if luck < 1.4 * self.rest:
            raise Killed


class SimulatedJob:
    """As much of submitit.SlurmJob as the command uses."""

    def __init__(self, job_id: str, function: Any, after: list[str], folder: Path) -> None:
        self.job_id, self.function, self.after, self.state = job_id, function, after, "PENDING"
        self.paths = SimpleNamespace(result_pickle=folder / f"{job_id}_0_result.pkl", stderr=folder / f"{job_id}.err")
        self.result_value: int | None = None

    def done(self) -> bool:
        return self.state != "PENDING"

    def exception(self) -> None:
        return None

    def result(self) -> int | None:
        return self.result_value


class Script:
    """A script in place of subprocess.Popen: three steps with a checkpoint after each, or the scores of runs."""

    simulation: Simulation
    pid = 2**22 + 1  # of no process

    def __init__(self, argv: list[str], **_: Any) -> None:
        self.argv = argv[1:]

    def __enter__(self) -> "Script":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def send_signal(self, number: int) -> None:
        pass

    def wait(self) -> int:
        script, *flags = self.argv
        if script == "evaluate.py":
            self.evaluate(flags)
        elif Path(flags[flags.index("--output_dir") + 1]).name == self.simulation.fails:
            return 3
        else:
            self.train(flags)
        return 0

    def train(self, flags: list[str]) -> None:
        run = RunDirectory(flags[flags.index("--output_dir") + 1])
        assert ("--resume" in flags) == run.has_checkpoint and not run.is_finished
        start = max([0, *(int(path.name.partition("-")[2]) for path in run.path.glob("checkpoint-*"))])
        for step in range(start + 1, STEPS + 1):
            self.simulation.hazard()
            write_checkpoint(run.checkpoint(step))
        run.adapter.mkdir()
        (run.adapter / "adapter_config.json").write_text("{}")
        self.simulation.completed[run.path.name] += 1

    def evaluate(self, flags: list[str]) -> None:
        runs = [Path(word) for word in flags[flags.index("--runs") + 1 :] if word != "base"]
        assert len({"qwen" in run.name for run in runs}) == 1
        for run in runs:
            self.simulation.hazard()
            label = "-".join(run.parts[1:]) + "@best" * (flags[flags.index("--checkpoint") + 1] == "best")
            scores = Path(flags[flags.index("--output_dir") + 1]) / label / f"{flags[1]}.json"
            assert RunDirectory(run).is_finished and not scores.exists()
            scores.parent.mkdir(parents=True, exist_ok=True)
            scores.write_text("{}")
            self.simulation.completed[str(scores)] += 1


@pytest.fixture
def simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Simulation:
    queue = Simulation(seed=0)

    class Executor:
        def __init__(self, folder: Path, cluster: str, **_: Any) -> None:
            self.folder, self.array, self.jobs = folder, next(queue.arrays), list[SimulatedJob]()
            folder.mkdir(parents=True, exist_ok=True)

        def update_parameters(self, slurm_dependency: str | None = None, **_: Any) -> None:
            self.after = slurm_dependency.removeprefix("afterany:").split(":") if slurm_dependency else []

        @contextlib.contextmanager
        def batch(self) -> Iterator[None]:
            yield
            queue.jobs |= {job.job_id: job for job in self.jobs}

        def submit(self, function: Any) -> SimulatedJob:
            self.jobs.append(SimulatedJob(f"{self.array}_{len(self.jobs)}", function, self.after, self.folder))
            return self.jobs[-1]

    monkeypatch.chdir(tmp_path)
    Script.simulation = queue
    monkeypatch.setattr("gtpo.paper.runner.subprocess.Popen", Script)
    monkeypatch.setattr(submitit, "AutoExecutor", Executor)
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=queue.tick))
    return queue


def matrix() -> tuple[list[Any], list[Evaluation]]:
    figures = figure_names(MATRIX)
    experiments = experiments_of(MATRIX, figures, "paper")
    return experiments, evaluations_of(MATRIX, figures, "paper", experiments)


@pytest.mark.slow
def test_every_run_and_evaluation_is_complete_once(simulation: Simulation) -> None:
    experiments, evaluations = matrix()
    simulation.rest = 0.15
    cluster, commands, messages = Cluster("slurm", None, {}, Path("jobs")), 0, ["not started"]
    while messages:
        commands += 1
        messages = run_jobs(experiments, evaluations, cluster)
        assert all("was killed in job" in message for message in messages)
    expected = {run.label for run in experiments}
    expected |= {str(work.result(run)) for work in evaluations for run in work.experiments}
    assert len(expected) == 107 + 84 * 4
    assert simulation.completed == dict.fromkeys(expected, 1)
    assert all(work.is_finished for work in [*experiments, *evaluations])
    assert commands > 1 and simulation.events["preempted"] > 50 and simulation.events["killed"] > 20
    submitted = len(simulation.jobs)
    assert run_jobs(experiments, evaluations, cluster) == [] and len(simulation.jobs) == submitted  # nothing is left


@pytest.mark.slow
def test_an_undisturbed_queue_needs_one_job_each_and_evaluations_wait_for_their_runs(simulation: Simulation) -> None:
    experiments, evaluations = matrix()
    assert run_jobs(experiments, evaluations, Cluster("slurm", None, {}, Path("jobs"))) == []
    assert len(simulation.jobs) == 107 + 15
    arrays = Counter(job_id.partition("_")[0] for job_id in simulation.jobs)
    assert arrays["1"] == 107 and sum(arrays.values()) - 107 == 15
    for job in simulation.jobs.values():
        needed = getattr(job.function.work, "experiments", ())
        assert {simulation.jobs[other].function.work for other in job.after} == set(needed)


@pytest.mark.slow
def test_a_run_that_fails_is_reported_and_the_others_are_evaluated(simulation: Simulation) -> None:
    experiments, evaluations = matrix()
    simulation.fails = "gtpo-qwen-math-g8-s1"
    cluster = Cluster("slurm", None, {}, Path("jobs"))
    (message,) = run_jobs(experiments, evaluations, cluster)
    log = "outputs/reproduce/paper/logs/gtpo-qwen-math-g8-s1.log"
    assert message.startswith(
        f"gtpo-qwen-math-g8-s1 failed with exit code 3, see {log}; the command was `python train_"
    )
    assert len(simulation.completed) == 106 + 83 * 4
    simulation.fails = ""
    assert run_jobs(experiments, evaluations, cluster) == []
    assert simulation.completed == dict.fromkeys(simulation.completed, 1) and len(simulation.completed) == 107 + 84 * 4
