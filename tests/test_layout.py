"""The layout of docs/architecture.md: imports run one way, heavy packages have owners, the root is short."""

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from helpers.scripts import ROOT, run_process

SCRIPTS = {"train_gtpo", "train_grpo", "train_sft", "evaluate", "reproduce", "figures"}


def modules_of(directory: str) -> set[str]:
    """Dotted names of the modules below a directory of the root."""
    paths = ROOT.glob(f"{directory}/**/*.py")
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths}


PACKAGE = modules_of("gtpo")
PAPER = modules_of("paper")
MODULES = PACKAGE | PAPER | SCRIPTS | {"rewards", "gtpo_loss"}
HEAVY = {"torch", "transformers", "trl", "peft", "accelerate", "datasets", "wandb", "unsloth", "vllm", "matplotlib"}

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
}


def path_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(path_of(module).read_text())


@cache
def imports(module: str, anywhere: bool) -> frozenset[str]:
    """Dotted names that a module imports: at module level, or anywhere (in functions and methods too)."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: a relative import"
            found.update(
                name if (name := f"{node.module}.{alias.name}") in MODULES else str(node.module) for alias in node.names
            )
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if anywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for child in ast.iter_child_nodes(node):
                visit(child)

    visit(tree_of(module))
    return frozenset(found)


def ours(module: str, anywhere: bool) -> set[str]:
    """Our modules that a module imports; importing gtpo.a.b also runs gtpo/a/__init__.py, which counts for cycles."""
    direct = imports(module, anywhere) & MODULES
    packages = {name.rpartition(".")[0] for name in direct} & PACKAGE
    return {name for name in direct | packages if name != module and not module.startswith(f"{name}.")}


def cycle() -> list[str]:
    """One circle of imports among our modules, or nothing."""
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(ours(module, anywhere=True)):
            if found := walk(other, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(MODULES) if (found := walk(module, []))), [])


def reached(module: str) -> set[str]:
    """Top-level packages that importing a module imports, through our modules."""
    names = set()
    open_ = [module]
    seen = set()
    while open_:
        current = open_.pop()
        if current in seen:
            continue
        seen.add(current)
        names |= {name.partition(".")[0] for name in imports(current, anywhere=False)}
        open_ += sorted(ours(current, anywhere=False))
    return names


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
PAPER_IMPORTS = LOADING | {"evaluation"}  # rooms that the paper's figures and matrix may import
MOST_ARROWS = 81


def room_of(module: str) -> str:
    """``gtpo.data.load`` and ``gtpo.data`` are in the room data; the ground and ``gtpo`` are not in one."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else ""


def arrows() -> list[tuple[str, str]]:
    """The imports from room to room, in functions too."""
    return [
        (module, name)
        for module in sorted(PACKAGE)
        for name in sorted(imports(module, anywhere=True) & PACKAGE)
        if room_of(module) and room_of(name) and room_of(module) != room_of(name)
    ]


def test_rooms_import_what_the_table_says() -> None:
    assert not [(module, name) for module, name in arrows() if room_of(name) not in ROOMS[room_of(module)]]


def test_few_imports_run_from_room_to_room() -> None:
    assert 0 < len(arrows()) <= MOST_ARROWS


def test_the_ground_imports_the_ground_alone() -> None:
    assert not [(module, name) for module in GROUND for name in imports(module, anywhere=True) & MODULES - GROUND]


def test_every_module_has_a_room() -> None:
    assert {module for module in PACKAGE if not room_of(module)} == GROUND - {"gtpo_loss"} | {"gtpo"}
    assert len(list((ROOT / "gtpo").glob("*.py"))) <= 8


def test_nothing_replaces_a_function_of_a_library() -> None:
    """An assignment to an attribute of an imported name, or unittest.mock, outside the tests."""
    for module in sorted(MODULES):
        assert "unittest" not in {name.partition(".")[0] for name in imports(module, anywhere=True)}, module
        tree = tree_of(module)
        imported = {
            (alias.asname or alias.name).partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
            if (getattr(node, "module", None) or alias.name).partition(".")[0] in HEAVY
        }
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                owner = target
                while isinstance(owner, ast.Attribute):
                    owner = owner.value
                is_attribute = isinstance(target, ast.Attribute) and isinstance(owner, ast.Name)
                assert not (is_attribute and owner.id in imported), f"{module}:{node.lineno}"


def test_the_one_file_is_short() -> None:
    assert len((ROOT / "gtpo_loss.py").read_text().splitlines()) <= 400


def test_package_paper_and_study_import_downwards() -> None:
    used = {module: {name.partition(".")[0] for name in imports(module, anywhere=True)} for module in MODULES}
    assert not [module for module in PACKAGE if used[module] & {"paper", "study"}]
    assert not [module for module in MODULES if "study" in used[module]]


def test_the_paper_imports_these_rooms() -> None:
    found = {room_of(name) for module in PAPER for name in imports(module, anywhere=True) & PACKAGE}
    assert found - {""} <= PAPER_IMPORTS


