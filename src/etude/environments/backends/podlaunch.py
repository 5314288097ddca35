"""The Python twin of native/podlaunch.c, for machines without a compiler: same arguments, same pod, a slower start.

Run as a script by a bare interpreter; standard library only. The C source says what each step is for.
"""

import ctypes
import os
import platform
import resource
import signal
import socket
import struct
import sys
import time
from fcntl import ioctl

FIRST_POD_UID = 0x40000000
NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x20000,
    0x2000000,
    0x4000000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
NOSUID, NODEV, NOEXEC, BIND, REC, PRIVATE, DETACH = 2, 4, 8, 4096, 16384, 1 << 18, 2
PDEATHSIG, SET_SECCOMP, CAPBSET_DROP, NO_NEW_PRIVS = 1, 22, 24, 38
PIVOT_ROOT, CAPSET = {"x86_64": (155, 126), "aarch64": (41, 91)}.get(platform.machine(), (155, 126))
DEVICES = (("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0))
libc = ctypes.CDLL(None, use_errno=True)


class Failed(Exception):
    """A step that did not work."""


def check(value: int, what: str) -> None:
    if value < 0:
        raise Failed(f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    check(
        libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]),
        f"mount {kind or source} at {target}",
    )


class Options:
    """The launcher's arguments."""

    def __init__(self, arguments: list[str]) -> None:
        self.one = {
            "hostname": "pod",
            "workdir": "/repo",
            "userns": "0",
            "disk": str(64 << 20),
            "inodes": "16384",
            "files": "1024",
        }
        self.cgroups: list[str] = []
        self.sets: list[tuple[str, str]] = []
        at = arguments.index("--")
        self.argv = arguments[at + 1 :]
        for text in arguments[:at]:
            key, _, value = text.partition("=")
            if key == "cgroup":
                self.cgroups.append(value)
            elif key == "set":
                path, _, wanted = value.rpartition(":")
                self.sets.append((path, wanted))
            else:
                self.one[key] = value
        self.user_namespace = self.one["userns"] == "1"

    def number(self, key: str) -> int:
        return int(self.one.get(key, "0"))


def write_text(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def remove_cgroups(folders: list[str]) -> None:
    for folder in reversed(folders):
        for _ in range(500):
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                pass
            except OSError:
                time.sleep(0.001)
                continue
            break


def owned_directory(path: str, mode: int, uid: int) -> None:
    os.makedirs(path, exist_ok=True)
    os.chmod(path, mode)
    os.chown(path, uid, uid)


def make_root(options: Options, uid: int) -> None:
    os.chdir(options.one["state"])
    mount(None, "/", None, REC | PRIVATE, None)
    mount("tmpfs", "mnt", "tmpfs", NOSUID, f"size={options.one['disk']},nr_inodes={options.one['inodes']},mode=0755")
    for name in ("upper", "work", "root", "upper/dev"):
        os.mkdir(f"mnt/{name}", 0o755)
    for name, mode in (("/tmp", 0o1777), ("/home", 0o755), ("/dev/shm", 0o1777), (options.one["workdir"], 0o755)):
        owned_directory(f"mnt/upper{name}", mode, uid)
    if not options.user_namespace:
        for name, major, minor in DEVICES:
            os.mknod(f"mnt/upper/dev/{name}", 0o20666, os.makedev(major, minor))
            os.chmod(f"mnt/upper/dev/{name}", 0o666)
    more = ",userxattr" if options.user_namespace else ""
    mount(
        "overlay",
        "mnt/root",
        "overlay",
        NOSUID,
        f"lowerdir={options.one['image']},upperdir=mnt/upper,workdir=mnt/work{more}",
    )
    if options.user_namespace:
        for name, _, _ in DEVICES[:5]:
            os.close(os.open(f"mnt/root/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o644))
            mount(f"/dev/{name}", f"mnt/root/dev/{name}", None, BIND, None)
    mount("proc", "mnt/root/proc", "proc", NOSUID | NODEV | NOEXEC, None)
    os.chdir("mnt/root")
    check(libc.syscall(PIVOT_ROOT, b".", b"."), "pivot_root")
    check(libc.umount2(b".", DETACH), "leave the host's root")
    os.chdir(options.one["workdir"])


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as endpoint:
        ioctl(endpoint, 0x8914, struct.pack("16sH22x", b"lo", 0x41))  # SIOCSIFFLAGS, up and running


def drop_rights(options: Options, uid: int) -> None:
    for which in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, getattr(resource, "RLIMIT_MSGQUEUE", 12)):
        resource.setrlimit(which, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (options.number("files"),) * 2)
    if options.number("cpu"):
        resource.setrlimit(resource.RLIMIT_CPU, (options.number("cpu"), resource.RLIM_INFINITY))
    if options.number("space"):
        resource.setrlimit(resource.RLIMIT_AS, (options.number("space"),) * 2)
    if options.number("processes"):
        resource.setrlimit(resource.RLIMIT_NPROC, (options.number("processes"),) * 2)
    for capability in range(64):
        libc.prctl(CAPBSET_DROP, capability, 0, 0, 0)
    if not options.user_namespace:
        os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    check(libc.syscall(CAPSET, struct.pack("Ii", 0x20080522, 0), bytes(24)), "capset")
    check(libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    check(libc.prctl(PDEATHSIG, 9, 0, 0, 0), "pdeathsig")


def load_filter(code: bytes) -> None:
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    check(libc.prctl(SET_SECCOMP, 2, program, 0, 0), "seccomp")


def run_pod(options: Options, uid: int) -> None:
    code = open(options.one["seccomp"], "rb").read() if "seccomp" in options.one else b""
    for folder in options.cgroups:
        write_text(f"{folder}/cgroup.procs", "0")
    check(libc.unshare(NEWNS | NEWNET | NEWIPC | NEWUTS | NEWCGROUP), "unshare")
    make_root(options, uid)
    loopback_up()
    socket.sethostname(options.one["hostname"])
    os.setsid()
    os.umask(0o022)
    drop_rights(options, uid)
    if code:
        load_filter(code)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.execve(options.argv[0], options.argv, {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"})


def main() -> int:
    options = Options(sys.argv[1:])
    uid = FIRST_POD_UID + os.getpid()
    watched = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    made: list[str] = []
    try:
        for folder in options.cgroups:
            os.mkdir(folder, 0o755)
            made.append(folder)
        for path, value in options.sets:
            write_text(path, value)
        own_uid, own_gid = os.geteuid(), os.getegid()
        check(libc.unshare((NEWUSER if options.user_namespace else 0) | NEWPID), "unshare the process namespace")
        if options.user_namespace:
            write_text("/proc/self/setgroups", "deny")
            write_text("/proc/self/uid_map", f"{uid} {own_uid} 1")
            write_text("/proc/self/gid_map", f"{uid} {own_gid} 1")
        child = os.fork()
        if child == 0:
            try:
                run_pod(options, uid)
            except (OSError, Failed) as error:
                os.write(2, f"podlaunch: {error}\n".encode())
            os._exit(125)
        os.close(0)
        os.close(1)
        while True:
            told = signal.sigwaitinfo(watched)
            if told.si_signo != signal.SIGCHLD:
                os.kill(child, signal.SIGKILL)
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid == child:
                return os.waitstatus_to_exitcode(status) % 256
    except (OSError, Failed) as error:
        os.write(2, f"podlaunch: {error}\n".encode())
        return 125
    finally:
        remove_cgroups(made)


if __name__ == "__main__":
    os._exit(main())
