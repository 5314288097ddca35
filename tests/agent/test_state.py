"""The state is a pure fold over the records: rebuilding at any prefix gives the same tokens and budgets."""

import random

import pytest

from etude.agent.config import AgentConfig
from etude.agent.loop import AgentOptions, run_rollout
from etude.agent.scripted import ScriptedEngine
from etude.agent.state import Episode
from etude.agent.tools.registry import ToolSet
from etude.chat.format import TOOL_TOKENS
from etude.records.errors import BadInput
from etude.records.rollout import SpanKind, decode_rollout, encode

TOOLS = ("read_file", "edit_file", "run", "grep", "finish")


def random_script(actions, tokenizer, seed):
    """Actions of every kind, noise included, from a seed."""
    rng = random.Random(seed)

    def script(ids):
        kind = rng.randrange(8)
        if kind == 0:
            return [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 9))]
        if kind == 1:
            return actions.call(("read_file", {"path": "m.py"}), ("grep", {"pattern": "x"}), think="look")
        if kind == 2:
            return actions.edit("absent", "b")
        if kind == 3:
            return actions.edit("return", "b")
        if kind in (4, 5):
            return actions.edit(new=rng.choice(["x < low", "x >= low", "x == low"]))
        return actions.run()

    return script


@pytest.mark.parametrize("seed", range(12))
async def test_rebuilding_after_any_prefix_gives_the_same_next_ids_and_budgets(
    tokenizer, actions, pods, make_task, seed
):
    config = AgentConfig(tools=TOOLS, grammar=False, max_calls=3, max_turns=7, malformed_limit=3)
    task = make_task()
    rollout = await run_rollout(
        task,
        attempt=0,
        seed=seed,
        engine=ScriptedEngine(random_script(actions, tokenizer, seed)),
        pods=pods,
        tokenizer=tokenizer,
        options=AgentOptions(config=config, verify=False),
    )
    stored = decode_rollout(encode(rollout))
    episode = Episode(task, seed=seed, tokenizer=tokenizer, config=config, toolset=ToolSet.of(config))
    state = episode.start()
    for count, generation in enumerate(stored.generations):
        rebuilt = episode.replay(stored.generations[:count], stored.tool_calls)
        assert rebuilt == state
        assert rebuilt.next_ids == generation.prompt_ids
        assert episode.sampling(rebuilt) == generation.sampling
        assert episode.remaining(rebuilt) == episode.remaining(state)
        assert episode.action_spans(rebuilt, generation.sampled_ids) == generation.spans
        state = episode.after(state, generation, [c for c in stored.tool_calls if c.generation == count])
    assert state.stop == rollout.stop_reason
    assert state.effort == rollout.effort and state.well_formed == rollout.well_formed


@pytest.mark.parametrize("seed", range(6))
async def test_every_token_has_one_span_and_effort_counts_each_new_token_once(
    tokenizer, actions, pods, make_task, seed
):
    config = AgentConfig(tools=TOOLS, grammar=False, max_calls=3, max_turns=6, malformed_limit=9)
    rollout = await run_rollout(
        make_task(),
        attempt=0,
        seed=seed,
        engine=ScriptedEngine(random_script(actions, tokenizer, 100 + seed)),
        pods=pods,
        tokenizer=tokenizer,
        options=AgentOptions(config=config, verify=False),
    )
    for generation in rollout.generations:
        length = len(generation.prompt_ids) + len(generation.sampled_ids)
        covered = [index for span in generation.spans for index in range(span.start, span.end)]
        assert covered == list(range(length))
    sampled = sum(len(generation.sampled_ids) for generation in rollout.generations)
    effort = rollout.effort
    assert effort.thinking_tokens + effort.tool_call_tokens + effort.final_tokens == sampled
    last = rollout.generations[-1]
    fed = sum(s.end - s.start for s in last.spans if s.kind is SpanKind.TOOL_OUTPUT)
    assert effort.tool_output_tokens == fed
    assert effort.turns == len(rollout.generations)
    assert effort.tool_calls == sum(1 for call in rollout.tool_calls if call.name)


async def test_records_that_do_not_follow_are_refused(tokenizer, actions, pods, make_task):
    config = AgentConfig()
    task = make_task()
    rollout = await run_rollout(
        task,
        attempt=0,
        seed=1,
        engine=ScriptedEngine(lambda ids: actions.run()),
        pods=pods,
        tokenizer=tokenizer,
        options=AgentOptions(config=config, verify=False),
    )
    episode = Episode(task, seed=1, tokenizer=tokenizer, config=config, toolset=ToolSet.of(config))
    with pytest.raises(BadInput):
        episode.replay(rollout.generations[1:], rollout.tool_calls)


async def test_the_grammar_forbids_edits_already_tried_and_binds_to_the_viewed_file(
    tokenizer, actions, pods, make_task
):
    config = AgentConfig(max_turns=3)
    task = make_task()
    rollout = await run_rollout(
        task,
        attempt=0,
        seed=1,
        engine=ScriptedEngine(lambda ids: actions.edit(new="x >= low")),
        pods=pods,
        tokenizer=tokenizer,
        options=AgentOptions(config=config, verify=False),
    )
    episode = Episode(task, seed=1, tokenizer=tokenizer, config=config, toolset=ToolSet.of(config))
    spec = episode.grammar(episode.replay(rollout.generations[:1], rollout.tool_calls))
    assert spec is not None and spec.forbidden_edits == (("x > low", "x >= low"),)
    text = task.environment["m.py"].decode()
    assert tokenizer.decode(spec.source_ids) == text
    prompt = rollout.generations[0].prompt_ids
    width = len(spec.source_ids)
    assert any(prompt[i : i + width] == spec.source_ids for i in range(len(prompt)))
    building = AgentConfig(edit_base="current")
    spec = Episode(task, seed=1, tokenizer=tokenizer, config=building, toolset=ToolSet.of(building)).grammar(
        episode.start()
    )
    assert spec is not None and spec.source_ids == () and spec.forbidden_edits == ()


async def test_forcing_a_retry_bars_finish_until_a_run_passes_and_run_until_an_edit(
    tokenizer, actions, pods, make_task
):
    config = AgentConfig(force_retry=True, max_turns=6)
    task = make_task()
    plan = [actions.edit(new="x >= low"), actions.run(), actions.edit("min", "max"), actions.run(), actions.edit()]
    plan.append(actions.run())
    rollout = await run_rollout(
        task,
        attempt=0,
        seed=1,
        engine=ScriptedEngine(lambda ids: plan.pop(0)),
        pods=pods,
        tokenizer=tokenizer,
        options=AgentOptions(config=config, verify=False),
    )
    episode = Episode(task, seed=1, tokenizer=tokenizer, config=config, toolset=ToolSet.of(config))
    names = {tokenizer.special[token]: name for name, token in TOOL_TOKENS.items()}
    allowed = []
    for count in range(7):
        spec = episode.grammar(episode.replay(rollout.generations[:count], rollout.tool_calls))
        assert spec is not None
        allowed.append({names[tool.token_id] for tool in spec.tools})
    everything = {"edit_file", "run", "finish"}
    retry, again = {"edit_file"}, {"edit_file", "run"}
    assert allowed == [everything, everything, retry, again, retry, again, everything]
    with pytest.raises(BadInput, match="force_retry"):
        Episode(
            task,
            seed=1,
            tokenizer=tokenizer,
            config=AgentConfig(force_retry=True, grammar=False),
            toolset=ToolSet.of(config),
        )
