"""The layout of docs/architecture.md: imports run one way, heavy packages have owners, the root is short."""

import ast
import re
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter

import pytest
from helpers.scripts import ROOT, run_process

import gtpo

SCRIPTS = {"train_gtpo", "train_grpo", "train_sft", "evaluate", "reproduce", "figures"}


def modules_of(directory: str) -> set[str]:
    """Dotted names of the modules below a directory of the root."""
    paths = ROOT.glob(f"{directory}/**/*.py")
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths}


PACKAGE = modules_of("gtpo")
PAPER = modules_of("paper")
MODULES = PACKAGE | PAPER | SCRIPTS | {"rewards", "gtpo_loss"}
STANDARD = {*sys.stdlib_module_names}

# Who may import a package at all, in a function or at the top.
OWNERS = {
    "wandb": {"gtpo.reports.wandb", "paper.results"},
    "vllm": {"gtpo.evaluation.sampling", "gtpo.forward.vllm_lora"},
    "unsloth": {"gtpo.models.backend", "gtpo.models.load"},
    "datasets": {"gtpo.data.load", "gtpo.training.refusals", "gtpo.data.tables"},
    "matplotlib": {"gtpo.reports.curves"},
    "sympy": {"gtpo.grading.symbolic"},
    "math_verify": {"gtpo.grading.symbolic"},
    "deepspeed": {"gtpo.processes"},
    "submitit": {"paper.slurm"},
    "unittest": set(),  # nothing is mocked outside the tests
}
GROUND = {"gtpo_loss", "gtpo.errors", "gtpo.prompts", "gtpo.files", "gtpo.arguments", "gtpo.processes"}
LOADING = {"forward", "grading", "data", "runs", "reports", "models"}
ROOMS: dict[str, set[str]] = {  # room -> rooms that it may import, besides the ground
    "forward": set(),
    "grading": set(),
    "data": {"grading"},
    "runs": set(),
    "reports": {"runs"},
    "models": {"data", "forward", "runs"},
    "training": LOADING,
    "evaluation": LOADING,
    "cli": {"data", "models", "runs"},
}


@cache
def tree_of(module: str) -> ast.Module:
    path = ROOT / module.replace(".", "/")
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


@cache
def imports(module: str, *, anywhere: bool = True) -> set[str]:
    """Dotted names that a module imports: in functions and methods, too, or at its top alone."""
    found: set[str] = set()
    for node in ast.walk(tree_of(module)) if anywhere else tree_of(module).body:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & MODULES or {str(node.module)}
    return found


def packages(module: str, *, anywhere: bool = True) -> set[str]:
    return {name.partition(".")[0] for name in imports(module, anywhere=anywhere)}


def room_of(module: str) -> str:
    """``gtpo.data.load`` and ``gtpo.data`` are in the room data; the ground and ``gtpo`` are not in one."""
    return next((room for room in ROOMS if f"{module}.".startswith(f"gtpo.{room}.")), "")


def test_rooms_import_what_the_table_says() -> None:
    for module in PACKAGE:
        if room := room_of(module):
            assert {room_of(name) for name in imports(module)} <= {"", room, *ROOMS[room]}, module


def test_the_ground_imports_the_ground_alone() -> None:
    assert not [(module, name) for module in GROUND for name in imports(module) & MODULES - GROUND]


def test_every_module_has_a_room() -> None:
    assert {module for module in PACKAGE if not room_of(module)} == GROUND - {"gtpo_loss"} | {"gtpo"}


@pytest.mark.parametrize(
    ("importers", "others"),
    [
        (MODULES, ("study", *SCRIPTS)),
        (PACKAGE, ("paper", "rewards")),
        (PAPER, ("gtpo.training", "gtpo.cli")),
    ],
    ids=["all", "package", "paper"],
)
def test_these_import_none_of_the_others(importers: set[str], others: tuple[str, ...]) -> None:
    assert not [(module, name) for module in importers for name in imports(module) if name.startswith(others)]


def test_modules_import_without_circles() -> None:
    """Those in functions count, too."""
    TopologicalSorter({module: imports(module) & MODULES - {"gtpo"} for module in MODULES}).prepare()


def test_nothing_replaces_a_function_of_a_library() -> None:
    """There is no assignment to an attribute of an imported name."""
    for module in MODULES:
        nodes = [*ast.walk(tree_of(module))]
        aliases = [node for node in nodes if isinstance(node, ast.alias)]
        targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
        assigned = {ast.unparse(target).partition(".")[0] for target in targets if isinstance(target, ast.Attribute)}
        imported = {(alias.asname or alias.name).partition(".")[0] for alias in aliases}
        assert not assigned & imported - STANDARD, module


def test_the_root_has_eight_python_files() -> None:
    assert {path.stem for path in ROOT.glob("*.py")} == SCRIPTS | {"rewards", "gtpo_loss"}


@pytest.mark.parametrize("module", ["gtpo_loss", "gtpo.forward.head"])
def test_loss_and_head_need_torch_alone(module: str) -> None:
    assert packages(module) <= {"torch", *STANDARD}


def test_the_plugin_of_verl_needs_verl_and_the_loss_alone() -> None:
    of_verl = {"omegaconf", "numpy", "torch", "transfer_queue", "verl"}
    assert packages("examples.verl.gtpo_verl") <= {"gtpo_loss", *of_verl, *STANDARD}
    assert not [name for name in modules_of("examples/verl") if "gtpo" in packages(name)]


@pytest.mark.parametrize("package", OWNERS)
def test_heavy_packages_have_owners(package: str) -> None:
    assert {module for module in MODULES if package in packages(module)} <= OWNERS[package]


def test_the_package_imports_what_it_requires() -> None:
    """At module level: `pip install .` into an empty environment gives nothing else."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.split("[>=<]", line)[0].replace("-", "_") for line in project["dependencies"]}
    required |= {"filelock", "markupsafe", "numpy", "pandas", "safetensors", "tqdm", "yaml"}  # of the others
    for module in PACKAGE:
        assert packages(module, anywhere=False) <= {*required, *STANDARD, "gtpo", "gtpo_loss"}, module


def test_scripts_and_light_modules_import_nothing_heavy() -> None:
    """Unsloth patches trl, transformers and peft, which are imported after it; Windows has no fcntl and resource."""
    heavy = {"torch", "transformers", "trl", "peft", "accelerate", "datasets", "wandb", "matplotlib", "sympy"}
    light = ["rewards", "gtpo.data.load", "gtpo.runs.directory", "gtpo.grading", "gtpo.evaluation.metrics", *SCRIPTS]
    code = f"""
import sys
sys.modules["fcntl"] = sys.modules["resource"] = None
import {", ".join(light)}
from gtpo import GTPOArguments, load_backend
print({heavy} & sys.modules.keys())
"""
    assert run_process([sys.executable, "-c", code]).stdout == "set()\n"


def test_the_package_lists_its_names() -> None:
    assert {"GRPOTrainer", "GTPOTrainer", "GTPOArguments", "load_backend"} <= {*dir(gtpo)}
    with pytest.raises(AttributeError, match="GTPOTrainr"):
        gtpo.GTPOTrainr  # noqa: B018
