"""One text for one outcome, whatever the process."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from etude.tasks.canonical import canonical, outcome

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(plain)
def test_plain_values_read_back_from_their_text(value: object) -> None:
    assert eval(canonical(value)) == value
    assert canonical(value) == repr(value)


@given(st.sets(st.text(max_size=4)))
def test_sets_do_not_depend_on_hash_order(value: set[str]) -> None:
    assert canonical(value) == canonical(set(sorted(value, reverse=True)))
    assert eval(canonical(value)) == value
    assert eval(canonical(frozenset(value))) == value


@given(st.floats(-1e300, 1e300))
def test_floats_keep_ten_digits(value: float) -> None:
    assert abs(float(canonical(value)) - value) <= 1e-9 * abs(value)


def test_types_that_compare_equal_stay_apart() -> None:
    assert len({canonical(1), canonical(1.0), canonical(True)}) == 3


def test_outcomes_are_texts_for_results_changes_errors_iterators_and_timeouts() -> None:
    assert outcome(lambda x, y: x + y, "1, 2", 1.0) == "3"
    assert outcome(lambda x: x.append(1), "[]", 1.0) == "None with ([1],)"
    assert outcome(lambda x: None, "[]", 1.0) == "None"
    assert outcome(lambda x: 1 // x, "0", 1.0) == "raises ZeroDivisionError"
    assert outcome(lambda x: iter(range(x)), "3", 1.0) == "iter([0, 1, 2])"
    assert outcome(lambda x: (i for i in iter(int, 1)), "3", 1.0) == "raises OverflowError"

    def hang(x: int) -> None:
        while True:
            x += 1

    assert outcome(hang, "3", 0.05) == "timeout"
    assert outcome(lambda x: open(x), "'/etc/passwd', __import__", 1.0) == "raises NameError"
