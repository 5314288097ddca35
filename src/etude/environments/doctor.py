"""Checks of what pods need on this machine: rights, limits, compiler, disk, a free port; each says what to enable.

Only looks: starts one empty pod below a cache folder and takes it away again.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from etude.environments import cgroups
from etude.environments.backends.namespace import missing_rights
from etude.environments.image import Image, ensure_image
from etude.environments.launcher import Launcher, find_launcher, probe_launch
from etude.native.build import compiler
from etude.records.errors import BadInput

NEEDED_DISK_BYTES = 500 << 20


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `needed` is False where the package works without it, only worse."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    needed: bool = True


def check_rights(cache: Path, probe: Callable[[Launcher, Image], str] = probe_launch) -> Check:
    """Whether a pod starts here."""
    try:
        told = probe(find_launcher(cache), ensure_image(cache))
    except BadInput as error:
        return Check("pods", False, str(error), error.expected)
    if told:
        return Check("pods", False, told, missing_rights(told).expected)
    return Check("pods", True, "namespace pods start" + ("" if os.geteuid() == 0 else " (in a user namespace)"))


def check_limits() -> Check:
    """Whether memory, processes and CPU of a pod can be limited."""
    tree = cgroups.find_tree() if sys.platform == "linux" else None
    have = sorted(tree.parents) if tree else []
    missing = [name for name in cgroups.CONTROLLERS if name not in have]
    fix = (
        f"run as root with writable cgroups for {', '.join(missing)} (in a container: --privileged)" if missing else ""
    )
    version = f"version {tree.version}: {', '.join(have)}" if tree else "none usable"
    return Check("cgroups", not missing, version, fix, needed=False)


def check_compiler() -> Check:
    """Whether the pod launcher can be compiled."""
    found = compiler()
    fix = (
        ""
        if found
        else "install a C compiler (apt-get install gcc libc6-dev); without one pods start several times slower"
    )
    return Check("compiler", found is not None, found or "none", fix, needed=False)


def check_disk(folder: Path, needed_bytes: int = NEEDED_DISK_BYTES) -> Check:
    """Whether `folder` can be written and has room."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"x")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check("disk", False, f"{folder}: {error.strerror}", f"make {folder} writable, or choose another folder")
    ok = free >= needed_bytes
    return Check(
        "disk",
        ok,
        f"{free >> 20} MB free at {folder}",
        "" if ok else f"free at least {needed_bytes >> 20} MB at {folder}",
    )


def check_port(port: int, host: str = "127.0.0.1") -> Check:
    """Whether a service could listen on `port`; 0 asks for any."""
    with socket.socket() as endpoint:
        endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            endpoint.bind((host, port))
        except OSError as error:
            return Check(
                f"port {port}",
                False,
                f"{host}:{port}: {error.strerror}",
                "stop what listens there, or choose another port",
            )
    return Check(f"port {port}", True, f"{host}:{port} is free")


def diagnose(cache: Path, *, ports: tuple[int, ...] = (0,)) -> list[Check]:
    """Every check, in the order in which a person would fix them."""
    return [
        check_disk(cache),
        check_compiler(),
        check_limits(),
        check_rights(cache),
        *(check_port(port) for port in ports),
    ]
