"""The agent's tools, a library inside the pod reached by the verb `call`: read_file, edit_file, grep, run.

Every result is `{ok, text, error, changed, timed_out, oom, dropped}`: `text` is for the policy, short; `error` is a name from a
closed set. Files are bytes: line ends, BOM, tabs and foreign encodings stay as they are. What a call may reach is the repository;
that is a courtesy to the policy, the walls are the pod's. Knows nothing of prompts or of how a call was parsed.
"""

import posix
from time import monotonic_ns

from . import paths, wire
from .jobs import Job, find_program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .agent import Agent

Result = dict[str, object]

ARGUMENTS = {
    "read_file": {"path", "start", "count"},
    "edit_file": {"path", "old", "new"},
    "grep": {"pattern", "path"},
    "run": {"command"},
}
DEFAULTS: dict[str, object] = {
    "path": "",
    "base": "current",
    "command": "python -B check.py",
    "timeout_ms": 5000,
    "output_limit": 1 << 16,
    "text_limit": 4000,
    "line_limit": 200,
    "matches": 50,
    "file_limit": 4 << 20,
}
# a command of these characters alone means the same without a shell
PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./=:,@%+ ")


class ToolError(Exception):
    """A failure that the policy caused, with its name and a text it can act on."""

    def __init__(self, error: str, text: str) -> None:
        super().__init__(text)
        self.error, self.text = error, text


def result(
    text: str, error: str = "", *, changed: tuple[str, ...] = (), timed_out: bool = False, dropped: int = 0
) -> Result:
    """A tool's result; `oom` is filled in by the host, which alone can see the pod's memory events."""
    return {
        "ok": not error,
        "text": text,
        "error": error,
        "changed": list(changed),
        "timed_out": timed_out,
        "oom": False,
        "dropped": dropped,
    }


def call(agent: "Agent", key: object, tool: str, arguments: object, options: object) -> Result | None:
    """Runs a tool; None when the answer comes later."""
    try:
        given = _checked(tool, arguments)
        if not isinstance(options, dict):
            raise TypeError("options must be a table")
        chosen = {**DEFAULTS, **options}
        if tool == "read_file":
            return read_file(agent.workdir, given, chosen)
        if tool == "edit_file":
            return edit_file(agent.workdir, agent.originals, given, chosen)
        if tool == "grep":
            _grep_apart(agent, key, given, chosen)
        else:
            _run(agent, key, given, chosen)
        return None
    except ToolError as failure:
        return result(failure.text, failure.error)


def _checked(tool: str, arguments: object) -> dict[str, str]:
    if tool not in ARGUMENTS:
        raise ToolError("unknown_tool", "no tool " + tool)
    if not isinstance(arguments, dict):
        raise ToolError("bad_arguments", "arguments must be named")
    for name, value in arguments.items():
        if name not in ARGUMENTS[tool]:
            raise ToolError("bad_arguments", "no argument " + str(name))
        if not isinstance(value, (str, int)) or isinstance(value, bool):
            raise ToolError("bad_arguments", str(name) + " must be text")
    return {name: str(value) for name, value in arguments.items()}


def _need(given: dict[str, str], name: str) -> str:
    if name not in given:
        raise ToolError("bad_arguments", name + " is missing")
    return given[name]


def _number(given: dict[str, str], name: str, default: int) -> int:
    text = given.get(name, "").strip()
    if not text:
        return default
    if not text.isdigit() or int(text) < 1:
        raise ToolError("bad_arguments", name + " must be a number from 1")
    return int(text)


def _integer(options: dict[str, object], name: str) -> int:
    value = options[name]
    assert isinstance(value, int)
    return value


def _resolved(workdir: str, path: str) -> tuple[str, str]:
    try:
        return paths.inside(workdir, path)
    except paths.Outside:
        raise ToolError("bad_path", "path is outside the repository") from None


def _content(full: str, shown: str, limit: int) -> tuple[bytes, int]:
    try:
        fd = posix.open(full, posix.O_RDONLY | posix.O_CLOEXEC | posix.O_NONBLOCK)
    except PermissionError:
        raise ToolError("bad_path", "not allowed: " + shown) from None
    except OSError:
        raise ToolError("bad_path", "no file " + shown) from None
    try:
        found = posix.fstat(fd)
        if found.st_mode & 0o170000 != 0o100000:
            raise ToolError("bad_path", shown + " is not a file")
        if found.st_size > limit:
            raise ToolError("bad_path", shown + " is too long")
        parts = []
        while part := posix.read(fd, 1 << 20):
            parts.append(part)
        return b"".join(parts), found.st_mode & 0o7777
    finally:
        posix.close(fd)


