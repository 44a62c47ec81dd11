"""The weight of code: syntax nodes without docstrings, and nodes a code line."""

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SUB_EXPRESSIONS = (
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.IfExp,
    ast.Lambda,
    ast.NamedExpr,
)
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


class Weight(NamedTuple):
    """What one file, or several together, weigh."""

    nodes: int  # syntax nodes, docstrings not counted
    lines: int  # lines with code: no blank, comment or docstring lines
    functions: dict[str, int]  # "path:line name" -> lines of the function
    heavy_lines: list[str]  # lines with three or more comprehensions, conditional expressions, lambdas or walruses

    @property
    def density(self) -> float:
        """Syntax nodes a code line."""
        return self.nodes / max(self.lines, 1)


def docstrings(tree: ast.Module) -> list[ast.Expr]:
    """The expression statements that are docstrings."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
            assert isinstance(node.body[0], ast.Expr)
            found.append(node.body[0])
    return found


def code_lines(text: str, tree: ast.Module) -> int:
    """Lines that hold a token of code."""
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            used |= set(range(token.start[0], token.end[0] + 1))
    for docstring in docstrings(tree):
        assert docstring.end_lineno
        used -= set(range(docstring.lineno, docstring.end_lineno + 1))
    return len(used)


def weight(paths: Iterable[Path]) -> Weight:
    """The weight of Python files together."""
    nodes = lines = 0
    functions: dict[str, int] = {}
    heavy_lines: list[str] = []
    for path in paths:
        text = path.read_text()
        tree = ast.parse(text)
        skipped = {part for docstring in docstrings(tree) for part in (docstring, docstring.value)}
        per_line: Counter[int] = Counter()
        for node in ast.walk(tree):
            nodes += node not in skipped
            if isinstance(node, SUB_EXPRESSIONS):
                per_line[node.lineno] += 1
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno
                functions[f"{path}:{node.lineno} {node.name}"] = node.end_lineno - node.lineno + 1
        heavy_lines += [f"{path}:{line}" for line, count in per_line.items() if count >= 3]
        lines += code_lines(text, tree)
    return Weight(nodes, lines, functions, heavy_lines)
