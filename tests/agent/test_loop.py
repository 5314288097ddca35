"""The loop: tokens stay what was sampled, every stop reason, budgets, order of results, causes, cancellation."""

import asyncio
from itertools import count

import msgspec
import pytest

from etude.agent.config import AgentConfig
from etude.agent.loop import AgentOptions, run_rollout
from etude.agent.scripted import ScriptedEngine
from etude.chat.format import TOOL
from etude.environments.pod import PodRefused
from etude.inference.protocol import EngineRefused, FaultKind
from etude.records.errors import BadInput, EngineError, IntegrityError, PodLost, PrefixMismatch
from etude.records.rollout import CauseClass, StopReason, Verdict
from etude.records.task import Limits

FREE = AgentConfig(grammar=False, tools=("read_file", "edit_file", "run", "grep", "finish"), max_calls=8)


@pytest.fixture
def roll(tokenizer, pods, make_task):
    """Runs one rollout of a scripted list of actions (the last one repeats)."""

    async def run(actions_or_engine, *, task=None, config=FREE, resume=None, **options):
        engine = actions_or_engine
        if isinstance(actions_or_engine, list):
            numbers = count()
            engine = ScriptedEngine(lambda ids: actions_or_engine[min(next(numbers), len(actions_or_engine) - 1)])
        return await run_rollout(
            task or make_task(),
            attempt=0,
            seed=7,
            engine=engine,
            pods=pods,
            tokenizer=tokenizer,
            options=AgentOptions(config=config, **{"verify": False, **options}),
            resume=resume,
        )

    return run


def non_canonical(tokenizer, text):
    """Ids of `text` byte by byte: a split that encoding never gives."""
    return [tokenizer.token_bytes.index(bytes([byte])) for byte in text.encode()]


async def test_trained_ids_equal_emitted_ids_over_turns_with_non_canonical_splits(roll, tokenizer, actions):
    special = tokenizer.special
    emitted = [
        [
            special["<|edit_file|>"],
            special["<|old|>"],
            *non_canonical(tokenizer, "x > low"),
            special["<|new|>"],
            *non_canonical(tokenizer, "x == low"),
            tokenizer.end_id,
        ],
        [special["<|think|>"], *non_canonical(tokenizer, "hello"), special["<|run|>"], tokenizer.end_id],
        actions.finish(),
    ]
    assert tokenizer.encode("x == low") != non_canonical(tokenizer, "x == low")
    rollout = await roll(emitted)
    assert [list(generation.sampled_ids) for generation in rollout.generations] == emitted
    assert rollout.tool_calls[0].ok and rollout.tool_calls[0].arguments == {"old": "x > low", "new": "x == low"}
    for before, after in zip(rollout.generations, rollout.generations[1:]):
        known = before.prompt_ids + before.sampled_ids
        assert after.prompt_ids[: len(known)] == known
        new = after.prompt_ids[len(known) :]
        assert new[0] == special[TOOL]  # the action ended itself, so nothing stands between it and its result
        assert len(new) < 80


async def test_only_new_tokens_are_sent_and_the_session_is_closed(roll, actions):
    sent = []

    class Listening(ScriptedEngine):
        async def generate(self, request):
            sent.append(request)
            async for event in super().generate(request):
                yield event

    plan = iter([actions.edit(), actions.run(), actions.finish()])
    engine = Listening(lambda ids: next(plan))
    rollout = await roll(engine)
    assert rollout.stop_reason is StopReason.FINISH
    assert len(sent) == 3 and len({request.session_id for request in sent}) == 1
    total = sum(len(request.new_token_ids) for request in sent)
    last = rollout.generations[-1]
    assert total == len(last.prompt_ids) - sum(len(g.sampled_ids) for g in rollout.generations[:-1])
    assert (await engine.health()).sessions == 0


