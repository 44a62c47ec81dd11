"""Files that no test uses as people do: Dockerfile, workflow, launch scripts, CITATION.cff; the repository's URL."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

from helpers.files import read_settings
from helpers.scripts import ROOT, run_process
from packaging.specifiers import SpecifierSet
from pytest import MonkeyPatch, mark

DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
WORKFLOW = read_settings(ROOT / ".github/workflows/tests.yml")
SKY = read_settings(ROOT / "examples/sky.yaml")
STEPS = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
COMMANDS = [
    *(step["run"] for step in STEPS if "run" in step),
    *re.findall(r"&& (make .*)", DOCKERFILE),
    " ".join(re.findall(r'"([^"]+)"', DOCKERFILE.splitlines()[-1])),
]


@mark.parametrize("command", COMMANDS)
def test_make_has_the_targets_of_dockerfile_and_workflow(command: str) -> None:
    make, *words = shlex.split(command)
    assert make == "make"
    run_process(["make", "--dry-run", *words])


STAND_INS = """
srun() { "$@"; }
scontrol() { echo $* >> requeued; }
python() { echo $*; [ -e outputs ] || return 140; }
mkdir -p .venv/bin && touch .venv/bin/activate
"""


def sbatch(folder: Path, script: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a batch script as job 7, with functions in place of Slurm's commands and of Python."""
    names = "export SLURM_JOB_NAME=gtpo SLURM_JOB_ID=7 SLURM_ARRAY_TASK_ID=2"
    line = f"{STAND_INS}{names}; set -- {shlex.join(argv)}; source {ROOT}/examples/slurm/{script}"
    return subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True)


def test_an_element_of_an_array_runs_its_line(tmp_path: Path) -> None:
    lines = tmp_path / "commands.sh"
    lines.write_text("exit 1\n[ -e done ] || echo $UNSLOTH_COMPILE_LOCATION '#' > second; exit 5  # second; 3 hours\n")
    done = sbatch(tmp_path, "array.sbatch", "commands.sh")
    assert done.returncode == 5, done.stderr
    assert (tmp_path / "second").read_text() == "unsloth_compiled_cache/2 #\n"


def test_a_job_of_one_gpu_is_requeued_and_resumes(tmp_path: Path) -> None:
    """The first start ends as SIGUSR2 ends it, the second finds a checkpoint."""
    first = sbatch(tmp_path, "one_gpu.sbatch", "--model", "llama")
    assert first.returncode == 140, first.stderr
    assert first.stdout == "train_gtpo.py --model llama --output_dir outputs/gtpo-7 --overwrite\n"
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    (tmp_path / "outputs/gtpo-7/checkpoint-2/files.json").mkdir(parents=True)
    second = sbatch(tmp_path, "one_gpu.sbatch", "--model", "llama")
    assert second.stdout == "train_gtpo.py --model llama --output_dir outputs/gtpo-7 --resume outputs/gtpo-7\n"


def test_processes_of_a_job_have_the_ranks_of_slurm(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    for name, value in {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "python").write_text("#!/bin/sh\necho $RANK $LOCAL_RANK $WORLD_SIZE $*; exit 140\n")
    (tmp_path / "python").chmod(0o755)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text("PATH=$PWD:$PATH\n")
    done = sbatch(tmp_path, "train.sbatch", "train_gtpo.py")
    assert done.returncode == 140, done.stderr
    assert done.stdout == "1 0 2 train_gtpo.py --backend transformers --output_dir outputs/gtpo-7\n"
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"


def test_the_job_of_skypilot_resumes(tmp_path: Path) -> None:
    """Its line with `echo` instead of Python, before and after a checkpoint."""
    line = f"python() {{ echo $*; }}; {SKY['envs']['LINE']}"
    for expected in ("--overwrite true", "--resume outputs/llama"):
        shown = run_process(["bash", "-c", line], cwd=tmp_path).stdout
        assert shown.split()[0] == "train_gtpo.py" and shown.strip().endswith(expected)
        (tmp_path / "outputs/llama/checkpoint-2").mkdir(parents=True, exist_ok=True)
        (tmp_path / "outputs/llama/checkpoint-2/files.json").touch()
    assert "~/sky_workdir/outputs" in SKY["file_mounts"]


def test_the_dockerfile_installs_what_is_locked_for_its_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (version,) = re.findall(r"^FROM python:(3\.\d+)-", DOCKERFILE, re.MULTILINE)
    locked = re.findall(r"--python-version (3\.\d+) --output", (ROOT / "Makefile").read_text())
    assert version in SpecifierSet(project["requires-python"]) and {*locked} == {version}
    (copied,) = re.findall(r"^COPY (.+) requirements/$", DOCKERFILE, re.MULTILINE)
    assert all((ROOT / file).is_file() for file in copied.split())
    for text in (DOCKERFILE, SKY["setup"]):
        (installed,) = re.findall(r'-r "?(requirements/.+?\.txt)', text)
        assert [installed.replace("$(uname -m)", machine) for machine in ("x86_64", "aarch64")] == copied.split()
    (pytest_pin,) = re.findall(r"pytest==[\d.]+", DOCKERFILE)
    assert pytest_pin in (ROOT / "requirements/dev.txt").read_text().splitlines()
