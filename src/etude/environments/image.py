"""The pods' lower layer: a minimal root file system made from this machine's Python, content-addressed.

It holds the interpreter, the shared libraries it needs, an allow-list of standard modules as bytecode without source, a shell, a
few programs and the pod agent: no packages, no git, no source of the standard library. `Image.modules` says what can be
imported inside, so that tasks are made from other modules (no task source may lie in an image, as import, file or bytecode).
Knows nothing of how a pod is started. DESIGN decision 11.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from etude.records.errors import BadInput, MissingCapability

IMAGE_NAME = "python-small"
BUILDER_VERSION = 1
# below /usr, where an interpreter finds its library from its own path
AGENT_FOLDER = "/usr/pod"
AGENT_PYTHON = f"{AGENT_FOLDER}/python"
# -P -s -S keep the start short and out of reach of the repository; the environment is the launcher's, with the pod's hash seed
AGENT_ARGV = (
    AGENT_PYTHON,
    "-P",
    "-s",
    "-S",
    "-X",
    "utf8",
    "-c",
    f"import sys;sys.path.insert(0,{AGENT_FOLDER!r});from podagent.agent import main;main()",
)

STDLIB_MODULES = (
    "__future__",
    "abc",
    "ast",
    "bisect",
    "codecs",
    "collections",
    "collections.abc",
    "contextlib",
    "copy",
    "copyreg",
    "encodings.ascii",
    "encodings.latin_1",
    "encodings.utf_8",
    "enum",
    "errno",
    "functools",
    "heapq",
    "importlib",
    "io",
    "itertools",
    "json",
    "keyword",
    "math",
    "operator",
    "os",
    "re",
    "reprlib",
    "select",
    "signal",
    "stat",
    "string",
    "struct",
    "sys",
    "time",
    "types",
    "typing",
    "unicodedata",
    "warnings",
    "weakref",
)
PROGRAMS = (
    *(
        "sh",
        "grep",
        "cat",
        "chmod",
        "cp",
        "cut",
        "date",
        "dd",
        "echo",
        "env",
        "false",
        "find",
        "head",
        "ln",
        "ls",
        "mkdir",
        "mv",
    ),
    *(
        "printf",
        "pwd",
        "rm",
        "rmdir",
        "sed",
        "seq",
        "sleep",
        "sort",
        "tail",
        "tee",
        "test",
        "touch",
        "tr",
        "true",
        "uniq",
        "wc",
    ),
)
OPTIONAL_PROGRAMS = ("basename", "bash", "cmp", "diff", "dirname", "id", "setsid", "timeout", "xargs")
NEEDED_PROGRAMS = ("sh", "cat", "grep")


@dataclass(frozen=True)
class Image:
    """A built image: `path` is its root directory, `digest` the sha256 over its sorted (path, mode, content)."""

    digest: str
    path: Path
    python: str
    """Version of the interpreter inside, such as `3.11.7`."""
    _modules: frozenset[str]

    def modules(self) -> frozenset[str]:
        """Dotted names of every module that can be imported in a pod, frozen and built-in ones included."""
        return self._modules


def _base_python() -> Path:
    return Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))


def _agent_sources() -> list[Path]:
    return sorted((Path(__file__).parent / "podagent").glob("*.py"))


def _fingerprint(modules: tuple[str, ...]) -> str:
    """Key of the inputs: the same inputs find the built image without building it again."""
    h = hashlib.sha256()
    for part in (BUILDER_VERSION, sys.version, AGENT_ARGV, modules, PROGRAMS, OPTIONAL_PROGRAMS):
        h.update(repr(part).encode() + b"\0")
    for path in (_base_python(), *(Path(found) for name in PROGRAMS if (found := shutil.which(name)))):
        status = os.stat(path)
        h.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    for path in (Path(__file__).parent / "bytecode.py", *_agent_sources()):
        h.update(path.read_bytes() + b"\0")
    return h.hexdigest()


def ensure_image(cache: Path, *, modules: tuple[str, ...] = STDLIB_MODULES) -> Image:
    """The image under `cache`, built when it is not there yet; safe when several processes ask at once.

    Raises MissingCapability when this machine lacks what an image is made of, BadInput when `cache` cannot be written.
    """
    if sys.platform != "linux":
        raise MissingCapability(
            "environments", "platform", sys.platform, "Linux for namespace pods (run in a Linux machine or VM)"
        )
    cache = cache.absolute()
    key_file = cache / "keys" / f"{_fingerprint(modules)}.json"
    try:
        found = json.loads(key_file.read_text())
        image = Image(found["digest"], cache / "images" / found["digest"], found["python"], frozenset(found["modules"]))
        if image.path.is_dir():
            return image
    except (OSError, ValueError, KeyError):
        pass
    try:
        (cache / "images").mkdir(parents=True, exist_ok=True)
        key_file.parent.mkdir(exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".new-", dir=cache / "images"))
        try:
            names = _Builder(staging, modules).build()
            digest = image_digest(staging)
            target = cache / "images" / digest
            try:
                os.rename(staging, target)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            python = ".".join(str(part) for part in sys.version_info[:3])
            record = key_file.with_suffix(f".{os.getpid()}.new")
            record.write_text(json.dumps({"digest": digest, "python": python, "modules": sorted(names)}))
            os.replace(record, key_file)
            return Image(digest, target, python, frozenset(names))
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise BadInput(
            str(cache), "environments.cache", error.strerror, "a writable directory with 200 MB free"
        ) from error


def image_digest(root: Path) -> str:
    """sha256 over the sorted lines (path, mode, kind, sha256 of the content or link target) of everything below `root`."""
    lines = []
    for folder, directories, files in os.walk(root):
        for name in (*directories, *files):
            path = Path(folder) / name
            status = path.lstat()
            if path.is_symlink():
                kind, content = "link", os.readlink(path)
            elif path.is_dir():
                kind, content = "directory", ""
            else:
                kind, content = "file", _file_sha256(path)
            mode = 0 if kind == "link" else status.st_mode & 0o7777
            lines.append(f"{path.relative_to(root)}\0{mode:o}\0{kind}\0{content}\n")
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def _file_sha256(path: Path) -> str:
    mode = path.stat().st_mode
    if not os.access(path, os.R_OK):  # the agent's interpreter is executable only, also for its owner
        path.chmod(0o500)
        try:
            return hashlib.sha256(path.read_bytes()).hexdigest()
        finally:
            path.chmod(mode & 0o7777)
    return hashlib.sha256(path.read_bytes()).hexdigest()


class _Builder:
    """Fills one staging directory."""

    def __init__(self, root: Path, modules: tuple[str, ...]) -> None:
        self.root = root
        self.wanted = modules
        self.python = _base_python()
        self.version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        self.lib = f"/usr/{sys.platlibdir}/{self.version}"
        self.libraries: dict[str, Path] = {}
        self.loader = ""

    def build(self) -> set[str]:
        for name in (
            "usr/bin",
            "etc",
            "proc",
            "dev",
            "tmp",
            "home",
            "repo",
            f".{self.lib}/lib-dynload",
            f".{AGENT_FOLDER}/podagent",
        ):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        os.symlink("usr/bin", self.root / "bin")
        for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
            os.symlink(target, self.root / "dev" / name)
        self._file("/etc/passwd", b"root:x:0:0:root:/:/bin/false\nagent:x:65534:65534:agent:/home:/bin/sh\n")
        self._file("/etc/group", b"root:x:0:\nagent:x:65534:\n")
        self._file("/etc/hosts", b"127.0.0.1 localhost\n::1 localhost\n")
        self._copy(self.python, f"/usr/bin/{self.version}", 0o755)
        for name in ("python", "python3"):
            os.symlink(self.version, self.root / "usr/bin" / name)
        names = self._modules()
        self._programs()
        self._shared_libraries()
        # a copy that nobody may read: the kernel then keeps the agent's memory from other processes of its user
        self._copy(self.python, AGENT_PYTHON, 0o111)
        for folder, _, _ in os.walk(self.root):
            os.chmod(folder, 0o755)
        os.chmod(self.root / "tmp", 0o1777)
        return names

    def _file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(mode)

    def _copy(self, source: Path, path: str, mode: int) -> None:
        self._file(path, source.read_bytes(), mode)
        self._need_libraries(source)

    def _modules(self) -> set[str]:
        sources = [(str(path), f"{AGENT_FOLDER}/podagent/{path.name}") for path in _agent_sources()]
        first = self._bytecode([])
        if first["missing"]:
            raise MissingCapability(
                "image", "standard modules", first["missing"], "a Python with its whole standard library"
            )
        stdlib = Path(sysconfig.get_path("stdlib")).resolve()
        python_files: dict[str, str] = {}
        for name, found in first["loaded"].items():
            origin = Path(found["file"] or found["origin"])
            if found["origin"] == "frozen" and not found["file"]:
                origin = stdlib / (name.replace(".", "/") + ("/__init__.py" if found["package"] else ".py"))
            if origin.suffix == ".py" and origin.exists():
                path = name.replace(".", "/") + ("/__init__" if found["package"] else "")
                python_files[str(origin)] = f"{self.lib}/{path}.py"
            elif ".so" in origin.suffixes or origin.suffix == ".so":
                self._copy(origin, f"{self.lib}/lib-dynload/{origin.name}", 0o755)
        # the landmarks by which an interpreter finds its library
        python_files[str(stdlib / "os.py")] = f"{self.lib}/os.py"
        second = self._bytecode([*python_files.items(), *sources])
        for path, shown in (*python_files.items(), *sources):
            self._file(shown + "c", bytes.fromhex(second["code"][path]))
        return {*first["loaded"], *first["builtin"], *first["frozen"]} - {"__main__"}

    def _bytecode(self, sources: list[tuple[str, str]]) -> dict:  # type: ignore[type-arg]
        command = [str(self.python), "-I", "-S", str(Path(__file__).parent / "bytecode.py")]
        request = json.dumps({"modules": self.wanted, "sources": sources})
        done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise MissingCapability(
                "image", str(self.python), done.stderr.strip()[-200:], "a Python interpreter that starts with -I -S"
            )
        answer: dict = json.loads(done.stdout)  # type: ignore[type-arg]
        return answer

    def _programs(self) -> None:
        for name in (*PROGRAMS, *OPTIONAL_PROGRAMS):
            found = shutil.which(name, path="/usr/bin:/bin")
            if found is None or Path(found).read_bytes()[:4] != b"\x7fELF":
                if name in NEEDED_PROGRAMS:
                    raise MissingCapability(
                        "image", "program", name, f"{name} in /usr/bin or /bin (install coreutils, grep and a shell)"
                    )
                continue
            self._copy(Path(os.path.realpath(found)), f"/usr/bin/{name}", 0o755)

    def _need_libraries(self, binary: Path) -> None:
        # asked of the loader's own listing; a static program has none
        done = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, timeout=30)
        for line in done.stdout.splitlines():
            words = line.split()
            if "=>" in words and len(words) >= 3 and words[2].startswith("/"):
                self.libraries[words[0]] = Path(os.path.realpath(words[2]))
            elif words and words[0].startswith("/"):
                self.loader = words[0]

    def _shared_libraries(self) -> None:
        if not self.loader:
            return
        self._file(self.loader, Path(os.path.realpath(self.loader)).read_bytes(), 0o755)
        told = subprocess.run([self.loader, "--help"], capture_output=True, text=True, timeout=30).stdout
        folders = [line.split()[0] for line in told.splitlines() if "(system search path)" in line]
        folder = folders[0] if folders else "/usr/lib"
        for name, path in sorted(self.libraries.items()):
            self._file(name if name.startswith("/") else f"{folder}/{name}", path.read_bytes(), 0o755)
