"""New weights under running sessions: atomic, stamped per token, proven, and harmless when they fail (DESIGN 7-9)."""

from __future__ import annotations

import asyncio
import time
from itertools import groupby

import numpy as np
import pytest
import torch

from etude.inference import weights as weights_module
from etude.inference.client import LocalEngineClient, SessionRoutes, complete
from etude.inference.protocol import ApplyRequest, SwapMode
from etude.inference.sampler import CategoricalSampler
from etude.model.checkpoint import hf_state
from etude.model.decoder import KVCache, RouteReplay
from etude.records.errors import EngineError, IntegrityError
from etude.weightsync.digests import root_digest

PROMPT = (1, 5, 9, 13, 2, 2, 40)


class _Slow(CategoricalSampler):
    def sample(self, *arguments):
        time.sleep(0.01)
        return super().sample(*arguments)


@torch.no_grad()
def _keep_oracle(decoders, ids, version_of_position, routes):
    """Log-probabilities of ids[1:], each span of positions computed with its version over the pages held so far."""
    first = decoders[version_of_position[0]]
    cache, slot = KVCache(first.config, 1, len(ids)), torch.tensor([0])
    found, at = [], 0
    for version, span in groupby(version_of_position):
        count = len(list(span))
        rows = torch.from_numpy(routes[at : at + count].astype(np.int64))[None]
        replay = RouteReplay(rows, 0.0, torch.ones(1, count, dtype=torch.bool))
        out = decoders[version].extend(
            torch.tensor([ids[at : at + count]]), torch.tensor([count]), cache, slot, replay=replay
        )
        logp = decoders[version].logits(out.hidden)[0].double().log_softmax(-1)
        found.append(logp[torch.arange(count), torch.tensor(ids[at + 1 : at + count + 1])])
        at += count
    return torch.cat(found).numpy()


async def _swap_midway(client, request, key, mode):
    """Runs a generation and applies a version after its fifth token."""
    events, apply = [], None
    async for event in client.generate(request):
        events.append(event)
        if len(events) == 5:
            apply = asyncio.create_task(client.apply(ApplyRequest(manifest_key=key, mode=mode)))
    return events[:-1], events[-1], await apply


async def test_a_request_straddling_a_keep_swap_is_stamped_per_token_and_matches_the_span_oracle(
    serving, ask, plain_logprobs, make_decoder
):
    async with serving(sampler=_Slow()) as engine:
        tokens, end, reply = await _swap_midway(
            LocalEngineClient(engine), ask("a", PROMPT, max_tokens=60), "m1", SwapMode.KEEP
        )
    versions = [token.policy_version for token in tokens]
    assert versions == sorted(versions) and set(versions) == {0, 1} and reply.policy_version == 1
    ids = [*PROMPT, *(token.token_id for token in tokens)]
    routes = SessionRoutes().add(end)
    assert len(routes) == len(ids) - 1
    of_position = [0] * (len(PROMPT) - 1) + versions
    oracle = _keep_oracle([make_decoder(0), make_decoder(1)], ids, of_position, routes)[len(PROMPT) - 1 :]
    logprobs = np.array([token.logprob for token in tokens])
    assert np.abs(logprobs - oracle).max() < 1e-4
    plain = plain_logprobs(make_decoder(1), ids)[len(PROMPT) - 1 :]
    old, new = np.array(versions) == 0, np.array(versions) == 1
    assert np.abs(logprobs - plain_logprobs(make_decoder(0), ids)[len(PROMPT) - 1 :])[old].max() < 1e-4
    assert np.abs(logprobs - plain)[new].max() > 1e-3  # old pages are under the new tokens


