"""Which launcher starts pods here: the C one, compiled on first use, or its Python twin; and how it is called.

Both take the same arguments (native/podlaunch.c says which). Knows nothing of the protocol that runs over the pod's pipes.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.environments.image import Image
from etude.environments.seccomp import filter_bytes
from etude.native.build import ensure_program
from etude.records.errors import MissingCapability

SOURCE = Path(__file__).parent.parent / "native" / "podlaunch.c"
PYTHON_TWIN = Path(__file__).parent / "backends" / "podlaunch.py"


@dataclass(frozen=True)
class Launcher:
    """How to start a pod: the program before the options, the folder with `images/` and `mnt/`, the filter's file."""

    program: tuple[str, ...]
    state: Path
    filter_file: Path
    user_namespace: bool
    notices: tuple[str, ...] = ()

    def command(self, image: Image, options: Sequence[str], argv: Sequence[str]) -> list[str]:
        """The whole command that starts `argv` as PID 1 of a pod."""
        fixed = (
            f"state={self.state}",
            f"image=images/{image.digest}",
            f"seccomp={self.filter_file}",
            f"userns={int(self.user_namespace)}",
        )
        return [*self.program, *fixed, *options, "--", *argv]


def find_launcher(cache: Path, kind: str = "auto") -> Launcher:
    """The launcher for this machine. Raises MissingCapability when `kind` is `c` and there is no compiler."""
    cache = cache.absolute()
    (cache / "mnt").mkdir(parents=True, exist_ok=True)
    code = filter_bytes()
    filter_file = cache / f"seccomp-{hashlib.sha256(code).hexdigest()[:16]}.bpf"
    if not filter_file.exists():
        new = filter_file.with_suffix(f".{os.getpid()}.new")
        new.write_bytes(code)
        os.replace(new, filter_file)
    binary = ensure_program(SOURCE, cache / "bin") if kind != "python" else None
    if binary is None and kind == "c":
        raise MissingCapability(
            "environments",
            "C compiler",
            "none found",
            "cc, gcc or clang (apt-get install gcc libc6-dev), or launcher = python",
        )
    notices = () if binary else ("pods start with the Python launcher, several times slower: install a C compiler",)
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    program = (str(binary),) if binary else (python, "-I", "-S", str(PYTHON_TWIN))
    return Launcher(program, cache, filter_file, os.geteuid() != 0, notices)


def probe_launch(launcher: Launcher, image: Image) -> str:
    """Starts a pod that does nothing; what the launcher says when it fails, or an empty text."""
    try:
        done = subprocess.run(
            launcher.command(image, [], ["/usr/bin/true"]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=20,
            env={},
            cwd="/",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (
        ""
        if done.returncode == 0
        else done.stderr.decode("utf-8", "replace").strip() or f"exit status {done.returncode}"
    )
