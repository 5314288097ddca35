"""The thread: one in-process run from a task to the next token of the new weights, with exact expected records; and a
deterministic run twice, bit for bit."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch

from etude.agent.loop import rollout_id
from etude.coordinator.entries import (
    BatchFormed,
    EpochStarted,
    GroupQueued,
    GroupSealed,
    PromptDrawn,
    Record,
    Rules,
    RunEnded,
    SlotMoved,
    StepCommitted,
    VersionApplied,
    VersionPublished,
)
from etude.coordinator.seeds import rollout_seed
from etude.coordinator.slots import SlotState
from etude.inference.weights import live_digest
from etude.model.checkpoint import hf_state, load_hf_state_, load_pretrained
from etude.records.errors import PodLost
from etude.records.rollout import CauseClass, Generation, Group, Rollout, StopReason, encode
from etude.weightsync.chain import decode_manifest
from etude.weightsync.digests import root_digest

SEED = 11


def scripted(actions):
    """What each place of the two groups does."""

    def plan(task, place):
        right, wrong = actions.edit(task, "+"), actions.edit(task, "*")
        if task.name == "shift-2":
            return [
                [right, actions.run, actions.finish],
                [wrong, actions.run, actions.finish],
                [actions.finish],
            ][place]
        return [
            [wrong, actions.run, right, actions.run, actions.finish],
            [actions.run] * 5,
            [right, actions.finish],
        ][place]

    return plan


def edited(k: int, sign: str) -> tuple[object, ...]:
    return ("edit_file", {"old": f" - {k}", "new": f" {sign} {k}"}, True, "", "ok")


def passing() -> tuple[object, ...]:
    return ("run", {}, True, "", "ok")


def failing(got: int, want: int) -> tuple[object, ...]:
    return ("run", {}, False, "failed", f"shift(5) -> {got}, want {want}")


FINISHED = ("finish", {}, True, "", "")
CALLS = [
    [
        [edited(2, "+"), passing(), FINISHED],
        [edited(2, "*"), failing(10, 7), FINISHED],
        [FINISHED],
    ],
    [
        [edited(3, "*"), failing(15, 8), edited(3, "+"), passing(), FINISHED],
        [failing(2, 8)] * 5,
        [edited(3, "+"), FINISHED],
    ],
]
STOPS = [["finish", "finish", "finish"], ["finish", "turn_limit", "finish"]]
PASSED = [[3, 0, 0], [3, 0, 3]]


def expected_total(rollout_calls, ids: Sequence[Sequence[int]], tokenizer, success: bool) -> float:
    """success - 0.05 min(1, C(x) / C(400)), C(x) = ((1 + 0.02 x)^0.5 - 1) / 0.01, x from the counts that one can see."""
    shown = [call[-1] for call in rollout_calls[: len(ids) - 1]]
    output = sum(2 + len(tokenizer.encode(text)) for text in shown)
    x = sum(map(len, ids)) + 0.25 * output + 4 * len(rollout_calls) + 4 * len(ids)

    def cost(effort: float) -> float:
        return ((1 + 0.02 * effort) ** 0.5 - 1) / 0.01

    return float(success) - 0.05 * min(1.0, cost(x) / cost(400))


@torch.no_grad()
def plain_logprobs(decoder, generation: Generation, blobs: dict[str, bytes]) -> np.ndarray:
    """float64 [sampled]: log-probabilities of the sampled ids by one plain forward under the recorded masks."""
    ids = torch.tensor([generation.prompt_ids + generation.sampled_ids])
    logits = decoder.logits(decoder(ids[:, :-1]).hidden)[0, len(generation.prompt_ids) - 1 :].double()
    assert generation.masks is not None
    bits = np.frombuffer(blobs[generation.masks.digest], dtype=np.uint8).reshape(generation.masks.shape)
    allowed = torch.from_numpy(np.unpackbits(bits, axis=1, count=logits.shape[1]).astype(bool))
    logp = logits.masked_fill(~allowed, float("-inf")).log_softmax(-1)
    return logp.gather(1, torch.tensor(generation.sampled_ids)[:, None])[:, 0].numpy()


def weighted_logprob(decoder, group: Group, blobs: dict[str, bytes]) -> float:
    """Sum over the group of advantage times log-probability: what a step along the gradient raises."""
    return sum(
        advantage * sum(float(plain_logprobs(decoder, g, blobs).sum()) for g in rollout.generations)
        for rollout, advantage in zip(group.rollouts, group.advantages)
    )


@pytest.mark.pods
async def test_the_whole_thread_leaves_exactly_the_expected_records(
    tmp_path, small_run, actions, real_pods, tokenizer, model_folder
):
    plan = scripted(actions)
    async with small_run(
        tmp_path, tasks=2, plan=plan, pods=real_pods, group_size=3, seed=SEED, staleness=0, deterministic=True
    ) as it:
        outcome = await it.outcome()
        live = live_digest(it.engine.weights.decoder)
        it.service.save(str(tmp_path / "policy"))
        sealed, records = it.groups(), it.records()
        manifests = [decode_manifest(it.store.get(key), key) for key in it.store.list("weights/manifest")]
        states = [it.weights(f"weights/manifest/{version:012d}.json") for version in range(3)]
    assert (outcome.reason, outcome.steps, outcome.groups_trained, outcome.groups_void) == ("steps", 2, 2, 0)

    # What the agent did and earned.
    ids = [
        [rollout_id(task.id, p, rollout_seed(SEED, task.id, p)) for p in range(3)]
        for task in (it.tasks[0], it.tasks[1])
    ]
    for draw, (group, _) in enumerate(sealed):
        task = it.tasks[draw]
        assert (group.draw, group.task_id, group.oldest_version) == (draw, task.id, draw)
        assert [rollout.id for rollout in group.rollouts] == ids[draw]
        totals = []
        for place, rollout in enumerate(group.rollouts):
            wanted = [list(action) for action in plan(task, place)]
            assert [list(g.sampled_ids) for g in rollout.generations] == wanted
            calls = [(call.name, call.arguments, call.ok, call.error, call.result) for call in rollout.tool_calls]
            assert calls == CALLS[draw][place]
            assert [call.generation for call in rollout.tool_calls] == list(range(len(wanted)))
            assert rollout.stop_reason == STOPS[draw][place] and rollout.cause is CauseClass.POLICY
            assert rollout.well_formed and not rollout.error and rollout.backend == "namespace"
            verdict = rollout.verdict
            success = PASSED[draw][place] == 3
            assert verdict is not None
            assert (verdict.success, verdict.passed, verdict.total, verdict.detail) == (
                success,
                PASSED[draw][place],
                3,
                "",
            )
            edits = [call[1]["new"] for call in CALLS[draw][place] if call[0] == "edit_file"]
            text = task.environment["m.py"].decode()
            assert rollout.diff == ({"m.py": text.replace(f" - {draw + 2}", edits[-1])} if edits else {})
            totals.append(expected_total(CALLS[draw][place], wanted, tokenizer, success))
            assert rollout.rewards["total"] == pytest.approx(totals[-1], rel=1e-12)
            assert {v for g in rollout.generations for v in g.policy_versions} == {draw}
        assert group.advantages == pytest.approx([total - sum(totals) / 3 for total in totals], abs=1e-12)

    # The log-probabilities are those of the published weights of the stamped version, and the step went uphill.
    decoders = [load_pretrained(model_folder) for _ in states]
    for decoder, state in zip(decoders, states):
        load_hf_state_(decoder, state)
    for (group, blobs), decoder in zip(sealed, decoders):
        for rollout in group.rollouts:
            for generation in rollout.generations:
                assert generation.logprobs == pytest.approx(plain_logprobs(decoder, generation, blobs), abs=1e-5)
    for step, (group, blobs) in enumerate(sealed):
        assert weighted_logprob(decoders[step + 1], group, blobs) > weighted_logprob(decoders[step], group, blobs)

    # One chain of weights; trainer, store and engine agree on every bit.
    digests = [root_digest(state) for state in states]
    assert len(set(digests)) == 3 and digests[0] == root_digest(hf_state(load_pretrained(model_folder)))
    assert [(m.kind, m.policy_version, m.step, m.parent, m.parent_digest, m.root_digest) for m in manifests] == [
        ("anchor", 0, 0, None, "", digests[0]),
        ("delta", 1, 1, 0, digests[0], digests[1]),
        ("delta", 2, 2, 1, digests[1], digests[2]),
    ]
    saved = root_digest(hf_state(load_pretrained(tmp_path / "policy")))
    assert digests[2] == live == saved == outcome.digest == it.engine.weights.digest

    # The ledger, record by record.
    expected: list[Record] = [
        EpochStarted(
            epoch=1,
            incarnation=1,
            resumed_step=0,
            rules=Rules(staleness=0, batch_groups=1, group_size=3, tries=3),
        ),
        VersionPublished(
            policy_version=0, step=0, digest=digests[0], manifest_key="weights/manifest/000000000000.json"
        ),
        VersionApplied(engine="engine", policy_version=0, digest=digests[0]),
    ]
    for draw, (group, _) in enumerate(sealed):
        step = draw + 1
        key = f"weights/manifest/{step:012d}.json"
        expected += [
            PromptDrawn(draw=draw, task_id=it.tasks[draw].id, serving_step=draw),
            *(SlotMoved(draw=draw, place=p, state=s) for p in range(3) for s in (SlotState.ACTING, SlotState.DONE)),
            GroupSealed(
                draw=draw,
                rollouts=tuple(ids[draw]),
                oldest_version=draw,
                digest=hashlib.sha256(encode(group)).hexdigest(),
            ),
            GroupQueued(draw=draw),
            BatchFormed(step=step, draws=(draw,)),
            StepCommitted(step=step, draws=(draw,), policy_version=step, digest=digests[step]),
            VersionPublished(policy_version=step, step=step, digest=digests[step], manifest_key=key),
            VersionApplied(engine="engine", policy_version=step, digest=digests[step]),
        ]
    assert records == [*expected, RunEnded(reason="steps")]


async def test_a_swap_in_the_middle_of_a_rollout_shows_in_its_tokens_and_the_group_still_trains(
    tmp_path, small_run, halves, memory_pods
):
    pods = memory_pods()
    async with small_run(tmp_path, tasks=2, plan=halves, pods=pods, staleness=1) as it:

        async def second_group_waits(pod) -> None:
            if b" - 3" in pod.original["m.py"]:
                async with asyncio.timeout(20):
                    while it.engine.weights.policy_version == 0:  # noqa: ASYNC110
                        await asyncio.sleep(0.005)

        pods.on_call = second_group_waits
        outcome = await it.outcome()
        (first, _), (second, _) = it.groups()
    assert outcome.steps == outcome.groups_trained == 2
    assert {v for r in first.rollouts for g in r.generations for v in g.policy_versions} == {0}
    assert [[set(g.policy_versions) for g in r.generations] for r in second.rollouts] == [[{0}, {1}]] * 2
    assert second.oldest_version == 0
    assert [row.staleness_max for row in it.rows] == [0, 1]


class UnsteadyPods:
    """A backend whose pods start sooner or later, as on a busy machine, and every fourth not at all."""

    def __init__(self, inner) -> None:
        self._inner, self._random, self.name = inner, random.Random(0), inner.name
        self._created = 0

    async def create(self, spec):
        await asyncio.sleep(self._random.uniform(0, 0.05))
        self._created += 1
        if self._created % 4 == 0:
            raise PodLost("the pod's process is gone")
        return await self._inner.create(spec)


def timeless(rollout: Rollout) -> Rollout:
    """The record without the verifier's wall-clock time, which a run may not repeat."""
    assert rollout.verdict is not None
    return msgspec.structs.replace(rollout, verdict=msgspec.structs.replace(rollout.verdict, duration_s=0.0))


