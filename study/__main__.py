"""What was studied with small models on a CPU; docs/reproduction.md has the results.

    python -m study compare --arms grpo gtpo my_objective.py:Mine --n_seeds 5     # objectives, paired by seed
    python -m study compare missing_tags --list                   # a planned comparison of study/experiments.yaml
    python -m study collapse                                      # GRPO and GTPO with the published optimizer
    python -m study compare llama --gpus 0 1 --list               # the same question on a GPU, with its hours
    python -m study headroom                                      # GTPO and GRPO from the base of `--model tiny`
    python -m study smol                                          # SmolLM2, hours (`make smol`)
    python -m study mechanism --only tiny                         # what one update of each objective does
    python -m study claim fig2_late_accuracy --seeds 21 22 23     # one claim; without a name: lists all
    python -m study page                                          # results/ and the generated pages of docs/

Finished runs are skipped and interrupted ones resume: the same command continues where it stopped.
"""

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from gtpo.errors import UsageError
from gtpo.files import write_atomically
from gtpo.runs.script import run_script
from paper.figures import draw_all
from paper.matrix import evaluations_of, experiments_of, load_matrix, seeds_of_all
from paper.runner import slots_of
from paper.slurm import run_missing
from paper.states import table
from rewards import rewards_in
from study.bench import Comparison, numbers_of, pick, read_experiments, settings_of
from study.compare import PLAN, plan_text, refuse_dirty, run_comparison, state_line, works_of, write_page
from study.mechanism import measure, policies_of, policy_list, run_policies
from study.one_claim import claim_list, find_claims, report, work_of
from study.page import COMPARED
from study.page import write_page as write_pages

Flags = argparse.Namespace
HELPS = {
    "compare": "objectives, paired by seed: runs, scores, one page",
    "smol": "the runs of SmolLM2",
    "collapse": "GTPO and GRPO with the published optimizer",
    "headroom": "GTPO and GRPO from a base whose mode is wrong",
    "mechanism": "one update of each objective",
    "claim": "single claims, with other seeds",
    "page": "results/ and the generated pages",
}
OF_ANY_COMPARISON = {"name", "seeds", "output_dir", "plan", "dirty", "jobs", "gpus"}  # also of a planned one


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m study", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    added = {name: commands.add_parser(name, help=text, allow_abbrev=False) for name, text in HELPS.items()}
    for flag, options in read_experiments()["flags"].items():
        added["compare"].add_argument(flag, **options)
    added["claim"].add_argument("names", nargs="*", metavar="NAME", help="default: list the claims")
    added["mechanism"].add_argument("--policy", metavar="NAME", help="measure only this policy, in this process")
    for name in ("headroom", "collapse", "mechanism"):
        added[name].add_argument("--only", nargs="+", default=[""], metavar="PART", help="only names with such a part")
    for name in ("smol", "collapse", "headroom", "claim"):
        added[name].add_argument("--seeds", nargs="+", type=int, metavar="N", help="default: configs/experiments.yaml")
    for name in ("compare", "smol", "collapse", "headroom", "mechanism", "claim"):
        added[name].add_argument("--jobs", type=int, metavar="N", help="runs at the same time")
        added[name].add_argument("--list", action="store_true", help="print states and costs, and exit")
    return parser


def compare(flags: Flags) -> list[str]:
    """Plan, run and report a comparison; a message for each failure."""
    planned, directory = read_experiments()["comparisons"], flags.output_dir and Path(flags.output_dir)
    keys = {flag.removeprefix("--") for flag in read_experiments()["flags"]} - OF_ANY_COMPARISON
    given = {key: value for key, value in vars(flags).items() if key in keys and value is not None}
    if flags.name and given:
        raise UsageError(
            f"--{min(given)}: {flags.name} is planned in study/experiments.yaml; only --seeds may be given."
        )
    given |= {"set": settings_of(flags.set or ())} | ({"seeds": flags.seeds} if flags.seeds else {})
    spec = pick("comparison", flags.name, planned) if flags.name else given
    comparison = Comparison(flags.name, spec, directory)
    seeds = numbers_of(flags.seeds) if flags.seeds else comparison.seeds
    if flags.plan:
        path = comparison.results / PLAN
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, plan_text(comparison))
        print(f"{path}: commit it before the runs: git add --force {path}")
        return []
    print(state_line(comparison, *works_of(comparison, seeds)), flush=True)
    if flags.list:
        return []
    refuse_dirty(flags.dirty)
    failures = run_comparison(comparison, seeds, slots_of("tiny", flags.gpus, flags.jobs))
    command = shlex.join(["python", "-m", "study", *sys.argv[1:]])
    print(*write_page(comparison, comparison.directory, command), sep="\n")
    return failures


def page(flags: Flags) -> list[str]:
    print(*write_pages(load_matrix()), sep="\n")
    return []


def mechanism(flags: Flags) -> list[str]:
    """What one update does, of all policies or of one."""
    matrix = load_matrix()
    if flags.policy:
        measure(matrix, flags.policy, rewards_in)
        return []
    if flags.list:
        print(*policy_list(policies_of(matrix, flags.only)), sep="\n")
        return []
    policies, failures = run_policies(matrix, flags.only, flags.jobs)
    print(*(policy.path for policy in policies if policy.is_finished), sep="\n")
    return failures


def claim(flags: Flags) -> list[str]:
    """Single claims: the runs that they read, and their verdicts."""
    if not flags.names:
        print(claim_list())
        return []
    matrix, claims = load_matrix(), find_claims(flags.names)
    seeds = flags.seeds or seeds_of_all(matrix, "tiny")
    works = work_of(matrix, claims, seeds)
    if flags.list:
        print(table(matrix, [], "tiny", *works))
        return []
    results, failures = run_missing("tiny", *works, flags.jobs)
    print(*report(matrix, claims, results, seeds), sep="\n")
    return failures


def scale(flags: Flags) -> list[str]:
    """The runs of SmolLM2, of headroom or of collapse; `study page` compares them."""
    matrix, name = load_matrix(), flags.command
    seeds = flags.seeds or seeds_of_all(matrix, name)
    experiments = experiments_of(matrix, [name], name, seeds, getattr(flags, "only", [""]))
    if name in COMPARED:
        experiments = [replace(run, argv=("-m", "study.train", *run.argv)) for run in experiments]
    evaluations = evaluations_of(matrix, [name], name, experiments)
    if flags.list:
        print(table(matrix, [name], name, experiments, evaluations))
        return []
    results, failures = run_missing(name, experiments, evaluations, flags.jobs)
    written, missing = draw_all(matrix, [name], name, results)
    print(*written, *missing, sep="\n")
    return failures


COMMANDS = {"compare": compare, "page": page, "mechanism": mechanism, "claim": claim}


def main() -> None:
    flags = parser().parse_args()
    failures = COMMANDS.get(flags.command, scale)(flags)
    print(*failures, sep="\n", end="\n" if failures else "")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    run_script(main)
