"""Wrong inputs, refused before PyTorch, Transformers and TRL are imported, which takes seconds.

What passes is checked again where it is used: of a file only the first rows are read here.
"""

import ast
import warnings
from collections.abc import Collection
from pathlib import Path

from gtpo.arguments import (
    BENCHMARK_TITLES,
    DataArguments,
    RewardArguments,
    Values,
    fields_of,
    split_function,
)
from gtpo.data import tables
from gtpo.data.values import elements_of, is_empty, is_missing, to_question, to_text
from gtpo.errors import UsageError, first_line, nearest

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FIRST_ROWS = 1000  # of a file: its columns and answers, and whether it is short
BIND_UNSEEN = {"globals", "exec", "setattr", "__getattr__"}  # in a file: it may have names that its text does not show


def check_inputs(method: str, values: Values) -> tuple[int, int]:
    """Refuse wrong code, a wrong file, its columns and answers; the rows of a short file, the prompts of a step.

    ``values`` are the settings of preset, file and command line, without the defaults; code is named on the latter.
    """
    known = RewardArguments().reward
    rewards = values.get("reward") or known
    if isinstance(rewards, list):
        for name in {*rewards} - {*known}:
            module, function = split_function(name, known, "reward")
            if module.endswith(".py") and not Path(module).is_file():
                raise UsageError(f"--reward {name}: {module} is not a file.")
            _check_code("reward", name, module, function)
    objective = values.get("objective")
    if isinstance(objective, str) and ":" in objective:
        _check_code("objective", objective, *split_function(objective, (), "objective"))
    given = {name: values[name] for name in fields_of([DataArguments]) if values.get(name) is not None}
    data = DataArguments(**given)
    needs_answers = method != "sft" and "accuracy" in rewards
    required = ("prompt", "gold") if needs_answers else ("prompt",)
    count = _check_data(data, data.dataset, tables.DATASETS, "dataset", required)
    _check_data(data, data.eval_dataset or tables.DATASETS[0], BENCHMARK_TITLES, "eval_dataset", required)
    of_step = values.get("gradient_accumulation_steps") if method == "sft" else None
    return min(count, data.limit or count), values.get("prompts_per_step") or of_step or 1


def _check_code(noun: str, name: str, module: str, wanted: str) -> None:
    """Refuse a file that is no Python, or in which nothing has the name; nothing of it is run here."""
    path = Path(module.removesuffix(".py") + ".py")
    if not path.is_file():
        return  # a module elsewhere
    try:
        with warnings.catch_warnings(action="ignore"):  # they come when it is imported
            tree = ast.parse(path.read_bytes(), path.name)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        raise UsageError(f"--{noun} {name} cannot be imported: {what}.") from error
    bound = _names_in(tree)
    if wanted in bound or "*" in bound or bound & BIND_UNSEEN:
        return
    own = [node.name for node in tree.body if isinstance(node, DEFINITIONS)]
    there = ", ".join(own) or "nothing"
    raise UsageError(f"--{noun} {name}: {module} has no {wanted}{nearest(wanted, own)}: it has {there}.")


def _names_in(tree: ast.Module) -> set[str]:
    """The names that a module defines, imports or mentions, in functions too; ``*`` where it imports all of another."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, DEFINITIONS):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
    return names


def _check_data(data: DataArguments, source: str, known: Collection[str], flag: str, required: Collection[str]) -> int:
    """The number of usable rows of a short file."""
    tables.check_source(flag, source, known)
    if source in known or tables.is_on_hub(source):
        return FIRST_ROWS**2
    table = tables.read_file(Path(source), FIRST_ROWS)
    is_short = len(table.rows) < FIRST_ROWS
    try:
        columns = tables.columns_of(table, tables.named_columns(data), required)
    except UsageError:  # a later row may have it
        tables.columns_of(tables.read_file(Path(source)), tables.named_columns(data), required)
        return FIRST_ROWS**2
    usable = _usable_rows(table, columns, "gold" in required)
    if is_short and not usable:
        raise UsageError(f"{table.name} has no usable row: each lacks a prompt or an answer.")
    return usable if is_short else FIRST_ROWS**2


def _usable_rows(table: tables.Table, columns: tables.Columns, graded: bool) -> int:
    """How many rows have a prompt, and an answer where there is a column of them.

    A UsageError for a prompt that is no text or conversation, and a gold answer that is no text or number, as `true`.
    """
    usable = 0
    for row, place in table.rows:
        prompt = tables.value_of(row, columns["prompt"])
        answer = tables.value_of(row, columns["gold"]) if "gold" in columns else "none is needed"
        lacks_answer = is_missing(answer) if graded else is_empty(answer)
        if is_empty(prompt) or lacks_answer:
            continue
        usable += 1
        to_question(prompt, place, may_be_answered=True)
        for each in (elements_of(answer) or [answer]) if graded else ():
            to_text(each, f"{place}: column {columns['gold']!r}")
    return usable
