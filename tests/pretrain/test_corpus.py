"""Episodes: they parse into the calls they mean, their edits repair the file, and forbidden modules cannot enter."""

import ast
import itertools
import keyword
import random
import re
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.chat.format import ASSISTANT
from etude.chat.parse import parse_action
from etude.chat.tokenizer import Tokenizer
from etude.pretrain.config import EpisodeMix
from etude.pretrain.corpus import (
    CorpusPools,
    CorpusRow,
    EpisodeMaker,
    Failing,
    Mutant,
    check_modules,
    file_text,
    read_rows,
)
from etude.pretrain.corrupt import apply, choose, corruptions, line_change, slips
from etude.records.errors import BadInput

SOURCE = """def clamp(value, low, high):
    if value < low:
        return low
    total = value + 1 - 1
    for item in (1, 2):
        total = min(total, high)
    if not total and low is not None:
        return 'a < b + 1'
    return min(value, high)"""
ROWS = [
    CorpusRow(
        "clamp",
        SOURCE,
        ["import math"],
        "pack.m",
        "pack 1",
        [
            Mutant("comparison", SOURCE.replace("value < low", "value >= low"), Failing("1, 2, 3", "1", "2")),
            Mutant("arithmetic", SOURCE.replace("value + 1", "value - 1"), Failing("4, 2, 3", "2", "3")),
            Mutant(
                "missing_return", SOURCE.replace("return min(value, high)", "return"), Failing("5, 2, 9", "None", "5")
            ),
        ],
    ),
    CorpusRow("double", "def double(x):\n    y = x * 2\n    return y", [], "pack.n", "pack 1", []),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([file_text(row.imports, row.source) for row in ROWS] * 3, 420)


def actions(tokenizer: Tokenizer, ids: list[int]) -> list[list[int]]:
    """The sampled ids after each `<|assistant|>`."""
    out, opening = [], tokenizer.special[ASSISTANT]
    for position, index in enumerate(ids):
        if index == opening:
            rest = ids[position + 1 :]
            out.append(rest[: rest.index(tokenizer.end_id) + 1])
    return out


def broken_file(tokenizer: Tokenizer, ids: list[int]) -> str:
    begin = ids.index(tokenizer.special["<|file|>"]) + 1
    return tokenizer.decode(ids[begin : begin + ids[begin:].index(tokenizer.end_id)]).split("\n", 1)[1]


@settings(deadline=None)
@given(seed=st.integers(0, 10_000))
def test_one_bug_episodes_parse_and_the_targeted_edit_repairs_the_file(tokenizer: Tokenizer, seed: int) -> None:
    maker = EpisodeMaker(tokenizer, ROWS, EpisodeMix(wrong_edit=0.5, ending=0.5))
    rng = random.Random(seed)
    mutants = rng.sample(ROWS[0].mutants, 3)
    episode = maker.one_bug(rng, ROWS[0], mutants)
    assert episode is not None and len(episode.ids) == len(episode.weights) == len(episode.edit)
    broken, fixed = broken_file(tokenizer, episode.ids), file_text(ROWS[0].imports, SOURCE)
    assert broken == file_text(ROWS[0].imports, mutants[0].text)
    repaired = []
    for action in actions(tokenizer, episode.ids):
        parsed = parse_action(tokenizer, action)
        assert parsed.well_formed and len(parsed.calls) == 1
        call = parsed.calls[0]
        if call.name == "edit_file":
            old, new = call.arguments["old"], call.arguments["new"]
            assert broken.count(old) == 1 and old != new
            repaired.append(broken.replace(old, new) == fixed)
    assert repaired[-1] and not any(repaired[:-1])
    targets = [index for index, marked in zip(episode.ids, episode.edit, strict=True) if marked]
    edit_actions = [
        a for a in actions(tokenizer, episode.ids) if parse_action(tokenizer, a).calls[0].name == "edit_file"
    ]
    assert targets == edit_actions[-1]
    assert all(weight > 0 for weight, marked in zip(episode.weights, episode.edit, strict=True) if marked)


@settings(deadline=None)
@given(seed=st.integers(0, 10_000))
def test_all_edits_of_a_several_bug_episode_together_repair_the_file(tokenizer: Tokenizer, seed: int) -> None:
    maker = EpisodeMaker(tokenizer, ROWS, EpisodeMix())
    episode = maker.several_bugs(random.Random(seed), ROWS[0], ROWS[0].mutants)
    if episode is None:
        return
    text = broken_file(tokenizer, episode.ids)
    calls = parse_action(tokenizer, actions(tokenizer, episode.ids)[0]).calls
    places = sorted((text.index(call.arguments["old"]), call.arguments["old"], call.arguments["new"]) for call in calls)
    assert all(text.count(old) == 1 for _, old, _ in places)
    if any(a[0] + len(a[1]) > b[0] for a, b in itertools.pairwise(places)):
        return  # widened for uniqueness, two edits share context: each is right alone
    for begin, old, new in reversed(places):
        text = text[:begin] + new + text[begin + len(old) :]
    assert text == file_text(ROWS[0].imports, SOURCE)


def test_a_broken_place_is_not_a_target_of_the_prompt(tokenizer: Tokenizer) -> None:
    maker = EpisodeMaker(tokenizer, ROWS, EpisodeMix(prompt_share=1.0, wrong_edit=0.0))
    episode = maker.one_bug(random.Random(0), ROWS[0], ROWS[0].mutants)
    assert episode is not None
    begin = episode.ids.index(tokenizer.special["<|file|>"])
    end = episode.ids.index(tokenizer.special[ASSISTANT])
    silent = [i for i, w in zip(episode.ids[begin:end], episode.weights[begin:end], strict=True) if w == 0]
    assert ">=" in tokenizer.decode(silent) and "import" not in tokenizer.decode(silent)


def test_pools_are_pure_functions_of_their_number(tokenizer: Tokenizer) -> None:
    def ids(number: int) -> list[list[int]]:
        pools = CorpusPools(EpisodeMaker(tokenizer, ROWS, EpisodeMix()), seed=5, size=20)
        return [episode.ids for episode in pools.pool(number)]

    pools = CorpusPools(EpisodeMaker(tokenizer, ROWS, EpisodeMix()), seed=5, size=20)
    assert [[e.ids for e in pools.pool(n)] for n in (0, 1, 2)] == [ids(n) for n in (0, 1, 2)]
    assert ids(0) != ids(1)


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 6))
def test_corruptions_stay_outside_strings_and_are_undone_by_the_original(seed: int, count: int) -> None:
    changes = choose(random.Random(seed), corruptions(SOURCE), count)
    broken = apply(SOURCE, changes)
    assert broken != SOURCE and broken.startswith("def clamp(value, low, high):\n")
    assert "'a < b + 1'" in broken or "'" not in broken  # a return may lose its value as a whole
    back = line_change(broken, SOURCE)
    assert apply(broken, [back]) == SOURCE


