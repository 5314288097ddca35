"""Sampler against trainer: are the log-probabilities that the engine returns those of the weights it says it used?

Many sessions act in turns with tool results between, over one engine whose weights are swapped under them through a real
version chain, once per mode. `recompute` is held against a plain forward of each token's version (with the recorded routes
replayed where they are that version's), `keep` against an oracle that computes each span of positions with that span's weights over
retained pages (DESIGN decision 9). A random `deepseek_v3` policy unless `--model` names a folder. Run as
`python -m benchmarks.inference_parity`.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch

from etude.chat.grammar import GrammarSpec
from etude.inference.client import Completed, LocalEngineClient, SessionRoutes, complete, unpack_masks
from etude.inference.config import EngineConfig
from etude.inference.engine import Engine
from etude.inference.protocol import ApplyRequest, GenerateRequest, SwapMode, prefix_digest
from etude.model.checkpoint import hf_state, load_pretrained
from etude.model.config import ModelConfig
from etude.model.decoder import Decoder, KVCache, RouteReplay
from etude.weightsync.chain import manifest_key
from etude.weightsync.publisher import Publisher
from etude.weightsync.store import open_store
from etude.weightsync.subscriber import Subscriber

BAR = 1e-4
ALPHA = 0.9
SMALL = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    n_routed_experts=8,
    num_experts_per_tok=2,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    max_position_embeddings=1024,
    initializer_range=0.1,
)


@dataclass
class Turn:
    """One generation of a session: where its sampled tokens begin, and all that came back."""

    start: int
    temperature: float
    done: Completed
    routes: np.ndarray
    masks: np.ndarray | None


@dataclass
class Session:
    """The ids of one session and its turns."""

    ids: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)


class RandomMasks:
    """Stands in for a tool-call grammar: a random two thirds of the ids at every step, from the seed in the spec."""

    def __init__(self, spec: GrammarSpec, vocab_size: int) -> None:
        self._rng, self._vocab = np.random.default_rng(spec.max_calls), vocab_size
        self.finished = False
        self._mask = self._next()

    def _next(self) -> np.ndarray:
        return self._rng.random(self._vocab) < 0.67

    def allowed(self) -> np.ndarray:
        return self._mask

    def advance(self, token_id: int) -> None:
        self._mask = self._next()


def make_versions(model: str, count: int, seed: int, step: float) -> list[Decoder]:
    """A policy and `count - 1` successors, each a small random step from the one before, on BF16 values."""
    generator = torch.Generator().manual_seed(seed)
    first = load_pretrained(model) if model else Decoder(SMALL)
    if not model:
        first.reset_parameters(generator)
    versions = [first.eval().requires_grad_(False)]
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).float())
        for _ in range(count - 1):
            later = copy.deepcopy(versions[-1])
            for parameter in later.parameters():
                noise = torch.randn(parameter.shape, generator=generator) * parameter.abs().mean() * step
                parameter.copy_((parameter + noise).to(torch.bfloat16).float())
            versions.append(later)
    return versions


async def act(client: LocalEngineClient, number: int, options: argparse.Namespace, vocab_size: int) -> Session:
    """One session: turns of sampling with random tool results between them."""
    rng = np.random.default_rng((options.seed, number))
    session, routes = Session(), SessionRoutes()
    for turn in range(options.turns):
        new = rng.integers(0, vocab_size, rng.integers(20, 90) if turn == 0 else rng.integers(1, 25)).tolist()
        temperature = (1.0, 0.7)[number % 2]
        request = GenerateRequest(
            request_id=f"{number}/{turn}",
            session_id=str(number),
            prefix_digest=prefix_digest(session.ids),
            new_token_ids=tuple(new),
            max_tokens=int(rng.integers(10, 50)),
            temperature=temperature,
            seed=1000 * number + turn,
            grammar=GrammarSpec(tools=(), max_calls=number * 100 + turn) if number % 3 == 0 else None,
        )
        done = await complete(client, request)
        session.ids += new
        start = len(session.ids)
        session.ids += done.token_ids
        session.turns.append(Turn(start, temperature, done, routes.add(done.end), unpack_masks(done.end, vocab_size)))
        await asyncio.sleep(float(rng.random()) * 0.05)
    return session


async def run(
    mode: SwapMode, versions: list[Decoder], options: argparse.Namespace
) -> tuple[list[Session], dict[str, float]]:
    """All sessions over one engine, with the later versions applied at even shares of the sampled tokens."""
    vocab_size = versions[0].config.vocab_size
    config = EngineConfig(slots=options.sessions, max_session_tokens=640, flush_tokens=8)
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        with Publisher(store, "run", anchor_every=2) as publisher:
            for number, decoder in enumerate(versions[1:], start=1):
                publisher.wait(publisher.publish(number, number, 0, hf_state(decoder)))
        source = Subscriber(store, "run")
        policy = copy.deepcopy(versions[0])
        with Engine(policy, config, source=source, grammars=lambda spec: RandomMasks(spec, vocab_size)) as engine:
            client = LocalEngineClient(engine)
            began = time.monotonic()
            acting = [
                asyncio.create_task(act(client, number, options, vocab_size)) for number in range(options.sessions)
            ]
            expected = options.sessions * options.turns * 29.5
            pauses = []
            for number in range(1, len(versions)):
                share = expected * number / len(versions)
                while not all(task.done() for task in acting):
                    if (await client.health()).tokens_sampled >= share:
                        break
                    await asyncio.sleep(0.005)
                reply = await client.apply(ApplyRequest(manifest_key=manifest_key("run", number), mode=mode))
                pauses.append(reply.pause_seconds)
            sessions = await asyncio.gather(*acting)
            health = await client.health(verify=True)
    figures = {
        "sampled": health.tokens_sampled,
        "prefilled": health.tokens_prefilled,
        "without_reuse": sum(turn.start for session in sessions for turn in session.turns),
        "seconds": time.monotonic() - began,
        "pause_max": max(pauses),
    }
    return sessions, figures


def _of_sampled(logits_TV: torch.Tensor, session: Session, turn: Turn) -> np.ndarray:
    """Log-probabilities of a turn's sampled tokens from logits for positions [start - 1, ...)."""
    logits_SV = logits_TV[: len(turn.done.token_ids)].double() / turn.temperature
    if turn.masks is not None:
        logits_SV = logits_SV.masked_fill(~torch.from_numpy(turn.masks), float("-inf"))
    return logits_SV.log_softmax(-1)[torch.arange(len(logits_SV)), torch.tensor(turn.done.token_ids)].numpy()


