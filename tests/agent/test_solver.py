"""The scripted solver: its demonstrations are ordinary rollouts that try again by themselves and end solved."""

import random

from etude.agent.config import AgentConfig
from etude.agent.loop import AgentOptions
from etude.agent.solver import MAX_EDITS, RepairScript, demonstrations, is_solved, other_mutations, right_edit
from etude.agent.state import Episode
from etude.agent.tools.registry import ToolSet
from etude.records.rollout import StopReason

OPTIONS = AgentOptions(verify=False)


async def test_demonstrations_are_ordinary_rollouts_that_replay(tokenizer, pods, make_task):
    task, seen = make_task(), []
    made = await demonstrations(
        [task],
        tokenizer=tokenizer,
        pods=pods,
        n=12,
        seed=3,
        progress=lambda done, n: seen.append((done, n)),
        wrong_probability=0.6,
    )
    assert len(made) == 12 and seen[-1] == (12, 12)
    for rollout in made:
        assert rollout.stop_reason is StopReason.FINISH and rollout.well_formed and is_solved(rollout)
        episode = Episode(task, seed=3, tokenizer=tokenizer, config=AgentConfig(), toolset=ToolSet.of(AgentConfig()))
        assert episode.replay(rollout.generations, rollout.tool_calls).stop is StopReason.FINISH
        names = [call.name for call in rollout.tool_calls]
        edits = names.count("edit_file")
        assert names == ["edit_file", "run"] * edits + ["finish"] and 1 <= edits <= MAX_EDITS
        tried = [tuple(call.arguments.items()) for call in rollout.tool_calls if call.name == "edit_file"]
        assert len(set(tried)) == len(tried)
    assert len({rollout.tool_calls[0].arguments["new"] for rollout in made}) > 1


async def test_the_same_seed_gives_the_same_demonstrations(tokenizer, pods, make_task):
    runs = [
        await demonstrations([make_task()], tokenizer=tokenizer, pods=pods, n=4, seed=seed, options=OPTIONS)
        for seed in (5, 5, 6)
    ]
    ids = [[g.sampled_ids for rollout in run for g in rollout.generations] for run in runs]
    assert ids[0] == ids[1] != ids[2]


async def test_a_solver_that_is_never_wrong_needs_one_edit(tokenizer, pods, make_task):
    (rollout,) = await demonstrations([make_task()], tokenizer=tokenizer, pods=pods, n=1, seed=0, wrong_probability=0.0)
    assert [call.name for call in rollout.tool_calls] == ["edit_file", "run", "finish"]
    assert rollout.diff == {"m.py": make_task().solution["m.py"].decode()}


async def test_tasks_without_a_short_solving_edit_are_left_out(tokenizer, pods, make_task):
    rewritten = make_task(solution={"m.py": b"".join(b"def f%d(): return %d\n" % (i, i) for i in range(40))})
    assert right_edit(rewritten, tokenizer, longest=24) is None
    assert await demonstrations([rewritten], tokenizer=tokenizer, pods=pods, n=2, seed=0) == []


def test_wrong_edits_are_plausible_and_parse(make_task):
    text = make_task().environment["m.py"].decode()
    texts = other_mutations(make_task(), text)
    assert len(texts) >= 2 and text not in texts
    for candidate in texts:
        compile(candidate, "m.py", "exec")


def test_the_last_allowed_edit_is_right(tokenizer, make_task):
    task = make_task()
    script = RepairScript(task, tokenizer, rng=random.Random(0), wrong_probability=1.0)
    right = right_edit(task, tokenizer, longest=24)
    assert right is not None
    script._wrong = iter([((5, i), (6, i)) for i in range(40, 60)])
    edits = [script(()) for _ in range(2 * MAX_EDITS)][::2]
    assert list(right[0]) == edits[-1][2 : 2 + len(right[0])]
    assert tuple(edits[-1][-1 - len(right[1]) : -1]) == right[1]


async def test_a_task_whose_solution_fails_its_checks_gives_no_demonstration(tokenizer, pods, make_task):
    pods.answers["run"] = lambda *_: {"ok": False, "error": "failed", "text": "clamp(5, 1, 9) -> 1, want 5"}
    assert await demonstrations([make_task()], tokenizer=tokenizer, pods=pods, n=3, seed=0) == []
    assert len(pods.calls) <= 3 * 2 * MAX_EDITS