def shorten(text: str, limit: int) -> tuple[str, int]:
    """Head and tail of a long text with a marker between, `limit` characters apart from it; and how many it lost."""
    if len(text) <= limit:
        return text, 0
    dropped = len(text) - limit
    tail = limit // 2
    return text[: limit - tail] + f"\n[{dropped} characters dropped]\n" + text[len(text) - tail :], dropped


def overwritten(text: str) -> str:
    """The text as a terminal shows it: what follows a carriage return overwrites the line."""
    if "\r" not in text:
        return text
    lines = []
    for line in text.split("\n"):
        shown = ""
        for piece in line.rstrip("\r").split("\r"):
            shown = piece + shown[len(piece) :]
        lines.append(shown)
    return "\n".join(lines)


def read_file(workdir: str, given: dict[str, str], options: dict[str, object]) -> Result:
    """The file, or `count` lines from line `start` (the first is 1)."""
    full, shown = _resolved(workdir, given.get("path") or str(options["path"]))
    start, count = _number(given, "start", 1), _number(given, "count", 1 << 30)
    data, _ = _content(full, shown, _integer(options, "file_limit"))
    if b"\0" in data:
        raise ToolError("bad_path", shown + " is binary")
    lines = data.split(b"\n")
    ends_open = bool(lines[-1])
    if start > len(lines) - (not ends_open) and start > 1:
        raise ToolError("bad_arguments", f"start is past the end, the file has {len(lines) - (not ends_open)} lines")
    text = b"\n".join(lines[start - 1 : start - 1 + count]).decode("utf-8", "replace")
    text, dropped = shorten(text, _integer(options, "text_limit"))
    return result(text, dropped=dropped)


def occurrences(data: bytes, part: bytes) -> int:
    """How often `part` occurs in `data`, overlapping ones counted, at most 2."""
    first = data.find(part)
    return 0 if first < 0 else 1 if data.find(part, first + 1) < 0 else 2


def edited(base: bytes, old: str, new: str) -> bytes:
    """`base` with the only occurrence of `old` replaced. Raises ToolError; every other byte is kept.

    In a file of CRLF lines a `\\n` of the arguments stands for `\\r\\n`, since the policy was shown lines.
    """
    if not old:
        raise ToolError("bad_arguments", "old is empty")
    if old == new:
        raise ToolError("no_change", "old and new are equal")
    try:
        before, after = old.encode("utf-8"), new.encode("utf-8")
    except UnicodeEncodeError:
        raise ToolError("bad_arguments", "old and new must be text") from None
    count = occurrences(base, before)
    if not count and b"\r\n" in base and b"\n" in before + after and b"\r" not in before:
        before, after = before.replace(b"\n", b"\r\n"), after.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
        count = occurrences(base, before)
    elif count and b"\r\n" in base and base.count(b"\n") == base.count(b"\r\n"):
        after = after.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
    if not count:
        raise ToolError("not_found", "old not found")
    if count > 1:
        raise ToolError("not_unique", "old is not unique")
    return base.replace(before, after, 1)


def edit_file(workdir: str, originals: dict[str, bytes], given: dict[str, str], options: dict[str, object]) -> Result:
    """Replaces the only occurrence of `old` by `new`.

    With the option `base` = "original" the edit refers to the file as the task placed it, so an earlier edit is replaced.
    """
    full, shown = _resolved(workdir, given.get("path") or str(options["path"]))
    old, new = _need(given, "old"), _need(given, "new")
    current, mode = _content(full, shown, _integer(options, "file_limit"))
    base = originals.setdefault(full, current) if options["base"] == "original" else current
    data = edited(base, old, new)
    if data == current:
        raise ToolError("no_change", "the file is already so")
    replacement = full + ".etude-new"
    try:
        fd = posix.open(
            replacement, posix.O_WRONLY | posix.O_CREAT | posix.O_TRUNC | posix.O_CLOEXEC | posix.O_NOFOLLOW, mode
        )
        try:
            view = memoryview(data)
            while view:
                view = view[posix.write(fd, view) :]
            posix.fchmod(fd, mode)
        finally:
            posix.close(fd)
        posix.rename(replacement, full)
    except OSError as error:
        try:
            posix.unlink(replacement)
        except OSError:
            pass
        raise ToolError("bad_path", "cannot write " + shown + ": " + str(error.strerror)) from None
    return result("ok", changed=(shown,))


