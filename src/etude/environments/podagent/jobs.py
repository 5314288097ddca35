"""Processes of a pod: spawn, pump, time out, kill the whole tree, collect what they wrote.

Knows nothing of frames or verbs; `agent.py` owns the poll loop and calls `on_ready`, `on_exit` and `on_time`. Answers to the faults
listed in report sections on tool execution: stdin is /dev/null unless given, output is drained while waiting,
a result comes at the leader's exit even when its children hold the pipes, a timeout leaves no process behind.
"""

import posix
from time import monotonic_ns, sleep

from .warm import Script, recognise, run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

READ_SIZE = 1 << 16
DRAIN_GRACE_NS = 50_000_000
KILL_GRACE_NS = 2_000_000_000
SIGKILL = 9
# ignored by the interpreter or handled by the agent; a child starts with the defaults
DEFAULT_SIGNALS = (2, 13, 17, 25)
MARK = "ETUDE_EXEC"
MOST_FDS = 1 << 20
AGENT_FOLDER = "/usr/pod"


class HeadTail:
    """Keeps the first and the last bytes of a stream, `limit` in all, and counts what fell out between."""

    def __init__(self, limit: int) -> None:
        self.head_limit = limit - limit // 2
        self.tail_limit = limit // 2
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self.head_limit - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        if data and self.tail_limit:
            self.tail += data
            if len(self.tail) > 2 * self.tail_limit + READ_SIZE:
                del self.tail[: -self.tail_limit]

    def value(self) -> bytes:
        return bytes(self.head + self.tail[max(0, len(self.tail) - self.tail_limit) :])

    @property
    def dropped(self) -> int:
        return max(0, self.total - self.head_limit - self.tail_limit)


class Job:
    """One process that the agent started, with its pipes. `done(job)` is called once, when the result is complete."""

    def __init__(self, key: object, done: "Callable[[Job], None]", deadline_ns: int) -> None:
        self.key = key
        self.done = done
        self.pid = 0
        self.started_ns = monotonic_ns()
        self.ended_ns = 0
        self.deadline_ns = deadline_ns
        self.grace_ns = 0
        self.status: int | None = None
        self.timed_out = False
        # after a kill of everything: the result comes when nobody is left, or at the end of the kill's grace
        self.until_empty = False
        self.finished = False
        self.sinks: dict[int, HeadTail] = {}
        self.stdout = self.stderr = self.channel = HeadTail(0)
        self.stdin_fd = -1
        self.stdin = memoryview(b"")

    @property
    def exit_code(self) -> int | None:
        return posix.WEXITSTATUS(self.status) if self.status is not None and posix.WIFEXITED(self.status) else None

    @property
    def signal(self) -> int | None:
        return posix.WTERMSIG(self.status) if self.status is not None and posix.WIFSIGNALED(self.status) else None

    def result(self) -> dict[str, object]:
        """The fields of `ExecResult`."""
        return {
            "exit_code": self.exit_code,
            "signal": self.signal,
            "timed_out": self.timed_out,
            "stdout": self.stdout.value(),
            "stderr": self.stderr.value(),
            "dropped_stdout": self.stdout.dropped,
            "dropped_stderr": self.stderr.dropped,
            "channel": self.channel.value(),
            "dropped_channel": self.channel.dropped,
            "duration_us": ((self.ended_ns or monotonic_ns()) - self.started_ns) // 1000,
        }


def find_program(name: str, path: str) -> str:
    """Path of a program as execvp would find it; the name itself when there is none (exec then says why)."""
    if "/" in name:
        return name
    for folder in path.split(":"):
        candidate = (folder or ".") + "/" + name
        if posix.access(candidate, 1):
            return candidate
    return name


