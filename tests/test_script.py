"""How a script prints: warnings above its progress bar."""

import subprocess
import sys

from helpers.scripts import ROOT, user_environment


def test_a_warning_is_a_line_of_its_own_above_the_bar() -> None:
    code = """
import logging, sys
from tqdm import tqdm
from gtpo.script import run_script
def main():
    with tqdm(total=2, ncols=40, ascii=True, bar_format="{desc}{n_fmt}/{total_fmt}", desc="bar ") as bar:
        logging.getLogger("gtpo.anything").warning("%d rows dropped", 3)
        logging.getLogger("gtpo.anything").info("not shown")
        bar.update(2)
run_script(main)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=user_environment(), capture_output=True)
    assert done.returncode == 0
    lines = [line.split("\r")[-1].rstrip() for line in done.stderr.decode().split("\n") if line]
    assert "3 rows dropped" in lines and lines[-1] == "bar 2/2"
    assert "not shown" not in done.stderr.decode()
