"""One engine process over HTTP: `etude serve inference`. MessagePack bodies, the messages of `protocol`.

`POST /v1/generate` streams frames, `POST /v1/apply`, `/v1/drain` and `/v1/close` answer one message, `GET /v1/health` is JSON
for people and MessagePack for clients. A client that hangs up frees its work. Knows nothing of scheduling.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import msgspec
import torch
import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from etude.chat.grammar import Grammar
from etude.chat.tokenizer import Tokenizer
from etude.inference.config import InferenceConfig
from etude.inference.engine import Engine, WeightSource
from etude.inference.jobs import GrammarFactory
from etude.inference.protocol import (
    ApplyRequest,
    CloseRequest,
    EngineFault,
    EngineRefused,
    FaultKind,
    GenerateRequest,
    encode_frame,
)
from etude.model.checkpoint import load_pretrained
from etude.records.errors import BadInput, EtudeError, IntegrityError, MissingCapability

M = TypeVar("M", bound=msgspec.Struct)


def _decode(body: bytes, kind: type[M]) -> M:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise BadInput("request body", kind.__name__, f"{len(body)} bytes", f"MessagePack of it ({error})") from error


def _fault_of(error: EtudeError) -> EngineFault:
    if isinstance(error, EngineRefused):
        return EngineFault(error.kind, error.message)
    kinds = {IntegrityError: FaultKind.INTEGRITY, BadInput: FaultKind.BAD_REQUEST}
    kind = next((kind for parent, kind in kinds.items() if isinstance(error, parent)), FaultKind.FAILED)
    return EngineFault(kind, str(error))


_STATUS = {FaultKind.BAD_REQUEST: 400, FaultKind.INTEGRITY: 409}


def _answer(message: msgspec.Struct) -> Response:
    status = _STATUS.get(message.kind, 503) if isinstance(message, EngineFault) else 200
    return Response(msgspec.msgpack.encode(message), status_code=status, media_type="application/msgpack")


def make_app(engine: Engine) -> Starlette:
    """The HTTP face of a started engine."""

    async def generate(request: Request) -> Response:
        body = await request.body()

        async def frames() -> AsyncIterator[bytes]:
            try:
                async with aclosing(engine.batches(_decode(body, GenerateRequest))) as batches:
                    async for messages in batches:
                        yield b"".join(map(encode_frame, messages))
            except EtudeError as error:
                yield encode_frame(_fault_of(error))

        return StreamingResponse(frames(), media_type="application/x-etude-frames")

    async def apply(request: Request) -> Response:
        try:
            return _answer(await engine.apply(_decode(await request.body(), ApplyRequest)))
        except EtudeError as error:
            return _answer(_fault_of(error))

    async def drain(request: Request) -> Response:
        try:
            await engine.drain()
            return _answer(await engine.health())
        except EtudeError as error:
            return _answer(_fault_of(error))

    async def close(request: Request) -> Response:
        try:
            await engine.close_session(_decode(await request.body(), CloseRequest).session_id)
            return _answer(await engine.health())
        except EtudeError as error:
            return _answer(_fault_of(error))

    async def health(request: Request) -> Response:
        try:
            found = await engine.health(verify=request.query_params.get("verify") == "1")
        except EtudeError as error:
            return _answer(_fault_of(error))
        if request.query_params.get("format") == "msgpack":
            return _answer(found)
        return Response(msgspec.json.encode(found), media_type="application/json")

    return Starlette(
        routes=[
            Route("/v1/generate", generate, methods=["POST"]),
            Route("/v1/apply", apply, methods=["POST"]),
            Route("/v1/drain", drain, methods=["POST"]),
            Route("/v1/close", close, methods=["POST"]),
            Route("/v1/health", health, methods=["GET"]),
        ]
    )


def bind(host: str, port: int) -> socket.socket:
    """A bound socket. Raises MissingCapability naming host and port when it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, port))
        taken.listen(512)
    except OSError as error:
        taken.close()
        reason = error.strerror or str(error)
        raise MissingCapability(f"{host}:{port}", "port", port, f"a free port on this host ({reason})") from error
    return taken


class _Server(uvicorn.Server):
    """uvicorn that tells when it accepts."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


def run_server(engine: Engine, listening: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
    """Serves a started engine until SIGINT or SIGTERM."""
    config = uvicorn.Config(
        make_app(engine),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=5,
        timeout_keep_alive=75,
        backlog=512,
    )
    _Server(config, ready).run(sockets=[listening])


def announce(config: InferenceConfig, engine: Engine, port: int) -> None:
    """Writes the ready line to standard output, and to `ready_file` (whole or not at all)."""
    line = json.dumps(
        {
            "ready": "inference",
            "url": f"http://{f'[{config.host}]' if ':' in config.host else config.host}:{port}",
            "host": config.host,
            "port": port,
            "pid": os.getpid(),
            "engine_id": engine.engine_id,
            "policy_version": engine.weights.policy_version,
            "digest": engine.weights.digest,
        }
    )
    if config.ready_file:
        target = Path(config.ready_file)
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        partial.write_text(line + "\n", encoding="utf-8")
        partial.replace(target)
    print(line, flush=True)


def _weight_source(config: InferenceConfig) -> WeightSource | None:
    if not config.store:
        return None
    from etude.weightsync.store import open_store
    from etude.weightsync.subscriber import Subscriber

    return Subscriber(open_store(config.store), config.run_prefix)


def serve(config: InferenceConfig) -> None:
    """Loads the policy, listens, announces itself, serves until a signal. Raises BadInput (checkpoint, port) before it listens."""
    if not config.model:
        raise BadInput("inference", "model", config.model, "the Hugging Face folder of a policy")
    torch.set_num_threads(config.threads)
    listening = bind(config.host, config.port)
    try:
        decoder = load_pretrained(config.model)
        grammars: GrammarFactory | None = None
        if (Path(config.model) / "tokenizer.json").exists():
            tokenizer = Tokenizer.load(config.model)
            grammars = lambda spec: Grammar(spec, tokenizer)  # noqa: E731
        engine = Engine(
            decoder,
            config,
            grammars=grammars,
            source=_weight_source(config),
            policy_version=config.policy_version,
        )
        with engine:
            port = int(listening.getsockname()[1])
            run_server(engine, listening, lambda: announce(config, engine, port))
    finally:
        listening.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m etude.inference.server`: every field of `InferenceConfig` is an option. Exit code 2 on bad input."""
    parser = argparse.ArgumentParser(prog="etude serve inference", description="Serve a policy over HTTP.")
    for name, field in InferenceConfig.model_fields.items():
        kind: Callable[[str], Any] = {int: int, float: float}.get(field.annotation, str)  # type: ignore[arg-type]
        flag = "--run" if name == "run_prefix" else "--" + name.replace("_", "-")
        parser.add_argument(
            flag, dest=name, type=kind, default=None, help=f"{field.description} (default {field.default})"
        )
    given: dict[str, Any] = {
        key: value for key, value in vars(parser.parse_args(arguments)).items() if value is not None
    }

    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, terminate)
    try:
        serve(InferenceConfig(**given))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        print(f"error: {BadInput('inference', name, first['input'], first['msg'])}", file=sys.stderr)
        return 2
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