async def test_after_a_recompute_swap_log_probabilities_are_those_of_a_plain_forward_of_the_new_version(
    serving, ask, plain_logprobs, make_decoder
):
    async with serving(sampler=_Slow()) as engine:
        client = LocalEngineClient(engine)
        idle = await complete(client, ask("idle", PROMPT, seed=3))
        tokens, end, _ = await _swap_midway(client, ask("a", PROMPT, max_tokens=60), "m1", SwapMode.RECOMPUTE)
        held = PROMPT + idle.token_ids
        later = await complete(client, ask("idle", (8, 9), prefix=held, seed=4))
    versions = np.array([token.policy_version for token in tokens])
    assert set(versions) == {0, 1}
    routes = SessionRoutes()
    routes.add(idle.end)
    for ids, logprobs, new, found in (
        (
            [*PROMPT, *(t.token_id for t in tokens)],
            [t.logprob for t in tokens],
            versions == 1,
            SessionRoutes().add(end),
        ),
        ([*held, 8, 9, *later.token_ids], later.logprobs, slice(None), routes.add(later.end)),
    ):
        assert len(found) == len(ids) - 1
        expected = plain_logprobs(make_decoder(1), ids, routes=found)[-len(logprobs) :]
        assert np.abs(np.array(logprobs) - expected)[new].max() < 1e-4
    assert later.end.routes_start == 0 and set(later.policy_versions) == {1}


async def test_an_idle_session_goes_on_over_its_own_old_pages_after_a_keep_swap_and_a_new_one_gets_none(
    serving, ask, plain_logprobs, make_decoder
):
    async with serving() as engine:
        client = LocalEngineClient(engine)
        first = await complete(client, ask("a", PROMPT))
        await client.apply(ApplyRequest(manifest_key="m1"))
        held = PROMPT + first.token_ids
        later = await complete(client, ask("a", (3,), prefix=held))
        new = await complete(client, ask("b", held))
    ids = (*held, 3, *later.token_ids)
    routes = SessionRoutes()
    routes.add(first.end)
    of_position = [0] * (len(held) - 1) + [1] * (1 + len(later.token_ids))
    oracle = _keep_oracle([make_decoder(0), make_decoder(1)], list(ids), of_position, routes.add(later.end))
    assert np.abs(np.array(later.logprobs) - oracle[-len(later.logprobs) :]).max() < 1e-4
    plain = plain_logprobs(make_decoder(1), held + new.token_ids)[len(held) - 1 :]
    assert np.abs(np.array(new.logprobs) - plain).max() < 1e-5


async def test_a_delayed_apply_never_stamps_early_and_serving_goes_on_meanwhile(serving, ask, source):
    source.gate.clear()
    async with serving() as engine:
        client = LocalEngineClient(engine)
        applying = asyncio.create_task(client.apply(ApplyRequest(manifest_key="m1")))
        await asyncio.to_thread(source.entered.wait, 10)
        meanwhile = await complete(client, ask("a", PROMPT))
        assert set(meanwhile.policy_versions) == {0} and (await client.health()).policy_version == 0
        source.gate.set()
        reply = await applying
        assert reply.policy_version == 1 and reply.digest == source.versions["m1"][0].root_digest
        assert set((await complete(client, ask("b", PROMPT))).policy_versions) == {1}


async def test_a_failed_apply_keeps_the_old_version_whole_and_the_next_one_works(serving, ask, source):
    whole = source.versions["m2"][1]
    name = next(iter(whole))
    source.broken["torn"] = IntegrityError("part 3 is torn")
    source.broken["lost"] = OSError("no route to the store")
    source.versions["partial"] = (source.versions["m2"][0], {k: v for k, v in whole.items() if k != name})
    source.versions["misshapen"] = (source.versions["m2"][0], {**whole, name: whole[name][:1]})
    async with serving() as engine:
        client = LocalEngineClient(engine)
        before, digest = await complete(client, ask("a", PROMPT)), (await client.health()).digest
        for key in ("torn", "lost", "partial", "misshapen", "unknown"):
            with pytest.raises((IntegrityError, EngineError)):
                await client.apply(ApplyRequest(manifest_key=key, mode=SwapMode.RECOMPUTE))
            health = await client.health(verify=True)
            assert (health.policy_version, health.digest, health.fenced) == (0, digest, "")
        after = await complete(client, ask("b", PROMPT))
        assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
        assert (await client.apply(ApplyRequest(manifest_key="m2"))).policy_version == 2


async def test_an_apply_given_up_in_its_fetch_never_commits_later(serving, ask, source, until):
    source.gate.clear()
    async with serving(apply_timeout_s=1.0) as engine:
        client = LocalEngineClient(engine)
        with pytest.raises(EngineError, match="not ready"):
            await client.apply(ApplyRequest(manifest_key="m1"))
        source.gate.set()
        reply = await client.apply(ApplyRequest(manifest_key="m2"))
        assert reply.policy_version == 2
        assert set((await complete(client, ask("a", PROMPT))).policy_versions) == {2}


