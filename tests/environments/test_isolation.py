"""What a pod cannot reach, and that nothing of it is left behind. `probe.c` makes the system calls that programs would."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from etude.environments.backends.namespace import NamespaceBackend
from etude.environments.client import AgentPod
from etude.environments.pod import PodBackend, PodSpec
from etude.native.build import ensure_program
from etude.records.errors import InfrastructureError, PodLost, Unsupported

pytestmark = pytest.mark.pods

PROBE = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
#define SAY(name, call) do { errno = 0; long r = (long)(call); printf("%s %s\n", name, r < 0 ? strerrorname_np(errno) : "DONE"); } while (0)
#include <string.h>
int main(void) {
    SAY("mount", mount("none", "/tmp", "tmpfs", 0, ""));
    SAY("unshare", unshare(CLONE_NEWUSER));
    SAY("clone", syscall(SYS_clone, CLONE_NEWUSER | 17, 0, 0, 0, 0));
    SAY("setns", setns(0, 0));
    SAY("ptrace", ptrace(PTRACE_ATTACH, 1, 0, 0));
    SAY("chroot", chroot("/tmp"));
    SAY("bpf", syscall(SYS_bpf, 0, 0, 0));
    SAY("keyctl", syscall(SYS_keyctl, 0, 0, 0));
    SAY("userfaultfd", syscall(SYS_userfaultfd, 0));
    SAY("open_by_handle_at", syscall(SYS_open_by_handle_at, 0, 0, 0));
    SAY("io_uring", syscall(SYS_io_uring_setup, 1, 0));
    SAY("vsock", socket(40, SOCK_STREAM, 0));
    SAY("packet", socket(17, SOCK_RAW, 0));
    SAY("inet", socket(AF_INET, SOCK_STREAM, 0));
    SAY("memory", open("/proc/1/mem", O_RDWR));
    SAY("channel", open("/proc/1/fd/0", O_RDONLY));
    SAY("setuid", setuid(0));
    return 0;
}
"""


async def test_kernel_administration_and_the_agents_memory_are_out_of_reach(
    backend: NamespaceBackend, tmp_path: Path
) -> None:
    source = tmp_path / "probe.c"
    source.write_text(PROBE)
    binary = ensure_program(source, tmp_path / "bin")
    if binary is None:
        pytest.skip("no C compiler")
    pod = await backend.create(PodSpec(files={"probe": binary.read_bytes()}, modes={"probe": 0o755}))
    done = await pod.exec(["./probe"])
    told = dict(line.split() for line in done.text().splitlines())
    denied = (
        "mount",
        "unshare",
        "clone",
        "setns",
        "ptrace",
        "chroot",
        "bpf",
        "keyctl",
        "userfaultfd",
        "open_by_handle_at",
        "setuid",
    )
    assert {name: told[name] for name in denied} == dict.fromkeys(denied, "EPERM")
    assert told["io_uring"] == "ENOSYS" and told["vsock"] == told["packet"] == "EAFNOSUPPORT" and told["inet"] == "DONE"
    assert told["memory"] == told["channel"] == "EACCES"


