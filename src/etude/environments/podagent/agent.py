"""PID 1 of a pod: answers framed requests on its stdin/stdout until stdin ends, then dies and the pod with it.

One thread, one poll loop, no imports but built-in modules and `select`: the start is paid for every pod. Every request
has an id; a repeated id gets the first result and runs nothing twice. The verbs are the methods named `do_*`.
It trusts the host, and nothing else in the pod: its memory is closed to other processes (its binary is not readable).
DESIGN decision 11.
"""

import _signal  # type: ignore[import-not-found]
import errno
import posix
import select
import sys
from time import monotonic_ns

from . import wire
from .jobs import SIGKILL, Job, Jobs, kill_everything, processes, state_of
from .warm import preload

PROTOCOL = 1
KEPT_REPLY_BYTES = 16 << 20
ERRORS = {
    errno.ENOENT: "not_found",
    errno.ENOTDIR: "not_found",
    errno.EACCES: "not_allowed",
    errno.EPERM: "not_allowed",
    errno.EROFS: "not_allowed",
    errno.EISDIR: "is_directory",
    errno.ENOSPC: "disk_full",
    errno.EAGAIN: "no_processes",
    errno.ENOEXEC: "not_executable",
    errno.E2BIG: "too_long",
    errno.ENAMETOOLONG: "too_long",
}

Reply = dict[str, object]


