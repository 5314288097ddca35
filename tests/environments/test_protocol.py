"""The wire: both sides agree on every value; versions, verbs and damaged frames."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.environments import protocol
from etude.environments.backends.namespace import NamespaceBackend
from etude.environments.client import AgentPod
from etude.environments.pod import PodRefused, PodSpec
from etude.environments.podagent import wire
from etude.records.errors import InfrastructureError, PodLost

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=300) | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner, max_size=20),
    max_leaves=30,
)


@settings(max_examples=60, deadline=None)
@given(values)
def test_the_pods_codec_and_the_hosts_agree(value: object) -> None:
    assert msgspec.msgpack.decode(wire.pack(value)) == value
    assert wire.unpack(msgspec.msgpack.encode(value)) == value


@pytest.mark.parametrize("size", [0, 31, 32, 255, 256, 65535, 65536, 1 << 20])
def test_sizes_at_the_edges_of_the_format(size: int) -> None:
    for value in ("x" * size, b"x" * size, [None] * min(size, 70000)):
        assert msgspec.msgpack.decode(wire.pack(value)) == value == wire.unpack(msgspec.msgpack.encode(value))


@given(st.binary(max_size=60))
def test_damaged_bytes_are_an_error_and_nothing_else(data: bytes) -> None:
    try:
        wire.unpack(data)
    except wire.WireError:
        pass


async def _ask(answer: bytes) -> None:
    """One request to a pod that answers with these bytes and ends."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()
    link = protocol.Link()
    await loop.create_connection(lambda: link, sock=ours)
    asking = asyncio.create_task(link.request(protocol.Processes(id="1"), protocol.ProcessesReply, 5))
    with theirs:
        await loop.sock_recv(theirs, 1 << 16)
        await loop.sock_sendall(theirs, answer)
    try:
        await asking
    finally:
        await asyncio.wait_for(link.closed, 1)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff\xff\xff\xff",
        b"\0\0\0\1\xc0",
        wire.frame({"id": "x"}),
        wire.frame({"id": "", "ok": False, "error": "e", "message": "m", "body": None}),
    ],
)
async def test_a_pod_that_breaks_the_protocol_is_lost_and_not_waited_for(answer: bytes) -> None:
    with pytest.raises(PodLost):
        await _ask(answer)


async def test_a_reply_of_the_wrong_shape_is_no_reply() -> None:
    with pytest.raises(PodLost, match="Processes"):
        await _ask(wire.frame({"id": "1", "ok": True, "error": "", "message": "", "body": {"pids": "many"}}))


async def test_a_silent_pod_is_lost_after_its_time() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    link = protocol.Link()
    await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
    with theirs, pytest.raises(PodLost, match="did not answer Processes"):
        await link.request(protocol.Processes(id="1"), protocol.ProcessesReply, 0.05)


class _Teleport(protocol.Request, tag="teleport", frozen=True, kw_only=True):
    pass


@pytest.mark.pods
async def test_unknown_verb_is_a_named_error(pod: AgentPod) -> None:
    with pytest.raises(PodRefused) as caught:
        await pod.link.request(_Teleport(id="t"), protocol.Empty, 5)
    assert caught.value.error == "unknown_verb" and "teleport" in str(caught.value)
    assert (await pod.exec(["true"])).ok


@pytest.mark.pods
async def test_another_version_is_refused_in_clear_words(
    backend: NamespaceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "PROTOCOL", 99)
    with pytest.raises(InfrastructureError, match="version_mismatch: the agent speaks protocol 1"):
        await backend.create(PodSpec())


@pytest.mark.pods
async def test_hello_comes_first(pod: AgentPod) -> None:
    with pytest.raises(PodRefused):  # a second hello of another version is refused too
        await pod.link.request(protocol.Hello(id="h", version=0, workdir="/", env={}, files=[]), protocol.HelloReply, 5)


@pytest.mark.pods
async def test_an_old_result_that_is_gone_says_so_and_is_not_run_again(pod: AgentPod) -> None:
    await pod.exec(["sh", "-c", "echo x >> log"], request_id="old")
    for _ in range(5):
        await pod.exec(["head", "-c", "5000000", "/dev/zero"], output_limit=6_000_000)
    with pytest.raises(PodRefused) as caught:
        await pod.exec(["sh", "-c", "echo x >> log"], request_id="old")
    assert caught.value.error == "result_gone"
    assert await pod.read("log") == b"x\n"
