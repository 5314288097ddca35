"""Tasks as Harbor folders (task.toml 1.4): `environment/`, `tests/`, `solution/`, `instruction.md`, and back to the noun.

A task's id is the content hash of its folder, so a folder that was touched is another task. Every fault is a TaskError that
names the file and the field. Deliberately knows nothing of how tasks are made, stored together, or run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from etude.records.errors import TaskError
from etude.records.task import Limits, Split, Task, VerifierMode

SCHEMA_VERSION = "1.4"
WORKDIR = "/repo"
DOCKERFILE = f"FROM python:3.11-slim\nCOPY repo/ {WORKDIR}/\nWORKDIR {WORKDIR}\n".encode()
_ENVIRONMENT, _TESTS, _SOLUTION = "environment/repo/", "tests/", "solution/"
_EXECUTABLE = (".sh",)


def folder_id(files: Mapping[str, bytes]) -> str:
    """Content hash of a folder given as relative path -> bytes: sha256 hex over names and contents in sorted order."""
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(f"{path}\0{len(files[path])}\0".encode())
        total.update(files[path])
    return total.hexdigest()


def to_files(task: Task) -> dict[str, bytes]:
    """The task's folder as relative path -> bytes. Raises TaskError when `task.id` is set and not this content's hash
    (then the task was read from a folder that holds more than a Task does)."""
    files = {
        "task.toml": _toml(task).encode(),
        "instruction.md": task.instruction.encode() + b"\n",
        "environment/Dockerfile": DOCKERFILE,
    }
    files |= {_ENVIRONMENT + path: data for path, data in task.environment.items()}
    files |= {_TESTS + path: data for path, data in task.tests.items()}
    files |= {_SOLUTION + path: data for path, data in task.solution.items()}
    found = folder_id(files)
    if task.id and task.id != found:
        raise TaskError(task.name, "id", task.id, f"the content hash {found} of the folder")
    return files


def with_id(task: Task) -> Task:
    """The same task with the id that its folder gives."""
    fresh = msgspec.structs.replace(task, id="")
    return msgspec.structs.replace(task, id=folder_id(to_files(fresh)))


def write_folder(task: Task, folder: Path) -> None:
    """Writes the task's folder whole or not at all. Raises TaskError when the folder exists."""
    if folder.exists():
        raise TaskError(str(folder), "folder", "exists", "a new folder")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for path, data in to_files(task).items():
            target = partial / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            if path.endswith(_EXECUTABLE):
                target.chmod(0o755)
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_folder(folder: Path) -> Task:
    """Reads a task folder. Raises TaskError naming the file and field when it lacks what a task needs."""
    if not folder.is_dir():
        raise TaskError(str(folder), "task folder", "missing", "a Harbor task folder")
    files: dict[str, bytes] = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in ("__pycache__", ".git"))
        for name in sorted(names):
            path = Path(parent) / name
            if path.is_symlink():
                raise TaskError(str(path), "file", "a symbolic link", "a plain file")
            files[path.relative_to(folder).as_posix()] = path.read_bytes()
    return from_files(files, str(folder))


def from_files(files: Mapping[str, bytes], place: str) -> Task:
    """The task that a folder (relative path -> bytes) holds. `place` names it in errors (TaskError)."""
    table = _read_toml(files, place)
    task_table, metadata = _table(table, "task", place), _table(table, "metadata", place)
    instruction = _text(files, "instruction.md", place).strip()
    if not instruction:
        raise TaskError(f"{place}/instruction.md", "text", "", "the instruction that the agent reads")
    environment = _below(files, _ENVIRONMENT)
    if not environment:
        raise TaskError(f"{place}/{_ENVIRONMENT}", "files", 0, "at least one file of the agent's repository")
    tests, solution = _below(files, _TESTS), _below(files, _SOLUTION)
    verifier = _field(metadata, "verifier", "cases", place)
    allowed = tuple(_field(metadata, "allowed_changes", (), place, list))
    _check_tests(tests, verifier, place)
    if "solve.sh" not in solution:
        raise TaskError(f"{place}/solution/solve.sh", "file", "missing", "a script that solves the task")
    for path in allowed:
        if path not in environment:
            raise TaskError(f"{place}/task.toml", "metadata.allowed_changes", path, "a file below environment/repo")
    try:
        return Task(
            id=folder_id(files),
            name=str(task_table.get("name", "")).removeprefix("etude/") or Path(place).name,
            instruction=instruction,
            split=Split(_field(metadata, "split", Split.HELD_OUT, place)),
            environment=environment,
            tests=tests,
            solution=solution,
            allowed_changes=allowed,
            viewed_files=tuple(_field(metadata, "viewed_files", (), place, list)),
            test_command=_field(metadata, "test_command", "python -B check.py", place),
            image=_field(metadata, "image", "python-small", place),
            verifier_mode=VerifierMode(_field(metadata, "verifier_mode", VerifierMode.PRISTINE, place)),
            verifier=verifier,
            category=_field(metadata, "category", "repair", place),
            operator=_field(metadata, "operator", "", place),
            module=_field(metadata, "module", "", place),
            function=_field(metadata, "function", "", place),
            source=_field(metadata, "source", "", place),
            licence=_field(metadata, "licence", "", place),
            limits=_limits(table, metadata, place),
        )
    except ValueError as error:
        raise TaskError(f"{place}/task.toml", "metadata", str(error), "a known split and verifier_mode") from error


