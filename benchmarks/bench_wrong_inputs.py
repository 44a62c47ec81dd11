"""CPU seconds until a wrong input is refused, next to those of a wrong flag, for each train script.

python benchmarks/bench_wrong_inputs.py
"""

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
WRONG = {
    "flag": "--lerning_rate 1",
    "path": "--dataset nowhere.csv",
    "column": "--dataset two.csv --prompt_column task",
    "model name": "--model tinny",
    "reward name": "--reward acuracy",
    "tags": "--tags one_tag",
    "too few rows": "--dataset two.csv --prompts_per_step 4",
    "existing directory": "--output_dir .",
}


def cpu_seconds(script: str, words: list[str], directory: str) -> tuple[float, str]:
    """Of a process with its children, and its last line; it exits with code 2."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, ROOT / script, *words], cwd=directory, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2, done.stderr
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, done.stderr.splitlines()[-1]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "two.csv").write_text("prompt,answer\n1 + 1?,2\n2 + 2?,4\n")
        for script in ("train_gtpo.py", "train_grpo.py", "train_sft.py"):
            for name, flags in WRONG.items():
                if name != "reward name" or script != "train_sft.py":
                    seconds, message = cpu_seconds(script, flags.split(), directory)
                    print(f"{seconds:5.2f} s  {name:18}  {message}")
