"""Faults drawn at random over the lines of code, to judge the tests: ``python tests/helpers/faults.py SEED [NUMBER]``.

Lists those of a seed, or writes one into the working tree, for `make test` and `git checkout .`.
"""

import ast
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
ROOMS = ("gtpo/*.py", "gtpo/*.yaml", "*.py", "paper/*.py", "study/*.py", "examples/objectives/*.py")
ELSEWHERE = ("tests/", "benchmarks/", "examples/", "gtpo/grading/tables.yaml", "gtpo/grading/words.yaml")  # word lists
OPPOSITE = {ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.Eq: ast.NotEq, ast.In: ast.NotIn, ast.Is: ast.IsNot}
EDGE = {ast.Lt: ast.LtE, ast.Gt: ast.GtE}
OTHER = {ast.Add: ast.Sub, ast.Mult: ast.Div, ast.BitOr: ast.BitAnd}
NAMES = {"min": "max", "any": "all", "startswith": "endswith"}
OPPOSITE, EDGE, OTHER, NAMES = ({**each, **{b: a for a, b in each.items()}} for each in (OPPOSITE, EDGE, OTHER, NAMES))
OTHER |= {ast.FloorDiv: ast.Div, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult}
NAMES |= {"sorted": "list", "first": "last", "strip": "lstrip", "rpartition": "partition"}
Change = tuple[str, Any, str]  # kind, node that is replaced, its new text


class Fault(NamedTuple):
    file: str
    line: int
    kind: str
    text: str  # of the whole file


def but(node: Any, **fields: Any) -> str:
    """The source of a node with other fields."""
    return ast.unparse(type(node)(**{**dict(ast.iter_fields(node)), **fields}))


def without(elements: list[Any], place: int) -> list[Any]:
    return elements[:place] + elements[place + 1 :]


def fewer(kind: str, node: Any, least: int, *fields: str) -> Iterator[tuple[str, str]]:
    """One element less, where there are at least so many."""
    count = len(getattr(node, fields[0]))
    for place in range(count) if count >= least else ():
        yield kind, but(node, **{field: without(getattr(node, field), place) for field in fields})