def cases_of(task: Task) -> tuple[str, str, list[tuple[str, str]], list[tuple[str, str]]]:
    """(module, function, visible, hidden) of a `cases` task; each case is (argument text, canonical result). Raises
    TaskError when tests/cases.json is not that."""
    try:
        table = json.loads(task.tests["cases.json"])
        visible = [(str(args), str(want)) for args, want in table["visible"]]
        hidden = [(str(args), str(want)) for args, want in table["hidden"]]
        return str(table["module"]), str(table["function"]), visible, hidden
    except (KeyError, ValueError, TypeError) as error:
        raise TaskError(
            f"{task.name}/tests/cases.json", "module, function, visible, hidden", type(error).__name__, "pairs of texts"
        ) from error


def _check_tests(tests: Mapping[str, bytes], verifier: str, place: str) -> None:
    needed = {"cases": ("test.sh", "cases.json", "driver.py"), "pytest": ("test.sh", "pytest.json")}.get(verifier)
    if needed is None:
        raise TaskError(f"{place}/task.toml", "metadata.verifier", verifier, "`cases` or `pytest`")
    for name in needed:
        if not tests.get(name):
            found = "missing" if name not in tests else "empty"
            raise TaskError(f"{place}/tests/{name}", "file", found, "the task's hidden tests: a task needs them")


def _limits(table: Mapping[str, Any], metadata: Mapping[str, Any], place: str) -> Limits:
    values = dict(_field(metadata, "limits", {}, place, dict))
    agent, verifier = table.get("agent", {}), table.get("verifier", {})
    environment = table.get("environment", {})
    if "timeout_sec" in agent:
        values["agent_timeout_s"] = agent["timeout_sec"]
    if "timeout_sec" in verifier:
        values["verifier_timeout_s"] = verifier["timeout_sec"]
    if "memory_mb" in environment:
        values["memory_bytes"] = int(environment["memory_mb"]) << 20
    try:
        return msgspec.convert(values, Limits)
    except msgspec.ValidationError as error:
        raise TaskError(f"{place}/task.toml", "metadata.limits", values, f"numbers ({error})") from error


def _read_toml(files: Mapping[str, bytes], place: str) -> dict[str, Any]:
    try:
        table = tomllib.loads(_text(files, "task.toml", place))
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{place}/task.toml", "TOML", str(error), "a TOML document") from error
    version = table.get("schema_version", table.get("version"))
    if str(version) not in ("1.0", "1.1", "1.2", "1.3", SCHEMA_VERSION):
        raise TaskError(f"{place}/task.toml", "schema_version", version, f"Harbor {SCHEMA_VERSION} or an earlier 1.x")
    return table


def _table(table: Mapping[str, Any], name: str, place: str) -> Mapping[str, Any]:
    found = table.get(name, {})
    if not isinstance(found, dict):
        raise TaskError(f"{place}/task.toml", name, found, "a table")
    return found


def _field(table: Mapping[str, Any], name: str, default: Any, place: str, kind: type = str) -> Any:
    found = table.get(name, default)
    if name in table and not isinstance(found, kind):
        raise TaskError(f"{place}/task.toml", f"metadata.{name}", found, f"a {kind.__name__}")
    return found


def _text(files: Mapping[str, bytes], name: str, place: str) -> str:
    if name not in files:
        raise TaskError(f"{place}/{name}", "file", "missing", "a file of a Harbor task folder")
    try:
        return files[name].decode("utf-8")
    except UnicodeDecodeError as error:
        raise TaskError(f"{place}/{name}", "encoding", str(error), "UTF-8 text") from error


def _below(files: Mapping[str, bytes], prefix: str) -> dict[str, bytes]:
    return {path[len(prefix) :]: data for path, data in files.items() if path.startswith(prefix)}


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _toml(task: Task) -> str:
    limits = task.limits
    tables: dict[str, dict[str, object]] = {
        "": {"schema_version": SCHEMA_VERSION},
        "task": {"name": f"etude/{task.name}", "description": task.instruction, "keywords": [task.category]},
        "metadata": {
            "split": str(task.split), "category": task.category, "operator": task.operator, "module": task.module,
            "function": task.function, "source": task.source, "licence": task.licence, "verifier": task.verifier,
            "verifier_mode": str(task.verifier_mode), "allowed_changes": task.allowed_changes,
            "viewed_files": task.viewed_files, "test_command": task.test_command, "image": task.image,
        },
        "metadata.limits": {
            "max_turns": limits.max_turns, "max_sampled_tokens": limits.max_sampled_tokens,
            "max_context_tokens": limits.max_context_tokens, "tool_timeout_s": limits.tool_timeout_s,
            "processes": limits.processes,
        },
        "agent": {"timeout_sec": limits.agent_timeout_s},
        "verifier": {"timeout_sec": limits.verifier_timeout_s},
        "environment": {"memory_mb": limits.memory_bytes >> 20, "network_mode": "no-network", "workdir": WORKDIR},
    }  # fmt: skip
    blocks = []
    for name, table in tables.items():
        head = f"[{name}]\n" if name else ""
        blocks.append(head + "".join(f"{key} = {_value(value)}\n" for key, value in table.items()))
    return "\n".join(blocks)
