"""A comparison of objectives: its arms, bases, rates and seeds, and the runs and evaluations that it needs."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from gtpo.arguments import BENCHMARK_TITLES, GTPOArguments, fields_of, name_of
from gtpo.cli.flags import outline_of
from gtpo.data.tables import short_name_of
from gtpo.errors import UsageError, nearest
from gtpo.evaluation.arguments import DATA_FLAGS
from gtpo.files import fingerprint, read_yaml
from gtpo.grading.user_functions import import_named
from gtpo.models.source import model_source
from gtpo.runs.directory import OUTPUTS, to_argv
from paper.matrix import Evaluation, Experiment
from paper.results import GREEDY, Results
from study import SETTINGS, Row, Seeds, Values, Words
from study.pairs import rate_rows

RESULTS = Path("results")
OF_PRESET = "preset"  # the rate of a base of your own, where no other is given
Runs = Sequence[Experiment]
INSTEAD = {"arm": ["FILE.py:Class of your objective", "a YAML of settings"]}  # of a name in study/experiments.yaml
INSTEAD |= {"base": ["a directory with your model", "a Hub id (owner/name)"]}
OTHER_COLORS = ("#882255", "#000000", "#AA9900", "#117733")  # of a user's objectives


@cache
def read_experiments() -> Row:
    """study/experiments.yaml."""
    return read_yaml(Path(__file__).with_name("experiments.yaml"))


class Choice(NamedTuple):
    """How one half of the seeds chooses the rates of the other half.

    Attributes:
        by: The measure whose mean is highest.
        least: Measure -> the least mean of a rate that may be chosen; if no rate has it, all may.
    """

    by: str
    least: Values = MappingProxyType({})


class Arm(NamedTuple):
    """An objective with its settings.

    Attributes:
        runs: The names of its runs, with {rate}.
        method: Of the script that trains it.
        prompts: A generation.
        updates: A generation.
    """

    name: str
    runs: str
    method: str
    label: str
    color: str
    settings: Values
    prompts: int = 1
    updates: int = 1

    def run_name(self, rate: str | None) -> str:
        return self.runs.format(rate=rate)

    def has(self, key: str) -> bool:
        """Whether its runs have a setting: one of every run, of GTPO, or of a user's ``Settings``."""
        if name_of(key) in settings_of_all():
            return True
        if key in fields_of([GTPOArguments]):
            return self.method == "gtpo"
        if "objective" not in self.settings:
            return False
        kind: Any = import_named(self.settings["objective"], {}, "objective")
        return key in getattr(kind.Settings, "__dataclass_fields__", ())


