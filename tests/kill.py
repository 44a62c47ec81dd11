"""Kill the scripts, or fill the disk, at every file operation; then each has to recover to the undisturbed result.

    python tests/kill.py                                           # everything: about two hours of one core
    python tests/kill.py --points 20 --faults kill                 # at most 20 operations of each scenario
    python tests/kill.py --methods gtpo --scenarios start resume   # in full
    python tests/kill.py --methods gtpo --scenarios start --faults kill --at 17

Scenarios: ``start`` a run; ``overwrite`` a finished one; ``resume`` a killed one; ``rotation`` of checkpoints with
``--save_total_limit 2``; ``evaluation`` of an adapter. Every command runs under another hash seed than the one before
it; a failure names them. It needs a C compiler. Exit code 1 if a run did not recover.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["OMP_NUM_THREADS"] = "1"

from helpers.file_operations import build_library, choose  # noqa: E402
from helpers.recovery import FAULTS, METHODS, SCENARIOS, Point, Scenario, build_small_model  # noqa: E402
from helpers.scripts import ScriptServer  # noqa: E402


def main(options: argparse.Namespace) -> int:
    rows, failed = [], 0
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        if (library := build_library(work)) is None:
            sys.exit("No C compiler: install gcc.")
        model = build_small_model(work / "model")
        servers = []
        for hash_seed in options.hash_seeds:
            (logs := work / f"logs-{hash_seed}").mkdir()
            servers.append(ScriptServer(logs, library, hash_seed=hash_seed))
        for method in options.methods:
            for name in options.scenarios:
                if name == "evaluation" and method != "gtpo":
                    continue  # the adapters of all methods are evaluated alike
                scenario = Scenario(name, method, servers, model, work)
                for fault in options.faults:
                    points = sweep(scenario, fault, options)
                    problems = [point for point in points if point.problem]
                    failed += len(problems)
                    counts = (len(scenario.operations), len(points), len(points) - len(problems), len(problems))
                    rows.append((scenario.title, fault, *counts))
        for server in servers:
            server.close()
    print(f"\n{'scenario':20}{'fault':>6}{'operations':>12}{'points':>8}{'recovered':>11}{'failed':>8}")
    for title, fault, *numbers in rows:
        print(f"{title:20}{fault:>6}" + "{:12}{:8}{:11}{:8}".format(*numbers))
    print(f"{'together':26}" + "{:12}{:8}{:11}{:8}".format(*[sum(row[i] for row in rows) for i in (2, 3, 4, 5)]))
    return min(failed, 1)


def sweep(scenario: Scenario, fault: str, options: argparse.Namespace) -> list[Point]:
    """Place the fault at the chosen operations of a scenario; failures are printed as they occur."""
    start, points = time.monotonic(), []
    for number in options.at or choose(scenario.operations, fault, options.points, options.seed):
        point = scenario.try_point(fault, number)
        points.append(point)
        if point.problem:
            operation = f"{point.operation.name} {point.operation.path}"
            print(f"FAILED {scenario.title}, {fault} at {number} ({operation}): {point.problem}", flush=True)
    print(f"{scenario.title}, {fault}: {len(points)} points, {time.monotonic() - start:.0f} s", flush=True)
    return points


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--points", type=int, help="At most so many operations of each scenario, at random.")
    parser.add_argument("--seed", type=int, default=0, help="Of --points.")
    parser.add_argument("--hash_seeds", type=int, nargs="+", default=[1, 2, 3], help="Of the commands, in turn.")
    parser.add_argument("--at", type=int, nargs="+", help="These operations.")
    sys.exit(main(parser.parse_args()))
