"""Pods in Linux namespaces: an overlay over the image, no network, limits, a seccomp filter. For trusted tools and tests.

Each pod is a small shim process (native/podlaunch.c, or its Python twin) that owns the pod's groups and PID 1, so nothing is left
whatever dies first. The kernel is shared with the host: use a stronger backend for code that attacks kernels. SPEC E.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from etude.environments import cgroups
from etude.environments.client import AgentPod
from etude.environments.image import AGENT_ARGV, IMAGE_NAME, Image, ensure_image
from etude.environments.launcher import Launcher, find_launcher, probe_launch
from etude.environments.lease import PodLease
from etude.environments.pod import Capabilities, Pod, PodSpec, PodStats, refuse
from etude.environments.protocol import Link
from etude.records.errors import BadInput, InfrastructureError, MissingCapability, PodLost

AGENT_PROCESSES = 1
END_TIMEOUT_S = 5.0
AGENT_MEMORY_BYTES = 16 << 20
_backend_numbers = itertools.count(1)


class _Shim:
    """The launcher's process on the host: started, watched, reaped."""

    def __init__(self, command: list[str], channel: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self.errors = os.memfd_create("podlaunch")
        try:
            self.process = subprocess.Popen(
                command, stdin=channel.fileno(), stdout=channel.fileno(), stderr=self.errors, cwd="/", env={}
            )
        except OSError:
            os.close(self.errors)
            raise
        self.loop = loop
        self.ended: asyncio.Future[None] = loop.create_future()
        self.pidfd = os.pidfd_open(self.process.pid)
        loop.add_reader(self.pidfd, self._exited)

    def _exited(self) -> None:
        self.loop.remove_reader(self.pidfd)
        os.close(self.pidfd)
        self.process.wait()
        if not self.ended.done():
            self.ended.set_result(None)

    def told(self) -> str:
        """What the launcher wrote on stderr."""
        return os.pread(self.errors, 4096, 0).decode("utf-8", "replace").strip()

    async def end(self) -> bool:
        """Ends the pod; False when the shim had to be killed."""
        clean = True
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.returncode is not None:
                break
            self.process.send_signal(number)
            try:
                await asyncio.wait_for(asyncio.shield(self.ended), END_TIMEOUT_S)
            except TimeoutError:
                clean = False
        os.close(self.errors)
        return clean


class NamespaceBackend:
    """See `etude.environments.pod.PodBackend`. Made by `open`, which finds out what this machine can do."""

    name = "namespace"

    def __init__(
        self,
        image: Image,
        launcher: Launcher,
        tree: cgroups.CgroupTree | None,
        *,
        max_pods: int = 16,
        start_timeout_s: float = 10.0,
        queue_timeout_s: float = 600.0,
        cpus: float | None = None,
        disk_bytes: int | None = None,
    ) -> None:
        self._cpus, self._disk_bytes = cpus, disk_bytes
        self.image, self.launcher, self.tree = image, launcher, tree
        self.lease = PodLease(max_pods)
        self.start_timeout_s, self.queue_timeout_s = start_timeout_s, queue_timeout_s
        self._label = f"{cgroups.NAME_PREFIX}-{os.getpid()}-{next(_backend_numbers)}"
        self._numbers = itertools.count(1)
        self._pods: dict[str, tuple[AgentPod, cgroups.CgroupPlan | None]] = {}

    @classmethod
    async def open(
        cls,
        cache: Path,
        *,
        max_pods: int = 16,
        start_timeout_s: float = 10.0,
        queue_timeout_s: float = 600.0,
        launcher: str = "auto",
        cpus: float | None = None,
        disk_bytes: int | None = None,
        probe: Callable[[Launcher, Image], str] = probe_launch,
    ) -> NamespaceBackend:
        """Builds or finds the image and the launcher below `cache` and tries them.

        `cpus` and `disk_bytes`, when given, bound every pod whatever its specification says.
        `launcher` is `auto`, `c` or `python`; `probe` starts an empty pod and gives the launcher's error, empty when it works.
        Raises MissingCapability, whose text says what to enable.
        """
        image = await asyncio.to_thread(ensure_image, cache)
        found = await asyncio.to_thread(find_launcher, cache, launcher)
        told = await asyncio.to_thread(probe, found, image)
        if told:
            raise missing_rights(told)
        tree = None if found.user_namespace else cgroups.find_tree()
        if tree is not None:
            await asyncio.to_thread(tree.sweep)
        await asyncio.to_thread(_warm, image)
        return cls(
            image,
            found,
            tree,
            max_pods=max_pods,
            start_timeout_s=start_timeout_s,
            queue_timeout_s=queue_timeout_s,
            cpus=cpus,
            disk_bytes=disk_bytes,
        )

    @property
    def capabilities(self) -> Capabilities:
        limited = self.tree.parents if self.tree else {}
        notices = list(self.launcher.notices)
        if "memory" not in limited:
            notices.append(
                "no memory cgroup: memory is limited per process only; run as root with the memory controller"
            )
        return Capabilities(
            isolation="namespaces",
            memory_limit="memory" in limited,
            process_limit=True,
            cpu_limit="cpu" in limited,
            notices=tuple(notices),
        )

    async def create(self, spec: PodSpec) -> AgentPod:
        """See PodBackend.create; waits while `max_pods` are running."""
        if spec.image not in (IMAGE_NAME, self.image.digest):
            raise BadInput("pod", "image", spec.image, f"{IMAGE_NAME} or its digest {self.image.digest[:12]}...")
        if not spec.workdir.startswith("/") or ".." in spec.workdir.split("/") or spec.workdir.rstrip("/") == "":
            raise BadInput("pod", "workdir", spec.workdir, "an absolute path below /")
        spec = replace(
            spec,
            cpus=min(spec.cpus, self._cpus or spec.cpus),
            disk_bytes=min(spec.disk_bytes, self._disk_bytes or spec.disk_bytes),
        )
        await self.lease.acquire(self.queue_timeout_s)
        try:
            return await self._start(spec)
        except BaseException:
            self.lease.release()
            raise

    def _options(self, spec: PodSpec, plan: cgroups.CgroupPlan | None) -> list[str]:
        limited = self.tree.parents if self.tree else {}
        options = {
            "hostname": spec.hostname,
            "workdir": spec.workdir.rstrip("/"),
            "disk": spec.disk_bytes,
            "cpu": max(1, round(spec.cpu_s)),
        }
        if "memory" not in limited:
            options["space"] = spec.memory_bytes + AGENT_MEMORY_BYTES
        if "pids" not in limited:
            options["processes"] = spec.processes + AGENT_PROCESSES
        return [*(f"{key}={value}" for key, value in options.items()), *(plan.options() if plan else ())]

    async def _start(self, spec: PodSpec) -> AgentPod:
        loop = asyncio.get_running_loop()
        pod_id = f"{self._label}-{next(self._numbers)}"
        plan = None
        if self.tree is not None:
            # files live in memory: they are counted on top, so that a full disk is ENOSPC and not a kill
            memory = spec.memory_bytes + spec.disk_bytes + AGENT_MEMORY_BYTES
            plan = self.tree.plan(
                pod_id, memory_bytes=memory, processes=spec.processes + AGENT_PROCESSES, cpus=spec.cpus
            )
        ours, theirs = socket.socketpair()
        shim: _Shim | None = None
        link: Link | None = None
        try:
            with theirs:
                shim = _Shim(self.launcher.command(self.image, self._options(spec, plan), AGENT_ARGV), theirs, loop)
            ours.setblocking(False)
            link = made = Link()
            await loop.create_connection(lambda: made, sock=ours)
            started = shim

            async def end() -> None:
                await self._ended(pod_id, started, plan)

            pod = AgentPod(
                pod_id, spec, link, oom_kills=lambda: (plan.out_of_memory_kills() or 0) if plan else 0, end=end
            )
            self._pods[pod_id] = (pod, plan)
            await pod.greet(self.start_timeout_s)
        except BaseException as error:
            self._pods.pop(pod_id, None)
            if link is not None and link.connected:
                # the transport owns the socket: closing it here would leave the loop watching a descriptor of someone else
                link.abort("the pod did not start")
            else:
                ours.close()
            told = ""
            if shim is not None:
                # the launcher's own words first: the channel only says that it ended
                if isinstance(error, PodLost):
                    await asyncio.wait({shim.ended}, timeout=0.5)
                told = shim.told()
                await shim.end()
            if plan is not None:
                plan.remove()
            if isinstance(error, (OSError, PodLost)):
                raise InfrastructureError(f"pod {pod_id} does not start: {told or error}") from error
            raise
        return pod

    async def _ended(self, pod_id: str, shim: _Shim, plan: cgroups.CgroupPlan | None) -> None:
        if self._pods.pop(pod_id, None) is None:
            return
        try:
            clean = await shim.end()
            if plan is not None and not clean:
                plan.remove()
        finally:
            self.lease.release()

    async def destroy(self, pod: Pod) -> None:
        await pod.close()

    async def stats(self, pod: Pod) -> PodStats:
        plan = self._pods[pod.id][1] if pod.id in self._pods else None
        if plan is None:
            return PodStats(None, None, None, None, None)
        now, peak = plan.memory()
        processes = plan.processes()
        return PodStats(
            now, peak, plan.cpu_s(), processes - AGENT_PROCESSES if processes else processes, plan.out_of_memory_kills()
        )

    async def snapshot(self, pod: Pod) -> str:
        raise refuse(self.name, "snapshot")

    async def restore(self, snapshot: str, spec: PodSpec) -> Pod:
        raise refuse(self.name, "restore")

    async def fork(self, pod: Pod, count: int) -> list[Pod]:
        raise refuse(self.name, "fork")

    async def aclose(self) -> None:
        """Ends every pod."""
        await asyncio.gather(*(pod.close() for pod, _ in list(self._pods.values())))


def missing_rights(told: str) -> MissingCapability:
    """The one line that says why no pod starts here and what to enable."""
    return MissingCapability(
        "environments",
        "namespace pods",
        told,
        "the right to make namespaces: run as root, or allow unprivileged user namespaces "
        "(sysctl -w kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0); a container needs --privileged",
    )


def _warm(image: Image) -> None:
    # read by us, the files' pages are not charged to the first pod that needs them
    for folder, _, files in os.walk(image.path):
        for name in files:
            path = Path(folder) / name
            if not path.is_symlink() and os.access(path, os.R_OK):
                path.read_bytes()
