"""What was studied with small models on a CPU; docs/reproduction.md, figures.md and mechanism.md have the results.

    python -m study collapse                                      # GRPO with the published optimizer, half an hour
    python -m study headroom                                      # GTPO and GRPO from the base of `--model tiny`
    python -m study smol                                          # SmolLM2, hours (`make smol`)
    python -m study mechanism --only tiny                         # what one update of each objective does
    python -m study claim fig2_late_accuracy --seeds 21 22 23     # one claim; without a name: lists all
    python -m study page                                          # results/ and the generated pages of docs/

Finished runs are skipped and interrupted ones resume: the same command continues where it stopped.
"""

import argparse
import sys

from gtpo.paper.figures import draw_all
from gtpo.paper.matrix import evaluations_of, experiments_of, load_matrix, seeds_of_all
from gtpo.paper.missing import run_missing
from gtpo.paper.states import table
from gtpo.runs.script import run_script
from rewards import rewards_in
from study.collapse import admission
from study.collapse import table as collapse_table
from study.mechanism import measure, overview, policies_of, policy_list, run_policies
from study.one_claim import claim_list, find_claims, report, work_of
from study.page import write_page


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m study", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    smol = commands.add_parser("smol", help="the runs of SmolLM2", allow_abbrev=False)
    collapse = commands.add_parser("collapse", help="GRPO with the published optimizer", allow_abbrev=False)
    headroom = commands.add_parser("headroom", help="GTPO and GRPO from a base whose mode is wrong", allow_abbrev=False)
    mechanism = commands.add_parser("mechanism", help="one update of each objective", allow_abbrev=False)
    claim = commands.add_parser("claim", help="single claims, with other seeds", allow_abbrev=False)
    commands.add_parser("page", help="results/ and the generated pages", allow_abbrev=False)
    claim.add_argument("names", nargs="*", metavar="NAME", help="default: list the claims")
    for command, things in ((mechanism, "policies"), (headroom, "runs"), (collapse, "runs")):
        command.add_argument("--only", nargs="+", default=[""], metavar="PART", help=f"{things} with such a part")
    mechanism.add_argument("--policy", metavar="NAME", help="measure only this policy, in this process")
    for command in (smol, collapse, headroom, claim):
        command.add_argument("--seeds", nargs="+", type=int, metavar="N", help="default: configs/experiments.yaml")
    for command in (smol, collapse, headroom, mechanism, claim):
        command.add_argument("--jobs", type=int, metavar="N", help="runs at the same time")
        command.add_argument("--list", action="store_true", help="print states and costs, and exit")
    flags, matrix = parser.parse_args(), load_matrix()
    failures: list[str] = []
    if flags.command == "page":
        print(*write_page(matrix), sep="\n")
    elif flags.command == "mechanism" and flags.policy:
        measure(matrix, flags.policy, rewards_in)
    elif flags.command == "mechanism" and flags.list:
        print(*policy_list(policies_of(matrix, flags.only)), sep="\n")
    elif flags.command == "mechanism":
        policies, failures = run_policies(matrix, flags.only, flags.jobs)
        print(*(policy.path for policy in policies if policy.is_finished), *overview(policies), sep="\n")
    elif flags.command == "claim" and not flags.names:
        print(claim_list())
    else:
        scale = "tiny" if flags.command == "claim" else flags.command
        seeds = flags.seeds or seeds_of_all(matrix, scale)
        if scale != "tiny":
            figures, claims = [scale], []
            experiments = experiments_of(matrix, figures, scale, seeds, getattr(flags, "only", [""]))
            evaluations = evaluations_of(matrix, figures, scale, experiments)
        else:
            figures, claims = [], find_claims(flags.names)
            experiments, evaluations = work_of(matrix, claims, seeds)
        if flags.list:
            return print(table(matrix, figures, scale, experiments, evaluations))
        results, failures = run_missing(scale, experiments, evaluations, flags.jobs)
        written, missing = draw_all(matrix, figures, scale, results)
        rates = collapse_table(admission(matrix, results)) if scale == "collapse" else []
        print(*report(matrix, claims, results, seeds), *rates, *written, *missing, sep="\n")
    print(*failures, sep="\n", end="\n" if failures else "")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    run_script(main)