async def test_every_stop_reason_is_reached(roll, tokenizer, actions, pods, make_task):
    def limited(**limits):
        base = {"max_turns": 10, "max_sampled_tokens": 400, "max_context_tokens": 2000}
        return make_task(limits=Limits(**{**base, **limits}))

    nonsense = [tokenizer.special["<|path|>"], tokenizer.end_id]
    opening = len((await roll([actions.finish()])).generations[0].prompt_ids)
    reached = {
        "finish": await roll([actions.edit(), actions.finish()]),
        "final_message": await roll([actions.run(), actions.say("done")]),
        "malformed": await roll([nonsense]),
        "turn_limit": await roll([actions.run()], task=limited(max_turns=3)),
        "token_limit": await roll([actions.run()], task=limited(max_sampled_tokens=6)),
        "context_limit": await roll([actions.run()], task=limited(max_context_tokens=opening + 30)),
    }
    pods.delays["run"] = 0.03
    reached["time_limit"] = await roll([actions.run()], task=limited(agent_timeout_s=0.05))
    reached["infrastructure"] = await roll(AlwaysFails(EngineError("gone")))
    cancel = asyncio.Event()
    cancel.set()
    reached["cancelled"] = await roll([actions.run()], cancel=cancel)
    assert {name: str(rollout.stop_reason) for name, rollout in reached.items()} == {name: name for name in StopReason}
    for name, rollout in reached.items():
        outside = name in ("infrastructure", "cancelled")
        assert rollout.cause is (CauseClass.INFRASTRUCTURE if outside else CauseClass.POLICY), name
        assert bool(rollout.error) is outside
    assert all(pod.closed for pod in pods.pods)


class AlwaysFails(ScriptedEngine):
    """Raises `error` on the calls named in `at` (all by default), before or after sampling."""

    def __init__(self, error, script=lambda ids: [], at=None, after_sampling=False):
        super().__init__(script)
        self.error, self.at, self.after_sampling, self.asked = error, at, after_sampling, 0

    async def generate(self, request):
        self.asked += 1
        failing = self.at is None or self.asked - 1 in self.at
        if failing and not self.after_sampling:
            raise self.error
        async for event in super().generate(request):
            if failing:
                raise self.error
            yield event


async def test_a_lost_answer_is_asked_for_again_and_nothing_is_sampled_twice(roll, actions):
    plan = iter([actions.edit(), actions.run(), actions.finish()])
    engine = AlwaysFails(EngineError("reset"), lambda ids: next(plan), at={0, 2, 4}, after_sampling=True)
    rollout = await roll(engine)
    assert rollout.stop_reason is StopReason.FINISH and rollout.retries == 3
    assert [list(g.sampled_ids) for g in rollout.generations] == [actions.edit(), actions.run(), actions.finish()]
    assert engine.sampled == sum(len(g.sampled_ids) for g in rollout.generations)


async def test_a_foreign_prefix_goes_on_in_a_new_session_with_all_ids(roll, actions):
    plan = iter([actions.edit(), actions.run(), actions.finish()])
    sent = []

    class Forgetful(ScriptedEngine):
        async def generate(self, request):
            if len(sent) == 1:
                self._sessions.clear()
            sent.append(request)
            async for event in super().generate(request):
                yield event

    rollout = await roll(Forgetful(lambda ids: next(plan)))
    assert rollout.stop_reason is StopReason.FINISH and rollout.retries == 1
    assert sent[2].session_id != sent[1].session_id
    assert sent[2].new_token_ids == rollout.generations[1].prompt_ids
    assert len(sent[3].new_token_ids) < 60


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 11, 24])
async def test_the_budget_of_sampled_tokens_holds_over_turns_and_retries(roll, actions, make_task, budget):
    task = make_task(limits=Limits(max_turns=50, max_sampled_tokens=budget, max_context_tokens=3000))
    script = lambda ids: actions.edit(new="x == low")  # noqa: E731
    engine = AlwaysFails(EngineError("reset"), script, at={0, 1, 3}, after_sampling=True)
    rollout = await roll(engine, task=task, config=FREE.model_copy(update={"malformed_limit": 99}))
    total = sum(len(generation.sampled_ids) for generation in rollout.generations)
    assert total == budget and rollout.stop_reason is StopReason.TOKEN_LIMIT
    for generation in rollout.generations:
        assert generation.sampling.max_tokens <= budget


async def test_prompt_and_action_never_exceed_the_context(roll, actions, make_task):
    opening = len((await roll([actions.finish()])).generations[0].prompt_ids)
    for room in range(1, 60, 4):
        task = make_task(limits=Limits(max_turns=50, max_sampled_tokens=9999, max_context_tokens=opening + room))
        rollout = await roll([actions.run()], task=task, config=FREE.model_copy(update={"malformed_limit": 99}))
        assert rollout.stop_reason is StopReason.CONTEXT_LIMIT
        assert all(len(g.prompt_ids) + len(g.sampled_ids) <= opening + room for g in rollout.generations)