class Jobs:
    """All processes of the pod that the agent started, and the pipes of those that outlived their leader."""

    def __init__(self, watch: "Callable[[int, bool], None]", unwatch: "Callable[[int], None]") -> None:
        self.watch = watch
        self.unwatch = unwatch
        self.by_pid: dict[int, Job] = {}
        self.by_fd: dict[int, Job] = {}
        self.null = posix.open("/dev/null", posix.O_RDWR | posix.O_CLOEXEC)

    def live(self) -> list[Job]:
        return list(self.by_pid.values())

    def spawn(
        self,
        job: Job,
        argv: list[str],
        cwd: str,
        env: dict[str, str],
        stdin: bytes = b"",
        *,
        limit: int,
        channel_limit: int = 0,
        merge: bool = False,
        warm: bool = False,
    ) -> None:
        """Starts `argv`, as a fork of this interpreter when `warm` and it is a plain Python script.

        Raises OSError when it cannot be started; nothing stays open then.
        """
        job.stdout, job.stderr, job.channel = HeadTail(limit), HeadTail(limit), HeadTail(channel_limit)
        ends: list[int] = []
        try:
            out_read, out_write = self._pipe(ends)
            err_read, err_write = (-1, out_write) if merge else self._pipe(ends)
            in_read, in_write = self._pipe(ends) if stdin else (self.null, -1)
            channel_read, channel_write = self._pipe(ends) if channel_limit else (-1, -1)
            places = [(in_read, 0), (out_write, 1), (err_write, 2), *([(channel_write, 3)] if channel_limit else [])]
            script = recognise(argv, env) if warm else None
            env = {**env, MARK: str(job.key)}
            posix.chdir(cwd)
            try:
                if script is not None:
                    job.pid = posix.fork()
                    if job.pid == 0:
                        self._become(script, argv, cwd, env, places)
                else:
                    # relative programs are relative to cwd, so the search happens here
                    program = find_program(argv[0], env.get("PATH", ""))
                    actions = [(posix.POSIX_SPAWN_DUP2, source, target) for source, target in places]
                    job.pid = posix.posix_spawn(
                        program, argv, env, file_actions=actions, setsid=True, setsigdef=DEFAULT_SIGNALS, setsigmask=()
                    )
            finally:
                posix.chdir("/")
        except BaseException:
            for fd in ends:
                posix.close(fd)
            raise
        for read, sink in ((out_read, job.stdout), (err_read, job.stderr), (channel_read, job.channel)):
            if read >= 0:
                job.sinks[read] = sink
        keep = {*job.sinks, in_write}
        for fd in ends:
            if fd not in keep:
                posix.close(fd)
        if in_write >= 0:
            job.stdin_fd, job.stdin = in_write, memoryview(stdin)
        self._started(job)

    def _become(
        self, script: Script, argv: list[str], cwd: str, env: dict[str, str], places: list[tuple[int, int]]
    ) -> None:
        try:
            posix.setsid()
            for source, target in places:
                posix.dup2(source, target)
            if len(places) == 3:
                posix.close(3)
            posix.closerange(4, MOST_FDS)
            run(script, argv, cwd, env, AGENT_FOLDER)
        finally:
            posix._exit(125)

    def fork(self, job: Job, body: "Callable[[], bytes]", limit: int) -> None:
        """Runs `body` in a forked copy of the agent; its bytes arrive as the job's channel."""
        job.channel = HeadTail(limit)
        ends: list[int] = []
        read, write = self._pipe(ends)
        pid = posix.fork()
        if pid == 0:
            try:
                posix.setsid()
                posix.set_blocking(write, True)
                data = memoryview(body())
                while data:
                    data = data[posix.write(write, data) :]
            finally:
                posix._exit(0)
        posix.close(write)
        job.pid = pid
        job.sinks[read] = job.channel
        self._started(job)

    def _pipe(self, ends: list[int]) -> tuple[int, int]:
        read, write = posix.pipe2(posix.O_CLOEXEC)
        ends += (read, write)
        return read, write

    def _started(self, job: Job) -> None:
        self.by_pid[job.pid] = job
        for fd in job.sinks:
            posix.set_blocking(fd, False)
            self.by_fd[fd] = job
            self.watch(fd, False)
        if job.stdin_fd >= 0:
            posix.set_blocking(job.stdin_fd, False)
            self.by_fd[job.stdin_fd] = job
            self.watch(job.stdin_fd, True)
        try:
            # when memory runs out the kernel takes the work, not the agent
            fd = posix.open(f"/proc/{job.pid}/oom_score_adj", posix.O_WRONLY)
            try:
                posix.write(fd, b"500")
            finally:
                posix.close(fd)
        except OSError:
            pass  # already gone

    def _close(self, fd: int) -> None:
        job = self.by_fd.pop(fd)
        self.unwatch(fd)
        posix.close(fd)
        if fd == job.stdin_fd:
            job.stdin_fd = -1
        job.sinks.pop(fd, None)

    def on_ready(self, fd: int) -> None:
        """The pipe `fd` can be read or written, or its other end is closed."""
        job = self.by_fd[fd]
        if fd == job.stdin_fd:
            self._feed(job)
        else:
            self._read(job, fd, 1)
            if job.status is not None and not job.sinks and not job.until_empty:
                self._finish(job)

    def _feed(self, job: Job) -> None:
        try:
            sent = posix.write(job.stdin_fd, job.stdin[: 1 << 18])
            job.stdin = job.stdin[sent:]
            if job.stdin:
                return
        except BlockingIOError:
            return
        except OSError:
            pass  # the reader closed its stdin: the rest is not wanted
        job.stdin = memoryview(b"")
        self._close(job.stdin_fd)

    def _read(self, job: Job, fd: int, times: int) -> None:
        sink = job.sinks[fd]
        for _ in range(times):
            try:
                data = posix.read(fd, READ_SIZE)
            except BlockingIOError:
                return
            if not data:
                self._close(fd)
                return
            if (
                not job.finished
            ):  # what a survivor writes later is read and let go, so that it never blocks or dies of it
                sink.add(data)

    def on_exit(self) -> None:
        """Reaps every dead child, own or orphaned."""
        while True:
            try:
                pid, status = posix.waitpid(-1, posix.WNOHANG)
            except ChildProcessError:
                self._nobody_left()
                return
            if pid == 0:
                return
            job = self.by_pid.get(pid)
            if job is None:
                continue
            job.status = status
            job.ended_ns = monotonic_ns()
            for fd in list(job.sinks):
                self._read(job, fd, 64)
            if job.until_empty:
                continue
            if job.sinks:
                job.grace_ns = monotonic_ns() + DRAIN_GRACE_NS
            else:
                self._finish(job)

    def _nobody_left(self) -> None:
        for job in self.live():
            if job.status is not None and job.until_empty:
                for fd in list(job.sinks):
                    self._read(job, fd, 64)
                self._finish(job)

    def on_time(self, now_ns: int) -> int:
        """Ends what is over its time; nanoseconds until the next deadline, or -1."""
        wait = -1
        for job in self.live():
            if job.status is None and not job.timed_out and now_ns >= job.deadline_ns:
                job.timed_out = True
                job.grace_ns = now_ns + KILL_GRACE_NS
                job.until_empty = self.kill_tree(job)
            elif job.grace_ns and now_ns >= job.grace_ns:
                self._finish(job)
                continue
            due = job.grace_ns or job.deadline_ns
            wait = max(0, due - now_ns) if wait < 0 else min(wait, max(0, due - now_ns))
        return wait

    def _finish(self, job: Job) -> None:
        if job.finished:
            return
        job.finished = True
        self.by_pid.pop(job.pid, None)
        if job.stdin_fd >= 0:
            self._close(job.stdin_fd)
        job.done(job)

    def kill_tree(self, job: Job) -> bool:
        """Kills all that `job` started, however it hid; other running jobs and what they started are spared.

        True when nobody is spared: then all are about to be gone. Otherwise the killed are dead on return.
        """
        others = [other for other in self.live() if other is not job and not other.finished]
        if not others:
            kill_everything()
            return True
        marks = {str(other.key) for other in others}
        roots = {other.pid for other in others}
        for _ in range(50):  # until a scan finds nothing new: children may be born meanwhile
            parents, victims = {}, []
            for pid in processes():
                parents[pid] = parent_of(pid)
            for pid in parents:
                ancestor = pid
                while ancestor in parents and ancestor not in roots:
                    ancestor = parents[ancestor]
                if pid != 1 and ancestor not in roots and mark_of(pid) not in marks and state_of(pid) != "Z":
                    victims.append(pid)
            for pid in victims:
                try:
                    posix.kill(pid, SIGKILL)
                except OSError:
                    pass
            if not victims:
                break
            sleep(0.001)
        return False


