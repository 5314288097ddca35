import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.chat.edits import minimal_edit, occurrences
from etude.chat.grammar import Grammar, make_spec
from etude.chat.parse import parse_action
from etude.chat.tokenizer import Tokenizer
from etude.records.errors import BadInput

SOURCE = "def clamp(x, low, high):\n    if x > low:\n        return low\n    return min(x, high)\n"


@given(seed=st.integers(0, 10**6))
def test_every_masked_sample_is_a_well_formed_call_with_a_unique_span(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    source_ids = tokenizer.encode(SOURCE)
    spec = make_spec(tokenizer, ["edit_file", "run", "finish"], source_ids=source_ids, max_field_tokens=6)
    grammar, ids = Grammar(spec, tokenizer), []
    while not grammar.finished:
        ids.append(rng.choice(grammar.allowed().nonzero()[0].tolist()))
        grammar.advance(ids[-1])
        assert len(ids) < 200
    action = parse_action(tokenizer, ids)
    assert not action.error
    for call in action.calls:
        if call.name == "edit_file":
            assert occurrences(SOURCE.encode(), call.arguments["old"].encode()) == 1
    assert not grammar.allowed().any()


def test_no_op_and_repeated_edits_cannot_close(tokenizer: Tokenizer) -> None:
    source_ids = tokenizer.encode(SOURCE)
    edit = minimal_edit(tokenizer, source_ids, tokenizer.encode(SOURCE.replace(">", "<")))
    assert edit is not None
    old, new = edit
    for forbidden, replacement, closes in (((), new, True), ((), old, False), (None, new, False)):
        tried = ((tokenizer.decode(old), tokenizer.decode(new)),) if forbidden is None else ()
        spec = make_spec(tokenizer, ["edit_file"], source_ids=source_ids, forbidden_edits=tried)
        grammar = Grammar(spec, tokenizer)
        special = tokenizer.special
        for token in [special["<|edit_file|>"], special["<|old|>"], *old, special["<|new|>"], *replacement]:
            grammar.advance(token)
        assert bool(grammar.allowed()[tokenizer.end_id]) is closes


@given(seed=st.integers(0, 10**6))
def test_advance_refuses_exactly_what_the_mask_forbids(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    spec = make_spec(tokenizer, ["edit_file", "grep"], source_ids=tokenizer.encode(SOURCE), max_field_tokens=4)
    grammar = Grammar(spec, tokenizer)
    for _ in range(rng.randrange(8)):
        choices = grammar.allowed().nonzero()[0].tolist()
        if not choices:
            break
        grammar.advance(rng.choice(choices))
    mask = grammar.allowed()
    forbidden = [token for token in rng.sample(range(tokenizer.vocab_size), 30) if not mask[token]]
    for token in forbidden:
        with pytest.raises(BadInput):
            grammar.advance(token)


@given(data=st.data())
def test_minimal_edit_turns_the_broken_file_into_the_fixed_one(tokenizer: Tokenizer, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(SOURCE) - 1))
    end = data.draw(st.integers(begin, min(len(SOURCE), begin + 6)))
    fixed = SOURCE[:begin] + data.draw(st.text("abx <>=+-1(", max_size=5)) + SOURCE[end:]
    edit = minimal_edit(tokenizer, tokenizer.encode(SOURCE), tokenizer.encode(fixed))
    if edit is None:
        assert fixed == SOURCE or len(fixed) < len(SOURCE) // 2
        return
    old, new = (tokenizer.decode(ids) for ids in edit)
    assert SOURCE.count(old) == 1 and SOURCE.replace(old, new) == fixed