async def test_results_come_in_the_order_of_the_calls_and_reads_run_together(roll, actions, pods):
    pods.delays.update(read_file=0.05, grep=0.01, edit_file=0.01)
    call = actions.call(
        ("read_file", {"path": "m.py"}),
        ("grep", {"pattern": "clamp"}),
        ("edit_file", {"old": "x > low", "new": "x < low"}),
        ("read_file", {"path": "m.py"}),
        ("grep", {"pattern": "low"}),
        ("run", {}),
    )
    rollout = await roll([call, actions.finish()])
    calls = rollout.tool_calls[:6]
    assert [c.name for c in calls] == ["read_file", "grep", "edit_file", "read_file", "grep", "run"]
    assert "x > low" in calls[0].result and "x < low" in calls[3].result and calls[5].result == "ok"
    done = [name for name, _ in pods.finished]
    assert done == ["grep", "read_file", "edit_file", "grep", "read_file", "run"]
    assert pods.most_running == 2


async def test_calls_behind_finish_and_beyond_the_limit_do_not_run(roll, actions, pods):
    rollout = await roll([actions.call(("run", {}), ("finish", {}), ("run", {}))])
    assert [c.error for c in rollout.tool_calls] == ["", "", "not_run"] or rollout.tool_calls[0].error == "failed"
    assert rollout.stop_reason is StopReason.FINISH and len(pods.calls) == 1
    few = FREE.model_copy(update={"max_calls": 1})
    rollout = await roll([actions.call(("run", {}), ("run", {})), actions.finish()], config=few)
    assert rollout.tool_calls[1].error == "not_run" and "at most 1" in rollout.tool_calls[1].result


async def test_a_malformed_action_gets_an_error_result_the_policy_can_act_on(roll, tokenizer, actions):
    broken = actions.call(("edit_file", {"old": "x > low"}))
    rollout = await roll([broken, actions.edit(), actions.finish()])
    assert rollout.stop_reason is StopReason.FINISH and not rollout.well_formed
    assert rollout.tool_calls[0].error == "malformed" and rollout.tool_calls[0].result == "error: missing new"
    told = tokenizer.encode("error: missing new")
    prompt = list(rollout.generations[1].prompt_ids)
    assert any(prompt[i : i + len(told)] == told for i in range(len(prompt)))


async def test_a_failing_test_run_is_well_formed_and_a_missing_span_is_not(roll, actions):
    assert (await roll([actions.run(), actions.finish()])).well_formed
    assert not (await roll([actions.edit("nowhere", "b"), actions.finish()])).well_formed


@pytest.mark.parametrize(
    ("fault", "stop", "cause", "words"),
    [
        ("engine dies", StopReason.INFRASTRUCTURE, CauseClass.INFRASTRUCTURE, "EngineError: gone"),
        ("engine refuses", StopReason.INFRASTRUCTURE, CauseClass.INFRASTRUCTURE, "too_long"),
        ("engine forgets for ever", StopReason.INFRASTRUCTURE, CauseClass.INFRASTRUCTURE, "PrefixMismatch"),
        ("engine is silent", StopReason.INFRASTRUCTURE, CauseClass.INFRASTRUCTURE, "nothing for"),
        ("pod cannot start", StopReason.INFRASTRUCTURE, CauseClass.INFRASTRUCTURE, "no room"),
        ("pod is lost twice", StopReason.INFRASTRUCTURE, CauseClass.INFRASTRUCTURE, "PodLost"),
        ("pod is silent", StopReason.INFRASTRUCTURE, CauseClass.INFRASTRUCTURE, "no answer"),
        ("pod is lost once", StopReason.FINISH, CauseClass.POLICY, ""),
        ("engine fails once", StopReason.FINISH, CauseClass.POLICY, ""),
        ("tests time out", StopReason.FINISH, CauseClass.POLICY, ""),
        ("tests run out of memory", StopReason.FINISH, CauseClass.POLICY, ""),
    ],
)
async def test_causes_are_told_apart(roll, actions, pods, make_task, fault, stop, cause, words):
    plan = iter([actions.edit(), actions.run(), actions.finish()])
    script = lambda ids: next(plan)  # noqa: E731
    engine, config, task = ScriptedEngine(script), FREE, None
    if fault == "engine dies":
        engine = AlwaysFails(EngineError("gone"))
    elif fault == "engine refuses":
        engine = AlwaysFails(EngineRefused(FaultKind.TOO_LONG, "40 tokens"))
    elif fault == "engine forgets for ever":
        engine = AlwaysFails(PrefixMismatch("other ids"))
    elif fault == "engine fails once":
        engine = AlwaysFails(EngineError("reset"), script, at={1})
    elif fault == "engine is silent":
        config = FREE.model_copy(update={"engine_idle_s": 0.02, "engine_attempts": 2})
        engine = Silent(script)
    elif fault == "pod cannot start":
        pods.create_errors = [PodLost("no room"), PodLost("no room")]
    elif fault == "pod is lost twice":
        pods.lose_at = {1, 3}
    elif fault == "pod is lost once":
        pods.lose_at = {1}
    elif fault == "pod is silent":
        config = FREE.model_copy(update={"pod_grace_s": 0.01})
        pods.delays["run"] = 9.0
        task = make_task(limits=Limits(tool_timeout_s=0.02, max_context_tokens=2000))
    elif fault == "tests time out":
        pods.answers["run"] = lambda *_: {
            "ok": False,
            "timed_out": True,
            "error": "timeout",
            "text": "timeout after 5 s",
        }
    elif fault == "tests run out of memory":
        pods.answers["run"] = lambda *_: {"ok": False, "oom": True, "error": "failed", "text": "killed"}
    rollout = await roll(engine, task=task, config=config)
    assert (rollout.stop_reason, rollout.cause) == (stop, cause), rollout.error
    assert words in rollout.error
    assert all(pod.closed for pod in pods.pods)
    if fault == "tests time out":
        assert rollout.tool_calls[1].timed_out and rollout.well_formed
    if fault == "tests run out of memory":
        assert rollout.tool_calls[1].out_of_memory


