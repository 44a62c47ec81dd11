"""The tables of docs/gpu.md, from the reports in results/gpu/: ``python benchmarks/gpu/page.py`` writes them."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "benchmarks/gpu")]

from stages import STAGES  # noqa: E402
from timing import table  # noqa: E402

from gtpo.files import write_atomically  # noqa: E402


def measured_table(reports: Sequence[Mapping[str, Any]]) -> str:
    """What each report was made with, the verdicts by stage and GPU, and the measured steps."""
    names = dict.fromkeys(name for stages in (STAGES, *(report["stages"] for report in reports)) for name in stages)
    ran = {name: [report for report in reports if name in report["stages"]] for name in names}
    steps = []
    for report in reports:
        for name in STAGES:
            numbers = report["stages"].get(name, {}).get("numbers", {})
            if "seconds_of_a_step" in numbers:
                steps.append((name, report["environment"]["gpu"], numbers))
    measured = [name for name, *_ in steps]
    values = {
        "reports": reports,
        "verdicts": [name for name in names if ran[name] and measured.count(name) < len(reports)],
        "steps": steps,
        "missing": [name for name in names if not ran[name]],
        "stages": STAGES,
        "pins": pins(),
    }
    return table("gpu.md.jinja", values)


def pins() -> dict[str, str]:
    """The pinned version of each package."""
    lines = []
    for name in ("base", "earliest", "gpu"):
        lines += (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def gpu_page(text: str, reports: Sequence[Mapping[str, Any]]) -> str:
    """docs/gpu.md with the tables of the reports between its two comments."""
    before, start, rest = text.partition("<!-- measured -->\n")
    _, end, after = rest.partition("<!-- end -->")
    return f"{before}{start}{measured_table(reports)}\n{end}{after}"


def stored_reports() -> list[dict[str, Any]]:
    """Those of results/gpu/."""
    paths = (ROOT / "results" / "gpu").glob("*.json")
    return [json.loads(path.read_text()) for path in sorted(paths)]


if __name__ == "__main__":
    page = ROOT / "docs" / "gpu.md"
    write_atomically(page, gpu_page(page.read_text(), stored_reports()))
