"""The readable rendering shows every action and result, live in the same words as afterwards."""

from itertools import count

from etude.agent.config import AgentConfig
from etude.agent.loop import AgentOptions, run_rollout
from etude.agent.scripted import ScriptedEngine
from etude.agent.trajectory import TextWatcher, render


async def test_live_text_is_the_middle_of_the_whole_rendering(tokenizer, actions, pods, make_task):
    plan = [actions.edit("absent", "b"), actions.call(("run", {}), think="try it"), actions.edit(), actions.finish()]
    numbers, live = count(), []
    task = make_task()
    rollout = await run_rollout(
        task,
        attempt=0,
        seed=0,
        engine=ScriptedEngine(lambda ids: plan[next(numbers)]),
        pods=pods,
        tokenizer=tokenizer,
        options=AgentOptions(config=AgentConfig(grammar=False), watcher=TextWatcher(live.append), verify=False),
    )
    text = render(rollout, tokenizer, task)
    assert "\n".join(live) in text
    for words in (
        "fix clamp in m.py",
        "  | def clamp",
        "edit_file(old='absent'",
        "not found",
        "~ try it",
        "changed: m.py",
    ):
        assert words in text, words
    assert "ended: finish" in text
