"""Runs `python script.py` in a fork of the agent instead of a new interpreter: a fifth of the CPU time.

The child gets what a fresh interpreter would have: `__main__`, argv, path, environment, signals, exit code, tracebacks,
and no descriptor of the agent's. Anything but the plain form (`python [-B|-I|-E|-s|-P] script.py arguments`, with the pod's
own PYTHON* variables) is started as a program of its own. What differs: `sys.flags`, `/proc/self/exe`, that the hash seed is
the pod's also under -I and -E, and that `/proc/self/mem` and its kin cannot be read.
"""

import _signal  # type: ignore[import-not-found]
import builtins
import posix
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

PYTHONS = frozenset(("python", "python3", "/usr/bin/python", "/usr/bin/python3", "/bin/python", "/bin/python3"))
FLAGS = frozenset(("-B", "-I", "-E", "-s", "-P"))
# what the agent itself was started with; another value needs an interpreter of its own
OWN_ENV = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1"}
# imported once in the agent when the task's files name them; never one whose import has effects
PRELOAD = frozenset(
    (
        *(
            "bisect",
            "collections",
            "contextlib",
            "copy",
            "enum",
            "functools",
            "heapq",
            "itertools",
            "json",
            "keyword",
            "math",
        ),
        *("operator", "os", "re", "string", "struct", "types", "typing", "unicodedata"),
    )
)
RECURSION_LIMIT = 1000


class Script:
    """A command that can run warm."""

    def __init__(self, executable: str, flags: list[str], path: str, arguments: list[str]) -> None:
        self.executable, self.flags, self.path, self.arguments = executable, flags, path, arguments


def recognise(argv: list[str], env: dict[str, str]) -> Script | None:
    """The script that `argv` runs, when it can be run warm."""
    if argv[0] not in PYTHONS:
        return None
    at = 1
    while at < len(argv) and argv[at] in FLAGS:
        at += 1
    if at >= len(argv) or argv[at].startswith("-") or not argv[at].endswith(".py"):
        return None
    if {name: value for name, value in env.items() if name.startswith("PYTHON")} != OWN_ENV:
        return None
    executable = argv[0] if "/" in argv[0] else "/usr/bin/" + argv[0]
    return Script(executable, argv[1:at], argv[at], argv[at + 1 :])


def preload(sources: list[bytes]) -> None:
    """Imports what the task's own files import, once per pod."""
    for source in sources:
        for line in source.split(b"\n"):
            words = line.split(None, 2)
            if len(words) > 1 and words[0] in (b"import", b"from"):
                name = words[1].split(b".")[0].strip(b",;").decode("latin-1")
                if name in PRELOAD and name not in sys.modules:
                    __import__(name)


def run(script: Script, argv: list[str], cwd: str, env: dict[str, str], agent_folder: str) -> "NoReturn":
    """Becomes the script, in a forked child whose descriptors 0-3 are set. Does not return."""
    status = 1
    try:
        _signal.set_wakeup_fd(-1)
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        path = script.path if script.path.startswith("/") else cwd.rstrip("/") + "/" + script.path
        status = _execute(script, argv, path, env, agent_folder)
    finally:
        posix._exit(status)


def _execute(script: Script, argv: list[str], path: str, env: dict[str, str], agent_folder: str) -> int:
    try:
        fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
        try:
            source = b""
            while part := posix.read(fd, 1 << 20):
                source += part
        finally:
            posix.close(fd)
    except OSError as error:
        sys.stderr.write(f"{script.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        sys.stderr.flush()
        return 2
    main = _interpreter(script, argv, path, env, agent_folder)
    status = 0
    try:
        code = compile(source, path, "exec", dont_inherit=True)
        exec(code, main)
    except SystemExit as leaving:
        status = _exit_status(leaving)
    except BaseException as error:
        status = 1
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals is not main:
            trace = trace.tb_next
        sys.stdout.flush()
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    return _finish(main, status)


def _interpreter(
    script: Script, argv: list[str], path: str, env: dict[str, str], agent_folder: str
) -> dict[str, object]:
    """Sets the interpreter's own state as at a fresh start; the namespace of `__main__`."""
    folder = path.rpartition("/")[0] or "/"
    sys.path.remove(agent_folder)
    if not {"-I", "-P"} & set(script.flags):
        sys.path.insert(0, folder)
    sys.argv = [script.path, *script.arguments]
    sys.orig_argv = list(argv)
    sys.executable = script.executable
    sys.dont_write_bytecode = True
    for known in [known for known in sys.path_importer_cache if not known.startswith("/usr/lib")]:
        del sys.path_importer_cache[known]
    shadowed = {name[:-3] if name.endswith(".py") else name for name in posix.listdir(folder)} & PRELOAD - {
        "os",
        "itertools",
    }
    for name in list(sys.modules):
        if name.partition(".")[0] in shadowed or name.partition(".")[0] == "podagent":
            del sys.modules[name]
    encoded = {name.encode(): value.encode("utf-8", "surrogateescape") for name, value in env.items()}
    for old in list(posix.environ):
        posix.unsetenv(old)
    for variable, value in env.items():
        posix.putenv(variable, value)
    environ: dict[bytes, bytes] = posix.environ
    environ.clear()
    environ.update(encoded)
    if "os" in sys.modules:
        table = sys.modules["os"].environ._data
        table.clear()
        table.update(encoded)
    import _sitebuiltins

    for leave in ("exit", "quit"):
        setattr(builtins, leave, _sitebuiltins.Quitter(leave, "Ctrl-D (i.e. EOF)"))
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    main: dict[str, object] = module.__dict__
    loader = sys.modules["_frozen_importlib_external"].SourceFileLoader("__main__", path)
    main.update(__builtins__=builtins, __file__=path, __cached__=None, __loader__=loader, __annotations__={})
    depth, frame = 0, sys._getframe()
    while (back := frame.f_back) is not None:
        depth, frame = depth + 1, back
    sys.setrecursionlimit(RECURSION_LIMIT + depth + 1)  # the frames below and the call of exec are not the script's
    return main


def _exit_status(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    sys.stderr.write(str(leaving.code) + "\n")
    return 1


def _finish(main: dict[str, object], status: int) -> int:
    """What an interpreter does at its end, as far as a program can see it."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    import atexit

    atexit._run_exitfuncs()
    main.clear()  # files that were left open are written out
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not file.startswith("/usr/"):
            module.__dict__.clear()
    try:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except (OSError, ValueError):
        status = status or 120
    if sys.stderr is not None and not sys.stderr.closed:
        sys.stderr.flush()
    return status
