"""At every record of a run's ledger the books balance and engines read what the trainer recorded; one flipped bit anywhere
stops the run, or the replay of its ledger, with an error that says where."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Iterable, Sequence

import msgspec
import pytest
import torch

from etude.coordinator.entries import (
    BatchFormed,
    BatchReturned,
    GroupQueued,
    GroupVoided,
    PromptDrawn,
    Record,
    StepCommitted,
    VersionApplied,
    VersionPublished,
)
from etude.coordinator.ledger import Ledger, LedgerObject, _pack, replay
from etude.coordinator.run import RUN_PREFIX
from etude.coordinator.run_state import Counts
from etude.records.errors import IntegrityError
from etude.weightsync.store import ObjectStore


def recount(objects: Iterable[LedgerObject]) -> Counts:
    """Books of our own, from the records alone: balanced at each record, equal to what each object states, and no engine
    with other weights than were recorded for its version."""
    state: dict[int, str] = {}
    prompts: dict[int, str] = {}
    trained: list[str] = []
    batch: Sequence[int] = ()
    recorded: dict[int, str] = {}
    counts = Counts()
    for entry in objects:
        for record in entry.records:
            match record:
                case PromptDrawn():
                    assert record.draw == len(state)
                    state[record.draw], prompts[record.draw] = "in flight", record.task_id
                case GroupQueued():
                    assert state[record.draw] == "in flight"
                    state[record.draw] = "queued"
                case GroupVoided():
                    assert state[record.draw] in ("in flight", "queued") and record.draw not in batch
                    state[record.draw] = "void"
                case BatchFormed():
                    assert not batch and all(state[draw] == "queued" for draw in record.draws)
                    batch = record.draws
                case BatchReturned():
                    batch = ()
                case StepCommitted():
                    assert record.draws == batch and record.policy_version not in recorded
                    state.update(dict.fromkeys(batch, "trained"))
                    trained += [prompts[draw] for draw in batch]
                    batch = ()
                    recorded[record.policy_version] = record.digest
                case VersionPublished():
                    assert recorded.setdefault(record.policy_version, record.digest) == record.digest
                case VersionApplied():
                    assert recorded[record.policy_version] == record.digest
            values = list(state.values())
            counts = Counts(len(prompts), *(values.count(s) for s in ("in flight", "queued", "trained", "void")))
            assert counts.draws == counts.in_flight + counts.queued + counts.trained + counts.void
            assert len(set(trained)) == len(trained) == counts.trained
        assert entry.counts == counts
    return counts


def flip(data: bytes, bit: int) -> bytes:
    """The bytes with one bit changed."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def flip_live_bit(it, bit: int) -> None:
    """Changes one bit of an FP32 word in a tensor that the engine's forward reads."""
    weights = it.engine.weights.decoder.state_dict()
    name = next(name for name in weights if name.endswith("o_proj.weight"))
    weights[name].view(torch.int32).view(-1)[7] ^= 1 << bit


def trained_steps(it) -> int:
    return sum(isinstance(record, StepCommitted) for record in it.records())


async def fails(it, match: str) -> None:
    """The run ends by an IntegrityError of that text, leaves a sound ledger and nothing that still runs."""
    before = asyncio.all_tasks()
    with pytest.raises(IntegrityError, match=match):
        await it.outcome()
    assert asyncio.all_tasks() <= before
    assert replay(it.store, RUN_PREFIX).state.counts == recount(it.objects())


async def test_books_balance_and_digests_agree_at_every_record_of_an_asynchronous_run(tmp_path, small_run, halves):
    async with small_run(tmp_path, tasks=8, plan=halves, groups_per_batch=2, steps=3, staleness=2) as it:
        outcome = await it.outcome()
        objects = it.objects()
    counts = recount(objects)
    assert counts.trained == outcome.groups_trained == 6 and outcome.steps == 3
    final = replay(it.store, RUN_PREFIX)
    assert final.state.counts == counts and final.state.ended == "steps" and final.number == len(objects) - 1


# -- a: a tensor that an engine reads ----------------------------------------------------------------------------------

VISIBLE, INVISIBLE = 30, 3
"""Bits of an FP32 word that BF16 keeps, and that it drops."""


