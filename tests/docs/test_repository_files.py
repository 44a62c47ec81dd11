"""Files that no test uses as people do: Dockerfile, workflow, launch scripts."""

import re
import shlex
from pathlib import Path

from helpers.files import read_settings
from helpers.scripts import ROOT, run_process
from pytest import mark

DOCKERFILE = (ROOT / "Dockerfile").read_text()
WORKFLOW = (ROOT / ".github/workflows/tests.yml").read_text()
SKY = read_settings(ROOT / "examples/sky.yaml")


@mark.parametrize("command", re.findall(r"(?:run:|&&) (make .+)", WORKFLOW + DOCKERFILE))
def test_make_has_the_targets_of_dockerfile_and_workflow(command: str) -> None:
    run_process([*shlex.split(command), "--dry-run"])


# Functions in place of Slurm's commands, and a Python that writes its ranks and words and ends as SIGUSR2 ends it.
STAND_INS = r"""
srun() { "$@"; }
scontrol() { echo $* >> requeued; }
mkdir -p .venv/bin
echo 'PATH=$PWD/.venv/bin:$PATH' > .venv/bin/activate
printf '#!/bin/sh\necho $RANK $LOCAL_RANK $WORLD_SIZE $*\n[ -e outputs ] || exit 140\n' > .venv/bin/python
chmod +x .venv/bin/python
export SLURM_JOB_NAME=gtpo SLURM_JOB_ID=7 SLURM_ARRAY_TASK_ID=2
export SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NTASKS=2 MASTER_ADDR=here
"""


def sbatch(folder: Path, script: str, *argv: str, code: int) -> str:
    """What a batch script prints as job 7 until it ends with this exit code."""
    line = f"{STAND_INS} set -- {shlex.join(argv)}; source {ROOT}/examples/slurm/{script}"
    return run_process(["bash", "-c", line], cwd=folder, code=code).stdout


def test_an_element_of_an_array_runs_its_line(tmp_path: Path) -> None:
    lines = "exit 1\n[ -e done ] || echo $UNSLOTH_COMPILE_LOCATION '#' > second; exit 5  # second; 3 hours\n"
    (tmp_path / "commands.sh").write_text(lines)
    sbatch(tmp_path, "array.sbatch", "commands.sh", code=5)
    assert (tmp_path / "second").read_text() == "unsloth_compiled_cache/2 #\n"


def test_a_job_of_one_gpu_is_requeued_and_resumes(tmp_path: Path) -> None:
    """The first start ends as SIGUSR2 ends it, the second finds a checkpoint."""
    first = sbatch(tmp_path, "one_gpu.sbatch", "--model", "llama", code=140)
    assert first == "train_gtpo.py --model llama --output_dir outputs/gtpo-7 --overwrite\n"
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    (tmp_path / "outputs/gtpo-7/checkpoint-2/files.json").mkdir(parents=True)
    second = sbatch(tmp_path, "one_gpu.sbatch", "--model", "llama", code=0)
    assert second == "train_gtpo.py --model llama --output_dir outputs/gtpo-7 --resume outputs/gtpo-7\n"


def test_processes_of_a_job_have_the_ranks_of_slurm(tmp_path: Path) -> None:
    shown = sbatch(tmp_path, "train.sbatch", "train_gtpo.py", code=140)
    assert shown == "1 0 2 train_gtpo.py --backend transformers --output_dir outputs/gtpo-7\n"
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"


def test_the_job_of_skypilot_resumes(tmp_path: Path) -> None:
    """Its line with `echo` instead of Python, before and after a checkpoint."""
    line = f"python() {{ echo $*; }}; {SKY['envs']['LINE']}"
    for expected in ("--overwrite true", "--resume outputs/llama"):
        shown = run_process(["bash", "-c", line], cwd=tmp_path).stdout
        assert shown.startswith("train_gtpo.py ") and shown.endswith(f" {expected}\n")
        (tmp_path / "outputs/llama/checkpoint-2/files.json").mkdir(parents=True, exist_ok=True)
    assert "~/sky_workdir/outputs" in SKY["file_mounts"]


def test_the_dockerfile_installs_what_is_locked_for_its_python() -> None:
    version = re.findall(r"^FROM python:(3\.\d+)-", DOCKERFILE, re.MULTILINE)
    assert {*version} == {*re.findall(r"--python-version (3\.\d+) --output", (ROOT / "Makefile").read_text())}
    (copied,) = re.findall(r"^COPY (.+) requirements/$", DOCKERFILE, re.MULTILINE)
    assert all((ROOT / file).is_file() for file in copied.split())
    for file in re.findall(r'-r "?(requirements/.+?\.txt)', DOCKERFILE + SKY["setup"]):
        assert copied == " ".join(file.replace("$(uname -m)", machine) for machine in ("x86_64", "aarch64"))
    (pytest_pin,) = re.findall(r"pytest==[\d.]+", DOCKERFILE)
    assert f"{pytest_pin}\n" in (ROOT / "requirements/dev.txt").read_text()
