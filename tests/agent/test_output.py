"""Shortening of tool outputs: bounds hold, head and tail stay, nothing is left out silently."""

from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agent.tools.output import shorten


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=600), chars=st.integers(32, 300), tokens=st.integers(16, 200))
def test_bounds_hold_and_what_is_cut_is_told(tokenizer, text, chars, tokens):
    shown, dropped = shorten(text, tokenizer, max_chars=chars, max_tokens=tokens)
    assert len(shown) <= chars and len(tokenizer.encode(shown)) <= tokens
    clean = text.encode(errors="replace").decode()
    assert shown == clean if dropped == 0 else " cut]\n" in shown


def test_head_and_tail_stay_around_an_explicit_marker(tokenizer):
    text = "first line\n" + "x = 1\n" * 500 + "1 failed, 2 passed\n"
    shown, dropped = shorten(text, tokenizer, max_chars=120, max_tokens=1000)
    assert shown.startswith("first line\n") and shown.endswith("1 failed, 2 passed\n")
    kept = shown.replace(f"\n[{dropped} cut]\n", "")
    assert len(kept) == len(text) - dropped


def test_tokens_bound_text_that_is_short_in_characters(tokenizer):
    text = "💡" * 90  # four bytes each: many tokens
    shown, dropped = shorten(text, tokenizer, max_chars=400, max_tokens=64)
    assert dropped > 0 and len(tokenizer.encode(shown)) <= 64 and shown.startswith("💡") and shown.endswith("💡")


def test_lone_surrogates_become_valid_text(tokenizer):
    assert shorten("a\ud800b", tokenizer, max_chars=50, max_tokens=50).text == "a?b"