@pytest.mark.parametrize(("bit", "match"), [(VISIBLE, "live tensors of version"), (INVISIBLE, "live tensor .* cannot")])
@pytest.mark.parametrize("draw", [0, 1])
async def test_a_bit_flipped_in_a_live_tensor_stops_the_run_before_its_tokens_are_trained(
    tmp_path, small_run, halves, memory_pods, bit, match, draw
):
    pods = memory_pods()
    async with small_run(tmp_path, plan=halves, pods=pods, staleness=0) as it:
        flipped = False

        async def strike(spec) -> None:
            nonlocal flipped
            if len(it.run.latest) == 2 * draw and not flipped:
                flipped = True
                flip_live_bit(it, bit)

        pods.on_create = strike
        await fails(it, match)
        assert trained_steps(it) == draw
        assert (await it.engine.health()).fenced
    assert not pods.alive


async def test_a_bit_flipped_in_a_live_tensor_while_a_step_is_made_stops_the_swap(tmp_path, small_run, halves):
    def strike(it, row) -> None:
        flip_live_bit(it, VISIBLE)

    async with small_run(tmp_path, plan=halves, staleness=0, on_row=strike) as it:
        await fails(it, "live tensors of version 0")
        assert trained_steps(it) == 1 and it.engine.weights.policy_version == 0


async def test_one_failing_rollout_ends_its_whole_group_at_once(tmp_path, small_run, halves, memory_pods):
    """The rollouts beside it, in the midst of a tool call, leave neither a task nor a pod behind."""
    pods = memory_pods()
    calls = 0

    async def first_fails_others_hang(pod) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise IntegrityError("an invariant broke inside a rollout")
        await asyncio.Event().wait()

    pods.on_call = first_fails_others_hang
    async with small_run(tmp_path, plan=halves, pods=pods, group_size=4, steps=1) as it:
        await fails(it, "inside a rollout")
        assert not pods.alive and (await it.engine.health()).sessions == 0


# -- b: a published version in the store -------------------------------------------------------------------------------


class Around:
    """A trainer's handle that can be changed call by call."""

    def __init__(self, inner) -> None:
        self._inner = inner

    def __getattr__(self, name: str):
        return getattr(self._inner, name)


@pytest.mark.parametrize("place", ["part", "manifest"])
@pytest.mark.parametrize("version", [0, 1])
async def test_a_bit_flipped_in_a_published_object_stops_the_run_before_the_swap(
    tmp_path, small_run, halves, place, version
):
    def damage() -> None:
        kind = ("anchor" if version == 0 else "delta") if place == "part" else "manifest"
        found = [key for key in it.store.list(f"weights/{kind}") if f"{version:012d}" in key]
        data = it.store.get(found[0])
        it.store.put(found[0], flip(data, 4 * len(data)))

    class Damaging(Around):
        async def publish_first(self):
            made = await self._inner.publish_first()
            if version == 0:
                damage()
            return made

        async def published(self, policy_version: int):
            made = await self._inner.published(policy_version)
            if version == policy_version:
                damage()
            return made

    async with small_run(tmp_path, plan=halves, staleness=0, around_trainer=Damaging) as it:
        await fails(it, "cannot be verified|is damaged")
        assert trained_steps(it) == version
        assert it.engine.weights.policy_version == 0
        assert f"{version:012d}" not in it.engine.weights.manifest_key


# -- c: the ledger -----------------------------------------------------------------------------------------------------


async def test_a_bit_flipped_in_any_ledger_object_stops_replay_and_the_next_coordinator(tmp_path, small_run, halves):
    async with small_run(tmp_path, plan=halves, staleness=0) as it:
        await it.outcome()
        rules = replay(it.store, RUN_PREFIX).state.rules
    rng = random.Random(0)
    keys = it.store.list(f"{RUN_PREFIX}/ledger")
    for key in keys:
        data = it.store.get(key)
        it.store.put(key, flip(data, rng.randrange(8 * len(data))))
        with pytest.raises(IntegrityError, match=f"{key} is damaged"):
            replay(it.store, RUN_PREFIX)
        it.store.put(key, data)
    it.store.put(keys[-1], flip(it.store.get(keys[-1]), 300))
    with pytest.raises(IntegrityError, match="is damaged"):
        await Ledger.open(it.store, RUN_PREFIX, rules)


# -- d: the digest that the trainer recorded ---------------------------------------------------------------------------


