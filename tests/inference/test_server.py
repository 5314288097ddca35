"""The same messages over HTTP: streams, faults, lost clients, applies, the ready line, a busy port."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, closing

import httpx
import msgspec
import pytest
import uvicorn

from etude.inference.client import HttpEngineClient, LocalEngineClient, complete
from etude.inference.protocol import ApplyRequest, EngineRefused, FaultKind
from etude.inference.sampler import CategoricalSampler
from etude.inference.server import bind, main, make_app
from etude.model.checkpoint import save_pretrained
from etude.records.errors import EngineError, IntegrityError, MissingCapability, PrefixMismatch

PROMPT = (1, 5, 9, 13, 2, 2, 40)


class _Slow(CategoricalSampler):
    def sample(self, *arguments):
        import time

        time.sleep(0.02)
        return super().sample(*arguments)


@asynccontextmanager
async def _http(engine):
    listening = bind("127.0.0.1", 0)
    config = uvicorn.Config(make_app(engine), log_level="warning", lifespan="off", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    client = HttpEngineClient(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout_s=20)
    try:
        yield client
    finally:
        await client.aclose()
        server.should_exit = True
        await asyncio.to_thread(thread.join, 20)
        listening.close()


async def test_http_and_in_process_clients_get_the_same(serving, ask):
    async with serving(slots=16, flush_tokens=4) as engine, _http(engine) as client:
        over_http = await asyncio.gather(*(complete(client, ask(f"s{i}", PROMPT, seed=i)) for i in range(6)))
        for i, found in enumerate(over_http):
            local = await complete(LocalEngineClient(engine), ask(f"t{i}", PROMPT, seed=i))
            assert found.token_ids == local.token_ids and found.end.routes == local.end.routes
            assert found.logprobs == pytest.approx(local.logprobs, abs=1e-5)
        held = PROMPT + over_http[0].token_ids
        later = await complete(client, ask("s0", (3,), prefix=held))
        assert later.end.routes_start == len(held) - 1


async def test_faults_and_failures_cross_http_by_kind(serving, ask, source):
    source.broken["torn"] = IntegrityError("part 3 is torn")
    async with serving() as engine, _http(engine) as client:
        with pytest.raises(PrefixMismatch):
            await complete(client, ask("a", (3,), prefix=PROMPT))
        with pytest.raises(EngineRefused) as refused:
            await complete(client, ask("a", (999,)))
        assert refused.value.kind is FaultKind.BAD_REQUEST
        with pytest.raises(IntegrityError, match="part 3 is torn"):
            await client.apply(ApplyRequest(manifest_key="torn"))
        with pytest.raises(EngineError):
            await client.apply(ApplyRequest(manifest_key="unknown"))
        reply = await client.apply(ApplyRequest(manifest_key="m1"))
        health = await client.health(verify=True)
        assert (health.policy_version, health.digest) == (1, reply.digest)
        await client.close_session("a")
        await client.drain()
        with pytest.raises(EngineRefused) as refused:
            await complete(client, ask("b", PROMPT))
        assert refused.value.kind is FaultKind.DRAINING


async def test_a_body_that_is_no_request_is_a_bad_request(serving):
    async with serving() as engine, _http(engine) as client:
        async with httpx.AsyncClient(base_url=client._url, trust_env=False) as raw:
            streamed = await raw.post("/v1/generate", content=b"not messagepack")
            assert b"bad_request" in streamed.content
            assert (await raw.post("/v1/apply", content=b"\x80")).status_code == 400
            assert msgspec.json.decode((await raw.get("/v1/health")).content)["slots"] == 8


async def test_a_client_that_hangs_up_frees_its_work_and_slot(serving, ask, until):
    async with serving(sampler=_Slow(), reconnect_grace_s=0.0) as engine, _http(engine) as client:
        request = ask("a", PROMPT, max_tokens=100)
        async with httpx.AsyncClient(base_url=client._url, trust_env=False) as raw:
            async with raw.stream("POST", "/v1/generate", content=msgspec.msgpack.encode(request)) as response:
                await anext(response.aiter_raw())

        async def freed():
            health = await client.health()
            return health.running == 0 and health.sessions == 0

        await until(freed)
        assert (await client.health()).tokens_sampled < 100


async def test_a_connection_lost_in_the_stream_is_taken_up_again_without_sampling_twice(serving, ask):
    async with serving(sampler=_Slow()) as engine, _http(engine) as client:
        port = int(client._url.rsplit(":", 1)[1])
        cut = asyncio.Event()

        async def relay(reader, writer):
            back_reader, back_writer = await asyncio.open_connection("127.0.0.1", port)

            async def pump(source, target, limit):
                passed = 0
                while (data := await source.read(512)) and not (limit and passed > limit and not cut.is_set()):
                    passed += len(data)
                    target.write(data)
                    await target.drain()
                if limit:
                    cut.set()
                    target.transport.abort()
                    back_writer.transport.abort()

            with closing(writer), closing(back_writer):
                await asyncio.gather(
                    pump(reader, back_writer, 0), pump(back_reader, writer, 400), return_exceptions=True
                )

        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        lossy = HttpEngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=20)
        found = await complete(lossy, ask("a", PROMPT, max_tokens=40))
        whole = await complete(client, ask("b", PROMPT, max_tokens=40))
        assert cut.is_set() and found.token_ids == whole.token_ids
        assert (await client.health()).tokens_sampled == 80
        await lossy.aclose()
        server.close()
        await server.wait_closed()


async def test_no_engine_there_is_an_engine_error(ask):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    client = HttpEngineClient(f"http://127.0.0.1:{port}", timeout_s=2, reconnects=1)
    with pytest.raises(EngineError):
        await complete(client, ask("a", PROMPT))
    with pytest.raises(EngineError):
        await client.health()
    await client.aclose()


def test_a_busy_port_is_named():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MissingCapability, match=f"127.0.0.1:{port}"):
            bind("127.0.0.1", port)


def test_the_process_announces_itself_serves_and_ends_on_a_signal(tmp_path, make_decoder, ask):
    save_pretrained(make_decoder(0), tmp_path / "policy")
    ready_file = tmp_path / "ready.json"
    command = [sys.executable, "-m", "etude.inference.server", "--slots", "4", "--max-session-tokens", "64"]
    arguments = ["--model", str(tmp_path / "policy"), "--ready-file", str(ready_file), "--policy-version", "5"]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            ready = json.loads(process.stdout.readline())
            assert json.loads(ready_file.read_text()) == ready

            async def use():
                client = HttpEngineClient(ready["url"])
                done = await complete(client, ask("a", PROMPT))
                health = await client.health(verify=True)
                await client.aclose()
                return done, health

            done, health = asyncio.run(use())
            assert set(done.policy_versions) == {5} and health.digest == ready["digest"]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 0


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        for arguments, named in (
            (["--model", "x", "--port", str(port)], f"127.0.0.1:{port}"),
            (["--model", str(tmp_path / "no")], str(tmp_path / "no")),
            ([], "model"),
            (["--model", "x", "--slots", "0"], "slots"),
        ):
            assert main(arguments) == 2
            said = capsys.readouterr().err
            assert named in said and len(said.strip().splitlines()) == 1
