"""The Dockerfile, which no test builds, and the batch script: what they name exists and fits together."""

import re
import shlex
import subprocess
import tomllib

from helpers.scripts import ROOT
from packaging.specifiers import SpecifierSet

TEXT = (ROOT / "Dockerfile").read_text()
INSTRUCTIONS = [
    (line.partition(" ")[0], line.partition(" ")[2])
    for line in TEXT.replace("\\\n", " ").splitlines()
    if line and not line.startswith("#")
]
COMMANDS = [
    shlex.split(part) for instruction, words in INSTRUCTIONS if instruction == "RUN" for part in words.split("&&")
]


def test_every_file_that_is_copied_or_installed_exists() -> None:
    instructions = [instruction for instruction, _ in INSTRUCTIONS]
    assert instructions == ["FROM", "WORKDIR", "COPY", "RUN", "ENV", "COPY", "RUN", "CMD"]
    (*files, target), everything = (words.split() for instruction, words in INSTRUCTIONS if instruction == "COPY")
    assert target == "requirements/" and everything == [".", "."]
    assert all((ROOT / file).is_file() for file in files)
    installed = [words[words.index("-r") + 1] for words in COMMANDS if "-r" in words]
    assert [name.replace("$(uname -m)", machine) for machine in ("x86_64", "aarch64") for name in installed] == files


def test_python_and_pins_are_those_of_the_project() -> None:
    (version,) = re.findall(r"^FROM python:(3\.\d+)-", TEXT, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert version in SpecifierSet(project["requires-python"])
    locked = re.findall(r"--python-version (3\.\d+) --output", (ROOT / "Makefile").read_text())
    assert {*locked} == {version}
    (pytest_pin,) = re.findall(r"pytest==[\d.]+", TEXT)
    assert pytest_pin in (ROOT / "requirements" / "dev.txt").read_text().splitlines()


def test_make_targets_and_scripts_exist() -> None:
    make = [words for words in COMMANDS if words[0] == "make"]
    make += [re.findall(r'"([^"]+)"', words) for instruction, words in INSTRUCTIONS if instruction == "CMD"]
    assert len(make) == 2
    for _, *words in make:
        subprocess.run(["make", "--dry-run", *words], cwd=ROOT, check=True, capture_output=True)
    scripts = [words[1] for words in COMMANDS if words[0] == "python" and words[1] != "-m"]
    assert scripts == ["train_gtpo.py"] and (ROOT / scripts[0]).is_file()


def test_the_environment_of_the_host_stays_out_of_the_image() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".venv*", "outputs", "**/__pycache__"} <= {*ignored}
    assert not {"configs", "requirements", "tests", "gtpo", "Makefile"} & {*ignored}


def test_the_batch_script_of_slurm() -> None:
    path = ROOT / "examples" / "slurm" / "train.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", path.read_text(), re.MULTILINE))
    assert options["signal"].startswith("USR2@")  # without B: the training processes are signalled, not this shell
    assert options["ntasks-per-node"] == options["gpus-per-node"]  # a process per GPU
    assert {"requeue", "open-mode"} <= options.keys()