@torch.no_grad()
def plain(decoder: Decoder, session: Session, turn: Turn, routes: np.ndarray | None, alpha: float = 0.0):
    """The trainer's forward over the turn's context and tokens: log-probabilities of its sampled tokens, and the output."""
    length = turn.start + len(turn.done.token_ids) - 1
    replay = None
    if routes is not None:
        rows = torch.from_numpy(routes[:length].astype(np.int64))[None]
        replay = RouteReplay(rows, alpha, torch.ones(1, length, dtype=torch.bool))
    out = decoder(torch.tensor([session.ids[:length]]), replay=replay)
    return _of_sampled(decoder.logits(out.hidden)[0, turn.start - 1 :], session, turn), out


@torch.no_grad()
def spans(versions: list[Decoder], session: Session) -> list[np.ndarray]:
    """The `keep` oracle: every span of positions under its own version, over the pages of the spans before it."""
    used: list[int] = []
    for turn in session.turns:
        # A position is computed by the forward that samples the first token after it.
        stamps = turn.done.policy_versions
        used += [stamps[0]] * (turn.start - 1 - len(used)) + list(stamps)
    cache, slot = KVCache(versions[0].config, 1, len(session.ids)), torch.tensor([0])
    routes, parts, at = session.turns[-1].routes, [], 0
    for version, span in groupby(used):
        count = len(list(span))
        rows = torch.from_numpy(routes[at : at + count].astype(np.int64))[None]
        replay = RouteReplay(rows, 0.0, torch.ones(1, count, dtype=torch.bool))
        ids = torch.tensor([session.ids[at : at + count]])
        out = versions[version].extend(ids, torch.tensor([count]), cache, slot, replay=replay)
        parts.append(versions[version].logits(out.hidden)[0])
        at += count
    logits_TV = torch.cat(parts)
    return [_of_sampled(logits_TV[turn.start - 1 :], session, turn) for turn in session.turns]


def measure_recompute(versions: list[Decoder], sessions: list[Session]) -> dict[str, float]:
    """Largest difference to a plain forward of each token's version; replaced fractions at the same and the next version."""
    worst, worst_own, tokens, own = 0.0, 0.0, 0, 0
    replaced = {0: [0, 0], 1: [0, 0]}
    for session in sessions:
        for turn in session.turns:
            stamps, found = np.array(turn.done.policy_versions), np.array(turn.done.logprobs)
            for version in sorted(set(stamps.tolist())):
                # Routes were recorded anew at each swap: those delivered are the last version's.
                last = version == stamps[-1]
                at = stamps == version
                expected, _ = plain(versions[version], session, turn, turn.routes if last else None)
                gap = float(np.abs(expected - found)[at].max())
                worst, worst_own = (max(worst, gap), worst_own) if last else (worst, max(worst_own, gap))
                tokens, own = tokens + int(at.sum()), own + (0 if last else int(at.sum()))
            for ahead, counts in replaced.items():
                if stamps[-1] + ahead < len(versions):
                    _, out = plain(versions[stamps[-1] + ahead], session, turn, turn.routes, ALPHA)
                    counts[0] += int(out.replaced)
                    counts[1] += int(out.considered)
    return {
        "recompute_max_diff": max(worst, worst_own),
        "recompute_tokens": tokens,
        "recompute_tokens_before_a_swap": own,
        "replaced_fraction_same_version": replaced[0][0] / max(1, replaced[0][1]),
        "replaced_fraction_next_version": replaced[1][0] / max(1, replaced[1][1]),
    }


