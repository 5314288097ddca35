"""A start that is cut off frees its descriptors through the loop, so that none is watched for another owner."""

import asyncio
import contextlib
import socket

import pytest

from etude.environments.backends.namespace import NamespaceBackend
from etude.environments.pod import PodSpec

pytestmark = pytest.mark.pods


async def _use_new_sockets() -> None:
    """Opens sockets all the time: whoever closes a descriptor sees its number used again at once."""
    while True:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            receiving = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(ours, 1))
            await asyncio.sleep(0)
            theirs.send(b"x")
            await receiving


async def test_descriptors_of_cancelled_starts_can_be_used_by_others(backend: NamespaceBackend) -> None:
    using = asyncio.create_task(_use_new_sockets())
    try:
        for delay in (0.004, 0.008, 0.012, 0.016, 0.02, 0.03):
            starting = asyncio.create_task(backend.create(PodSpec(files={})))
            await asyncio.sleep(delay)
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await starting).close()
            assert not using.done(), using.exception()
    finally:
        using.cancel()
