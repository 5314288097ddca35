import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.records import rollout as nouns
from etude.records.errors import BadInput

texts = st.text(max_size=8)
ids = st.lists(st.integers(0, 2**31), max_size=6).map(tuple)
floats = st.floats(allow_nan=False, allow_infinity=False)
blobs = st.none() | st.builds(nouns.BlobRef, digest=texts, dtype=texts, shape=st.tuples(st.integers(0, 9)))
spans = st.lists(
    st.builds(nouns.Span, st.integers(0, 9), st.integers(0, 9), st.sampled_from(nouns.SpanKind)), max_size=3
)
sampling = st.builds(
    nouns.SamplingParams,
    temperature=floats,
    max_tokens=st.integers(0, 99),
    seed=st.integers(0, 2**63 - 1),
    stop_ids=ids,
    grammar=texts,
)
generations = st.builds(
    nouns.Generation,
    index=st.integers(0, 9),
    prompt_ids=ids,
    sampled_ids=ids,
    logprobs=st.lists(floats, max_size=4).map(tuple),
    policy_versions=ids,
    spans=spans.map(tuple),
    sampling=sampling,
    finish=texts,
    engine_id=texts,
    chat_format_id=texts,
    routes=blobs,
    masks=blobs,
)
calls = st.builds(
    nouns.ToolCall,
    generation=st.integers(0, 9),
    name=texts,
    arguments=st.dictionaries(texts, texts, max_size=2),
    ok=st.booleans(),
    result=texts,
)
verdicts = st.none() | st.builds(
    nouns.Verdict, success=st.booleans(), passed=st.integers(0, 9), total=st.integers(0, 9)
)
rollouts = st.builds(
    nouns.Rollout,
    id=texts,
    task_id=texts,
    attempt=st.integers(0, 9),
    seed=st.integers(0, 2**63 - 1),
    generations=st.lists(generations, max_size=2).map(tuple),
    tool_calls=st.lists(calls, max_size=2).map(tuple),
    stop_reason=st.sampled_from(nouns.StopReason),
    cause=st.sampled_from(nouns.CauseClass),
    verdict=verdicts,
    rewards=st.dictionaries(texts, floats, max_size=2),
    forked_from=st.none() | st.tuples(texts, st.integers(0, 9)),
)


@given(rollout=rollouts)
def test_rollout_round_trips_over_wire_and_json(rollout: nouns.Rollout) -> None:
    assert nouns.decode_rollout(nouns.encode(rollout)) == rollout
    assert msgspec.json.decode(msgspec.json.encode(rollout), type=nouns.Rollout) == rollout


@given(members=st.lists(rollouts, max_size=2), advantages=st.lists(floats, max_size=2))
def test_group_round_trips(members: list[nouns.Rollout], advantages: list[float]) -> None:
    group = nouns.Group(
        id="g", draw=1, task_id="t", rollouts=tuple(members), advantages=tuple(advantages), oldest_version=0
    )
    assert nouns.decode_group(nouns.encode(group)) == group


@given(rollout=rollouts, cut=st.integers(1, 20))
def test_torn_or_foreign_bytes_are_a_clear_error(rollout: nouns.Rollout, cut: int) -> None:
    data = nouns.encode(rollout)
    with pytest.raises(BadInput, match=r"f\.bin"):
        nouns.decode_rollout(data[:-cut], "f.bin")
    with pytest.raises(BadInput, match="version"):
        nouns.decode_rollout(nouns.encode(msgspec.structs.replace(rollout, version=99)))
