"""Functions of a module in one normal form: `ast.unparse` text without docstrings, annotations and decorators.

The anonymised hash (local names numbered in order) and the signature key are what the splits are kept disjoint by.
Also says which functions are self-contained: only builtins and deterministic standard modules are free in them.
Deliberately knows nothing of mutation, of running code, or of splits.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import warnings
from collections.abc import Iterator

import msgspec

from etude.tasks.sources import SourceModule

MIN_LINES, MAX_LINES, MAX_CHARS, MAX_LINE_CHARS = 3, 12, 420, 100

SAFE_MODULES = frozenset(
    "math re string itertools functools collections operator bisect heapq textwrap unicodedata binascii struct copy cmath "
    "fractions decimal datetime calendar json html base64 statistics keyword difflib fnmatch posixpath numbers "
    "urllib.parse".split()
)
"""Standard modules a task's function may import: deterministic, and in the environment image."""
_SAFE_PATH = frozenset("join basename dirname split splitext normpath isabs commonprefix sep".split())
_UNSAFE_BUILTINS = frozenset(
    "open exec eval input print __import__ exit quit globals locals setattr delattr compile breakpoint help vars super "
    "memoryview id hash dir object classmethod property staticmethod copyright credits license getattr hasattr".split()
)
_UNSAFE_ATTRIBUTES = frozenset("today now utcnow fromtimestamp timestamp astimezone".split())
_UNTESTABLE = (
    ast.Import,
    ast.ImportFrom,
    ast.Global,
    ast.Nonlocal,
    ast.Await,
    ast.With,
    ast.AsyncWith,
    ast.AsyncFor,
    ast.ClassDef,
)


class Function(msgspec.Struct, frozen=True):
    """One normalised function. `digest` is the anonymised hash; `hints` is one text per positional parameter
    (annotation or default's type, or empty); `testable` says that it can run on its own."""

    name: str
    parameters: tuple[str, ...]
    source: str
    imports: tuple[str, ...]
    module: str
    package: str
    licence: str
    digest: str
    testable: bool
    hints: tuple[str, ...] = ()

    @property
    def signature(self) -> str:
        """Name and parameter names: a second key by which vendored and edited copies are found."""
        return f"{self.name}({','.join(self.parameters)})"


class _Strip(ast.NodeTransformer):
    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns, node.decorator_list = None, []
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            node.body = node.body[1:] or [ast.Pass()]
        return node

    visit_FunctionDef = _function
    visit_AsyncFunctionDef = _function

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        self.generic_visit(node)
        return None if node.value is None else ast.copy_location(ast.Assign([node.target], node.value), node)


def parse_function(source: str) -> ast.FunctionDef:
    """The one function of a normalised text. Raises SyntaxError or ValueError when it holds something else."""
    body = _quiet_parse(source).body
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef):
        raise ValueError("not exactly one function")
    return body[0]


def normalise(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Normal-form text of a function node (which is changed in place)."""
    return ast.unparse(ast.fix_missing_locations(_Strip().visit(node)))


def digest(source: str) -> str:
    """Anonymised hash of a normalised function: equal for copies that differ only in the names of locals and itself."""
    function = _quiet_parse(source).body[0]
    renamed: dict[str, str] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            node.arg = renamed.setdefault(node.arg, f"v{len(renamed)}")
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            renamed.setdefault(node.id, f"v{len(renamed)}")
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id in renamed:
            node.id = renamed[node.id]
    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        function.name = "f"
    return hashlib.sha256(ast.dump(function).encode()).hexdigest()[:24]


def parameter_names(arguments: ast.arguments) -> tuple[str, ...]:
    """All parameter names in the order of the signature."""
    named = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    return tuple(argument.arg for argument in named if argument is not None)


def functions_of(module: SourceModule) -> Iterator[Function]:
    """Every function of the module (methods and nested ones too) whose normal form fits the limits."""
    try:
        tree = _quiet_parse(module.text)
    except (SyntaxError, ValueError, RecursionError):
        return
    imported = _imports(tree)
    for node in list(ast.walk(tree)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("test"):
            continue
        if (node.end_lineno or 0) - node.lineno > 120:
            continue
        hints = _hints(node.args)
        try:
            source = normalise(node)
            if not _fits(source):
                continue
            function = _quiet_parse(source).body[0]
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            free = free_names(function)
            imports = tuple(sorted({imported[name] for name in free if name in imported}))
            testable = isinstance(function, ast.FunctionDef) and _self_contained(function, free, imported)
            yield Function(
                function.name, parameter_names(function.args), source, imports, module.name, module.package,
                module.licence, digest(source), testable, hints,
            )  # fmt: skip
        except (RecursionError, ValueError, SyntaxError, AttributeError, TypeError):
            continue


def signatures_of(text: str) -> set[str]:
    """Signature of every function of a file, of any size; empty when it does not parse."""
    try:
        nodes = list(ast.walk(_quiet_parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return set()
    found = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {f"{node.name}({','.join(parameter_names(node.args))})" for node in found}


def free_names(function: ast.AST) -> set[str]:
    """Names read in the function that it does not bind itself."""
    bound = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    loads: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            (loads if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
    return loads - bound


def _fits(source: str) -> bool:
    lines = source.split("\n")
    if not MIN_LINES <= len(lines) <= MAX_LINES or not 40 <= len(source) <= MAX_CHARS or not source.isascii():
        return False
    return max(map(len, lines)) <= MAX_LINE_CHARS and lines[0].startswith(("def ", "async def "))


def _imports(tree: ast.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                found[bound] = f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            for alias in node.names:
                if alias.name != "*":
                    suffix = f" as {alias.asname}" if alias.asname else ""
                    found[alias.asname or alias.name] = f"from {origin} import {alias.name}{suffix}"
    return found


def _self_contained(function: ast.FunctionDef, free: set[str], imported: dict[str, str]) -> bool:
    path_names = set()
    for name in free:
        if name in imported:
            origin = imported[name].split()[1]
            if imported[name] == "import os":
                path_names.add(name)
            elif origin not in SAFE_MODULES:
                return False
        elif not hasattr(builtins, name) or name in _UNSAFE_BUILTINS:
            return False
    if function.args.posonlyargs + function.args.args and (function.args.posonlyargs + function.args.args)[0].arg in (
        "self",
        "cls",
        "mcs",
    ):
        return False
    safe_os = 0
    for node in ast.walk(function):
        if isinstance(node, _UNTESTABLE) or (isinstance(node, ast.Call) and function.name == "main"):
            return False
        if isinstance(node, ast.Attribute):
            if node.attr.startswith("__") or node.attr in _UNSAFE_ATTRIBUTES:
                return False
            inner = node.value
            if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id in path_names:
                if inner.attr != "path" or node.attr not in _SAFE_PATH:
                    return False
                safe_os += 1
    used_os = sum(isinstance(node, ast.Name) and node.id in path_names for node in ast.walk(function))
    return used_os == safe_os


def _hints(arguments: ast.arguments) -> tuple[str, ...]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    hints = []
    for argument, default in zip(positional, defaults):
        if argument.annotation is not None:
            hints.append(ast.unparse(argument.annotation)[:60])
        elif isinstance(default, ast.Constant) and default.value is not None:
            hints.append(type(default.value).__name__)
        else:
            hints.append("")
    return tuple(hints)


def _quiet_parse(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)
