"""The modules sort without circles, and what is only run is a leaf (figures.py and report.py are imported too)."""

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = {path.stem for path in ROOT.glob("*.py")}
SCRIPTS = {name for name in MODULES if name.startswith("train_")} | (MODULES & {"evaluate", "demo", "reproduce"})
HEAVY = {"torch", "transformers", "trl", "peft", "accelerate", "datasets", "wandb", "unsloth", "vllm", "matplotlib"}


@cache
def imports(path: Path, anywhere: bool) -> frozenset[str]:
    """Top-level names that a file imports: at module level, or anywhere (in functions and methods too)."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: a relative import in a flat layout"
            found.add(str(node.module).partition(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            found.update(str(arg.value) for arg in node.args if isinstance(arg, ast.Constant))
        if anywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for child in ast.iter_child_nodes(node):
                visit(child)

    visit(tree)
    return frozenset(found)


def local_imports(module: str, anywhere: bool) -> set[str]:
    return set(imports(ROOT / f"{module}.py", anywhere) & MODULES)


def cycle(anywhere: bool) -> list[str]:
    """One circle of imports among our modules, or nothing."""
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(local_imports(module, anywhere)):
            if found := walk(other, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(MODULES) if (found := walk(module, []))), [])


def reached(module: str) -> set[str]:
    """What importing a module imports, through our modules."""
    names, open_ = set(), [module]
    while open_:
        current = open_.pop()
        for name in imports(ROOT / f"{current}.py", anywhere=False) - names:
            names.add(name)
            if name in MODULES:
                open_.append(name)
    return names


def test_the_expected_files_are_there() -> None:
    flat = "train_gtpo train_grpo train_sft evaluate rewards gtpo_loss trainer models data answers prompts sampling"
    assert not set(f"{flat} metrics config tracking figures".split()) - MODULES


def test_scripts_are_leaves() -> None:
    others = [*ROOT.glob("*.py"), *ROOT.glob("benchmarks/*.py")]
    importers = {(path.name, name) for path in others for name in imports(path, anywhere=True) & SCRIPTS}
    assert not importers


def test_modules_import_without_circles() -> None:
    assert cycle(anywhere=False) == []


def test_imports_in_functions_make_no_circle_either() -> None:
    assert cycle(anywhere=True) == []


def test_the_search_for_circles_finds_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker itself: a circle that closes inside a function is one of the second kind only."""
    (tmp_path / "a.py").write_text("import os\nfrom b import x\n")
    (tmp_path / "b.py").write_text("class B:\n    def f(self):\n        import a\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "MODULES", {"a", "b"})
    assert cycle(anywhere=False) == []
    assert cycle(anywhere=True) == ["a", "b", "a"]


def test_loss_needs_torch_alone() -> None:
    assert imports(ROOT / "gtpo_loss.py", anywhere=True) <= {"torch", *sys.stdlib_module_names}


@pytest.mark.parametrize("module", ["rewards", "answers", "metrics", "config", "prompts"])
def test_light_modules_import_nothing_heavy(module: str) -> None:
    assert not reached(module) & HEAVY


def test_train_scripts_import_trl_after_the_backend() -> None:
    """Unsloth patches trl, transformers and peft, so no module imported before load_backend() may import them."""
    for script in sorted(name for name in MODULES if name.startswith("train_")):
        assert not reached(script) & {"torch", "transformers", "trl", "peft", "datasets", "accelerate"}, script


def test_libraries_do_not_print() -> None:
    for module in sorted(MODULES):
        text = (ROOT / f"{module}.py").read_text()
        if "__main__" in text:
            continue  # also a command, which tells its user things
        calls = [
            node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        ]
        own = [call for call in calls if "sys.stderr" not in ast.unparse(call)]  # run_script tells the user errors
        assert not own, f"{module}.py:{own[0].lineno if own else 0} prints"


def test_the_root_shadows_no_package_and_light_modules_stay_light() -> None:
    """evaluate.py has the name of a Hugging Face package: the trainers have to import from here all the same."""
    code = """
import sys
import answers, config, metrics, prompts, rewards
heavy = {"torch", "transformers", "trl", "peft", "datasets", "wandb", "sympy"} & sys.modules.keys()
assert not heavy, heavy
import gtpo_loss
heavy = {"transformers", "trl", "peft", "datasets", "wandb"} & sys.modules.keys()
assert not heavy, heavy
import transformers, peft, trl
from trl import GRPOConfig, GRPOTrainer, SFTTrainer
from transformers import Trainer
import evaluate, models, data, tracking, trainer, sampling, figures
import train_gtpo, train_grpo, train_sft, demo
print("all imported")
"""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "WANDB_MODE")}
    completed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr[-2000:]
    assert completed.stdout.strip() == "all imported"  # and nothing else is said or done at import
