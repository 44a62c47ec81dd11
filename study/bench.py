"""A comparison of objectives: its arms, bases, rates and seeds, and the runs and evaluations that it needs."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from gtpo.arguments import GTPOArguments, fields_of, name_of
from gtpo.cli.flags import annotations_of
from gtpo.errors import UsageError, nearest
from gtpo.files import read_yaml
from gtpo.grading.user_functions import import_named
from gtpo.runs.directory import OUTPUTS, RunDirectory, to_argv
from paper.matrix import Evaluation, Experiment
from paper.results import GREEDY, Results
from study import SETTINGS
from study.comparison import best_of, rate_rows

EXPERIMENTS = Path(__file__).parent / "experiments.yaml"
RESULTS = Path("results")
OTHER_COLORS = ("#882255", "#000000", "#AA9900", "#117733")  # of a user's objectives


@cache
def read_experiments() -> dict[str, Any]:
    """study/experiments.yaml."""
    return read_yaml(EXPERIMENTS)


def known_comparisons() -> dict[str, Any]:
    """Name -> the keys of the comparisons of study/experiments.yaml; two families were an admission without arms."""
    experiments = read_experiments()
    every = experiments["comparisons"] | experiments["stored"]
    return {name: spec for name, spec in every.items() if spec["arms"]}


@dataclass(frozen=True)
class Arm:
    """An objective with its settings.

    Attributes:
        method: Of the script that trains it.
        runs: The names of its runs, with {rate}.
    """

    name: str
    label: str
    color: str
    method: str
    settings: Mapping[str, Any]
    runs: str

    def run_name(self, rate: str | None) -> str:
        return self.runs.format(rate=rate)

    def has(self, key: str) -> bool:
        """Whether it has a setting that not every arm has: one of GTPO, or of a user's ``Settings``."""
        if key in fields_of([GTPOArguments]):
            return self.method == "gtpo"
        objective = self.settings.get("objective")
        if objective is None:
            return False
        own: Any = getattr(import_named(objective, {}, "objective"), "Settings", object)
        return own is not object and key in fields_of([own])


@dataclass(frozen=True)
class Base:
    """A model that every arm starts from.

    Attributes:
        first: Settings of train_sft.py, which makes the model; empty if it is there.
        with_measures: Whether the metrics of :mod:`study.train` are logged.
        x: What differs between several bases, for a slope.
    """

    name: str
    settings: Mapping[str, Any]
    benchmark: str
    problems: int
    max_new_tokens: int
    minutes_per_100_steps: float
    seconds_per_sample: float
    first: Mapping[str, Any] = field(default_factory=dict)
    with_measures: bool = True
    x: float | None = None

    @property
    def benchmark_name(self) -> str:
        return Path(self.benchmark).stem

    @property
    def model(self) -> str:
        return str(self.settings["model"])

    @property
    def earlier(self) -> tuple[Experiment, ...]:
        """The run that makes the model."""
        if not self.first:
            return ()
        run = RunDirectory(Path(self.first["output_dir"]))
        argv = ("train_sft.py", *to_argv(self.first))
        log = run.path.parent / "logs" / f"{run.path.name}.log"
        minutes = self.minutes_per_100_steps * self.first["max_steps"] / 100
        return (Experiment("sft-warm-start", self.first["seed"], self.model, argv, run, log, minutes),)


