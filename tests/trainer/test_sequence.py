"""Rollout records to rows of tokens: what was sampled is trained on once, with what it was sampled with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.records.errors import BadInput, IntegrityError
from etude.records.rollout import BlobRef, Generation, Group, Rollout, SamplingParams, StopReason
from etude.trainer.sequence import group_sequences, rollout_sequence


@dataclass
class Blobs:
    """An in-memory blob store."""

    held: dict[str, bytes] = field(default_factory=dict)

    def keep(self, array: np.ndarray) -> BlobRef:
        data = np.ascontiguousarray(array).tobytes()
        digest = hashlib.sha256(data).hexdigest()
        self.held[digest] = data
        return BlobRef(digest=digest, dtype=str(array.dtype), shape=array.shape)

    def read(self, digest: str) -> bytes:
        return self.held[digest]


def _generation(
    index: int,
    prompt: tuple[int, ...],
    sampled: tuple[int, ...],
    *,
    link: str = "turn",
    routes: BlobRef | None = None,
    masks: BlobRef | None = None,
    temperature: float = 1.0,
) -> Generation:
    return Generation(
        index=index,
        link=link,
        prompt_ids=prompt,
        sampled_ids=sampled,
        logprobs=tuple(-(index + 1) - 0.01 * i for i in range(len(sampled))),
        policy_versions=tuple(10 * index + i for i in range(len(sampled))),
        spans=(),
        sampling=SamplingParams(temperature=temperature, max_tokens=9, seed=0, stop_ids=()),
        finish="stop",
        engine_id="e",
        chat_format_id="c",
        routes=routes,
        masks=masks,
    )


def _rollout(*generations: Generation, name: str = "r", forked_from: tuple[str, int] | None = None) -> Rollout:
    return Rollout(
        id=name,
        task_id="t",
        attempt=0,
        seed=0,
        generations=generations,
        tool_calls=(),
        stop_reason=StopReason.FINISH,
        forked_from=forked_from,
    )


def _nothing(digest: str) -> bytes:
    raise AssertionError(f"no blob is expected, {digest} was asked for")


def test_turns_append_to_one_row_and_each_token_keeps_its_own_record() -> None:
    first = _generation(0, (1, 2, 3), (4, 5))
    second = _generation(1, (1, 2, 3, 4, 5, 6), (7, 8), temperature=0.6)
    (row,) = rollout_sequence(_rollout(first, second), 0.5, _nothing).rows
    assert row.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert np.flatnonzero(row.sampled).tolist() == [3, 4, 6, 7]
    assert row.mu[row.sampled].tolist() == [-1.0, -1.01, -2.0, -2.01]
    assert row.versions[row.sampled].tolist() == [0, 1, 10, 11]
    assert row.temperature[row.sampled].tolist() == pytest.approx([1.0, 1.0, 0.6, 0.6])
    assert row.masks is None and row.routes is None and not row.routes_valid.any()


def test_a_summary_starts_a_new_row_in_which_the_summary_is_prompt() -> None:
    first = _generation(0, (1, 2), (3, 4))
    second = _generation(1, (1, 9, 3, 4), (5,), link="summary")
    third = _generation(2, (1, 9, 3, 4, 5, 7), (8,))
    sequence = rollout_sequence(_rollout(first, second, third), 1.0, _nothing)
    assert [row.ids[row.sampled].tolist() for row in sequence.rows] == [[3, 4], [5, 8]]
    assert sequence.sampled_tokens == 4


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5), st.booleans()), min_size=1, max_size=6), st.integers(0, 12)
)
def test_every_sampled_token_of_a_chain_occurs_once_in_order(
    turns: list[tuple[int, int, bool]], inherited: int
) -> None:
    generations, held, number, sampled_ids = [], (), 0, []
    for index, (new, count, summary) in enumerate(turns):
        prompt = (() if summary else held) + tuple(range(number, number + new))
        number += new
        sampled = tuple(range(1000 + number, 1000 + number + count))
        number += count
        generations.append(_generation(index, prompt, sampled, link="summary" if summary and index else "turn"))
        held = prompt + sampled
        sampled_ids.extend(sampled)
    whole = rollout_sequence(_rollout(*generations), 1.0, _nothing)
    got = [int(i) for row in whole.rows for i in row.ids[row.sampled]]
    assert got == sampled_ids
    fork = rollout_sequence(_rollout(*generations, forked_from=("r", inherited)), 1.0, _nothing)
    assert [int(i) for row in fork.rows for i in row.ids[row.sampled]] == sampled_ids[inherited:]


def test_a_fork_and_its_parent_count_each_sampled_token_once() -> None:
    # prime-rl#2975: a sampled message shared by k branches got k times the gradient
    shared = _generation(0, (1, 2), (3, 4))
    parent = _rollout(shared, _generation(1, (1, 2, 3, 4, 5), (6,)), name="p")
    child = _rollout(shared, _generation(1, (1, 2, 3, 4, 5), (7,)), name="c", forked_from=("p", 2))
    counts: dict[int, int] = {}
    for rollout in (parent, child):
        for row in rollout_sequence(rollout, 1.0, _nothing).rows:
            for token in row.ids[row.sampled].tolist():
                counts[token] = counts.get(token, 0) + 1
    assert counts == {3: 1, 4: 1, 6: 1, 7: 1}


def test_routes_of_a_position_are_those_that_its_first_tokens_were_sampled_under() -> None:
    blobs = Blobs()
    old = np.full((4, 2, 2), 1, np.uint8)
    new = np.full((7, 2, 2), 5, np.uint8)
    first = _generation(0, (1, 2, 3), (4, 5), routes=blobs.keep(old))
    second = _generation(1, (1, 2, 3, 4, 5, 6), (7, 8), routes=blobs.keep(new))
    (row,) = rollout_sequence(_rollout(first, second), 1.0, blobs.read).rows
    assert row.routes is not None and row.routes.shape == (7, 2, 2) and row.routes_valid.all()
    assert row.routes[:, 0, 0].tolist() == [1, 1, 1, 1, 5, 5, 5]


def test_missing_routes_of_one_generation_leave_its_positions_to_the_router() -> None:
    blobs = Blobs()
    first = _generation(0, (1, 2, 3), (4,), routes=blobs.keep(np.ones((3, 2, 2), np.uint8)))
    second = _generation(1, (1, 2, 3, 4, 6), (7,))
    (row,) = rollout_sequence(_rollout(first, second), 1.0, blobs.read).rows
    assert row.routes_valid.tolist() == [True, True, True, False, False]


def _mask(*allowed: set[int], vocab: int = 10) -> np.ndarray:
    return np.packbits([[i in ids for i in range(vocab)] for ids in allowed], axis=1)


def test_masks_follow_the_sampled_tokens_and_unmasked_generations_allow_everything() -> None:
    blobs = Blobs()
    first = _generation(0, (1,), (4, 9), masks=blobs.keep(_mask({4, 5}, {9})))
    second = _generation(1, (1, 4, 9, 2), (3,))
    (row,) = rollout_sequence(_rollout(first, second), 1.0, blobs.read).rows
    assert row.masks is not None
    bits = np.unpackbits(row.masks, axis=1, count=10).astype(bool)
    assert [np.flatnonzero(b).tolist() for b in bits[:2]] == [[4, 5], [9]] and bits[2].all()


def test_what_does_not_fit_stops_the_run() -> None:
    blobs = Blobs()
    first = _generation(0, (1, 2), (3, 4))
    with pytest.raises(IntegrityError, match="does not begin with the 4 ids"):
        rollout_sequence(_rollout(first, _generation(1, (1, 2, 3, 5), (6,))), 1.0, _nothing)
    with pytest.raises(IntegrityError, match="link"):
        rollout_sequence(_rollout(first, _generation(1, (1, 2, 3, 4), (6,), link="branch")), 1.0, _nothing)
    forbidding = _generation(0, (1,), (4, 9), masks=blobs.keep(_mask({4}, {8})))
    with pytest.raises(IntegrityError, match="forbids sampled token 1, id 9"):
        rollout_sequence(_rollout(forbidding), 1.0, blobs.read)
    short = _generation(0, (1, 2), (3, 4), routes=blobs.keep(np.ones((2, 2, 2), np.uint8)))
    with pytest.raises(IntegrityError, match="routes are uint8"):
        rollout_sequence(_rollout(short), 1.0, blobs.read)
    ref = blobs.keep(np.ones((3, 2, 2), np.uint8))
    damaged = {ref.digest: b"\0" + blobs.held[ref.digest][1:]}
    with pytest.raises(IntegrityError, match="another digest"):
        rollout_sequence(_rollout(_generation(0, (1, 2), (3, 4), routes=ref)), 1.0, damaged.__getitem__)
    with pytest.raises(BadInput, match="advantage"):
        rollout_sequence(_rollout(first), float("nan"), _nothing)


def test_a_group_pairs_advantages_with_rollouts() -> None:
    rollouts = tuple(_rollout(_generation(0, (1,), (2,)), name=f"r{i}") for i in range(2))
    group = Group(id="g", draw=0, task_id="t", rollouts=rollouts, advantages=(0.5, -0.5), oldest_version=0)
    assert [(s.id, s.group_id, s.advantage) for s in group_sequences(group, _nothing)] == [
        ("r0", "g", 0.5),
        ("r1", "g", -0.5),
    ]
    uneven = Group(id="g", draw=0, task_id="t", rollouts=rollouts, advantages=(0.5,), oldest_version=0)
    with pytest.raises(BadInput, match="advantages"):
        group_sequences(uneven, _nothing)
