"""What a client can rely on: same tokens in any company, prefix reuse, one answer per request id, nothing leaked."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from etude.inference.client import LocalEngineClient, SessionRoutes, complete, unpack_masks
from etude.inference.protocol import EngineRefused, FaultKind, GenerateEnd, TokenEvent
from etude.inference.sampler import CategoricalSampler, ScriptedSampler
from etude.records.errors import EngineError, PrefixMismatch

PROMPT = (1, 5, 9, 13, 2, 2, 40)


class _OddOnly:
    """Masks that allow odd ids at even steps and everything below 20 at odd ones; ends after `stop_after`."""

    def __init__(self, stop_after: int = 99) -> None:
        self._step, self._stop_after, self.finished = 0, stop_after, False

    def allowed(self):
        ids = np.arange(48)
        return ids % 2 == 1 if self._step % 2 == 0 else ids < 20

    def advance(self, token_id):
        assert self.allowed()[token_id]
        self._step += 1
        self.finished = self._step == self._stop_after


async def _crowd(client, ask, count):
    prompts = [tuple(int(x) for x in np.random.default_rng(i).integers(1, 48, 3 + 5 * i)) for i in range(count)]
    return await asyncio.gather(
        *(complete(client, ask(f"crowd{i}", prompts[i], seed=100 + i, max_tokens=5 + 3 * i)) for i in range(count))
    )


async def test_a_request_gets_the_same_tokens_alone_and_among_others(serving, ask):
    async with serving() as engine:
        alone = await complete(LocalEngineClient(engine), ask("a", PROMPT, max_tokens=40))
    async with serving() as engine:
        client = LocalEngineClient(engine)
        company = asyncio.create_task(_crowd(client, ask, 6))
        await asyncio.sleep(0)
        among = await complete(client, ask("a", PROMPT, max_tokens=40))
        await company
    assert among.token_ids == alone.token_ids
    assert np.abs(np.subtract(among.logprobs, alone.logprobs)).max() < 1e-5
    assert among.end.routes == alone.end.routes


async def test_log_probabilities_are_those_of_a_plain_forward_at_the_temperature(
    serving, ask, plain_logprobs, make_decoder
):
    for temperature in (1.0, 0.6, 0.0):
        async with serving() as engine:
            done = await complete(LocalEngineClient(engine), ask("a", PROMPT, max_tokens=30, temperature=temperature))
        ids = PROMPT + done.token_ids
        expected = plain_logprobs(make_decoder(0), ids, temperature=temperature or 1.0)[len(PROMPT) - 1 :]
        assert np.abs(np.array(done.logprobs) - expected).max() < 1e-5


async def test_greedy_tokens_are_the_argmax_of_a_plain_forward(serving, ask, make_decoder):
    import torch

    async with serving() as engine:
        done = await complete(LocalEngineClient(engine), ask("a", PROMPT, max_tokens=20, temperature=0.0))
    decoder = make_decoder(0)
    ids = list(PROMPT)
    for token_id in done.token_ids:
        assert token_id == int(decoder.logits(decoder(torch.tensor([ids])).hidden)[0, -1].argmax())
        ids.append(token_id)


async def test_masks_are_respected_recorded_and_in_the_log_probability(serving, ask, plain_logprobs, make_decoder):
    request = ask("a", PROMPT, max_tokens=20, grammar=_spec())
    async with serving(grammars=lambda spec: _OddOnly(stop_after=11)) as engine:
        client = LocalEngineClient(engine)
        done, _ = await asyncio.gather(complete(client, request), complete(client, ask("free", (3, 4), max_tokens=20)))
    assert done.end.finish == "stop" and len(done.token_ids) == 11
    assert all(token_id % 2 == 1 for token_id in done.token_ids[::2]) and max(done.token_ids[1::2]) < 20
    masks = unpack_masks(done.end, 48)
    oracle = _OddOnly()
    for row, token_id in zip(masks, done.token_ids, strict=True):
        assert np.array_equal(row, oracle.allowed())
        oracle.advance(token_id)
    ids = PROMPT + done.token_ids
    expected = plain_logprobs(make_decoder(0), ids, masks=masks, masks_from=len(PROMPT))[len(PROMPT) - 1 :]
    assert np.abs(np.array(done.logprobs) - expected).max() < 1e-5
    free = plain_logprobs(make_decoder(0), ids)[len(PROMPT) - 1 :]
    assert (np.array(done.logprobs) > free - 1e-5).all()


def _spec():
    from etude.chat.grammar import GrammarSpec

    return GrammarSpec(tools=())


class _Forced:
    """Every second id is forced, the last one too."""

    def __init__(self) -> None:
        self._taken: list[int] = []
        self.finished = False

    def allowed(self):
        mask = np.zeros(48, dtype=np.bool_)
        mask[slice(3, 4) if len(self._taken) % 2 else slice(10, 40)] = True
        return mask

    def advance(self, token_id: int) -> None:
        self._taken.append(token_id)
        self.finished = len(self._taken) == 8


async def test_forced_ids_take_no_step_and_still_get_masks_and_routes(serving, ask):
    async with serving(grammars=lambda spec: _Forced()) as engine:
        done = await complete(LocalEngineClient(engine), ask("a", PROMPT, max_tokens=20, grammar=_spec()))
        steps = (await engine.health()).steps
    assert len(done.token_ids) == 8 and done.end.finish == "stop"
    assert done.token_ids[1::2] == (3,) * 4 and done.logprobs[1::2] == (0.0,) * 4
    masks = unpack_masks(done.end, 48)
    assert masks is not None and masks.sum(1).tolist() == [30, 1] * 4
    rows = SessionRoutes().add(done.end)
    assert len(rows) == len(PROMPT) + 8 - 1
    assert steps == 4  # the first one draws after the prompt and again; the last one only feeds


async def test_a_grammar_without_a_tokenizer_is_a_bad_request(serving, ask):
    async with serving() as engine:
        with pytest.raises(EngineRefused) as refused:
            await complete(LocalEngineClient(engine), ask("a", PROMPT, grammar=_spec()))
    assert refused.value.kind is FaultKind.BAD_REQUEST


async def test_a_later_turn_reuses_the_prefix_and_gives_what_a_fresh_session_gives(serving, ask):
    results = (7, 7, 3)
    async with serving() as engine:
        client = LocalEngineClient(engine)
        first = await complete(client, ask("a", PROMPT, seed=1))
        held = PROMPT + first.token_ids
        before = (await client.health()).tokens_prefilled
        second = await complete(client, ask("a", results, prefix=held, seed=2))
        reused = (await client.health()).tokens_prefilled - before
        fresh = await complete(client, ask("b", held + results, seed=2))
    assert reused == len(results) + 1
    assert second.token_ids == fresh.token_ids
    assert np.abs(np.subtract(second.logprobs, fresh.logprobs)).max() < 1e-5
    routes = SessionRoutes()
    routes.add(first.end)
    assert second.end.routes_start == len(held) - 1
    joined = routes.add(second.end)
    assert len(joined) == len(held + results + second.token_ids) - 1
    assert np.array_equal(joined, SessionRoutes().add(fresh.end))


async def test_a_session_with_another_prefix_or_unknown_here_is_a_prefix_mismatch(serving, ask):
    async with serving() as engine:
        client = LocalEngineClient(engine)
        first = await complete(client, ask("a", PROMPT))
        for request in (
            ask("a", (3,), prefix=PROMPT),
            ask("a", (3,), prefix=(*PROMPT, *first.token_ids, 1)),
            ask("never", (3,), prefix=PROMPT),
        ):
            with pytest.raises(PrefixMismatch):
                await complete(client, request)
        again = await complete(client, ask("a", PROMPT, request_id="new start"))
        assert again.token_ids == first.token_ids and again.end.routes_start == 0


async def test_the_session_used_least_recently_gives_way_and_its_client_learns_it(serving, ask):
    async with serving(slots=2) as engine:
        client = LocalEngineClient(engine)
        first = {name: await complete(client, ask(name, PROMPT)) for name in ("a", "b")}
        await complete(client, ask("a", (2,), prefix=PROMPT + first["a"].token_ids))
        await complete(client, ask("c", PROMPT))
        with pytest.raises(PrefixMismatch):
            await complete(client, ask("b", (2,), prefix=PROMPT + first["b"].token_ids))
        assert (await client.health()).sessions == 2


async def test_requests_wait_for_a_slot_and_are_busy_beyond_the_queue_or_its_time(serving, ask):
    async with serving(slots=1, queue_limit=1) as engine:
        client = LocalEngineClient(engine)
        outcomes = await asyncio.gather(
            *(complete(client, ask(f"s{i}", PROMPT, max_tokens=25)) for i in range(3)), return_exceptions=True
        )
        refused = [outcome for outcome in outcomes if isinstance(outcome, EngineRefused)]
        assert [error.kind for error in refused] == [FaultKind.BUSY]
    async with serving(slots=1, queue_timeout_s=0.01, sampler=_Slow()) as engine:
        client = LocalEngineClient(engine)
        outcomes = await asyncio.gather(
            *(complete(client, ask(f"s{i}", PROMPT, max_tokens=25)) for i in range(2)), return_exceptions=True
        )
        assert [o.kind for o in outcomes if isinstance(o, EngineRefused)] == [FaultKind.BUSY]


class _Slow(CategoricalSampler):
    """A sampler that takes its time, so that a test can act in the middle of a generation."""

    def sample(self, *arguments):
        import time

        time.sleep(0.02)
        return super().sample(*arguments)


async def test_what_does_not_fit_or_is_malformed_is_refused_by_kind(serving, ask):
    async with serving(max_session_tokens=32) as engine:
        client = LocalEngineClient(engine)
        first = await complete(client, ask("a", PROMPT))
        cases = [
            (ask("b", range(1, 30)), FaultKind.TOO_LONG),
            (ask("a", range(1, 10), prefix=PROMPT + first.token_ids), FaultKind.TOO_LONG),
            (ask("b", (1, 48)), FaultKind.BAD_REQUEST),
            (ask("b", ()), FaultKind.BAD_REQUEST),
            (ask("b", (1,), max_tokens=0), FaultKind.BAD_REQUEST),
            (ask("b", (1,), temperature=float("nan")), FaultKind.BAD_REQUEST),
            (ask("b", (1,), seed=-1), FaultKind.BAD_REQUEST),
            (ask("b", PROMPT, request_id="a/0/7"), FaultKind.BAD_REQUEST),
        ]
        for request, kind in cases:
            with pytest.raises(EngineRefused) as refused:
                await complete(client, request)
            assert refused.value.kind is kind
        assert (await client.health()).sessions == 1


async def test_stop_ids_end_a_generation_and_stay_in_the_session(serving, ask):
    script = [11, 12, 3, 14]
    async with serving(sampler=ScriptedSampler(lambda row: script[row.index])) as engine:
        client = LocalEngineClient(engine)
        done = await complete(client, ask("a", PROMPT, stop_ids=(3,)))
        assert done.token_ids == (11, 12, 3) and done.end.finish == "stop"
        assert done.end.session_length == len(PROMPT) + 3
        await complete(client, ask("a", (8,), prefix=(*PROMPT, 11, 12, 3), max_tokens=2))


async def test_scripted_tokens_keep_the_models_log_probabilities(serving, ask, plain_logprobs, make_decoder):
    script = [11, 12, 3, 14]
    async with serving(sampler=ScriptedSampler(lambda row: script[row.index])) as engine:
        done = await complete(LocalEngineClient(engine), ask("a", PROMPT, max_tokens=4))
    expected = plain_logprobs(make_decoder(0), (*PROMPT, *script))[len(PROMPT) - 1 :]
    assert done.token_ids == tuple(script)
    assert np.abs(np.array(done.logprobs) - expected).max() < 1e-5


async def test_a_repeated_request_id_gets_the_recorded_answer_and_samples_nothing(serving, ask):
    async with serving() as engine:
        client = LocalEngineClient(engine)
        request = ask("a", PROMPT, max_tokens=30)
        first = await complete(client, request)
        sampled = (await client.health()).tokens_sampled
        assert await complete(client, request) == first
        assert (await client.health()).tokens_sampled == sampled
        twice = ask("b", PROMPT, max_tokens=30)
        one, two = await asyncio.gather(complete(client, twice), complete(client, twice))
        assert one == two
        assert (await client.health()).tokens_sampled == sampled + 30


async def test_a_lost_client_frees_the_work_and_in_the_end_the_slots(serving, ask, until):
    async with serving(reconnect_grace_s=0.0, sampler=_Slow()) as engine:
        client = LocalEngineClient(engine)
        free = (await client.health()).free_slots
        for i in range(4):
            async for _ in client.generate(ask(f"s{i}", PROMPT, max_tokens=100)):
                break

        async def all_free():
            return (await client.health()).free_slots == free

        await until(all_free)
        health = await client.health()
        assert health.running == 0 and health.sessions == 0 and health.tokens_sampled < 100


async def test_a_client_that_comes_back_goes_on_and_nothing_is_sampled_twice(serving, ask):
    async with serving() as engine:
        whole = await complete(LocalEngineClient(engine), ask("a", PROMPT, max_tokens=30))
    async with serving(sampler=_Slow()) as engine:
        client = LocalEngineClient(engine)
        request = ask("a", PROMPT, max_tokens=30)
        seen = []
        stream = client.generate(request)
        async for event in stream:
            seen.append(event)
            if len(seen) == 5:
                break
        await stream.aclose()
        resumed = await complete(client, request)
        assert resumed.token_ids[:5] == tuple(event.token_id for event in seen)
        assert (await client.health()).tokens_sampled == 30
    assert resumed.token_ids == whole.token_ids
    assert len(SessionRoutes().add(resumed.end)) == len(PROMPT) + 30 - 1
    assert resumed.end.routes_digest == whole.end.routes_digest


async def test_an_interrupted_turn_may_be_asked_anew_from_the_same_prefix(serving, ask):
    async with serving(sampler=_Slow()) as engine:
        client = LocalEngineClient(engine)
        first = await complete(client, ask("a", PROMPT))
        held = PROMPT + first.token_ids
        stream = client.generate(ask("a", (4, 4), prefix=held, request_id="cut", max_tokens=40, seed=3))
        async for _ in stream:
            break
        await stream.aclose()
        again = await complete(client, ask("a", (5,), prefix=held, request_id="other"))
        fresh = await complete(client, ask("b", (*held, 5)))
        assert again.token_ids == fresh.token_ids
        routes = SessionRoutes()
        routes.add(first.end)
        assert np.array_equal(routes.add(again.end), SessionRoutes().add(fresh.end))


async def test_closing_a_session_frees_its_slot_and_cancels_what_it_runs(serving, ask):
    async with serving(sampler=_Slow()) as engine:
        client = LocalEngineClient(engine)
        running = asyncio.create_task(complete(client, ask("a", PROMPT, max_tokens=100)))
        await asyncio.sleep(0.1)
        await client.close_session("a")
        await client.close_session("unknown")
        with pytest.raises(EngineRefused) as refused:
            await running
        assert refused.value.kind is FaultKind.CANCELLED
        health = await client.health()
        assert health.free_slots == health.slots and health.running == 0


async def test_idle_sessions_are_freed_in_time(serving, ask, until):
    async with serving(idle_timeout_s=0.05) as engine:
        client = LocalEngineClient(engine)
        await complete(client, ask("a", PROMPT))

        async def none_left():
            return (await client.health()).sessions == 0

        await until(none_left)


async def test_drain_finishes_what_runs_and_refuses_what_comes(serving, ask):
    async with serving(sampler=_Slow()) as engine:
        client = LocalEngineClient(engine)
        running = asyncio.create_task(complete(client, ask("a", PROMPT, max_tokens=10)))
        await asyncio.sleep(0.05)
        await client.drain()
        assert len((await running).token_ids) == 10
        with pytest.raises(EngineRefused) as refused:
            await complete(client, ask("b", PROMPT))
        assert refused.value.kind is FaultKind.DRAINING


async def test_a_closed_engine_ends_its_streams_and_says_so(serving, ask):
    async with serving(sampler=_Slow()) as engine:
        client = LocalEngineClient(engine)
        running = asyncio.create_task(complete(client, ask("a", PROMPT, max_tokens=100)))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineError, match="closed"):
            await running
        with pytest.raises(EngineError, match="closed"):
            await complete(client, ask("b", PROMPT))


async def test_tokens_arrive_in_order_before_their_end_however_they_are_batched(serving, ask):
    for flush in (1, 4, 100):
        async with serving(flush_tokens=flush) as engine:
            events = [event async for event in LocalEngineClient(engine).generate(ask("a", PROMPT, max_tokens=30))]
        assert isinstance(events[-1], GenerateEnd) and events[-1].sampled == 30
        assert all(isinstance(event, TokenEvent) for event in events[:-1]) and len(events) == 31


LONG = tuple(int(x) for x in np.random.default_rng(5).integers(1, 48, 40))


async def test_sessions_that_begin_alike_compute_their_prompt_once_and_get_what_they_would_get_alone(serving, ask):
    requests = [ask(f"s{i}", LONG, seed=i) for i in range(6)] + [ask("half", (*LONG[:25], 3, 4, 5), seed=9)]
    async with serving(share_prompts=False) as engine:
        client = LocalEngineClient(engine)
        alone = [await complete(client, request) for request in requests]
        assert (await client.health()).tokens_shared == 0
    async with serving() as engine:
        client = LocalEngineClient(engine)
        shared = await asyncio.gather(*(complete(client, request) for request in requests))
        health = await client.health()
        assert health.tokens_prefilled < 2 * len(LONG) and health.tokens_shared >= 5 * (len(LONG) - 1)
        await client.close_session("s0")
        await complete(client, ask("after", LONG))
        assert (await client.health()).tokens_prefilled == health.tokens_prefilled
    for one, other in zip(alone, shared, strict=True):
        assert one.token_ids == other.token_ids and one.end.routes_digest == other.end.routes_digest
        assert np.abs(np.subtract(one.logprobs, other.logprobs)).max() < 1e-5


async def test_a_prompt_computed_by_other_weights_is_never_shared(serving, ask):
    from etude.inference.protocol import ApplyRequest

    async with serving() as engine:
        client = LocalEngineClient(engine)
        await complete(client, ask("old", LONG))
        await client.apply(ApplyRequest(manifest_key="m1"))
        found = await complete(client, ask("new", LONG))
        assert (await client.health()).tokens_shared == 0
    async with serving(weights=1) as engine:
        fresh = await complete(LocalEngineClient(engine), ask("new", LONG))
    assert found.token_ids == fresh.token_ids and found.logprobs == fresh.logprobs


async def test_a_session_cut_back_to_another_prompt_does_not_hand_on_its_old_one(serving, ask):
    other = (*LONG[:20], *reversed(LONG[20:]))
    async with serving(share_prompts=False) as engine:
        alone = await complete(LocalEngineClient(engine), ask("b", LONG))
    async with serving() as engine:
        client = LocalEngineClient(engine)
        await complete(client, ask("a", LONG))
        await complete(client, ask("a", other, request_id="anew"))
        found = await complete(client, ask("b", LONG))
    assert found.token_ids == alone.token_ids
    assert np.abs(np.subtract(found.logprobs, alone.logprobs)).max() < 1e-5
