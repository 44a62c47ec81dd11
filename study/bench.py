"""A comparison of objectives: its arms, bases, rates and seeds, and the runs and evaluations that it needs."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gtpo.arguments import GTPOArguments, fields_of
from gtpo.errors import UsageError, nearest
from gtpo.files import read_yaml
from gtpo.runs.directory import OUTPUTS, RunDirectory, to_argv
from paper.matrix import Evaluation, Experiment, load_matrix
from paper.matrix import experiment as of_matrix
from paper.results import GREEDY, Results
from study.comparison import best_of, rate_rows

EXPERIMENTS = Path(__file__).parent / "experiments.yaml"
RESULTS = Path("results")
OTHER_COLORS = ("#882255", "#000000", "#AA9900", "#117733")  # of a user's objectives


@cache
def read_experiments() -> dict[str, Any]:
    """study/experiments.yaml."""
    return read_yaml(EXPERIMENTS)


@dataclass(frozen=True)
class Arm:
    """An objective with its settings. ``name`` begins the names of its runs."""

    name: str
    label: str
    color: str
    method: str  # of the script that trains it
    settings: Mapping[str, Any]

    @property
    def own_settings(self) -> set[str]:
        """The settings that only some arms have: those of GTPO."""
        return {*fields_of([GTPOArguments])} if self.method == "gtpo" else set()


@dataclass(frozen=True)
class Base:
    """A model that every arm starts from; ``x`` is what differs between several, for a slope."""

    name: str
    settings: Mapping[str, Any]
    benchmark: str
    problems: int
    max_new_tokens: int
    minutes_per_100_steps: float
    seconds_per_sample: float
    first: str = ""  # a run of SmolLM2 that comes first
    with_measures: bool = True  # those of study.train
    x: float | None = None

    @property
    def benchmark_name(self) -> str:
        return Path(self.benchmark).stem

    @property
    def earlier(self) -> tuple[Experiment, ...]:
        """The run that makes the model."""
        return (of_matrix(load_matrix(), "smol", self.first, 1),) if self.first else ()


class Comparison:
    """What is compared, from the keys of study/experiments.yaml; a missing one has its default there.

    Attributes:
        arms: The first one is subtracted from the others.
        rates: Of several, each arm gets the one with the highest mean training accuracy in the last quarter, over the
            seeds ``rate_seeds``.
        settings: Of every arm that has them, over those of base and arm.
        primary: Planned differences, each a ``measure``; ``arms``: of these alone; ``slope``: over the bases' ``x``.
        window: Steps of the trailing mean.
        directory: Of the runs, and of page and figure.
        results: Of plan.md, and of the condensed runs of a planned comparison.
    """

    def __init__(self, name: str, spec: Mapping[str, Any], directory: Path | None = None) -> None:
        spec = {**read_experiments()["defaults"], **spec}
        self.name, self.title = name, str(spec.get("title", ""))
        self.arms = [arm_of(word, number) for number, word in enumerate(spec["arms"])]
        self.bases = bases_of(spec)
        self.seeds = numbers_of(spec.get("seeds") or [f"1-{spec['n_seeds']}"])
        self.rates: list[str] = spec["rates"]
        self.rate_seeds = numbers_of(spec.get("rate_seeds") or [f"{max(self.seeds) + 1}-{max(self.seeds) + 3}"])
        self.betas: list[float] = spec["betas"]
        self.steps = int(spec["steps"])
        self.settings = dict(spec.get("set") or {})
        if "reward" in spec:
            self.settings["reward"] = spec["reward"]
        self.primary: list[dict[str, Any]] = spec["primary"]
        self.measures: list[str] = [row["measure"] for row in self.primary]
        self.measures += [measure for measure in spec["measures"] if measure not in self.measures]
        self.window = min(50, max(1, self.steps // 6))
        self.directory = directory or OUTPUTS / "study" / (name or "compare")
        self.results = RESULTS / name if name else self.directory
        if len(self.rates) > 1 and {*self.seeds} & {*self.rate_seeds}:
            raise UsageError("--rate_seeds are among --seeds: a rate that was chosen on a seed is not compared on it.")

    def place(self, base: Base) -> Path:
        """Of the runs from a base; a directory each, because a run is known by its name and seed."""
        return self.directory / base.name

    def run(self, base: Base, arm: Arm, rate: str, seed: int) -> Experiment:
        """A training run: train_grpo.py or train_gtpo.py with the metrics of :mod:`study.train`."""
        name = f"{arm.name}-{rate}"
        path = self.place(base) / f"{name}-s{seed}"
        betas = dict(zip(("adam_beta1", "adam_beta2"), self.betas, strict=True))
        length = {"learning_rate": rate, "max_steps": self.steps, "save_steps": max(1, self.steps // 2)}
        settings = {**base.settings, **arm.settings, **betas, **length, **self._settings_of(arm)}
        words = [word.replace("{method}", arm.method) for word in to_argv(settings)]
        script = f"train_{arm.method}.py"
        module = ("-m", "study.train") if base.with_measures else ()
        argv = (*module, script, *words, "--seed", str(seed), "--output_dir", str(path))
        log = self.place(base) / "logs" / f"{path.name}.log"
        cost = base.minutes_per_100_steps * self.steps / 100
        return Experiment(name, seed, str(base.settings["model"]), argv, RunDirectory(path), log, cost, base.earlier)

    def _settings_of(self, arm: Arm) -> dict[str, Any]:
        """Those of ``settings`` that an arm has."""
        of_some = {name for other in self.arms for name in other.own_settings}
        return {name: value for name, value in self.settings.items() if name in arm.own_settings or name not in of_some}

    def evaluations(self, base: Base, runs: Sequence[Experiment]) -> list[Evaluation]:
        """Some runs from a base on held-out problems: four samples of each, and greedily."""
        found = []
        model, log = str(base.settings["model"]), self.place(base) / "logs" / "evaluate.log"
        for suffix, k, temperature in (("", 4, 1.0), (GREEDY, 1, 0.0)):
            directory = self.place(base) / f"evaluation{suffix}"
            words = ["--benchmarks", base.benchmark, "--k", k, "--temperature", temperature, "--limit", base.problems]
            words += ["--max_new_tokens", base.max_new_tokens, "--output_dir", directory]
            cost = k * base.problems * (len(runs) + 1) * base.seconds_per_sample / 60
            name, flags, log = base.benchmark_name + suffix, tuple(map(str, words)), log.with_stem(f"evaluate{suffix}")
            found.append(Evaluation(model, name, "last", tuple(runs), flags, directory, log, cost))
        return found

    def chosen_rates(self, base: Base, results: Results) -> dict[str, str]:
        """Arm -> its rate on a base; of several the best one, once all of its runs are there."""
        found = {}
        for arm in self.arms:
            names = {f"{arm.name}-{rate}": rate for rate in self.rates}
            rows = rate_rows(results, [*names], self.rate_seeds, self.window)
            best = best_of(rows, [*names], len(self.rate_seeds)) if len(names) > 1 else next(iter(names))
            if best:
                found[arm.name] = names[best]
        return found


# From names and flags


def arm_of(word: str, number: int) -> Arm:
    """An arm by its name in study/experiments.yaml, or of a user: ``my_objective.py:Mine``."""
    of_user = {"method": "grpo", "objective": word}
    spec = of_user if ":" in word else pick("arm", word, read_experiments()["arms"])
    settings = {key: value for key, value in spec.items() if key not in ("method", "label", "color")}
    name = word.replace("/", "-").replace(".py:", "-")
    color = OTHER_COLORS[number % len(OTHER_COLORS)]
    return Arm(name, spec.get("label", name), spec.get("color", color), spec["method"], settings)


def bases_of(spec: Mapping[str, Any]) -> list[Base]:
    """The bases of a comparison, by their names in study/experiments.yaml, or the paths of models."""
    known = read_experiments()["bases"]
    held_out = {"benchmark": spec.get("benchmark"), "problems": int(spec.get("problems", 0))}
    held_out = {key: value for key, value in held_out.items() if value}
    found = []
    for word in spec["base"]:
        is_path = Path(word).is_dir()
        of_word = known["wrong-mode"] if is_path else pick("base", word, known)
        settings = {**of_word["settings"], **({"model": word} if is_path else {})}
        found.append(Base(Path(word).name, **{**of_word, **held_out, "settings": settings}))
    return found


def pick(kind: str, word: str, known: Mapping[str, Any]) -> Any:
    """An entry of study/experiments.yaml by its name."""
    if word not in known:
        raise UsageError(f"{kind} {word!r} is unknown{nearest(word, known)}: pick from {', '.join(known)}.")
    return known[word]


def numbers_of(words: Sequence[Any]) -> list[int]:
    """Seeds: ``21 22 23``, or ``501-520``."""
    found: list[int] = []
    for word in words:
        first, _, last = str(word).partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def settings_of(pairs: Sequence[str]) -> dict[str, Any]:
    """``key=value`` of a command line; a value of several words is a list."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        words = shlex.split(value)
        found[key] = words if len(words) > 1 else value
    return found