def measure_keep(versions: list[Decoder], sessions: list[Session]) -> dict[str, float]:
    """Largest difference to the span oracle, and the gap to a plain forward of each token's own version."""
    worst, gaps, tokens, old = 0.0, [], 0, 0
    for session in sessions:
        for turn, expected in zip(session.turns, spans(versions, session)):
            stamps, found = np.array(turn.done.policy_versions), np.array(turn.done.logprobs)
            worst = max(worst, float(np.abs(expected - found).max()))
            tokens += len(found)
            mixed = stamps > session.turns[0].done.policy_versions[0]
            old += int(mixed.sum())
            for version in sorted(set(stamps[mixed].tolist())):
                simple, _ = plain(versions[version], session, turn, turn.routes)
                gaps += np.abs(simple - found)[mixed & (stamps == version)].tolist()
    return {
        "keep_max_diff": worst,
        "keep_tokens": tokens,
        "keep_tokens_over_old_pages": old,
        "keep_gap_to_plain_mean": float(np.mean(gaps)) if gaps else 0.0,
        "keep_gap_to_plain_max": float(np.max(gaps)) if gaps else 0.0,
    }


@torch.no_grad()
def own_routes_bit_equal(decoder: Decoder, sessions: list[Session]) -> bool:
    """Whether replaying a batch's own routes, at either end of alpha, leaves its logits bit-equal in the same shape."""
    rows = sessions[:8]
    width = min(len(session.ids) for session in rows)
    ids_BT = torch.tensor([session.ids[:width] for session in rows])
    free = decoder(ids_BT)
    logits = decoder.logits(free.hidden)
    valid = torch.ones(ids_BT.shape, dtype=torch.bool)
    return all(
        torch.equal(logits, decoder.logits(decoder(ids_BT, replay=RouteReplay(free.routes, alpha, valid)).hidden))
        for alpha in (0.0, 1.0)
    )


def main() -> int:
    """Runs both modes, prints the table and the JSON line; 1 when a figure falls short."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="Hugging Face folder of a deepseek_v3 policy")
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--swaps", type=int, default=3)
    parser.add_argument(
        "--step", type=float, default=0.02, help="size of a version's random step, relative to the weights"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    versions = make_versions(options.model, options.swaps + 1, options.seed, options.step)
    recomputed, served = asyncio.run(run(SwapMode.RECOMPUTE, versions, options))
    kept, served_keep = asyncio.run(run(SwapMode.KEEP, versions, options))
    figures: dict[str, float] = {
        **measure_recompute(versions, recomputed),
        **measure_keep(versions, kept),
        "own_routes_bit_equal": float(own_routes_bit_equal(versions[-1], recomputed)),
        "prompt_tokens_computed": served_keep["prefilled"],
        "prompt_tokens_without_reuse": served_keep["without_reuse"],
        "swaps_each_mode": options.swaps,
        "swap_pause_seconds_max": max(served["pause_max"], served_keep["pause_max"]),
        "sampled_tokens_per_second": served_keep["sampled"] / served_keep["seconds"],
    }
    bars = {
        "recompute_max_diff": figures["recompute_max_diff"] <= BAR,
        "keep_max_diff": figures["keep_max_diff"] <= BAR,
        "own_routes_bit_equal": figures["own_routes_bit_equal"] == 1.0,
        "prompt_tokens_computed": figures["prompt_tokens_computed"] < figures["prompt_tokens_without_reuse"],
        "recompute_tokens_before_a_swap": figures["recompute_tokens_before_a_swap"] > 0,
        "keep_tokens_over_old_pages": figures["keep_tokens_over_old_pages"] > 0,
    }
    wanted = {
        "recompute_max_diff": f"<= {BAR:g}",
        "keep_max_diff": f"<= {BAR:g}",
        "own_routes_bit_equal": "1 (yes)",
        "prompt_tokens_computed": "fewer than without reuse",
        "recompute_tokens_before_a_swap": "> 0 (a swap fell into generations)",
        "keep_tokens_over_old_pages": "> 0 (a swap fell into sessions)",
    }
    print(f"{'figure':34} {'measured':>14}   bar")
    for name, value in figures.items():
        shown = f"{value:.3g}" if value < 1e-2 else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
        verdict = f"{wanted[name]}: {'ok' if bars[name] else 'SHORT'}" if name in bars else ""
        print(f"{name:34} {shown:>14}   {verdict}")
    print(
        json.dumps(
            {**figures, "model": options.model or "random", "sessions": options.sessions, "ok": all(bars.values())}
        )
    )
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
