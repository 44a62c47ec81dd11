"""What was studied with small models on a CPU; docs/reproduction.md, figures.md and mechanism.md have the results.

    python -m study collapse                                      # GRPO and GTPO with the published optimizer
    python -m study collapse --scale paper --stage 1 --list       # the same question on a GPU, with its hours
    python -m study headroom                                      # GTPO and GRPO from the base of `--model tiny`
    python -m study smol                                          # SmolLM2, hours (`make smol`)
    python -m study mechanism --only tiny                         # what one update of each objective does
    python -m study claim fig2_late_accuracy --seeds 21 22 23     # one claim; without a name: lists all
    python -m study page                                          # results/ and the generated pages of docs/

Finished runs are skipped and interrupted ones resume: the same command continues where it stopped.
"""

import argparse
import sys
from dataclasses import replace

from gtpo.runs.script import run_script
from paper.figures import draw_all
from paper.matrix import evaluations_of, experiments_of, load_matrix, seeds_of_all
from paper.slurm import run_missing
from paper.states import table
from rewards import rewards_in
from study.mechanism import measure, policies_of, policy_list, run_policies
from study.one_claim import claim_list, find_claims, report, work_of
from study.page import COMPARED, comparison_lines, write_page
from study.stages import MODELS, run_stage, runs_of_stage


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m study", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    helps = {
        "smol": "the runs of SmolLM2",
        "collapse": "GTPO and GRPO with the published optimizer",
        "headroom": "GTPO and GRPO from a base whose mode is wrong",
        "mechanism": "one update of each objective",
        "claim": "single claims, with other seeds",
        "page": "results/ and the generated pages",
    }
    added = {name: commands.add_parser(name, help=text, allow_abbrev=False) for name, text in helps.items()}
    added["claim"].add_argument("names", nargs="*", metavar="NAME", help="default: list the claims")
    added["mechanism"].add_argument("--policy", metavar="NAME", help="measure only this policy, in this process")
    for name in ("headroom", "collapse", "mechanism"):
        added[name].add_argument("--only", nargs="+", default=[""], metavar="PART", help="only names with such a part")
    for name in ("smol", "collapse", "headroom", "claim"):
        added[name].add_argument("--seeds", nargs="+", type=int, metavar="N", help="default: configs/experiments.yaml")
    for name in ("smol", "collapse", "headroom", "mechanism", "claim"):
        added[name].add_argument("--jobs", type=int, metavar="N", help="runs at the same time")
        added[name].add_argument("--list", action="store_true", help="print states and costs, and exit")
    stages = added["collapse"].add_argument_group("on a GPU")
    stages.add_argument("--scale", choices=("tiny", "paper"), default="tiny", help="paper: LLaMA on GSM8K [tiny]")
    stages.add_argument("--stage", type=int, choices=(1, 2), default=1, help="1: GRPO; 2: the four arms [1]")
    stages.add_argument("--model", choices=MODELS, default="llama", help="llama-1b: perhaps 0.2 of the hours [llama]")
    stages.add_argument("--gpus", nargs="+", metavar="ID", help="one run at a time on each of these GPUs")
    stages.add_argument("--slurm", nargs="+", metavar="KEY=VALUE", help="as Slurm jobs: docs/scaling.md, Many runs")
    return parser


def main() -> None:
    flags, matrix = parser().parse_args(), load_matrix()
    failures: list[str] = []
    if flags.command == "page":
        print(*write_page(matrix), sep="\n")
    elif flags.command == "mechanism" and flags.policy:
        measure(matrix, flags.policy, rewards_in)
    elif flags.command == "mechanism" and flags.list:
        print(*policy_list(policies_of(matrix, flags.only)), sep="\n")
    elif flags.command == "mechanism":
        policies, failures = run_policies(matrix, flags.only, flags.jobs)
        print(*(policy.path for policy in policies if policy.is_finished), sep="\n")
    elif flags.command == "claim" and not flags.names:
        print(claim_list())
    elif flags.command == "collapse" and flags.scale == "paper" and flags.list:
        print(table(matrix, [], "paper", runs_of_stage(matrix, flags.stage, flags.model), []))
    elif flags.command == "collapse" and flags.scale == "paper":
        lines, failures = run_stage(matrix, flags.stage, flags.model, flags.gpus, flags.slurm)
        print(*lines, sep="\n")
    else:
        claims = find_claims(flags.names) if flags.command == "claim" else []
        scale = "tiny" if claims else flags.command
        figures = [] if claims else [scale]
        seeds = flags.seeds or seeds_of_all(matrix, scale)
        if claims:
            experiments, evaluations = work_of(matrix, claims, seeds)
        else:
            experiments = experiments_of(matrix, figures, scale, seeds, getattr(flags, "only", [""]))
            if scale in COMPARED:
                experiments = [replace(run, argv=("-m", "study.train", *run.argv)) for run in experiments]
            evaluations = evaluations_of(matrix, figures, scale, experiments)
        if flags.list:
            return print(table(matrix, figures, scale, experiments, evaluations))
        results, failures = run_missing(scale, experiments, evaluations, flags.jobs)
        written, missing = draw_all(matrix, figures, scale, results)
        compared = comparison_lines(matrix, scale, results)
        print(*report(matrix, claims, results, seeds), *compared, *written, *missing, sep="\n")
    print(*failures, sep="\n", end="\n" if failures else "")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    run_script(main)