@pytest.mark.pods
async def test_two_deterministic_runs_end_bit_equal_though_pods_fail_in_one(tmp_path, small_run, real_pods):
    runs = []
    repairs = []
    for number, pods in enumerate((real_pods, UnsteadyPods(real_pods))):
        async with small_run(
            tmp_path / str(number),
            pods=pods,
            groups_per_batch=2,
            staleness=0,
            deterministic=True,
            agent={"max_turns": 3, "max_field_tokens": 6, "tools": ("edit_file", "run"), "pod_attempts": 1},
        ) as it:
            outcome = await it.outcome()
            records = it.records()
        groups = [(group.task_id, [timeless(r) for r in group.rollouts]) for group, _ in it.groups()]
        trained = [record.draws for record in records if isinstance(record, StepCommitted)]
        moves = [record for record in records if isinstance(record, SlotMoved)]
        order = [(record.draw, record.place) for record in moves]
        assert order == sorted(order)
        repairs.append(sum(move.state is SlotState.WAITING for move in moves))
        runs.append((outcome.digest, groups, trained))
    assert runs[0] == runs[1]
    assert repairs[0] == 0 < repairs[1]
    _, groups, trained = runs[0]
    assert trained == [(0, 1), (2, 3)] and len({task for task, _ in groups}) == 4
    rollouts = [rollout for _, group in groups for rollout in group]
    assert len({g.sampled_ids for r in rollouts for g in r.generations}) > 8
    assert any(r.stop_reason is StopReason.TURN_LIMIT for r in rollouts)