async def test_a_version_that_is_not_its_manifests_fences_the_engine(serving, ask, source):
    version, state = source.versions["m1"]
    source.versions["lie"] = (type(version)(1, "0" * 64), state)
    async with serving(sampler=_Slow()) as engine:
        client = LocalEngineClient(engine)
        running = asyncio.create_task(complete(client, ask("a", PROMPT, max_tokens=100)))
        await asyncio.sleep(0.05)
        with pytest.raises(IntegrityError, match="manifest says"):
            await client.apply(ApplyRequest(manifest_key="lie"))
        with pytest.raises(IntegrityError):
            await running
        with pytest.raises(IntegrityError):
            await complete(client, ask("b", PROMPT))
        with pytest.raises(IntegrityError):
            await client.apply(ApplyRequest(manifest_key="m2"))
        health = await client.health()
        assert health.policy_version == 0 and "manifest says" in health.fenced


def _flip(decoder, bit):
    parameter = dict(decoder.named_parameters())["layers.1.mlp.experts.down_proj"]
    parameter.data.view(torch.int32).view(-1)[5] ^= 1 << bit


@pytest.mark.parametrize("bit", [0, 16, 30])
async def test_a_bit_flipped_in_the_tensors_that_the_forward_reads_is_found(serving, ask, bit):
    async with serving() as engine:
        client = LocalEngineClient(engine)
        await client.health(verify=True)
        _flip(engine.weights.decoder, bit)
        with pytest.raises(IntegrityError):
            await client.health(verify=True)
        with pytest.raises(IntegrityError):
            await complete(client, ask("a", PROMPT))


async def test_a_bit_flipped_while_a_version_was_served_is_found_before_the_next_one(serving):
    async with serving() as engine:
        client = LocalEngineClient(engine)
        await client.apply(ApplyRequest(manifest_key="m1"))
        _flip(engine.weights.decoder, 16)
        with pytest.raises(IntegrityError, match="live tensors of version 1"):
            await client.apply(ApplyRequest(manifest_key="m2"))
        assert (await client.health()).fenced


async def test_a_load_that_writes_something_else_is_found_by_the_digest_of_what_the_forward_reads(serving, monkeypatch):
    def careless(decoder, state):
        original(decoder, state)
        _flip(decoder, 16)

    original = weights_module.load_hf_state_
    monkeypatch.setattr(weights_module, "load_hf_state_", careless)
    async with serving() as engine:
        with pytest.raises(IntegrityError, match="is live with digest"):
            await LocalEngineClient(engine).apply(ApplyRequest(manifest_key="m1"))


async def test_a_manifest_that_is_served_already_is_answered_at_once(serving, source):
    async with serving() as engine:
        client = LocalEngineClient(engine)
        first = await client.apply(ApplyRequest(manifest_key="m3"))
        source.broken["m3"] = OSError("must not be read again")
        again = await client.apply(ApplyRequest(manifest_key="m3"))
        assert (again.policy_version, again.digest) == (first.policy_version, first.digest)


async def test_versions_come_through_a_real_chain(tmp_path, ask, make_decoder):
    from etude.inference.config import EngineConfig
    from etude.inference.engine import Engine
    from etude.weightsync.publisher import Publisher
    from etude.weightsync.store import open_store
    from etude.weightsync.subscriber import Subscriber

    store = open_store(str(tmp_path))
    subscriber = Subscriber(store, "run/x")
    with Engine(make_decoder(0), EngineConfig(slots=2, max_session_tokens=64), source=subscriber) as engine:
        client = LocalEngineClient(engine)
        with Publisher(store, "run/x", anchor_every=2) as publisher:
            for version in (1, 2, 3):
                state = hf_state(make_decoder(version))
                manifest = await asyncio.to_thread(
                    lambda v=version, s=state: publisher.wait(publisher.publish(v, v, 0, s))
                )
                reply = await client.apply(ApplyRequest(manifest_key=subscriber.latest()))
                assert reply.policy_version == version
                assert reply.digest == manifest.root_digest == root_digest(state)
        assert set((await complete(client, ask("a", PROMPT))).policy_versions) == {3}