def test_the_root_has_eight_python_files() -> None:
    assert {path.stem for path in ROOT.glob("*.py")} == SCRIPTS | {"rewards", "gtpo_loss"}


def test_scripts_are_short() -> None:
    lengths = {name: len(path_of(name).read_text().splitlines()) for name in SCRIPTS}
    assert all(length <= 50 for length in lengths.values()), lengths


def test_nothing_imports_a_script_or_rewards() -> None:
    leaves = {(module, name) for module in MODULES for name in imports(module, anywhere=True) & SCRIPTS}
    assert not leaves
    assert not {module for module in PACKAGE if "rewards" in imports(module, anywhere=True)}


def test_modules_import_without_circles() -> None:
    """Those in functions count, too."""
    assert cycle() == []


@pytest.mark.parametrize("module", ["gtpo_loss", "gtpo.forward.head"])
def test_loss_and_head_need_torch_alone(module: str) -> None:
    assert {name.partition(".")[0] for name in imports(module, anywhere=True)} <= {"torch", *sys.stdlib_module_names}


@pytest.mark.parametrize("package", sorted(OWNERS))
def test_heavy_packages_have_owners(package: str) -> None:
    assert package not in ("matplotlib", "wandb") or not [m for m in MODULES if package in imports(m, anywhere=False)]
    users = {
        module for module in MODULES for name in imports(module, anywhere=True) if name.partition(".")[0] == package
    }
    assert users <= OWNERS[package]


@pytest.mark.parametrize(
    "module",
    [
        "rewards",
        "gtpo",
        "gtpo.cli.parse",
        "gtpo.data.load",
        "gtpo.runs.directory",
        "gtpo.grading",
        "gtpo.evaluation.metrics",
        "evaluate",
    ],
)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    assert not reached(module) & HEAVY


def test_the_package_imports_what_it_requires() -> None:
    """At module level: `pip install .` into an empty environment gives nothing else."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.split("[>=<]", line)[0].replace("-", "_") for line in project["dependencies"]}
    required |= {"filelock", "markupsafe", "numpy", "pandas", "safetensors", "tqdm", "yaml"}  # of the others
    for module in sorted(PACKAGE):
        names = {name.partition(".")[0] for name in imports(module, anywhere=False)}
        assert names <= required | {*sys.stdlib_module_names, "gtpo", "gtpo_loss"}, module


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_scripts_import_trl_after_the_backend(script: str) -> None:
    """Unsloth patches trl, transformers and peft: no module may import them before load_backend()."""
    assert not reached(script) & {"torch", "transformers", "trl", "peft", "datasets", "accelerate"}
    assert not reached(script) & {"fcntl", "resource"}  # Windows has neither: run_script says what to do there


@pytest.mark.slow
def test_the_root_shadows_no_package() -> None:
    """evaluate.py has the name of a Hugging Face package: transformers, peft and trl import all the same."""
    code = """
import sys
import gtpo, gtpo.grading, gtpo.cli.parse, gtpo.evaluation.metrics, gtpo.prompts, rewards
heavy = {"torch", "transformers", "trl", "peft", "datasets", "wandb", "sympy"} & sys.modules.keys()
assert not heavy, heavy
import gtpo_loss, gtpo.forward.head
heavy = {"transformers", "trl", "peft", "datasets", "wandb"} & sys.modules.keys()
assert not heavy, heavy
import transformers, peft, trl
from trl import GRPOConfig, GRPOTrainer, SFTTrainer
from transformers import Trainer
import evaluate, figures, reproduce, train_gtpo, train_grpo, train_sft
import gtpo.training.faults, gtpo.evaluation.sampling, gtpo.training.loop, paper.figures
import gtpo.reports.html, gtpo.training.trainer
print("all imported")
"""
    done = run_process([sys.executable, "-c", code])
    assert done.stdout.strip() == "all imported"  # and nothing else is printed at import


@pytest.mark.slow
def test_public_names_are_lazy() -> None:
    """`import gtpo` loads neither torch nor trl; a name loads its module; an unknown name is an AttributeError."""
    code = """
import sys, gtpo
assert not {"torch", "trl", "transformers", "yaml"} & sys.modules.keys()
from gtpo import GTPOArguments, load_backend
assert not {"torch", "trl", "transformers"} & sys.modules.keys()
assert {"GRPOTrainer", "GTPOTrainer", "GTPOArguments", "load_backend"} <= set(dir(gtpo))
try:
    gtpo.GTPOTrainr
except AttributeError as error:
    assert "GTPOTrainr" in str(error)
else:
    raise AssertionError
from gtpo import GRPOTrainer, GTPOTrainer
assert issubclass(GTPOTrainer, GRPOTrainer) and GTPOTrainer.__module__ == "gtpo.training.trainer"
"""
    run_process([sys.executable, "-c", code])
