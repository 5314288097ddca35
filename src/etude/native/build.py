"""Compiles a C source of this package on first use into a cache folder; None where there is no compiler.

The file name holds the hash of source and flags, so a changed source is compiled anew and two processes never see half a file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

FLAGS = ("-O2", "-s", "-Wall", "-Wextra")


def compiler() -> str | None:
    """Path of the C compiler: `$CC`, cc, gcc or clang, the first that is there."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    return None


def ensure_program(source: Path, cache: Path) -> Path | None:
    """The compiled program of `source` below `cache`, static where the C library allows; None when it cannot be compiled."""
    digest = hashlib.sha256(source.read_bytes() + repr(FLAGS).encode()).hexdigest()[:16]
    target = cache / f"{source.stem}-{digest}"
    if target.exists():
        return target
    cc = compiler()
    if cc is None:
        return None
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        built = Path(folder) / source.stem
        for static in (("-static",), ()):
            done = subprocess.run(
                [cc, *FLAGS, *static, "-o", str(built), str(source)], capture_output=True, timeout=120
            )
            if done.returncode == 0:
                os.replace(built, target)
                return target
    return None