class Silent(ScriptedEngine):
    """Accepts every request and never answers."""

    async def generate(self, request):
        await asyncio.sleep(60)
        yield  # pragma: no cover


async def test_a_rebuilt_pod_has_replayed_the_recorded_changes(roll, actions, pods):
    pods.lose_at = {1}
    rollout = await roll([actions.edit(), actions.run(), actions.finish()])
    assert rollout.stop_reason is StopReason.FINISH and rollout.retries == 1
    assert [c.result for c in rollout.tool_calls] == ["ok", "ok", ""]
    assert len(rollout.generations) == 3 and len(pods.pods) == 2
    assert rollout.diff["m.py"] == pods.pods[1].files["m.py"].decode()
    assert [name for name, _, _ in pods.calls] == ["edit_file", "run", "edit_file", "run"]


async def test_a_rebuilt_pod_that_answers_differently_is_infrastructure(roll, actions, pods):
    pods.lose_at = {1}
    numbers = count()
    pods.answers["edit_file"] = lambda *_: {"text": f"ok {next(numbers)}"}
    rollout = await roll([actions.edit(), actions.run(), actions.finish()])
    assert rollout.stop_reason is StopReason.INFRASTRUCTURE and "differently" in rollout.error


async def test_a_broken_invariant_is_raised_and_not_scored(roll, pods):
    with pytest.raises(IntegrityError):
        await roll(AlwaysFails(IntegrityError("digest")))
    assert all(pod.closed for pod in pods.pods)