def of_expression(node: Any) -> Iterator[tuple[str, str]]:  # noqa: C901, PLR0912 (a case for each kind of fault)
    match node:
        case ast.Compare():
            for kind, table in (("turned", OPPOSITE), ("edge", EDGE)):
                if other := table.get(type(node.ops[0])):
                    yield kind, but(node, ops=[other(), *node.ops[1:]])
        case ast.BoolOp(values=values):
            yield "and/or", but(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
            if len(values) == 2:
                yield from (("operand", ast.unparse(value)) for value in reversed(values))
            else:
                yield from fewer("operand", node, 3, "values")
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield "not", ast.unparse(node.operand)
        case ast.Constant(value=bool()):
            yield "bool", str(not node.value)
        case ast.Constant(value=int() | float()):
            yield "off by one", repr(node.value + 1)
        case ast.BinOp() if other := OTHER.get(type(node.op)):
            yield "operator", but(node, op=other())
            yield "operand", ast.unparse(node.left)
        case ast.IfExp():
            yield from (("condition", ast.unparse(part)) for part in (node.body, node.orelse))
        case ast.Call(args=args):
            yield from fewer("argument", node, 2, "args")
            yield from fewer("argument", node, 1, "keywords")
            if len(args) > 1:
                yield "exchanged", but(node, args=[args[1], args[0], *args[2:]])
        case ast.Subscript() if (place := ast.unparse(node.slice)) in ("0", "-1"):
            yield "first/last", but(node, slice=ast.Constant(-1 if place == "0" else 0))
        case ast.Subscript(slice=ast.Slice()):
            yield "slice", ast.unparse(node.value)
        case ast.Set() | ast.List(ctx=ast.Load()) | ast.Tuple(ctx=ast.Load()):
            yield from fewer("element", node, 2, "elts")
        case ast.Dict():
            yield from fewer("element", node, 2, "keys", "values")
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            loop, *rest = node.generators
            first = ast.parse(f"list({ast.unparse(loop.iter)})[:1]", mode="eval").body
            yield "only the first", but(node, generators=[ast.comprehension(loop.target, first, loop.ifs, 0), *rest])
            if loop.ifs:
                yield "condition", but(node, generators=[ast.comprehension(loop.target, loop.iter, [], 0), *rest])
        case ast.Name(ctx=ast.Load(), id=name) | ast.Attribute(ctx=ast.Load(), attr=name) if other := NAMES.get(name):
            yield "another function", ast.unparse(node)[: -len(name)] + other


def of_statement(node: Any, names: list[str]) -> Iterator[Change]:
    match node:
        case ast.Expr(value=ast.Constant()):  # a docstring
            return
        case ast.If() | ast.While():
            yield "condition", node.test, "False"
            yield "not", node.test, f"not ({ast.unparse(node.test)})"
            if isinstance(node, ast.If):
                yield "condition", node.test, "True"
        case ast.For():
            yield "only the first", node.iter, f"list({ast.unparse(node.iter)})[:1]"
        case ast.Return(value=ast.expr()):
            others = [name for name in names if name != ast.unparse(node.value)]
            yield from (("return", node.value, name) for name in ("None", *others[:3]))
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "removed", node, "pass"
        case ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break() | ast.Delete():
            yield "removed", node, "pass"
        case ast.ExceptHandler() if not isinstance(node.body[-1], ast.Pass):
            yield "swallowed", node.body[-1], "pass"


def changes(node: Any, names: list[str]) -> Iterator[Change]:
    """Every fault below a node, but for annotations, decorators, messages and what types alone need."""
    is_typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    if is_typing or isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        stored = [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
        names = list(dict.fromkeys([each.arg for each in node.args.args if each.arg != "self"] + stored))
    if isinstance(node, ast.stmt | ast.ExceptHandler):
        yield from of_statement(node, names)
    elif isinstance(node, ast.expr):
        yield from ((kind, node, text) for kind, text in of_expression(node))
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from changes(child, names)


def faults_of(file: str) -> dict[int, list[Fault]]:
    """Line -> the faults that begin there; of a YAML file each line may go."""
    source = (ROOT / file).read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    found: dict[int, list[Fault]] = {}
    if file.endswith(".yaml"):
        for place, line in enumerate(lines, 1):
            if line.strip() and not line.lstrip().startswith("#"):
                found[place] = [Fault(file, place, "line of data", "".join(without(lines, place - 1)))]
        return found
    for kind, node, text in changes(ast.parse(source), []):
        start, end = lines[node.lineno - 1].encode(), lines[node.end_lineno - 1].encode()
        before = "".join(lines[: node.lineno - 1]) + start[: node.col_offset].decode()
        after = end[node.end_col_offset :].decode() + "".join(lines[node.end_lineno :])
        new = text if text == "pass" or not isinstance(node, ast.expr) else f"({text})"
        found.setdefault(node.lineno, []).append(Fault(file, node.lineno, kind, before + new + after))
    return found


def can_be_read(fault: Fault) -> bool:
    """Whether it is Python or YAML, and another one than before."""
    texts = fault.text, (ROOT / fault.file).read_text(encoding="utf-8")
    try:
        new, old = (
            [yaml.safe_load, lambda text: ast.dump(ast.parse(text))][fault.file.endswith(".py")](t) for t in texts
        )
    except (SyntaxError, yaml.YAMLError):
        return False
    return new != old


def draw(seed: int, count: int = 100) -> list[Fault]:
    """Faults of lines drawn uniformly, of a line first the kind and then one of it."""
    listed = subprocess.run(["git", "ls-files", *ROOMS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [
        file for file in listed.split() if file.startswith("examples/objectives/") or not file.startswith(ELSEWHERE)
    ]
    lines = [faults for file in sorted(files) for _, faults in sorted(faults_of(file).items())]
    generator = random.Random(seed)
    drawn: list[Fault] = []
    while len(drawn) < count:
        faults = generator.choice(lines)
        kind = generator.choice(sorted({fault.kind for fault in faults}))
        fault = generator.choice([fault for fault in faults if fault.kind == kind])
        if can_be_read(fault) and fault not in drawn:
            drawn.append(fault)
    return drawn


if __name__ == "__main__":
    seed, *chosen = map(int, sys.argv[1:])
    for number, fault in enumerate(draw(seed)):
        print(number, f"{fault.file}:{fault.line}", fault.kind)
        if number in chosen:
            (ROOT / fault.file).write_text(fault.text, encoding="utf-8")
