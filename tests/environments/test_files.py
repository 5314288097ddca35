"""Files of a pod: read, write, stat, archives."""

from __future__ import annotations

import io
import tarfile

import pytest

from etude.environments.backends.namespace import NamespaceBackend
from etude.environments.client import AgentPod
from etude.environments.pod import PodRefused, PodSpec

pytestmark = pytest.mark.pods


async def test_placed_files_are_there_with_their_modes(backend: NamespaceBackend) -> None:
    pod = await backend.create(
        PodSpec(files={"a/b/c.sh": b"#!/bin/sh\necho ran\n", "/tmp/x": b"\xff"}, modes={"a/b/c.sh": 0o755})
    )
    assert (await pod.exec(["./a/b/c.sh"])).stdout == b"ran\n"
    assert await pod.read("/tmp/x") == b"\xff"
    assert (await pod.stat("a/b/c.sh")).mode == 0o755
    assert (await pod.stat("a")).kind == "directory"


async def test_write_makes_folders_and_read_is_exact(pod: AgentPod) -> None:
    data = bytes(range(256)) * 1000
    await pod.write("deep/er/file.bin", data, 0o640)
    assert await pod.read("deep/er/file.bin") == data
    found = await pod.stat("deep/er/file.bin")
    assert (found.kind, found.size, found.mode) == ("file", len(data), 0o640)


async def test_what_is_no_plain_file_is_refused_by_name_and_never_hangs(pod: AgentPod) -> None:
    await pod.exec(["python", "-c", "import os; os.mkfifo('pipe')"])
    for path, error in (
        ("none", "not_found"),
        (".", "is_directory"),
        ("pipe", "not_regular"),
        ("/dev/zero", "not_regular"),
    ):
        with pytest.raises(PodRefused) as caught:
            await pod.read(path)
        assert caught.value.error == error
    with pytest.raises(PodRefused) as caught:
        await pod.write("/usr/bin/sh", b"")
    assert caught.value.error == "not_allowed"
    await pod.write("big", b"123456")
    with pytest.raises(PodRefused) as caught:
        await pod.read("big", limit=5)
    assert caught.value.error == "too_long"


async def test_archives_keep_mode_time_and_symlinks_both_ways(pod: AgentPod) -> None:  # 9.19
    long_name = "folder/" * 15 + "file.txt"
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data, mode in (("run.sh", b"echo hi", 0o755), (long_name, b"x" * 1025, 0o600), ("empty", b"", 0o644)):
            member = tarfile.TarInfo(name)
            member.size, member.mode, member.mtime = len(data), mode, 1_000_000_000
            tar.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "run.sh"
        tar.addfile(link)
    assert set(await pod.tar_in(archive.getvalue())) == {"run.sh", long_name, "empty", "link"}
    assert (await pod.exec(["sh", "-c", "./link; sh link"])).stdout.endswith(b"hi\n")
    with tarfile.open(fileobj=io.BytesIO(await pod.tar_out(["."]))) as tar:
        members = {member.name: member for member in tar.getmembers()}
        assert members["run.sh"].mode == 0o755 and members["run.sh"].mtime == 1_000_000_000
        assert members["link"].linkname == "run.sh" and members["link"].issym()
        assert members[long_name].mode == 0o600
        read = tar.extractfile(long_name)
        assert read is not None and read.read() == b"x" * 1025
    again = await pod.tar_out(["run.sh", "folder"])
    with tarfile.open(fileobj=io.BytesIO(again)) as tar:
        assert long_name in tar.getnames()


async def test_archive_that_leaves_the_folder_is_refused(pod: AgentPod) -> None:
    for name in ("../up", "/abs", "out/x"):
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            link = tarfile.TarInfo("out")
            link.type, link.linkname = tarfile.SYMTYPE, "/tmp"
            tar.addfile(link)
            member = tarfile.TarInfo(name)
            member.size = 1
            tar.addfile(member, io.BytesIO(b"x"))
        with pytest.raises(PodRefused) as caught:
            await pod.tar_in(archive.getvalue())
        assert caught.value.error == "bad_request"
    with pytest.raises(PodRefused):
        await pod.stat("/tmp/x")