class Base(NamedTuple):
    """A model that every arm starts from.

    Attributes:
        title: Of its panels.
        spread: Measure -> the standard deviation over pairs of a stored comparison, which is ``of``.
        minutes_per_100_steps: And ``seconds_per_sample``; 0 if they are not known.
        max_new_tokens: None: as many as in training.
        with_measures: Whether the metric of :mod:`study.train` is logged.
        x: What differs between several bases, for a slope.
        weights: A hash of the files of a user's directory.
    """

    name: str
    settings: Values
    benchmark: str
    problems: int
    title: str
    spread: Values
    max_new_tokens: int | None = None
    minutes_per_100_steps: float = 0.0
    seconds_per_sample: float = 0.0
    with_measures: bool = True
    x: float | None = None
    weights: str | None = None

    @property
    def benchmark_name(self) -> str:
        return short_name_of(self.benchmark, BENCHMARK_TITLES)

    def timed(self, results: Results) -> "Base":
        """With the minutes of the runs that are there, for a base that has no estimate."""
        if self.minutes_per_100_steps or "step_time" not in results.metrics:
            return self
        seconds = float(results.metrics["step_time"].mean())
        return self._replace(minutes_per_100_steps=seconds * 100 / 60)


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Attributes:
        name: In study/experiments.yaml; empty for one that is made of flags.
        is_own: Whether the arms are a user's next to the first one of a planned comparison, whose stored runs count.
        arms: The first one is subtracted from the others.
        panels: Metrics of the figure.
        rates: Of several, each arm gets the one with the highest mean training accuracy in the last quarter, over the
            seeds ``rate_seeds``, from each base or, with ``shares_rates``, from the first one for all.
        choices: By name. With choices every arm is trained at every rate with all seeds, but for ``rates_of`` (arm ->
            its only rates) and ``rates_as`` (arm -> the arm whose chosen rates it has).
        added_rates: Arm -> rates that a rule of the plan has added to its own, once runs at those were there.
        views: What arms are compared at: names of choices and rates; the first one unless a primary says ``at``.
        set: Settings of every arm that has them, over those of base and arm.
        betas: Of Adam.
        steps: Of a run, or generations where the arms have several updates of one.
        window: Steps of the trailing mean.
        primary: Planned differences, each a ``measure``; ``arms``: of these alone; ``slope``: over the bases' ``x``.
        measures: The planned ones of the primary differences first.
        needs_p: Whether a difference is decided by interval and p, else by the interval alone.
        notes: Rules of the plan that no key has.
        directory: Of the runs, and of page and figure.
        repeats: Whether runs that are stored in results/ are made again, in a directory that was named.
        results: Of plan.md, and of the condensed runs of a planned comparison; several share it if ``is_shared``.
    """

    name: str
    is_own: bool
    title: str
    arms: Sequence[Arm]
    bases: Sequence[Base]
    panels: Words
    seeds: Seeds
    rate_seeds: Seeds
    rates: Words
    shares_rates: bool
    choices: Mapping[str, Choice]
    rates_of: Mapping[str, Words]
    rates_as: Mapping[str, str]
    added_rates: Mapping[str, Words]
    views: Words
    set: Values
    betas: tuple[float, float]
    steps: int
    window: int
    primary: Sequence[Row]
    measures: Words
    needs_p: bool
    notes: Words
    predictions: Words
    directory: Path
    repeats: bool
    results: Path
    is_shared: bool

    @classmethod
    def of(cls, name: str, given: Values, directory: Path | None = None, is_own: bool = False) -> "Comparison":
        """From the keys of study/experiments.yaml; a missing one has its default there."""
        known = read_experiments()
        spec = known["defaults"] | given
        arms = arms_of(spec["arms"])
        bases = bases_of(spec)
        rates = spec["rates"]
        if "rates" not in given and any(base.name not in known["bases"] for base in bases):
            rates = [OF_PRESET]
        seeds = numbers_of(spec["seeds"] or [f"1-{spec['n_seeds']}"])
        after_seeds = range(max(seeds) + 1, max(seeds) + 4)
        planned = [row["measure"] for row in spec["primary"]]
        place = directory or OUTPUTS / "study" / ((name or "compare") + "-own" * is_own)
        return cls(
            name=name,
            is_own=is_own,
            title=spec["title"],
            arms=arms,
            bases=bases,
            panels=spec["panels"],
            seeds=seeds,
            rate_seeds=numbers_of(spec["rate_seeds"] or after_seeds),
            rates=rates,
            shares_rates=spec["shares_rates"],
            choices={key: Choice(**choice) for key, choice in spec["choices"].items()},
            rates_of=spec["rates_of"],
            rates_as=spec["rates_as"],
            added_rates=spec["added_rates"],
            views=spec["views"],
            set=spec["set"],
            betas=spec["betas"],
            steps=spec["steps"],
            window=spec["window"] or min(50, max(1, spec["steps"] // 6)),
            primary=spec["primary"],
            measures=[*dict.fromkeys([*planned, *spec["measures"]])],
            needs_p=spec["needs_p"],
            notes=spec["notes"],
            predictions=spec["predictions"],
            directory=place,
            repeats=not name or (directory is not None and not is_own),
            results=RESULTS / (spec["results"] or name) if name else place,
            is_shared=spec["results"] is not None,
        )

    def __post_init__(self) -> None:
        if len(self.rates) > 1 and {*self.seeds} & {*self.rate_seeds}:
            raise UsageError("--rate_seeds are among --seeds: a rate that was chosen on a seed is not compared on it.")
        for key in self.set.keys() - {*chain(*self.settings_of.values())}:
            raise UsageError(f"--set {key}: no arm has this setting{nearest(key, settings_of_all())}.")

    @cached_property
    def settings_of(self) -> dict[str, Row]:
        """Arm -> those of ``set`` that it has."""
        return {arm.name: {key: self.set[key] for key in self.set if arm.has(key)} for arm in self.arms}

    @property
    def every_rate(self) -> list[str]:
        """Those of the plan, then the added ones."""
        return [*dict.fromkeys([*self.rates, *chain(*self.added_rates.values())])]

    @property
    def run_names(self) -> list[str]:
        """Of every arm at every rate."""
        return [arm.run_name(rate) for arm, rate in product(self.arms, self.every_rate)]

    def place(self, base: Base) -> Path:
        """Of the runs from a base; a directory each, because a run is known by its name and seed."""
        return self.directory / base.name

    def stored(self, base: Base) -> Path:
        """Of the condensed runs from a base."""
        if self.is_shared:
            return self.results
        return self.results / base.name

    def rates_for(self, arm: Arm) -> Words:
        """The rates that an arm is trained at, with every seed where there are choices."""
        return [*self.rates_of.get(arm.name, self.rates), *self.added_rates.get(arm.name, ())]

    def run(self, base: Base, arm: Arm, rate: str, seed: int) -> Experiment:
        """A training run: train_grpo.py or train_gtpo.py with the metric of :mod:`study.train`."""
        name = arm.run_name(rate)
        path = self.place(base) / f"{name}-s{seed}"
        beta1, beta2 = self.betas
        settings = {
            **base.settings,
            **arm.settings,
            "adam_beta1": beta1,
            "adam_beta2": beta2,
            **({} if rate == OF_PRESET else {"learning_rate": rate}),
            "max_steps": self.steps * arm.updates,
            "save_steps": max(1, self.steps // 2) * arm.updates,
            **self.settings_of[arm.name],
        }
        words = [word.replace("{method}", arm.method) for word in to_argv(settings)]
        module = ("-m", "study.train") if base.with_measures else ()
        words += to_argv({"seed": seed, "output_dir": str(path)})
        argv = (*module, f"train_{arm.method}.py", *words)
        log = path.parent / "logs" / f"{path.name}.log"
        return Experiment(
            name,
            seed,
            base.settings["model"],
            argv,
            path,
            log,
            base.minutes_per_100_steps * self.steps * arm.updates / 100,
        )

    def chooser(self, base: Base) -> Base:
        """The base whose runs choose the rates for a base."""
        return self.bases[0] if self.shares_rates else base

    def runs(self, base: Base, arms: Sequence[Arm], rates: Words, seeds: Seeds) -> list[Experiment]:
        """Those of some arms, one after the other."""
        return [self.run(base, arm, rate, seed) for arm, rate, seed in product(arms, rates, seeds)]

    def evaluations(self, base: Base, runs: Runs) -> list[Evaluation]:
        """Some runs from a base on held-out problems: four samples of each, and greedily."""
        found = []
        place = self.place(base)
        shared: Row = {}
        if base.benchmark not in BENCHMARK_TITLES:  # its columns are called as those of the training rows
            shared |= {key: value for key, value in self.set.items() if key in DATA_FLAGS}
        if base.max_new_tokens:
            shared["max_new_tokens"] = base.max_new_tokens
        for suffix, k, temperature in (("", 4, 1.0), (GREEDY, 1, 0.0)):
            directory = place / f"evaluation{suffix}"
            sampling = {
                "benchmarks": base.benchmark,
                "k": k,
                "temperature": temperature,
                "limit": base.problems,
                "output_dir": str(directory),
                **shared,
            }
            flags = tuple(to_argv(sampling))
            log = place / "logs" / f"evaluate{suffix}.log"
            samples = k * base.problems * (len(runs) + 1)  # and the base
            evaluation = Evaluation(
                base.settings["model"],
                base.benchmark_name + suffix,
                "last",
                tuple(runs),
                flags,
                directory,
                log,
                samples * base.seconds_per_sample / 60,
            )
            found.append(evaluation)
        return found

    @property
    def counts_generations(self) -> bool:
        """Whether a step of the metrics is a generation, of which an arm has several updates."""
        return max(arm.updates for arm in self.arms) > 1

    def chosen_rates(self, results: Results) -> dict[str, str]:
        """Arm -> its rate; of several the best one, once all of its runs are there."""
        if self.choices:
            return {arm.name: self.views[0] for arm in self.arms}
        if len(self.rates) == 1:
            return {arm.name: self.rates[0] for arm in self.arms}
        found = {}
        for arm in self.arms:
            names = {arm.run_name(rate): rate for rate in self.rates}
            rows = rate_rows(results, names, self.rate_seeds)
            seeds = [row["seeds"] for row in rows.values()]
            if seeds == [len(self.rate_seeds)] * len(names):
                best = max(rows, key=lambda name: rows[name]["accuracy"][0])
                found[arm.name] = names[best]
        return found


# From names and flags


def known_comparison(name: str, directory: Path | None = None, arms: Words = ()) -> Comparison:
    """A comparison of study/experiments.yaml; with ``arms`` its first arm and these instead of the planned ones."""
    spec = pick("comparison", name, known_comparisons())
    if not arms:
        return Comparison.of(name, spec, directory)
    planned = dict.fromkeys(spec["arms"]) | (spec["arms"] if isinstance(spec["arms"], dict) else {})
    first = next(iter(planned))
    own = {"predictions": [], "arms": {word: planned.get(word) for word in (first, *arms)}}
    return Comparison.of(name, spec | own, directory, is_own=True)


def stored_comparison(name: str) -> Comparison:
    """The same of the runs in results/ alone: what is below outputs/ is another state, or not rounded."""
    return known_comparison(name, known_comparison(name).results)


def known_comparisons() -> Row:
    """Name -> keys of the comparisons of study/experiments.yaml."""
    experiments = read_experiments()
    return dict(experiments["comparisons"] | experiments["families"] | experiments["real"])


def arms_of(words: Any) -> list[Arm]:
    """Arms by their names in study/experiments.yaml, with names of runs.

    Or of a user: ``my_objective.py:Mine``, or a YAML file, which gives its objective alone, and is GTPO's if its name
    begins so.
    """
    found = []
    known = read_experiments()
    for number, word in enumerate(words):
        name = word.removesuffix(".yaml").replace("/", "-").replace(".py:", "-")
        runs = (words[word] if isinstance(words, dict) else None) or name + "-{rate}"
        color = OTHER_COLORS[number % len(OTHER_COLORS)]
        if ":" in word:
            arm = Arm(name, runs, "grpo", name, color, {"objective": word})
        elif Path(word).suffix == ".yaml":
            settings = {key: value for key, value in read_yaml(word).items() if name_of(key) not in known["shared"]}
            title = Path(word).stem
            arm = Arm(name, runs, "gtpo" if title.startswith("gtpo") else "grpo", title, color, settings)
        else:
            arm = Arm(name, runs, **pick("arm", word, known["arms"]))
        found.append(arm)
    if len({arm.name for arm in found}) < max(2, len(found)):
        rule = "name two or more, each once; the first is subtracted from the others"
        raise UsageError(f"--arms {' '.join(words)}: {rule}.")
    return found


@cache
def settings_of_all() -> set[str]:
    """The settings that every arm has."""
    return {*fields_of([*SETTINGS, outline_of("grpo_config")])}


def bases_of(spec: Values) -> list[Base]:
    """The bases of a comparison, by their names in study/experiments.yaml, or a user's directory or Hub id."""
    known = read_experiments()["bases"]
    given = {key: spec[key] for key in ("benchmark", "problems") if spec[key]}
    found = []
    for word in spec["base"]:
        if word in known or not ("/" in word or Path(word).is_dir()):
            found.append(Base(word, **{**pick("base", word, known), **given}))
            continue
        if not spec["benchmark"]:
            raise UsageError(f"--base {word}: add --benchmark with held-out problems, as gsm8k or my_test.csv.")
        if model_source(word).adapter:  # its base would be scored without it
            raise UsageError(f"--base {word} is an adapter: merge it (--merge 16bit) and name the merged model.")
        name = Path(word).name
        own = {"settings": {"model": word}, "title": name, "weights": fingerprint(word)}
        found.append(Base(name, **{**read_experiments()["own"], **given, **own}))
    return found


def pick(kind: str, word: str, known: Values) -> Any:
    """An entry of study/experiments.yaml by its name; a UsageError also says what a user may name instead."""
    if word not in known:
        here = [path.name for path in Path().iterdir() if kind in INSTEAD and path.is_dir() is (kind == "base")]
        choice = ", ".join([*known, *INSTEAD.get(kind, [])])
        raise UsageError(f"{kind} {word!r} is unknown{nearest(word, [*known, *here])}: pick from {choice}.")
    return known[word]


def numbers_of(words: Iterable[Any]) -> list[int]:
    """Seeds: ``21 22 23``, or ``501-520``."""
    found: list[int] = []
    for word in words:
        first, _, last = str(word).partition("-")
        found += range(int(first), int(last or first) + 1)
    return list(dict.fromkeys(found))


def settings_of(pairs: Iterable[str]) -> Row:
    """``key=value`` of a command line; a value of several words is a list."""
    found = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        words = shlex.split(value)
        found[key] = words if len(words) > 1 else value
    return found