def other(digest: str) -> str:
    """The hex digest with its last bit changed."""
    return f"{int(digest, 16) ^ 1:064x}"


async def test_a_step_recorded_with_another_digest_than_is_published_stops_the_run(tmp_path, small_run, halves):
    class Misremembering(Around):
        async def step(self, groups, blobs, policy_version: int):
            report = await self._inner.step(groups, blobs, policy_version)
            return msgspec.structs.replace(report, digest=other(report.digest))

    async with small_run(tmp_path, plan=halves, staleness=0, around_trainer=Misremembering) as it:
        await fails(it, "version 1 is published as step 1.*the trainer recorded")
        assert it.engine.weights.policy_version == 0


async def test_an_engine_that_reports_other_weights_than_were_recorded_stops_the_run(tmp_path, small_run, halves):
    class Misreporting(Around):
        async def apply(self, request):
            reply = await self._inner.apply(request)
            return msgspec.structs.replace(reply, digest=other(reply.digest)) if reply.policy_version else reply

    async with small_run(tmp_path, plan=halves, staleness=0, around_engine=Misreporting) as it:
        await fails(it, "engine engine reads weights .* as version 1; the trainer recorded")


@pytest.mark.parametrize("kind", [StepCommitted, VersionPublished, VersionApplied])
async def test_a_digest_changed_inside_a_ledger_forged_to_its_last_hash_is_found_by_replay(
    tmp_path, small_run, halves, kind
):
    async with small_run(tmp_path, plan=halves, staleness=0) as it:
        await it.outcome()
        objects, keys = it.objects(), it.store.list(f"{RUN_PREFIX}/ledger")

    def forged(record: Record) -> Record:
        if isinstance(record, kind) and record.policy_version == 1:
            return msgspec.structs.replace(record, digest=other(record.digest))
        return record

    previous = ""
    for key, entry in zip(keys, objects):
        records = tuple(map(forged, entry.records))
        data = _pack(msgspec.structs.replace(entry, records=records, previous=previous))
        it.store.put(key, data)
        previous = hashlib.sha256(data).hexdigest()
    with pytest.raises(IntegrityError, match="the trainer recorded"):
        replay(it.store, RUN_PREFIX)


# -- e: a sealed group -------------------------------------------------------------------------------------------------


class FlippingStore(ObjectStore):
    """Keeps every group object with one bit changed, at `share` of its length."""

    share = 0.5

    def put_if_absent(self, key: str, data: bytes) -> None:
        bit = min(8 * len(data) - 1, int(8 * len(data) * self.share))
        super().put_if_absent(key, flip(data, bit) if "/groups/" in key else data)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 1.0])
async def test_a_bit_flipped_in_a_stored_group_stops_the_run_before_it_is_trained(tmp_path, small_run, halves, share):
    def damaged(store: ObjectStore) -> ObjectStore:
        flipping = FlippingStore(store._backend, store.url)
        flipping.share = share
        return flipping

    async with small_run(tmp_path, plan=halves, staleness=0, around_store=damaged) as it:
        await fails(it, r"groups/\w+ is damaged")
        assert trained_steps(it) == 0
        assert [r.reason for r in it.records() if isinstance(r, BatchReturned)] == ["IntegrityError"]


async def test_a_stored_group_exchanged_for_another_sound_one_stops_the_run(tmp_path, small_run, halves):
    class Exchanging(ObjectStore):
        first = b""

        def put_if_absent(self, key: str, data: bytes) -> None:
            if "/groups/" in key:
                self.first = data = self.first or data
            super().put_if_absent(key, data)

    def exchanged(store: ObjectStore) -> ObjectStore:
        return Exchanging(store._backend, store.url)

    async with small_run(tmp_path, plan=halves, staleness=0, around_store=exchanged) as it:
        await fails(it, "holds another group")
        assert trained_steps(it) == 1


async def test_a_bit_flipped_in_an_array_on_its_way_to_the_trainer_stops_the_step(tmp_path, small_run, halves):
    class Lossy(Around):
        async def step(self, groups, blobs, policy_version: int):
            name, blob = next(iter(blobs.items()))
            return await self._inner.step(groups, {**blobs, name: flip(blob, 5)}, policy_version)

    async with small_run(tmp_path, plan=halves, staleness=0, around_trainer=Lossy) as it:
        await fails(it, "not what its name says")
        assert trained_steps(it) == 0
