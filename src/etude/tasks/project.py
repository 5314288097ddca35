"""Repair tasks from a user's own project: one mistake in one line of its code that its own pytest tests notice.

The project is copied; its tests run there in child processes, never in place. The file keeps its formatting: a mutant of the
normal form is carried over only where the original has that line once. Such tasks have verifier kind `pytest`:
the exact ids that passed before and must pass again. Deliberately knows nothing of corpora and splits by module.
"""

from __future__ import annotations

import ast
import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from etude.records.errors import BadInput
from etude.records.task import Limits, Split, Task
from etude.tasks.functions import normalise
from etude.tasks.harbor import with_id
from etude.tasks.mutate import mutants

Progress = Callable[[str], None]

MAX_FILE_BYTES, MAX_PROJECT_BYTES = 1 << 20, 16 << 20
_SKIPPED = frozenset(
    ".git .hg .svn .venv venv env .tox .nox __pycache__ .pytest_cache .mypy_cache .ruff_cache build dist .cache node_modules".split()
)
_TEST_SH = """#!/bin/sh
cp -R "$(dirname "$0")/repo/." .
mkdir -p /logs/verifier
if python3 -B -m pytest -q -p no:cacheprovider {ids}; then echo 1.0; else echo 0.0; fi > /logs/verifier/reward.txt
"""


class Place(msgspec.Struct, frozen=True):
    """One possible mistake: file, function, line of the file (0-based) and its text before and after."""

    path: str
    function: str
    operator: str
    line: int
    before: str
    after: str


def make_from_project(
    root: Path, *, limit: int = 50, per_function: int = 3, seed: int = 0, python: str = sys.executable,
    timeout_s: float = 300.0, progress: Progress = print,
) -> list[Task]:  # fmt: skip
    """Up to `limit` tasks from the project at `root`: each mutated tree fails at least one test that passes on the original.

    Raises BadInput when the folder holds no Python code or no passing pytest test.
    """
    if not root.is_dir():
        raise BadInput(str(root), "--repo", "missing", "a folder with Python code and pytest tests")
    files = project_files(root)
    places = list(_places(files, random.Random(seed)))
    if not places:
        raise BadInput(str(root), "Python functions", 0, "at least one function with a line that can be mutated")
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "repo"
        _lay(files, tree)
        started = time.monotonic()
        passing = run_pytest(tree, python, timeout_s)
        seconds = time.monotonic() - started
        if not passing:
            raise BadInput(
                str(root), "passing pytest tests", 0, "at least one (`python -m pytest` in the project shows why)"
            )
        progress(f"{len(passing)} tests pass in {seconds:.1f} s; {len(places)} possible mistakes")
        tasks: list[Task] = []
        used: Counter[tuple[str, str]] = Counter()
        for place in places:
            if len(tasks) >= limit:
                break
            if used[place.path, place.function] >= per_function:
                continue
            broken = _apply(files[place.path], place)
            (tree / place.path).write_bytes(broken)
            still = run_pytest(tree, python, min(timeout_s, 5 * seconds + 10))
            (tree / place.path).write_bytes(files[place.path])
            # A run that hung says nothing of single tests, and no agent could be shown it.
            failing = passing - still if still is not None else set()
            if failing:
                used[place.path, place.function] += 1
                tasks.append(_task(root.name, files, place, broken, passing, failing))
                progress(
                    f"{len(tasks)} of {limit}: {place.path} {place.function} ({place.operator}) fails {len(failing)} tests"
                )
    return tasks


def project_files(root: Path) -> dict[str, bytes]:
    """Relative path -> bytes of the project's files, without version control, environments, caches and big files."""
    files: dict[str, bytes] = {}
    total = 0
    for parent, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.endswith(".egg-info"))
        for name in sorted(names):
            path = Path(parent) / name
            if (
                path.is_symlink()
                or not path.is_file()
                or name.endswith((".pyc", ".so"))
                or path.stat().st_size > MAX_FILE_BYTES
            ):
                continue
            files[path.relative_to(root).as_posix()] = path.read_bytes()
            total += path.stat().st_size
            if total > MAX_PROJECT_BYTES:
                raise BadInput(str(root), "project size", f"over {MAX_PROJECT_BYTES} bytes", "a smaller folder")
    return files


