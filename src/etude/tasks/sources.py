"""Where code comes from: the running Python's standard library and wheels pinned by name, version and sha256.

Fetching goes through pip as the user has configured it, with hashes required and binary distributions only, so that no
code of a package runs. Deliberately knows nothing of functions, splits or tasks.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from etude.records.errors import BadInput, InfrastructureError

PINS = Path(__file__).with_name("sources.toml")
PERMISSIVE = frozenset(
    ["MIT", "BSD-2-Clause", "BSD-3-Clause", "Apache-2.0", "ISC", "PSF-2.0", "Biopython License (MIT style)"]
)
MAX_FILE_BYTES = 400_000
_SKIPPED_PARTS = frozenset(
    "test tests testing idle_test _vendor vendor vendored _vendored extern externals lib2to3 site-packages "
    "lib-dynload __pycache__ locale locales conf node_modules turtledemo".split()
)
_PLATFORMS = (
    "any",
    "manylinux1_x86_64",
    "manylinux2014_x86_64",
    *(f"manylinux_2_{n}_x86_64" for n in (17, 24, 27, 28)),
)

Progress = Callable[[str], None]


class Pin(msgspec.Struct, frozen=True):
    """One wheel that code may be taken from; `licence` is an SPDX id (or the licence's name where there is none)."""

    name: str
    version: str
    file: str
    sha256: str
    licence: str


class SourceModule(msgspec.Struct, frozen=True):
    """One Python file. `name` is dotted and unique over all sources: it is the unit of the splits."""

    name: str
    package: str
    licence: str
    text: str


def read_pins(path: Path = PINS) -> tuple[Pin, ...]:
    """Reads the pinned source list. Raises BadInput when a field is missing or a licence is not permissive."""
    try:
        pins = msgspec.convert(tomllib.loads(path.read_text("utf-8"))["source"], tuple[Pin, ...])
    except (OSError, KeyError, ValueError) as error:
        raise BadInput(
            str(path), "source", type(error).__name__, f"tables of name, version, file, sha256, licence ({error})"
        ) from error
    for pin in pins:
        if pin.licence not in PERMISSIVE:
            raise BadInput(str(path), f"{pin.name}.licence", pin.licence, "one of " + ", ".join(sorted(PERMISSIVE)))
    return pins


def fetch(folder: Path, pins: tuple[Pin, ...] | None = None, progress: Progress = lambda line: None) -> list[Path]:
    """Makes `folder` hold every pinned wheel, verified by sha256, and returns their paths in the order of the pins.

    Only missing files are downloaded, in batches. Raises InfrastructureError when pip cannot deliver one.
    """
    pins = read_pins() if pins is None else pins
    folder.mkdir(parents=True, exist_ok=True)
    missing = [pin for pin in pins if not _verified(folder / pin.file, pin)]
    for start in range(0, len(missing), 12):
        batch = missing[start : start + 12]
        progress(f"fetching {start + 1}-{start + len(batch)} of {len(missing)} packages")
        _download(folder, batch)
        for pin in batch:
            if not _verified(folder / pin.file, pin):
                raise InfrastructureError(f"{folder / pin.file}: sha256 is not the pinned {pin.sha256}")
    return [folder / pin.file for pin in pins]


def _verified(path: Path, pin: Pin) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == pin.sha256


def _download(folder: Path, pins: list[Pin]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        wanted = Path(scratch) / "wanted.txt"
        wanted.write_text("".join(f"{pin.name}=={pin.version} --hash=sha256:{pin.sha256}\n" for pin in pins))
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--require-hashes", "--dest", str(folder), "--requirement", str(wanted)]
        command += [
            "--python-version",
            "3.11",
            "--implementation",
            "cp",
            "--abi",
            "cp311",
            "--abi",
            "abi3",
            "--abi",
            "none",
        ]
        for platform in _PLATFORMS:
            command += ["--platform", platform]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise InfrastructureError(f"pip could not fetch the pinned sources: {done.stderr.strip()[-600:]}")


def stdlib_package() -> str:
    """Name and version under which the running standard library is recorded."""
    return f"python-stdlib {sys.version_info.major}.{sys.version_info.minor}"


def stdlib_modules(root: Path | None = None) -> Iterator[SourceModule]:
    """Every module of the standard library that is no test, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _wanted(relative.parts) and path.stat().st_size <= MAX_FILE_BYTES:
            text = _decode(path.read_bytes())
            if text is not None:
                yield SourceModule("stdlib." + _dotted(relative.parts), stdlib_package(), "PSF-2.0", text)


def wheel_modules(path: Path, pin: Pin) -> Iterator[SourceModule]:
    """Every module of a wheel that is no test and no vendored copy, in the order of their names."""
    with zipfile.ZipFile(path) as wheel:
        for name in sorted(wheel.namelist()):
            parts = tuple(name.split("/"))
            if not name.endswith(".py") or not _wanted(parts) or wheel.getinfo(name).file_size > MAX_FILE_BYTES:
                continue
            text = _decode(wheel.read(name))
            if text is not None:
                yield SourceModule(_dotted(parts), f"{pin.name} {pin.version}", pin.licence, text)


def licence_text(path: Path, pin: Pin) -> str:
    """The licence files inside a wheel's metadata, or its licence's name where it carries none."""
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in sorted(wheel.namelist()) if ".dist-info/" in name and not name.endswith("/")]
        found = [
            name
            for name in names
            if re.search(r"licen[cs]e|copying|notice|copyright", name.split(".dist-info/")[1], re.I)
        ]
        texts = [wheel.read(name).decode("utf-8", "replace").strip() for name in found]
    head = f"{pin.name} {pin.version} ({pin.licence}), from {pin.file}\n\n"
    return head + ("\n\n".join(texts) or "The distribution carries no licence file of its own.") + "\n"


def _wanted(parts: tuple[str, ...]) -> bool:
    leaf = parts[-1]
    return not (_SKIPPED_PARTS & set(parts[:-1])) and not leaf.startswith(("test_", "conftest")) and "-" not in parts[0]


def _dotted(parts: tuple[str, ...]) -> str:
    names = [*parts[:-1], parts[-1].removesuffix(".py")]
    return ".".join(names[:-1] if names[-1] == "__init__" and len(names) > 1 else names)


def _decode(data: bytes) -> str | None:
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None
