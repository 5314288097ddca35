"""Control groups of pods: where they can be made on this machine, which files limit what, what they tell. Versions 1 and 2.

Pods' groups are made below the group of this process, so a limit set on us holds for our pods too. Making and removing is done by
the launcher, which outlives us; this module only computes paths and reads counters.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

CONTROLLERS = ("memory", "pids", "cpu")
CPU_PERIOD_US = 100_000
NAME_PREFIX = "etude"


@dataclass(frozen=True)
class CgroupTree:
    """Folders below which a pod's groups can be made, by controller; version 2 has one for all."""

    version: int
    parents: dict[str, Path]

    def sweep(self, older_than_s: float = 60.0) -> list[Path]:
        """Removes the empty groups of hosts that are gone together with their launchers (killed as a whole tree); their paths."""
        removed = []
        for parent in dict.fromkeys(self.parents.values()):
            for folder in parent.glob(f"{NAME_PREFIX}-*"):
                host = folder.name.split("-")[1]
                try:
                    if not Path(f"/proc/{host}").exists() and time.time() - folder.stat().st_mtime > older_than_s:
                        folder.rmdir()  # fails while a process is in it
                        removed.append(folder)
                except OSError:
                    continue
        return removed

    def plan(self, name: str, *, memory_bytes: int, processes: int, cpus: float) -> CgroupPlan:
        """What to create for one pod and which files to write."""
        folders = {controller: parent / name for controller, parent in self.parents.items()}
        writes: list[tuple[Path, str]] = []

        def add(controller: str, file: str, value: str, *, optional: bool = False) -> None:
            if controller in folders and (not optional or (self.parents[controller] / file).exists()):
                writes.append((folders[controller] / file, value))

        quota = str(max(1000, int(cpus * CPU_PERIOD_US)))
        if self.version == 1:
            add("memory", "memory.limit_in_bytes", str(memory_bytes))
            add("memory", "memory.memsw.limit_in_bytes", str(memory_bytes), optional=True)
            add("pids", "pids.max", str(processes))
            add("cpu", "cpu.cfs_quota_us", quota)
        else:
            add("memory", "memory.max", str(memory_bytes))
            add("memory", "memory.swap.max", "0", optional=True)
            add("pids", "pids.max", str(processes))
            add("cpu", "cpu.max", f"{quota} {CPU_PERIOD_US}")
        return CgroupPlan(self.version, folders, tuple(writes))


@dataclass(frozen=True)
class CgroupPlan:
    """The groups of one pod."""

    version: int
    folders: dict[str, Path]
    writes: tuple[tuple[Path, str], ...]

    def options(self) -> list[str]:
        """As the launcher's arguments."""
        unique = dict.fromkeys(self.folders.values())
        return [*(f"cgroup={folder}" for folder in unique), *(f"set={path}:{value}" for path, value in self.writes)]

    def out_of_memory_kills(self) -> int | None:
        """How many processes the kernel has killed for want of memory; None when unknown."""
        file = "memory.oom_control" if self.version == 1 else "memory.events"
        for line in (_read(self.folders.get("memory"), file) or "").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        return None

    def memory(self) -> tuple[int | None, int | None]:
        """(bytes in use, peak)."""
        now, peak = (
            ("memory.usage_in_bytes", "memory.max_usage_in_bytes")
            if self.version == 1
            else ("memory.current", "memory.peak")
        )
        folder = self.folders.get("memory")
        return _number(folder, now), _number(folder, peak)

    def processes(self) -> int | None:
        return _number(self.folders.get("pids"), "pids.current")

    def cpu_s(self) -> float | None:
        """CPU time used; version 1 keeps it in a controller that pods do not join."""
        for line in (_read(self.folders.get("cpu"), "cpu.stat") or "").splitlines():
            if line.startswith("usage_usec "):
                return int(line.split()[1]) / 1e6
        return None

    def left(self) -> list[Path]:
        """Folders that still exist."""
        return [folder for folder in dict.fromkeys(self.folders.values()) if folder.exists()]

    def remove(self) -> None:
        """Removes what is left; a group with processes stays."""
        for folder in self.left():
            try:
                folder.rmdir()
            except OSError:
                continue


def _read(folder: Path | None, file: str) -> str | None:
    if folder is None:
        return None
    try:
        return (folder / file).read_text()
    except OSError:
        return None


def _number(folder: Path | None, file: str) -> int | None:
    text = _read(folder, file)
    return int(text) if text and text.strip().isdigit() else None


def _mounts(mountinfo: str) -> list[tuple[str, str, str, str]]:
    """(root, mount point, file system, super options) of every mount."""
    found = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        found.append((left[3], left[4], right[0], right[2] if len(right) > 2 else ""))
    return found


def find_tree(process: Path = Path("/proc/self")) -> CgroupTree | None:
    """Where this process may make groups for pods, with at least a memory or a process limit; None when nowhere."""
    try:
        own = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
        mounts = _mounts((process / "mountinfo").read_text())
    except (OSError, IndexError):
        return None
    version_1: dict[str, Path] = {}
    for root, point, kind, options in mounts:
        for _, controllers, path in own:
            inside = path[len(root.rstrip("/")) :].lstrip("/") if path.startswith(root) else ""
            folder = Path(point) / inside
            if kind == "cgroup":
                for controller in CONTROLLERS:
                    if controller in controllers.split(",") and controller in options.split(",") and _usable(folder):
                        version_1.setdefault(controller, folder)
            elif kind == "cgroup2" and not controllers:
                for candidate in (folder, folder.parent):
                    enabled = (_read(candidate, "cgroup.subtree_control") or "").split()
                    if "memory" in enabled and "pids" in enabled and _usable(candidate):
                        return CgroupTree(2, {name: candidate for name in CONTROLLERS if name in enabled})
    return CgroupTree(1, version_1) if "memory" in version_1 or "pids" in version_1 else None


def _usable(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)