class Comparison:
    """What is compared, from the keys of study/experiments.yaml; a missing one has its default there.

    Attributes:
        arms: The first one is subtracted from the others.
        rates: Of several, each arm gets the one with the highest mean training accuracy in the last quarter, over the
            seeds ``rate_seeds``.
        settings: Arm -> those that it has, over those of base and arm.
        primary: Planned differences, each a ``measure``; ``arms``: of these alone; ``slope``: over the bases' ``x``.
        labels: Name in a table -> measure.
        window: Steps of the trailing mean.
        directory: Of the runs, and of page and figure.
        results: Of plan.md, and of the condensed runs of a planned comparison; several share it if ``is_shared``.
    """

    def __init__(self, name: str, spec: Mapping[str, Any], directory: Path | None = None) -> None:
        spec = {**read_experiments()["defaults"], **spec}
        self.name = name
        self.title = str(spec.get("title", ""))
        self.arms = arms_of(spec["arms"])
        self.bases = bases_of(spec)
        self.seeds = numbers_of(spec.get("seeds") or [f"1-{spec['n_seeds']}"])
        self.rates: list[str] = spec["rates"]
        after = max(self.seeds)
        self.rate_seeds = numbers_of(spec.get("rate_seeds") or [f"{after + 1}-{after + 3}"])
        if len(self.rates) > 1 and {*self.seeds} & {*self.rate_seeds}:
            raise UsageError("--rate_seeds are among --seeds: a rate that was chosen on a seed is not compared on it.")
        self.betas: list[float] = spec["betas"]
        self.steps = int(spec["steps"])
        self.settings = dict(spec.get("set") or {})
        if "reward" in spec:
            self.settings["reward"] = spec["reward"]
        self.settings_of = settings_by_arm(self.arms, self.settings)
        self.primary: list[dict[str, Any]] = spec["primary"]
        measures = spec["measures"]
        self.labels: dict[str, str] = measures if isinstance(measures, dict) else {text: text for text in measures}
        primary = [row["measure"] for row in self.primary]
        self.measures = list(dict.fromkeys([*primary, *self.labels.values()]))
        self.window: int = spec.get("window") or min(50, max(1, self.steps // 6))
        self.directory = directory or OUTPUTS / "study" / (name or "compare")
        self.is_shared = "results" in spec
        self.results = RESULTS / spec.get("results", name) if name else self.directory

    def place(self, base: Base) -> Path:
        """Of the runs from a base; a directory each, because a run is known by its name and seed."""
        return self.directory / base.name

    def stored(self, base: Base) -> Path:
        """Of the condensed runs from a base."""
        return self.results if self.is_shared else self.results / base.name

    def run(self, base: Base, arm: Arm, rate: str, seed: int) -> Experiment:
        """A training run: train_grpo.py or train_gtpo.py with the metrics of :mod:`study.train`."""
        name = arm.run_name(rate)
        path = self.place(base) / f"{name}-s{seed}"
        length = {"learning_rate": rate, "max_steps": self.steps, "save_steps": max(1, self.steps // 2)}
        betas = dict(zip(("adam_beta1", "adam_beta2"), self.betas, strict=True))
        settings = {**base.settings, **arm.settings, **betas, **length, **self.settings_of[arm.name]}
        words = [word.replace("{method}", arm.method) for word in to_argv(settings)]
        module = ("-m", "study.train") if base.with_measures else ()
        script = f"train_{arm.method}.py"
        argv = (*module, script, *words, "--seed", str(seed), "--output_dir", str(path))
        log = self.place(base) / "logs" / f"{path.name}.log"
        cost = base.minutes_per_100_steps * self.steps / 100
        return Experiment(name, seed, base.model, argv, RunDirectory(path), log, cost, base.earlier)

    def evaluations(self, base: Base, runs: Sequence[Experiment]) -> list[Evaluation]:
        """Some runs from a base on held-out problems: four samples of each, and greedily."""
        found = []
        for suffix, k, temperature in (("", 4, 1.0), (GREEDY, 1, 0.0)):
            directory = self.place(base) / f"evaluation{suffix}"
            sampling = {"benchmarks": base.benchmark, "k": k, "temperature": temperature, "limit": base.problems}
            sampling |= {"max_new_tokens": base.max_new_tokens, "output_dir": str(directory)}
            flags = tuple(to_argv(sampling))
            log = self.place(base) / "logs" / f"evaluate{suffix}.log"
            samples = k * base.problems * (len(runs) + 1)
            cost = samples * base.seconds_per_sample / 60
            name = base.benchmark_name + suffix
            found.append(Evaluation(base.model, name, "last", tuple(runs), flags, directory, log, cost))
        return found

    def chosen_rates(self, base: Base, results: Results) -> dict[str, str]:
        """Arm -> its rate on a base; of several the best one, once all of its runs are there."""
        if len(self.rates) == 1:
            return {arm.name: self.rates[0] for arm in self.arms}
        found = {}
        for arm in self.arms:
            names = {arm.run_name(rate): rate for rate in self.rates}
            rows = rate_rows(results, [*names], self.rate_seeds, self.window)
            best = best_of(rows, [*names], len(self.rate_seeds))
            if best:
                found[arm.name] = names[best]
        return found


# From names and flags


def arms_of(words: Sequence[str] | Mapping[str, str]) -> list[Arm]:
    """Arms by their names in study/experiments.yaml, or of a user, ``my_objective.py:Mine``; with names of runs."""
    patterns = words if isinstance(words, Mapping) else {}
    found = []
    for number, word in enumerate(words):
        of_user = {"method": "grpo", "objective": word}
        spec = of_user if ":" in word else pick("arm", word, read_experiments()["arms"])
        settings = {key: value for key, value in spec.items() if key not in ("method", "label", "color")}
        name = word.replace("/", "-").replace(".py:", "-")
        color = spec.get("color", OTHER_COLORS[number % len(OTHER_COLORS)])
        runs = patterns.get(word, name + "-{rate}")
        found.append(Arm(name, spec.get("label", name), color, spec["method"], settings, runs))
    return found


@cache
def settings_of_all() -> set[str]:
    """The settings that every arm has."""
    return {*annotations_of("grpo_config"), *fields_of(SETTINGS)}


def settings_by_arm(arms: Sequence[Arm], settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Arm -> those of some settings that it has; UsageError for one that no arm has."""
    of_all = settings_of_all()
    found: dict[str, dict[str, Any]] = {arm.name: {} for arm in arms}
    for key, value in settings.items():
        having = [arm.name for arm in arms if name_of(key) in of_all or arm.has(key)]
        if not having:
            raise UsageError(f"--set {key}: no arm has this setting{nearest(key, of_all)}.")
        for name in having:
            found[name][key] = value
    return found


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