class Refusal(Exception):
    """A named error for the reply."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(message)
        self.error, self.message = error, message


class Agent:
    """The state of a pod as its agent keeps it."""

    def __init__(self, input_fd: int, output_fd: int) -> None:
        self.input_fd, self.output_fd = input_fd, output_fd
        self.inbox = bytearray()
        self.outbox: list[memoryview] = []
        self.poll = select.poll()
        self.jobs = Jobs(self._watch, self.poll.unregister)
        self.greeted = False
        self.workdir = "/repo"
        self.env: dict[str, str] = {"PATH": "/usr/bin:/bin"}
        self.originals: dict[str, bytes] = {}
        self.preloaded = False
        self.background: dict[str, Job] = {}
        self.replies: dict[object, bytes | None] = {}
        self.kept: list[object] = []
        self.kept_bytes = 0

    # ---- the loop
    def _watch(self, fd: int, write: bool) -> None:
        self.poll.register(fd, select.POLLOUT if write else select.POLLIN)

    def serve(self) -> None:
        """Answers until the input ends."""
        wake_read, wake_write = posix.pipe2(posix.O_CLOEXEC | posix.O_NONBLOCK)
        _signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        _signal.signal(_signal.SIGCHLD, lambda number, place: None)
        # a handled signal could be sent from inside the pod; default ones do not reach PID 1
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
        for fd in (self.input_fd, self.output_fd):
            posix.set_blocking(fd, False)
        self._watch(self.input_fd, False)
        self._watch(wake_read, False)
        while True:
            wait_ns = self.jobs.on_time(monotonic_ns())
            # the answer of a request may lie in the same batch of events, so flush once a round
            self._flush()
            for fd, _event in self.poll.poll(None if wait_ns < 0 else wait_ns / 1e6 + 1):
                if fd == wake_read:
                    self._drain(wake_read)
                    self.jobs.on_exit()
                elif fd in self.jobs.by_fd:
                    self.jobs.on_ready(fd)
                elif fd == self.input_fd and not self._receive():
                    return

    def _drain(self, fd: int) -> None:
        try:
            posix.read(fd, 4096)
        except BlockingIOError:
            pass

    def _receive(self) -> bool:
        try:
            data = posix.read(self.input_fd, 1 << 20)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        inbox = self.inbox
        inbox += data
        while len(inbox) >= 4:
            size = int.from_bytes(inbox[:4], "big")
            if size > wire.MAX_FRAME:
                return False
            if len(inbox) < size + 4:
                break
            body = bytes(memoryview(inbox)[4 : size + 4])
            del inbox[: size + 4]
            self._request(wire.unpack(body))
        return True

    def _flush(self) -> None:
        while self.outbox:
            try:
                sent = posix.write(self.output_fd, self.outbox[0][: 1 << 20])
            except BlockingIOError:
                self._wait_for_output()
                continue
            except OSError:
                posix._exit(0)
            self.outbox[0] = self.outbox[0][sent:]
            if not self.outbox[0]:
                self.outbox.pop(0)

    def _wait_for_output(self) -> None:
        # deadlines go on counting while the host is slow to read
        only = select.poll()
        only.register(self.output_fd, select.POLLOUT)
        only.poll(100)
        self.jobs.on_time(monotonic_ns())

    # ---- requests and replies
    def _request(self, request: object) -> None:
        if not isinstance(request, dict) or "id" not in request or "verb" not in request:
            posix._exit(1)  # not our protocol: there is nobody to answer
        key, verb = request["id"], request["verb"]
        if key in self.replies:
            kept = self.replies[key]
            if kept is not None:
                self.outbox.append(memoryview(kept))
            return
        self.replies[key] = None
        try:
            method = getattr(self, "do_" + str(verb), None)
            if method is None:
                raise Refusal("unknown_verb", "no verb " + str(verb))
            if not self.greeted and verb != "hello":
                raise Refusal("no_hello", "the first request must be hello")
            reply = method(key, request)
        except Refusal as refusal:
            self.answer(key, None, refusal.error, refusal.message)
        except OSError as error:
            name = str(error.filename or "")
            self.answer(
                key, None, ERRORS.get(error.errno or 0, "os_error"), (name + ": " if name else "") + str(error.strerror)
            )
        except (KeyError, TypeError, ValueError, MemoryError) as error:
            self.answer(key, None, "bad_request", type(error).__name__ + ": " + str(error))
        else:
            if reply is not None:
                self.answer(key, reply)

    def answer(self, key: object, body: Reply | None, error: str = "", message: str = "") -> None:
        """Sends the one reply to request `key` and keeps it for a repetition."""
        frame = wire.frame({"id": key, "ok": not error, "error": error, "message": message, "body": body})
        if len(frame) > wire.MAX_FRAME:
            frame = wire.frame(
                {"id": key, "ok": False, "error": "too_long", "message": "the reply is too long", "body": None}
            )
        self.outbox.append(memoryview(frame))
        self.replies[key] = frame
        self.kept.append(key)
        self.kept_bytes += len(frame)
        while self.kept_bytes > KEPT_REPLY_BYTES and len(self.kept) > 1:
            old = self.kept.pop(0)
            self.kept_bytes -= len(self.replies[old] or b"")
            # never run again what has run: the result is gone, and says so
            gone = {
                "id": old,
                "ok": False,
                "error": "result_gone",
                "message": "answered before, no longer kept",
                "body": None,
            }
            self.replies[old] = wire.frame(gone)

    # ---- verbs
    def do_hello(self, key: object, request: Reply) -> Reply:
        """Checks the version, takes over the environment and writes the task's files, the originals that edits can refer to."""
        if request["version"] != PROTOCOL:
            raise Refusal("version_mismatch", f"the agent speaks protocol {PROTOCOL}")
        env, files = request["env"], request["files"]
        assert isinstance(env, dict) and isinstance(files, list)
        self.greeted = True
        self.workdir = str(request["workdir"])
        self.env.update(env)
        for path, mode, data in files:
            full = self._path(path)
            _write_file(full, data, mode)
            self.originals[full] = data
        verbs = sorted(name[3:] for name in dir(self) if name.startswith("do_"))
        return {"version": PROTOCOL, "python": ".".join(str(part) for part in sys.version_info[:3]), "verbs": verbs}

    def do_exec(self, key: object, request: Reply) -> Reply | None:
        argv, env, stdin = request["argv"], request["env"], request["stdin"]
        assert isinstance(argv, list) and isinstance(env, dict) and isinstance(stdin, bytes)
        background = bool(request["background"])
        job = self._job(key, _int(request["timeout_ms"]), self._background_done if background else self._exec_done)
        cwd = self._path(str(request["cwd"] or "."))
        self.jobs.spawn(
            job,
            argv,
            cwd,
            {**self.env, **env},
            stdin,
            limit=_int(request["output_limit"]),
            channel_limit=_int(request["channel_limit"]),
            merge=bool(request["merge"]),
            warm=self.warm(background),
        )
        if not background:
            return None
        self.background[str(key)] = job
        return {"handle": str(key), "pid": job.pid}

    def warm(self, background: bool = False) -> bool:
        """Whether a Python script may run as a fork; its imports are then made here, once."""
        if background:
            return False
        if not self.preloaded:
            self.preloaded = True
            preload([data for path, data in self.originals.items() if path.endswith(".py")])
        return True

    def _job(self, key: object, timeout_ms: int, done: object) -> Job:
        return Job(key, done, monotonic_ns() + timeout_ms * 1_000_000)  # type: ignore[arg-type]

    def _exec_done(self, job: Job) -> None:
        self.answer(job.key, job.result())

    def _background_done(self, job: Job) -> None:
        pass  # `attach` asks

    def do_attach(self, key: object, request: Reply) -> Reply:
        """What a background process has written so far, and how it ended when it has."""
        job = self.background.get(str(request["handle"]))
        if job is None:
            raise Refusal("not_found", "no background process " + str(request["handle"]))
        return {"running": not job.finished, "result": job.result()}

    def do_signal(self, key: object, request: Reply) -> Reply:
        """Signals a background process's session, or (target `all`) everything in the pod but the agent."""
        target, number = str(request["target"]), _int(request["signal"])
        if target == "all":
            kill_everything(number)
            return {}
        job = self.background.get(target)
        if job is None:
            raise Refusal("not_found", "no background process " + target)
        if job.finished:
            return {}
        if number == SIGKILL:
            self.jobs.kill_tree(job)
        else:
            posix.killpg(job.pid, number)
        return {}

    def do_ps(self, key: object, request: Reply) -> Reply:
        return {
            "pids": [pid for pid in processes() if pid != 1],
            "zombies": sum(pid != 1 and state_of(pid) == "Z" for pid in processes()),
        }

    def do_read(self, key: object, request: Reply) -> Reply:
        data, mode = _read_file(self._path(str(request["path"])), _int(request["limit"]))
        return {"data": data, "mode": mode}

    def do_write(self, key: object, request: Reply) -> Reply:
        data = request["data"]
        assert isinstance(data, bytes)
        _write_file(self._path(str(request["path"])), data, _int(request["mode"]))
        return {}

    def do_stat(self, key: object, request: Reply) -> Reply:
        found = posix.lstat(self._path(str(request["path"])))
        kinds = {0o100000: "file", 0o040000: "directory", 0o120000: "symlink"}
        kind = kinds.get(found.st_mode & 0o170000, "other")
        return {"kind": kind, "size": found.st_size, "mode": found.st_mode & 0o7777, "mtime_ns": found.st_mtime_ns}

    def do_tar_in(self, key: object, request: Reply) -> Reply:
        from . import tar

        data = request["data"]
        assert isinstance(data, bytes)
        return {"files": tar.unpack(data, self._path("."))}

    def do_tar_out(self, key: object, request: Reply) -> Reply:
        from . import tar

        paths = request["paths"]
        assert isinstance(paths, list)
        return {"data": tar.pack(paths, self._path("."), _int(request["limit"]))}

    def do_call(self, key: object, request: Reply) -> Reply | None:
        from . import tools

        return tools.call(self, key, str(request["tool"]), request["arguments"], request["options"])

    def _path(self, path: str) -> str:
        return path if path.startswith("/") else self.workdir if path == "." else self.workdir + "/" + path