async def test_no_capability_no_host_user_no_new_rights(either_backend: NamespaceBackend) -> None:
    pod = await either_backend.create(PodSpec())
    for argv in (["cat", "/proc/self/status"], ["cat", "/proc/1/status"]):
        status = dict(line.split(":\t", 1) for line in (await pod.exec(argv)).text().splitlines() if ":\t" in line)
        assert all(int(status[name], 16) == 0 for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"))
        assert status["NoNewPrivs"] == "1" and status["Seccomp"] == "2"
        assert (
            all(int(uid) >= 65534 for uid in status["Uid"].split() + status["Gid"].split())
            and not status["Groups"].strip()
        )


async def test_there_is_no_network_but_loopback(either_backend: NamespaceBackend) -> None:
    pod = await either_backend.create(PodSpec())
    listed = (await pod.exec(["cat", "/proc/net/dev"])).text().splitlines()[2:]
    assert [line.split(":")[0].strip() for line in listed] == ["lo"]
    assert (await pod.exec(["cat", "/proc/net/route"])).text().count("\n") == 1


async def test_host_files_and_processes_are_not_there(either_backend: NamespaceBackend) -> None:
    pod = await either_backend.create(PodSpec())
    top = (await pod.exec(["ls", "/"])).text().split()
    assert set(top) <= {"bin", "dev", "etc", "home", "lib", "lib64", "proc", "repo", "tmp", "usr"}
    for path in (str(Path(__file__)), sys.executable, "/etc/shadow", "/sys", "/proc/1/root/work", "/mnt"):
        assert not (await pod.exec(["ls", path])).ok, path
    assert len((await pod.exec(["sh", "-c", "echo /proc/[0-9]*"])).text().split()) == 2
    mounts = (await pod.exec(["cat", "/proc/mounts"])).text()
    assert (
        len(mounts.splitlines()) <= (2 if os.geteuid() == 0 else 7) and str(either_backend.launcher.state) not in mounts
    )


async def test_pods_do_not_see_one_another(backend: NamespaceBackend) -> None:
    one, other = await asyncio.gather(backend.create(PodSpec()), backend.create(PodSpec()))
    await one.write("/tmp/x", b"secret")
    assert not (await other.exec(["cat", "/tmp/x"])).ok
    users = [(await pod.exec(["grep", "Uid", "/proc/self/status"])).stdout for pod in (one, other)]
    assert users[0] != users[1]


async def test_an_attack_on_the_agent_by_signals_does_nothing(pod: AgentPod) -> None:
    await pod.exec(["sh", "-c", "for s in 1 2 3 9 10 15 17 19 24; do kill -$s 1; done"])
    assert (await pod.exec(["echo", "well"])).stdout == b"well\n"


async def test_agent_dies_with_its_stdin_and_the_shim_cleans_up(backend: NamespaceBackend) -> None:
    pod = await backend.create(PodSpec())
    await pod.start(["sleep", "60"])
    _, plan = backend._pods[pod.id]
    pod.link.abort("test")
    for _ in range(200):
        if not _shims(backend) and not (plan and plan.left()):
            break
        await asyncio.sleep(0.02)
    assert not _shims(backend) and not (plan and plan.left())
    with pytest.raises(PodLost):
        await pod.exec(["true"])


def _shims(backend: NamespaceBackend) -> list[str]:
    """Command lines of our launcher's live processes."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if "podlaunch" in line and str(backend.launcher.state) in line:
                found.append(line)
    return found


def _mounts(backend: NamespaceBackend) -> list[str]:
    return [
        line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(backend.launcher.state) in line
    ]


async def test_twenty_pods_leave_nothing_behind(backend: NamespaceBackend) -> None:
    files_before = len(os.listdir("/proc/self/fd"))
    plans = []

    async def one(number: int) -> None:
        pod = await backend.create(PodSpec(files={"x": b"x"}))
        plans.append(backend._pods[pod.id][1])
        await pod.start(["sleep", "60"])
        if number % 3 == 0:
            task = asyncio.create_task(pod.exec(["sleep", "60"]))
            await asyncio.sleep(0.01)
            await pod.close()
            with pytest.raises(PodLost):
                await task
        await pod.close()
        await pod.close()

    await asyncio.gather(*(one(number) for number in range(20)))
    assert not _shims(backend) and not _mounts(backend)
    assert all(not plan.left() for plan in plans if plan)
    assert list((backend.launcher.state / "mnt").iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= files_before
    assert backend.lease.held == 0


async def test_a_killed_host_leaves_nothing_behind(backend: NamespaceBackend) -> None:  # 9.37
    program = textwrap.dedent(f"""
        import asyncio
        from pathlib import Path
        from etude.environments.backends.namespace import NamespaceBackend
        from etude.environments.pod import PodSpec
        async def main():
            backend = await NamespaceBackend.open(Path({str(backend.launcher.state)!r}))
            pods = [await backend.create(PodSpec()) for _ in range(2)]
            for pod in pods: await pod.start(["sleep", "60"])
            print(*[path for _, plan in backend._pods.values() if plan for path in plan.left()], flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
    """)
    host = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert host.stdout is not None
    try:
        groups = [Path(name.decode()) for name in (await asyncio.wait_for(host.stdout.readline(), 30)).split()]
        assert len(_shims(backend)) == 2
    finally:
        host.send_signal(signal.SIGKILL)
        await host.wait()
    for _ in range(200):
        if not _shims(backend) and not any(group.exists() for group in groups):
            break
        await asyncio.sleep(0.02)
    assert not _shims(backend) and not any(group.exists() for group in groups)


async def test_what_the_backend_cannot_do_is_refused_by_name(backend: NamespaceBackend, pod: AgentPod) -> None:
    promised: PodBackend = backend
    assert not (
        promised.capabilities.fork or promised.capabilities.file_snapshot or promised.capabilities.memory_snapshot
    )
    for refused, name in (
        (promised.snapshot(pod), "snapshot"),
        (promised.restore("x", PodSpec()), "restore"),
        (promised.fork(pod, 2), "fork"),
    ):
        with pytest.raises(Unsupported, match=name):
            await refused


async def test_a_start_that_fails_says_why_and_gives_its_place_back(backend: NamespaceBackend) -> None:
    with pytest.raises(InfrastructureError, match=r"No space left|disk_full"):
        await backend.create(PodSpec(disk_bytes=1 << 16, files={"big": bytes(1 << 20)}))
    assert backend.lease.held == 0 and not _shims(backend)


async def test_sixty_four_starts_at_once_queue(pod_cache: Path) -> None:  # 9.38
    backend = await NamespaceBackend.open(pod_cache, max_pods=6)
    try:

        async def one() -> bytes:
            pod = await backend.create(PodSpec())
            try:
                return (await pod.exec(["echo", "x"])).stdout
            finally:
                await pod.close()

        assert await asyncio.gather(*(one() for _ in range(64))) == [b"x\n"] * 64
        assert backend.lease.peak == 6 and backend.lease.held == backend.lease.waiting == 0
        held = [await backend.create(PodSpec()) for _ in range(6)]
        backend.queue_timeout_s = 0.1
        with pytest.raises(InfrastructureError, match="6 of 6"):
            await backend.create(PodSpec())
        assert len(held) == 6
    finally:
        await backend.aclose()