async def test_cancelling_leaves_a_cancelled_record_and_no_pod(roll, actions, pods):
    pods.delays["run"] = 30.0
    kept = []
    running = asyncio.ensure_future(roll([actions.edit(), actions.run()], on_cancelled=kept.append))
    await pods.reached(2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert kept[0].stop_reason is StopReason.CANCELLED and len(kept[0].generations) == 1
    assert all(pod.closed for pod in pods.pods)
    cancel = asyncio.Event()
    running = asyncio.ensure_future(roll([actions.edit(), actions.run()], cancel=cancel))
    await pods.reached(4)
    cancel.set()
    rollout = await running
    assert rollout.stop_reason is StopReason.CANCELLED and rollout.rewards == {}
    assert all(pod.closed for pod in pods.pods)


async def test_without_a_clock_two_runs_give_equal_records(roll, actions):
    plan = [actions.edit(new="x >= low"), actions.run(), actions.edit(), actions.run(), actions.finish()]
    first = await roll(plan, clock=lambda: 0.0, unix_time=lambda: 0.0)
    second = await roll(plan, clock=lambda: 0.0, unix_time=lambda: 0.0)
    assert first == second and first.timings.total_s == 0.0


@pytest.mark.parametrize("kept", range(5))
async def test_a_rollout_resumed_after_any_action_ends_as_if_never_stopped(roll, actions, pods, kept):
    plan = [
        actions.call(("read_file", {"path": "m.py"}), ("edit_file", {"old": "x > low", "new": "x >= low"})),
        actions.run(),
        actions.edit(),
        actions.call(("run", {}), ("run", {"command": ""})),
        actions.finish(),
    ]
    still = {"clock": lambda: 0.0, "unix_time": lambda: 0.0}
    whole = await roll(plan, **still)
    cut = msgspec.structs.replace(
        whole,
        generations=whole.generations[:kept],
        tool_calls=tuple(call for call in whole.tool_calls if call.generation < kept),
        stop_reason=StopReason.CANCELLED,
    )
    assert await roll(plan[kept:], resume=cut, **still) == whole
    assert all(pod.closed for pod in pods.pods)


async def test_a_resumed_rollout_gets_no_budget_twice(roll, actions, make_task):
    task = make_task(limits=Limits(max_turns=6, max_sampled_tokens=9, max_context_tokens=3000))
    whole = await roll([actions.run()], task=task)
    cut = msgspec.structs.replace(whole, generations=whole.generations[:3], tool_calls=whole.tool_calls[:3])
    again = await roll([actions.run()], task=task, resume=cut)
    assert sum(len(g.sampled_ids) for g in again.generations) == 9
    with pytest.raises(BadInput, match="toolset_id"):
        await roll([actions.run()], task=task, resume=msgspec.structs.replace(cut, toolset_id="other"))


@pytest.mark.parametrize(
    ("verdict", "stop", "total"),
    [
        (Verdict(success=True, passed=2, total=2), StopReason.FINISH, 1.0),
        (Verdict(success=False, passed=0, total=2, detail="timeout"), StopReason.FINISH, 0.0),
        (
            Verdict(success=False, passed=0, total=0, cause=CauseClass.INFRASTRUCTURE, detail="lost"),
            StopReason.INFRASTRUCTURE,
            None,
        ),
    ],
)
async def test_the_verdicts_cause_decides_whether_there_is_a_reward(roll, actions, monkeypatch, verdict, stop, total):
    async def verify(task, changed, pods):
        assert set(changed) == {"m.py"}
        return verdict

    monkeypatch.setattr("etude.agent.loop.verify", verify)
    rollout = await roll([actions.edit(), actions.finish()], verify=True)
    assert rollout.stop_reason is stop and rollout.verdict == verdict
    if total is None:
        assert rollout.rewards == {}
    else:
        assert total - 0.05 <= rollout.rewards["total"] < total


async def test_a_link_in_place_of_the_changed_file_scores_nothing(roll, actions, pods):
    def run(tool, arguments):
        pods.pods[-1].links.add("m.py")
        return {"text": "ok"}

    pods.answers["run"] = run
    rollout = await roll([actions.run(), actions.finish()], verify=True)
    assert rollout.verdict is not None and not rollout.verdict.success
    assert "not a regular file" in rollout.verdict.detail and rollout.diff == {}
    assert rollout.cause is CauseClass.POLICY


@pytest.mark.parametrize(
    ("error", "stop"),
    [
        ("no_processes", StopReason.FINISH),
        ("disk_full", StopReason.FINISH),
        ("unknown_verb", StopReason.INFRASTRUCTURE),
    ],
)
async def test_a_refusal_by_the_pod_is_the_policys_unless_only_the_harness_can_cause_it(
    roll, actions, pods, error, stop
):
    def refuse(tool, arguments):
        raise PodRefused(error, "said no")

    pods.answers["run"] = refuse
    rollout = await roll([actions.run(), actions.finish()])
    assert rollout.stop_reason is stop
    if stop is StopReason.FINISH:
        assert rollout.tool_calls[0].error == error and rollout.tool_calls[0].result == error.replace("_", " ")


async def test_files_are_read_only_after_all_the_agent_left_running_is_dead(roll, actions, pods):
    await roll([actions.edit(), actions.finish()])
    assert pods.signals == [("all", 9)]


async def test_a_rollout_that_calls_nothing_starts_no_pod(roll, actions, pods):
    rollout = await roll([actions.say("cannot")])
    assert rollout.stop_reason is StopReason.FINAL_MESSAGE and pods.pods == []
    assert rollout.effort.final_tokens == len(actions.say("cannot"))
