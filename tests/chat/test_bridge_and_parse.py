from hypothesis import given
from hypothesis import strategies as st

from etude.chat.bridge import append_results, first_prompt
from etude.chat.format import END, FIELD_TOKENS, TOOL_TOKENS
from etude.chat.parse import parse_action
from etude.chat.tokenizer import Tokenizer


def written(tokenizer: Tokenizer, *parts: str) -> list[int]:
    ids: list[int] = []
    for part in parts:
        ids += [tokenizer.special[part]] if part in tokenizer.special else tokenizer.encode(part)
    return ids


@given(ids=st.lists(st.integers(0, 599), max_size=40))
def test_parsing_is_total_and_spans_stay_inside(tokenizer: Tokenizer, ids: list[int]) -> None:
    action = parse_action(tokenizer, ids)
    assert all(0 <= span.start <= span.end <= len(ids) for span in action.spans)


@given(old=st.text(max_size=12), new=st.text(max_size=12))
def test_written_calls_parse_back(tokenizer: Tokenizer, old: str, new: str) -> None:
    ids = written(tokenizer, TOOL_TOKENS["edit_file"], FIELD_TOKENS["old"])
    ids += tokenizer.encode(old) + written(tokenizer, FIELD_TOKENS["new"]) + tokenizer.encode(new)
    ids += written(tokenizer, TOOL_TOKENS["run"], END)
    action = parse_action(tokenizer, ids)
    assert [call.name for call in action.calls] == ["edit_file", "run"]
    assert action.calls[0].arguments == {"old": old, "new": new}
    assert action.well_formed or "�" in old + new


def test_faults_of_form_are_named(tokenizer: Tokenizer) -> None:
    edit, old, new = TOOL_TOKENS["edit_file"], FIELD_TOKENS["old"], FIELD_TOKENS["new"]
    cases = {
        "missing new": [edit, old, "x", END],
        "repeated old": [edit, old, "x", old, "y", new, "z", END],
        "unknown pattern": [edit, FIELD_TOKENS["pattern"], "x", old, "x", new, "z", END],
        "text outside a field": [edit, "x", old, "x", new, "z", END],
    }
    for error, parts in cases.items():
        action = parse_action(tokenizer, written(tokenizer, *parts))
        assert action.calls[0].error == error and not action.well_formed
    assert parse_action(tokenizer, written(tokenizer, TOOL_TOKENS["run"])).error == "action not ended"


def test_text_without_a_call_is_the_final_message(tokenizer: Tokenizer) -> None:
    action = parse_action(tokenizer, written(tokenizer, "all done", END))
    assert (action.text, action.calls, action.well_formed) == ("all done", (), True)


@given(sampled=st.lists(st.integers(0, 599), max_size=20), results=st.lists(st.text(max_size=20), max_size=3))
def test_bridge_only_appends_and_its_spans_cover_every_new_token(
    tokenizer: Tokenizer, sampled: list[int], results: list[str]
) -> None:
    prompt, spans = first_prompt(tokenizer, system="s", instruction="fix it", files=[("a.py", "x = 1\n")])
    assert [span.start for span in spans[1:]] == [span.end for span in spans[:-1]]
    assert spans[-1].end == len(prompt)
    start = len(prompt) + len(sampled)
    new, new_spans = append_results(tokenizer, sampled, results, start=start)
    assert new_spans[0].start == start and new_spans[-1].end == start + len(new)
    closes = not sampled or sampled[-1] != tokenizer.end_id
    assert new.count(tokenizer.end_id) == len(results) + closes