def _grep_apart(agent: "Agent", key: object, given: dict[str, str], options: dict[str, object]) -> None:
    # a pattern can take for ever: a forked copy searches, under the deadline
    _need(given, "pattern")

    def search() -> bytes:
        try:
            return wire.pack(grep(agent.workdir, given, options))
        except ToolError as failure:
            return wire.pack(result(failure.text, failure.error))
        except Exception as error:  # the copy cannot raise into the agent: its failure travels as a result
            return wire.pack(result(type(error).__name__ + ": " + str(error), "failed"))

    def done(job: Job) -> None:
        if job.timed_out:
            agent.answer(key, result("the search took too long", "timeout", timed_out=True))
        elif job.channel.dropped or not job.channel.total:
            agent.answer(key, result("the search failed", "failed"))
        else:
            found = wire.unpack(job.channel.value())
            assert isinstance(found, dict)
            agent.answer(key, found)

    agent.jobs.fork(Job(key, done, monotonic_ns() + _integer(options, "timeout_ms") * 1_000_000), search, 1 << 20)


def grep(workdir: str, given: dict[str, str], options: dict[str, object]) -> Result:
    """Lines that hold `pattern` (a regular expression) in a file or below a directory, as `path:number: line`, in order."""
    pattern = _need(given, "pattern").encode("utf-8", "surrogateescape")
    full, shown = _resolved(workdir, given.get("path") or ".")
    if not pattern:
        raise ToolError("bad_arguments", "pattern is empty")
    plain = not any(letter in b"\\^$.|?*+()[]{}" for letter in pattern)
    search = None
    if not plain:
        import re

        try:
            search = re.compile(pattern).search
        except re.error as error:
            raise ToolError("bad_pattern", "bad pattern: " + str(error)) from None
    most, width = _integer(options, "matches"), _integer(options, "line_limit")
    lines: list[str] = []
    dropped = found = 0
    for path, name in paths.walk(full, shown):
        try:
            data, _ = _content(path, name, _integer(options, "file_limit"))
        except ToolError:
            continue
        if b"\0" in data or (plain and pattern not in data):
            continue
        for number, line in enumerate(data.split(b"\n"), 1):
            if search is None:
                at = line.find(pattern)
                end = at + len(pattern)
            else:
                match = search(line)
                at, end = match.span() if match else (-1, -1)
            if at < 0:
                continue
            found += 1
            if found > most:
                continue
            text, lost = _around(line.rstrip(b"\r"), at, end, width)
            dropped += lost
            lines.append(f"{name}:{number}: {text}")
    if found > most:
        lines.append(f"[{found - most} more matches]")
    text, lost = shorten("\n".join(lines) if lines else "no match", _integer(options, "text_limit"))
    return result(text, dropped=dropped + lost)


def _around(line: bytes, start: int, end: int, width: int) -> tuple[str, int]:
    """A long line cut around its match."""
    if len(line) <= width:
        return line.decode("utf-8", "replace"), 0
    left = max(0, min((start + end - width) // 2, len(line) - width, start))
    piece = line[left : left + width].decode("utf-8", "replace")
    return ("..." if left else "") + piece + ("..." if left + width < len(line) else ""), len(line) - width


def _run(agent: "Agent", key: object, given: dict[str, str], options: dict[str, object]) -> None:
    command = given.get("command") or str(options["command"])
    argv = ["/bin/sh", "-c", command]
    words = command.split()
    if words and all(letter in PLAIN for letter in command.encode()) and "=" not in words[0]:
        if find_program(words[0], agent.env["PATH"]) != words[0]:
            argv = words

    timeout_ms = _integer(options, "timeout_ms")

    def done(job: Job) -> None:
        agent.answer(key, run_result(job, timeout_ms, _integer(options, "text_limit")))

    job = Job(key, done, monotonic_ns() + timeout_ms * 1_000_000)
    limit = _integer(options, "output_limit")
    agent.jobs.spawn(job, argv, agent.workdir, agent.env, limit=limit, merge=True, warm=agent.warm())


def run_result(job: Job, timeout_ms: int, text_limit: int) -> Result:
    """What the command printed, both streams as they came; then how it ended, unless it ended well."""
    output, dropped = job.stdout.value(), job.stdout.dropped
    if dropped:
        middle = job.stdout.head_limit
        output = output[:middle] + b"\n[%d bytes dropped]\n" % dropped + output[middle:]
    text, lost = shorten(overwritten(output.decode("utf-8", "replace")).rstrip("\n"), text_limit)
    error = ""
    if job.timed_out:
        error, ending = "timeout", f"timeout after {timeout_ms / 1000:g} s"
    elif job.signal is not None:
        error, ending = "failed", f"killed by signal {job.signal}"
    elif job.exit_code:
        error, ending = "failed", "" if text else f"exit code {job.exit_code}"
    else:
        ending = "" if text else "ok"
    text = text + "\n" + ending if text and ending else text or ending
    return {
        **result(text, error, timed_out=job.timed_out, dropped=dropped + lost),
        "exit_code": job.exit_code,
        "signal": job.signal,
    }