def test_each_single_corruption_still_parses() -> None:
    found = corruptions(SOURCE)
    assert len(found) > 12
    for change in found:
        ast.parse(apply(SOURCE, [change]))


def test_rearrangements_swap_operands_and_arguments_and_move_bounds() -> None:
    source = "def f(a, b):\n    c = a[1:] + b[:2] + 'x - y'\n    d = g(a, b) * (a - b)\n    return -c"
    made = {apply(source, [change]).split("\n", 1)[1] for change in corruptions(source)}
    for old, new in [
        ("a[1:]", "a[1:-1]"),
        ("a[1:]", "a[:]"),
        ("b[:2]", "b[1:2]"),
        ("g(a, b)", "g(b, a)"),
        ("(a - b)", "(b - a)"),
        ("return -c", "return c"),
    ]:
        assert source.split("\n", 1)[1].replace(old, new) in made
    assert all("'x - y'" in text for text in made)


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 40))
def test_slips_put_another_word_of_the_same_kind_at_distinct_places_below_the_first_line(seed: int, count: int) -> None:
    found = slips(random.Random(seed), SOURCE, count)
    assert 1 <= len(found) <= count and len({slip.begin for slip in found}) == len(found)
    kinds = (r"[A-Za-z_]\w*", r"\d\w*", r"[^\w\s]+")
    for slip in found:
        old = SOURCE[slip.begin : slip.end]
        assert slip.text != old and not keyword.iskeyword(old) and not keyword.iskeyword(slip.text)
        assert any(re.fullmatch(kind, old) and re.fullmatch(kind, slip.text) for kind in kinds)
        assert slip.begin > SOURCE.index("\n") and not SOURCE.count("'", 0, slip.begin) % 2
    assert found == slips(random.Random(seed), SOURCE, count)


def test_a_function_without_a_body_has_no_slips() -> None:
    assert slips(random.Random(0), "def f(): return 1", 5) == []


def test_episodes_of_slips_parse_and_their_edit_repairs_the_file(tokenizer: Tokenizer) -> None:
    mix = EpisodeMix(slips=1.0, raw=0.0, several_bugs=0.0, wrong_edit=0.0, ending=0.0)
    maker, repaired = EpisodeMaker(tokenizer, ROWS, mix), 0
    for seed in range(30):
        episode = maker.draw(random.Random(seed), ROWS[0])
        if episode is None:
            continue
        (call,) = parse_action(tokenizer, actions(tokenizer, episode.ids)[-1]).calls
        broken = broken_file(tokenizer, episode.ids)
        assert broken.count(call.arguments["old"]) == 1
        fixed = broken.replace(call.arguments["old"], call.arguments["new"])
        assert fixed == file_text(ROWS[0].imports, SOURCE) != broken
        repaired += 1
    assert repaired > 10


def test_rows_of_other_splits_are_refused() -> None:
    check_modules(ROWS, frozenset({"other"}))
    with pytest.raises(BadInput, match=r"pack\.n"):
        check_modules(ROWS, frozenset({"pack.n"}))


def test_a_corpus_file_that_is_missing_or_not_rows_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="missing"):
        read_rows(tmp_path / "none.jsonl.zst")
    (tmp_path / "bad.jsonl.zst").write_bytes(zstandard.compress(b'{"function": 1}\n'))
    with pytest.raises(BadInput, match="line 1"):
        read_rows(tmp_path / "bad.jsonl.zst")
