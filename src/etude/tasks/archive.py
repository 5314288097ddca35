"""A set of tasks: a folder of task folders, or one `.tar.zst` whose bytes depend only on the tasks.

An archive begins with `index.json` (what one filters by: split, operator, module, size); task folders follow as ordinary
ustar members, so `tar` reads it too. Tasks are built from their bytes when asked for and checked against the index's
id. Deliberately knows nothing of how tasks are made or checked.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import zstandard

from etude.records.errors import TaskError
from etude.records.task import Split, Task
from etude.tasks.harbor import from_files, read_folder, to_files

INDEX = "index.json"
LICENCES = "licences"
INDEX_VERSION = 1
_BLOCK = 512
_MAX_BYTES = 4 << 30


class TaskEntry(msgspec.Struct, frozen=True):
    """What is known of a task without building it. `lines` counts those of the files that may be changed."""

    id: str
    name: str
    split: Split
    operator: str
    module: str
    function: str
    lines: int


class _Index(msgspec.Struct, frozen=True):
    version: int
    tasks: tuple[TaskEntry, ...]


def entry_of(task: Task) -> TaskEntry:
    """The index line of a task."""
    lines = sum(task.environment[path].count(b"\n") for path in task.allowed_changes)
    return TaskEntry(task.id, task.name, task.split, task.operator, task.module, task.function, lines)


class TaskSet:
    """Tasks by id and by split. Open with `TaskSet.open(path)`; entries keep the order of the archive."""

    def __init__(
        self,
        entries: tuple[TaskEntry, ...],
        files: Mapping[str, Mapping[str, bytes]],
        built: Mapping[str, Task],
        place: str,
    ) -> None:
        self.entries, self._files, self._built, self._place = entries, files, dict(built), place
        self._by_id = {entry.id: entry for entry in entries}

    @classmethod
    def of(cls, tasks: Iterable[Task], place: str = "tasks") -> TaskSet:
        """A set of tasks that are already there."""
        built = {task.id: task for task in tasks}
        return cls(tuple(map(entry_of, built.values())), {}, built, place)

    @classmethod
    def open(cls, path: Path | str) -> TaskSet:
        """Opens a `.tar.zst` archive, a folder of task folders, or one task folder. Raises TaskError."""
        path = Path(path)
        if path.is_file():
            return cls._open_archive(path)
        if not path.is_dir():
            raise TaskError(str(path), "task set", "missing", "a folder of task folders or a .tar.zst archive")
        if (path / "task.toml").exists():
            return cls.of([read_folder(path)], str(path))
        folders = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
        if not folders:
            raise TaskError(str(path), "task folders", 0, "at least one task folder")
        return cls.of(map(read_folder, folders), str(path))

    @classmethod
    def _open_archive(cls, path: Path) -> TaskSet:
        try:
            data = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompress(
                path.read_bytes(), max_output_size=_MAX_BYTES
            )
            members = dict(_members(data))
            index = msgspec.json.decode(members.pop(INDEX), type=_Index)
        except (OSError, zstandard.ZstdError, KeyError, ValueError, msgspec.DecodeError) as error:
            raise TaskError(
                str(path), "archive", type(error).__name__, f"a .tar.zst made by `etude tasks make` ({error})"
            ) from error
        if index.version != INDEX_VERSION:
            raise TaskError(str(path), "index version", index.version, f"version {INDEX_VERSION}")
        folders: dict[str, dict[str, bytes]] = {}
        for name, content in members.items():
            folder, _, inside = name.partition("/")
            folders.setdefault(folder, {})[inside] = content
        for entry in index.tasks:
            if entry.name not in folders:
                raise TaskError(str(path), "task", entry.name, "a folder in the archive")
        return cls(index.tasks, folders, {}, str(path))

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Task]:
        return (self.get(entry.id) for entry in self.entries)

    def ids(self, split: Split) -> tuple[str, ...]:
        """Ids of a split, in the order of the archive."""
        return tuple(entry.id for entry in self.entries if entry.split is split)

    def split(self, split: Split) -> tuple[Task, ...]:
        """Every task of a split, in the order of the archive."""
        return tuple(self.get(id) for id in self.ids(split))

    def get(self, id: str) -> Task:
        """The task with this id, name, or unique beginning of an id. Raises TaskError when there is none, or when its
        bytes are not those of the id."""
        entry = self._find(id)
        if entry.id not in self._built:
            task = from_files(self._files[entry.name], f"{self._place}:{entry.name}")
            if task.id != entry.id:
                raise TaskError(f"{self._place}:{entry.name}", "id", task.id, f"the index's {entry.id}")
            self._built[entry.id] = task
        return self._built[entry.id]

    def _find(self, id: str) -> TaskEntry:
        if id in self._by_id:
            return self._by_id[id]
        found = [entry for entry in self.entries if entry.name == id]
        found = found or [entry for entry in self.entries if len(id) >= 6 and entry.id.startswith(id)]
        if len(found) != 1:
            raise TaskError(
                self._place, "task id", id, f"one of its {len(self.entries)} tasks" if not found else "a longer id"
            )
        return found[0]


def write_archive(tasks: Iterable[Task], path: Path, licences: Mapping[str, str] | None = None) -> int:
    """Writes the archive, replacing an older one in one step, and returns its size in bytes. `licences` (package -> text)
    become `licences/<package>.txt` inside. Raises TaskError when two tasks share a name."""
    ordered = sorted(tasks, key=lambda task: (task.split, task.name))
    names = [task.name for task in ordered]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise TaskError(str(path), "task name", twice, "a name that only one task has")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        index = _Index(INDEX_VERSION, tuple(map(entry_of, ordered)))
        _add(tar, INDEX, json.dumps(msgspec.to_builtins(index), separators=(",", ":"), sort_keys=True).encode())
        for task in ordered:
            for inside, data in sorted(to_files(task).items()):
                _add(tar, f"{task.name}/{inside}", data)
        for package, text in sorted((licences or {}).items()):
            _add(tar, f"{LICENCES}/{package}.txt", text.encode())
    parameters = zstandard.ZstdCompressionParameters.from_level(12, window_log=27, enable_ldm=True)
    data = zstandard.ZstdCompressor(compression_params=parameters).compress(buffer.getvalue())
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.write_bytes(data)
    os.replace(partial, path)
    return len(data)


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = len(data), 0, 0o755 if name.endswith(".sh") else 0o644
    tar.addfile(info, io.BytesIO(data))


def _members(data: bytes) -> Iterator[tuple[str, bytes]]:
    # tarfile takes a second for 30,000 members; plain ustar files need only name, size and prefix.
    position = 0
    while position + _BLOCK <= len(data) and data[position]:
        header = data[position : position + _BLOCK]
        if header[257:262] != b"ustar":
            raise ValueError(f"no ustar header at byte {position}")
        name, prefix = header[:100].rstrip(b"\0").decode(), header[345:500].rstrip(b"\0").decode()
        size = int(header[124:135], 8)
        start = position + _BLOCK
        if start + size > len(data):
            raise ValueError(f"{name} is cut off")
        if header[156:157] in (b"0", b"\0"):
            yield (f"{prefix}/{name}" if prefix else name), data[start : start + size]
        position = start + -(-size // _BLOCK) * _BLOCK
