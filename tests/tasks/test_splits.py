"""No module, hash or signature is in two splits, whatever the functions are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from etude.records.task import Split
from etude.tasks.functions import Function
from etude.tasks.splits import deduplicate, disjoint, split_of


def _function(module: str, name: str, body: str) -> Function:
    return Function(name, ("x",), f"def {name}(x): {body}", (), module, "p", "MIT", body, True)


functions = st.lists(
    st.builds(
        _function,
        st.sampled_from([f"pkg.m{n}" for n in range(12)] + ["stdlib.a"]),
        st.sampled_from("fgh"),
        st.sampled_from("abcdef"),
    ),
    max_size=40,
)


@given(functions, st.frozensets(st.sampled_from(["f(x)", "g(x)"])))
def test_splits_share_no_module_hash_or_signature(found: list[Function], reserved: frozenset[str]) -> None:
    assigned = {function.module: split_of(function.module, 1) for function in found}
    by_split = disjoint(deduplicate(found), assigned, reserved)
    for key in (lambda f: f.module, lambda f: f.digest, lambda f: f.signature):
        owners: dict[str, Split] = {}
        for split, members in by_split.items():
            for function in members:
                assert owners.setdefault(key(function), split) is split
    for split in (Split.RL, Split.DEV, Split.HELD_OUT):
        assert not {f.signature for f in by_split[split]} & reserved


@given(st.text(max_size=20), st.integers(0, 100))
def test_a_module_keeps_its_split_and_precious_modules_are_not_wasted(module: str, testable: int) -> None:
    split = split_of(module, testable)
    assert split is split_of(module, testable)
    assert (split is Split.PRETRAIN) == (testable == 0 or module.startswith("stdlib."))
    assert split_of("stdlib." + module, testable) is Split.PRETRAIN


def test_a_copy_of_a_standard_function_stays_with_the_standard_library() -> None:
    copies = [_function("aaa.vendored", "f", "same"), _function("stdlib.z", "f", "same")]
    assert [f.module for f in deduplicate(copies)] == ["stdlib.z"]
