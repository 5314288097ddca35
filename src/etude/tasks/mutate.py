"""Mutation operators: each makes one realistic mistake on exactly one line of a normalised function.

An operator looks at one syntax node and offers edits of its fields; a mutant is kept when the unparsed text differs in one
line below the `def` line. `wrong_name` exists but is in no default mix: what a small policy cannot repair only costs
it probability mass. Deliberately knows nothing of tests or of which mutants are worth a task.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator

import msgspec

from etude.tasks.functions import parse_function


class Mutant(msgspec.Struct, frozen=True):
    """One mistake: line `line` (0-based) of the normalised source, `before` it and `after` it."""

    operator: str
    line: int
    before: str
    after: str

    def apply(self, source: str) -> str:
        """The broken text. Raises ValueError when `source` does not hold `before` there."""
        return _replace_line(source, self.line, self.before, self.after)

    def revert(self, broken: str) -> str:
        """The original text. Raises ValueError when `broken` does not hold `after` there."""
        return _replace_line(broken, self.line, self.after, self.before)


class Edit(msgspec.Struct, frozen=True):
    """Set `node.field` (or its item `index`) to `value`."""

    node: ast.AST
    field: str
    value: object
    index: int | None = None


Operator = Callable[[ast.AST, tuple[str, ...]], Iterator[Edit]]

_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_NEIGHBOUR: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
_OTHER_OPERATION: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
}  # fmt: skip
_TWINS = [
    ("min", "max"), ("any", "all"), ("lower", "upper"), ("startswith", "endswith"), ("lstrip", "rstrip"), ("find", "rfind"),
    ("index", "rindex"), ("split", "rsplit"), ("partition", "rpartition"), ("ljust", "rjust"), ("floor", "ceil"),
    ("append", "extend"), ("keys", "values"), ("isdigit", "isalpha"), ("islower", "isupper"), ("union", "intersection"),
    ("sin", "cos"), ("bisect_left", "bisect_right"), ("match", "search"), ("dirname", "basename"),
]  # fmt: skip
_TWIN = {a: b for pair in _TWINS for a, b in (pair, pair[::-1])}


def _comparison(node: ast.AST, names: tuple[str, ...]) -> Iterator[Edit]:
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            yield Edit(node, "ops", _OPPOSITE[type(operator)](), index)


def _boundary(node: ast.AST, names: tuple[str, ...]) -> Iterator[Edit]:
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            if type(operator) in _NEIGHBOUR:
                yield Edit(node, "ops", _NEIGHBOUR[type(operator)](), index)


def _arithmetic(node: ast.AST, names: tuple[str, ...]) -> Iterator[Edit]:
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _OTHER_OPERATION:
        formats = (
            isinstance(node, ast.BinOp) and isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
        )
        if not formats:
            yield Edit(node, "op", _OTHER_OPERATION[type(node.op)]())


def _boolean(node: ast.AST, names: tuple[str, ...]) -> Iterator[Edit]:
    if isinstance(node, ast.BoolOp):
        yield Edit(node, "op", ast.And() if isinstance(node.op, ast.Or) else ast.Or())


def _negation(node: ast.AST, names: tuple[str, ...]) -> Iterator[Edit]:
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        test = node.test
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield Edit(node, "test", test.operand)
        elif not isinstance(test, ast.Compare | ast.BoolOp | ast.Constant):
            yield Edit(node, "test", ast.UnaryOp(ast.Not(), test))
    elif isinstance(node, ast.Return) and isinstance(node.value, ast.UnaryOp) and isinstance(node.value.op, ast.Not):
        yield Edit(node, "value", node.value.operand)


def _constant(node: ast.AST, names: tuple[str, ...]) -> Iterator[Edit]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        for value in (node.value + 1, node.value - 1):
            if value >= 0:
                yield Edit(node, "value", value)


def _truth(node: ast.AST, names: tuple[str, ...]) -> Iterator[Edit]:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield Edit(node, "value", not node.value)


def _sign(node: ast.AST, names: tuple[str, ...]) -> Iterator[Edit]:
    for field in ("left", "right", "value", "upper", "lower", "slice"):
        inner = getattr(node, field, None)
        if isinstance(inner, ast.UnaryOp) and isinstance(inner.op, ast.USub):
            yield Edit(node, field, inner.operand)


def _slice(node: ast.AST, names: tuple[str, ...]) -> Iterator[Edit]:
    if isinstance(node, ast.Slice):
        if node.lower is None and node.upper is not None:
            yield Edit(node, "lower", ast.Constant(1))
        if node.lower is not None and node.upper is None:
            yield Edit(node, "upper", ast.UnaryOp(ast.USub(), ast.Constant(1)))
            yield Edit(node, "lower", None)
        if node.lower is not None and node.upper is not None:
            yield Edit(node, "upper", None)


def _missing_return(node: ast.AST, names: tuple[str, ...]) -> Iterator[Edit]:
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Name):
        yield Edit(node, "value", None)


def _swapped_arguments(node: ast.AST, names: tuple[str, ...]) -> Iterator[Edit]:
    if isinstance(node, ast.Call) and len(node.args) >= 2:
        first, second, *rest = node.args
        if (
            not isinstance(first, ast.Starred)
            and not isinstance(second, ast.Starred)
            and ast.dump(first) != ast.dump(second)
        ):
            yield Edit(node, "args", [second, first, *rest])


def _swapped_operands(node: ast.AST, names: tuple[str, ...]) -> Iterator[Edit]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub | ast.Div | ast.FloorDiv | ast.Mod | ast.Pow):
        simple = all(isinstance(side, ast.Name | ast.Constant) for side in (node.left, node.right))
        if (
            simple
            and not isinstance(getattr(node.left, "value", None), str)
            and ast.dump(node.left) != ast.dump(node.right)
        ):
            yield Edit(node, "left", (node.right, node.left))


def _twin_call(node: ast.AST, names: tuple[str, ...]) -> Iterator[Edit]:
    if isinstance(node, ast.Call):
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr in _TWIN:
            yield Edit(called, "attr", _TWIN[called.attr])
        elif isinstance(called, ast.Name) and called.id in ("min", "max", "any", "all"):
            yield Edit(called, "id", _TWIN[called.id])


def _loop_exit(node: ast.AST, names: tuple[str, ...]) -> Iterator[Edit]:
    body = getattr(node, "body", None)
    for index, statement in enumerate(body if isinstance(body, list) else []):
        if isinstance(statement, ast.Break | ast.Continue):
            yield Edit(node, "body", ast.Break() if isinstance(statement, ast.Continue) else ast.Continue(), index)


def _wrong_name(node: ast.AST, names: tuple[str, ...]) -> Iterator[Edit]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names:
        for other in names:
            if other != node.id:
                yield Edit(node, "id", other)


OPERATORS: dict[str, Operator] = {
    "comparison": _comparison, "boundary": _boundary, "arithmetic": _arithmetic, "boolean": _boolean,
    "negation": _negation, "constant": _constant, "truth": _truth, "sign": _sign, "slice": _slice,
    "missing_return": _missing_return, "swapped_arguments": _swapped_arguments, "swapped_operands": _swapped_operands,
    "twin_call": _twin_call, "loop_exit": _loop_exit, "wrong_name": _wrong_name,
}  # fmt: skip
DEFAULT_MIX = tuple(name for name in OPERATORS if name != "wrong_name")


def mutants(
    source: str, operators: tuple[str, ...] = DEFAULT_MIX, limit: int | None = None, seed: str = ""
) -> list[Mutant]:
    """Distinct single-line mutants of a normalised function, drawn operator first, then place, so that rare operators
    are not crowded out; the order depends only on the source, the operators and `seed`."""
    function = parse_function(source)
    lines = source.split("\n")
    places: dict[str, list[Edit]] = {}
    names = _local_names(function)
    for node in ast.walk(function):
        for name in operators:
            found = list(OPERATORS[name](node, names))
            if found:
                places.setdefault(name, []).extend(found)
    rng = random.Random(f"{seed}\n{source}")
    for edits in places.values():
        rng.shuffle(edits)
    kept: list[Mutant] = []
    seen: set[tuple[int, str]] = set()
    while places and (limit is None or len(kept) < limit):
        name = rng.choice(sorted(places))
        edit = places[name].pop()
        if not places[name]:
            del places[name]
        changed = _changed_line(lines, _unparse_with(function, edit))
        if changed is not None and changed not in seen:
            seen.add(changed)
            kept.append(Mutant(name, changed[0], lines[changed[0]], changed[1]))
    return kept


def _local_names(function: ast.FunctionDef) -> tuple[str, ...]:
    names = [node.arg for node in ast.walk(function) if isinstance(node, ast.arg)]
    names += [node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return tuple(dict.fromkeys(names))


def _unparse_with(function: ast.FunctionDef, edit: Edit) -> str | None:
    saved = {field: getattr(edit.node, field) for field in edit.node._fields if hasattr(edit.node, field)}
    try:
        if edit.index is not None:
            items = list(saved[edit.field])
            items[edit.index] = edit.value
            setattr(edit.node, edit.field, items)
        elif isinstance(edit.value, tuple):
            edit.node.left, edit.node.right = edit.value  # type: ignore[attr-defined]
        else:
            setattr(edit.node, edit.field, edit.value)
        return ast.unparse(ast.fix_missing_locations(function))
    except (ValueError, AttributeError, RecursionError):
        return None
    finally:
        for field, value in saved.items():
            setattr(edit.node, field, value)


def _changed_line(lines: list[str], text: str | None) -> tuple[int, str] | None:
    if text is None:
        return None
    new = text.split("\n")
    if len(new) != len(lines):
        return None
    different = [index for index, line in enumerate(lines) if line != new[index]]
    if len(different) != 1 or different[0] == 0:
        return None
    return different[0], new[different[0]]


def _replace_line(text: str, line: int, old: str, new: str) -> str:
    lines = text.split("\n")
    if line >= len(lines) or lines[line] != old:
        raise ValueError(f"line {line} is not {old!r}")
    return "\n".join([*lines[:line], new, *lines[line + 1 :]])
