"""Sampled tokens per second through the HTTP server: many concurrent sessions of several turns, with tool-call masks.

A random `deepseek_v3` policy of 2.1M parameters and a tokenizer trained on the standard library, unless `--model` names a
folder; the server is its own process with one torch thread. Run as `python -m benchmarks.inference_throughput`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import numpy as np
import psutil
import torch

from etude.chat.grammar import make_spec
from etude.chat.tokenizer import Tokenizer
from etude.inference.client import HttpEngineClient, SessionRoutes, complete
from etude.inference.protocol import GenerateRequest, prefix_digest
from etude.model.checkpoint import save_pretrained
from etude.model.decoder import Decoder
from etude.pretrain.starter import starter_config

BAR = 1500.0
POLICY = starter_config(2048)


def make_policy(folder: Path) -> None:
    """A random policy with a tokenizer of our own."""
    tokenizer = Tokenizer.train([Path(module).read_text() for module in (textwrap.__file__, argparse.__file__)], 2048)
    save_pretrained(Decoder(POLICY), folder)
    tokenizer.save(folder)


async def act(client: HttpEngineClient, number: int, tokenizer: Tokenizer, options: argparse.Namespace) -> int:
    """One session after another, each a prompt and a few edits with short results; returns the sampled tokens."""
    source = tokenizer.encode(textwrap.dedent(Path(textwrap.__file__).read_text())[3000:3500])
    sampled = 0
    for session in range(options.rounds):
        ids: list[int] = []
        routes = SessionRoutes()
        rng = np.random.default_rng((number, session))
        name = f"{number}.{session}"
        for turn in range(options.turns):
            new = source if turn == 0 else rng.integers(24, tokenizer.vocab_size, 14).tolist()
            request = GenerateRequest(
                request_id=f"{name}.{turn}",
                session_id=name,
                prefix_digest=prefix_digest(ids),
                new_token_ids=tuple(new),
                max_tokens=48,
                seed=int(rng.integers(1 << 40)),
                stop_ids=(tokenizer.end_id,),
                grammar=None if options.free else make_spec(tokenizer, ("edit_file",), source_ids=source),
            )
            done = await complete(client, request)
            ids += [*new, *done.token_ids]
            routes.add(done.end)
            sampled += len(done.token_ids)
        await client.close_session(name)
    return sampled


async def measure(url: str, pid: int, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Wall-clock and the server's own processor time for the whole load."""
    tokenizer, process = Tokenizer.load(folder), psutil.Process(pid)
    client = HttpEngineClient(url)
    before, began = process.cpu_times(), time.monotonic()
    sampled = sum(
        await asyncio.gather(*(act(client, number, tokenizer, options) for number in range(options.sessions)))
    )
    seconds, after = time.monotonic() - began, process.cpu_times()
    health = await client.health()
    await client.aclose()
    cpu = after.user + after.system - before.user - before.system
    return {
        "sampled_tokens": sampled,
        "prompt_tokens": health.tokens_prefilled,
        "seconds": seconds,
        "server_cpu_seconds": cpu,
        "steps": health.steps,
        "tokens_per_second": sampled / seconds,
        "tokens_per_server_cpu_second": sampled / cpu,
    }


def main() -> int:
    """Starts a server, loads it, prints the table and the JSON line; 1 when it is slower than the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="")
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--free", action="store_true", help="without token masks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.model or scratch)
        if not options.model:
            make_policy(folder)
        command = [sys.executable, "-m", "etude.inference.server", "--model", str(folder), "--slots", "48"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                ready = json.loads(server.stdout.readline())
                figures = asyncio.run(measure(ready["url"], ready["pid"], folder, options))
            finally:
                server.terminate()
                server.wait(timeout=20)
    ok = figures["tokens_per_second"] >= BAR
    print(f"{'figure':34} {'measured':>12}   bar")
    for name, value in figures.items():
        verdict = f">= {BAR:g}: {'ok' if ok else 'SHORT'}" if name == "tokens_per_second" else ""
        print(f"{name:34} {value:>12,.4g}   {verdict}")
    print(json.dumps({**figures, "sessions": options.sessions, "masks": not options.free, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