def _int(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError("an integer is expected, not " + type(value).__name__)
    return value


def _write_file(path: str, data: bytes, mode: int) -> None:
    """Writes a file with its mode, making the directories above it."""
    flags = posix.O_WRONLY | posix.O_CREAT | posix.O_TRUNC | posix.O_CLOEXEC | posix.O_NONBLOCK
    try:
        fd = posix.open(path, flags, mode)
    except FileNotFoundError:
        _make_directories(path.rpartition("/")[0])
        fd = posix.open(path, flags, mode)
    try:
        view = memoryview(data)
        while view:
            view = view[posix.write(fd, view) :]
        if posix.fstat(fd).st_mode & 0o7777 != mode:
            posix.fchmod(fd, mode)
    finally:
        posix.close(fd)


def _make_directories(path: str) -> None:
    at = 0
    while at >= 0:
        at = path.find("/", at + 1)
        try:
            posix.mkdir(path if at < 0 else path[:at], 0o755)
        except FileExistsError:
            pass
        except PermissionError:
            if at < 0:
                raise


def _read_file(path: str, limit: int) -> tuple[bytes, int]:
    """Bytes and mode of a regular file of at most `limit` bytes."""
    fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC | posix.O_NONBLOCK)
    try:
        found = posix.fstat(fd)
        if found.st_mode & 0o170000 != 0o100000:
            raise Refusal(
                "is_directory" if found.st_mode & 0o170000 == 0o040000 else "not_regular", path + " is no regular file"
            )
        if found.st_size > limit:
            raise Refusal("too_long", f"{path} has {found.st_size} bytes, the limit is {limit}")
        parts: list[bytes] = []
        while True:
            part = posix.read(fd, 1 << 20)
            if not part:
                return b"".join(parts), found.st_mode & 0o7777
            parts.append(part)
    finally:
        posix.close(fd)


def main() -> None:
    """Takes over fds 0 and 1 as the channel, so that no child can reach it, and serves."""
    null = posix.open("/dev/null", posix.O_RDWR | posix.O_CLOEXEC)
    while null < 4:  # fd 3 is the channel of children: keep it free of ours
        null = posix.dup(null)
    fds = []
    for fd in (0, 1):
        high = posix.dup(fd)
        posix.set_inheritable(high, False)
        fds.append(high)
    for fd in (0, 1, 2, 3):  # a shim's stderr must not stay open either: everything that is told goes over the channel
        posix.dup2(null, fd, fd < 3)
    try:
        Agent(fds[0], fds[1]).serve()
    except BaseException as error:
        told = f"{type(error).__name__}: {error}"
        place = error.__traceback__
        while place is not None:
            told += f" <- {place.tb_frame.f_code.co_name}:{place.tb_lineno}"
            place = place.tb_next
        posix.set_blocking(fds[1], True)
        posix.write(fds[1], wire.frame({"id": "", "ok": False, "error": "agent_failed", "message": told, "body": None}))
    finally:
        posix._exit(0)
