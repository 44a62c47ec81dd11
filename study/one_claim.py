"""A single claim checked again: the runs that it needs, with new seeds, and its verdict."""

from collections.abc import Sequence

from gtpo.errors import UsageError, nearest
from paper.matrix import Evaluation, Experiment, Matrix, experiment, plan_evaluations
from paper.results import Results
from study import Seeds, Words
from study.claims import Claim, read_claims
from study.verdicts import check

DIGITS = {"nats": 3, "steps": 0, "10⁻³": 2}  # decimal places to print a margin with


def find_claims(names: Words) -> list[Claim]:
    """The claims of some names, without duplicates."""
    known = {claim.name: claim for claim in _tiny_claims()}
    for name in names:
        if name not in known:
            raise UsageError(f"claim {name!r} is unknown{nearest(name, known)}: `python -m study claim` lists them.")
    return [known[name] for name in dict.fromkeys(names)]


def claim_list() -> str:
    """The name of every claim, and its sentence below."""
    return "\n".join(f"{claim.name}\n    {claim.sentence}" for claim in _tiny_claims())


def _tiny_claims() -> list[Claim]:
    found: list[Claim] = []
    for figure, claims in read_claims().items():
        found += claims if figure != "smol" else ()
    return found


def work_of(matrix: Matrix, claims: Sequence[Claim], seeds: Seeds) -> tuple[list[Experiment], list[Evaluation]]:
    """The runs and evaluations that some claims read, at tiny scale; the first seed of all runs before the second."""
    names: dict[str, None] = {}
    scored = set()  # runs and the benchmarks of their scores
    for claim in claims:
        names |= dict.fromkeys(claim.runs)
        for measure in claim.measures:
            if measure.benchmark:
                runs = [run.removesuffix("@best") for run in measure.runs]
                scored |= {(run, measure.benchmark) for run in runs}
    experiments = []
    for seed in dict.fromkeys(seeds):
        experiments += [experiment(matrix, "tiny", name, seed) for name in names]
    needed = []
    for work in experiments:
        for name, benchmark in sorted(scored):
            if name == work.name:
                needed.append((work, benchmark))
    return experiments, plan_evaluations(matrix, "tiny", needed)


def report(matrix: Matrix, claims: Sequence[Claim], results: Results, seeds: Seeds) -> list[str]:
    """The difference of each seed, their mean and interval, and the verdict of each claim, which may allow some."""
    lines = []
    for claim in claims:
        found = check(claim, results, seeds, matrix["tiny"]["window"])
        unit = claim.unit
        digits = DIGITS.get(unit, 1)
        lines.append(f"{claim.name}: {claim.sentence}")
        for seed, margin in found["margins"].items():
            difference = f"{margin - claim.allowed:+.{digits}f}"
            lines.append(f"  seed {seed}: {difference} {unit}")
        if found["mean"] is not None:
            mean = f"{found['difference']:+.{digits}f}"
            half_width = f"{found['half_width']:.{digits}f}"
            lines.append(f"  mean: {mean} ± {half_width} {unit}, 95 %")
        allows = f" (the claim allows a difference of -{claim.allowed:g} {unit})" if claim.allowed else ""
        lines.append(f"  verdict: {found['verdict']}{allows}")
    return lines