def kill_everything(number: int = SIGKILL) -> None:
    """Signals every process of the pod but the agent; one call is complete, a fork in flight fails on the pending signal."""
    try:
        posix.kill(-1, number)
    except OSError:
        pass  # nobody is left


def processes() -> list[int]:
    """Pids of the pod."""
    return [int(name) for name in posix.listdir("/proc") if name.isdigit()]


def _stat_fields(pid: int) -> list[str]:
    try:
        fd = posix.open(f"/proc/{pid}/stat", posix.O_RDONLY)
    except OSError:
        return ["Z", "0"]
    try:
        # the name is in parentheses and may itself hold some
        return posix.read(fd, 4096).decode("latin-1").rpartition(")")[2].split()
    except OSError:
        return ["Z", "0"]
    finally:
        posix.close(fd)


def parent_of(pid: int) -> int:
    """Parent of a process, 0 when it is gone."""
    return int(_stat_fields(pid)[1])


def state_of(pid: int) -> str:
    """State letter of a process, `Z` when it is dead or gone."""
    return _stat_fields(pid)[0]


def mark_of(pid: int) -> str:
    """The job that a process was started for, by its environment; empty when unknown."""
    try:
        fd = posix.open(f"/proc/{pid}/environ", posix.O_RDONLY)
    except OSError:
        return ""
    try:
        data = posix.read(fd, 1 << 17)
    except OSError:
        return ""
    finally:
        posix.close(fd)
    prefix = (MARK + "=").encode()
    for item in data.split(b"\0"):
        if item.startswith(prefix):
            return item[len(prefix) :].decode("latin-1")
    return ""