def run_pytest(tree: Path, python: str, timeout_s: float) -> set[str] | None:
    """Ids that pass of a tree's tests, run in a child process; None when it ran out of time or wrote no report."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [
            python,
            "-B",
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-o",
            "junit_family=xunit1",
            "-o",
            "addopts=",
            f"--junitxml={report}",
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "src")]),
            "PYTHONHASHSEED": "0",
        }
        quiet = subprocess.DEVNULL
        child = subprocess.Popen(
            command, cwd=tree, env=environment, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
        )  # fmt: skip
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            child.wait()
            return None
        if not report.exists():
            return None
        suite = ElementTree.parse(report).getroot()
    ids = set()
    for case in suite.iter("testcase"):
        if not any(child.tag in ("failure", "error", "skipped") for child in case):
            ids.add(_node_id(case.get("file") or "", case.get("classname") or "", case.get("name") or ""))
    return ids


def pytest_passes(files: dict[str, bytes], timeout_s: float, python: str = sys.executable) -> set[str]:
    """Ids that pass in a temporary tree of these files."""
    with tempfile.TemporaryDirectory() as scratch:
        _lay(files, Path(scratch) / "repo")
        return run_pytest(Path(scratch) / "repo", python, timeout_s) or set()


def _node_id(file: str, classname: str, name: str) -> str:
    module = file.removesuffix(".py").replace("/", ".")
    classes = classname.removeprefix(module).strip(".").replace(".", "::")
    return "::".join(part for part in (file, classes, name) if part)


def _is_test(path: str) -> bool:
    parts = path.split("/")
    return (
        "tests" in parts[:-1]
        or "test" in parts[:-1]
        or parts[-1].startswith(("test_", "conftest"))
        or parts[-1].endswith("_test.py")
    )


def _places(files: dict[str, bytes], rng: random.Random) -> Iterator[Place]:
    found: list[Place] = []
    for path, data in files.items():
        if not path.endswith(".py") or _is_test(path) or path in ("setup.py", "noxfile.py"):
            continue
        try:
            text = data.decode("utf-8")
            tree = ast.parse(text)
        except (UnicodeDecodeError, SyntaxError):
            continue
        lines = text.split("\n")
        forms = [_form(line) for line in lines]
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                span = range(node.lineno, node.end_lineno or node.lineno)
                found += _function_places(path, node, lines, forms, span)
    rng.shuffle(found)
    yield from found


def _function_places(path: str, node: ast.FunctionDef, lines: list[str], forms: list[str], span: range) -> list[Place]:
    places = []
    name = node.name
    source = normalise(ast.parse(ast.unparse(node)).body[0])  # type: ignore[arg-type]
    for mutant in mutants(source):
        where = [number for number in span if forms[number] == mutant.before.strip()]
        if len(where) == 1:
            old = lines[where[0]].rstrip("\r")
            indent = old[: len(old) - len(old.lstrip())]
            places.append(Place(path, name, mutant.operator, where[0], old, indent + mutant.after.strip()))
    return places


def _form(line: str) -> str:
    """The line as `ast.unparse` would write it, or empty when it is no whole statement or header."""
    text = line.strip()
    prefix, text = ("el", text[2:]) if text.startswith("elif ") else ("", text)
    for attempt, cut in (
        (text, ""),
        (text + " pass", "pass"),
        ("def f():\n " + text, "return"),
        ("while 1:\n " + text, "loop"),
    ):
        try:
            form = ast.unparse(ast.parse(attempt))
        except (SyntaxError, ValueError):
            continue
        if cut == "pass":
            head = form.split("\n")
            return prefix + head[0] if len(head) == 2 else ""
        return prefix + (form.split("\n", 1)[1].strip() if cut else form)
    return ""


def _apply(data: bytes, place: Place) -> bytes:
    lines = data.decode("utf-8").split("\n")
    ending = "\r" if lines[place.line].endswith("\r") else ""
    lines[place.line] = place.after + ending
    return "\n".join(lines).encode()


def _lay(files: dict[str, bytes], tree: Path) -> None:
    shutil.rmtree(tree, ignore_errors=True)
    for path, data in files.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(data)


def _task(
    project: str, files: dict[str, bytes], place: Place, broken: bytes, passing: set[str], failing: set[str]
) -> Task:
    first = min(failing)
    tests = {"repo/" + path: data for path, data in files.items() if _is_test(path)}
    tests["pytest.json"] = msgspec.json.format(
        msgspec.json.encode({"ids": sorted(passing), "failing": sorted(failing)})
    )
    tests["test.sh"] = _TEST_SH.format(ids=" ".join(f"'{name}'" for name in sorted(passing))).encode()
    digest = hashlib.sha256(f"{place.path}\0{place.line}\0{place.after}".encode()).hexdigest()[:8]
    stem = "-".join([project, place.function.strip("_") or "f", place.operator]).replace("_", "-").lower()
    return with_id(
        Task(
            id="",
            name=f"{stem[:56]}-{digest}",
            instruction=f"fix {place.function} in {place.path}: {first} fails",
            split=Split.RL,
            environment={**files, place.path: broken},
            tests=tests,
            solution={
                place.path: files[place.path],
                "solve.sh": f'#!/bin/sh\ncp "$(dirname "$0")/{place.path}" /repo/{place.path}\n'.encode(),
            },
            allowed_changes=(place.path,),
            viewed_files=(place.path,),
            test_command="python -B -m pytest -q -p no:cacheprovider",
            image="python-project",
            verifier="pytest",
            operator=place.operator,
            module=place.path,
            function=place.function,
            source=project,
            licence="as the project",
            limits=Limits(
                max_context_tokens=8192, max_sampled_tokens=2048, tool_timeout_s=60.0, verifier_timeout_s=300.0
            ),
        )
    )
