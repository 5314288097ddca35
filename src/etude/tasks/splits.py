"""Five splits, disjoint by source module, by anonymised syntax hash and by name + signature.

A module goes to a split as a whole, by a hash of its name alone, so that adding a source never moves another module. Only
modules with testable functions are precious; the rest is for pretraining. The standard library is for pretraining as a
whole: part of it lies in every pod. When a hash or a signature occurs in two splits, the later of
pretrain, sft, rl, dev, held_out keeps it. Deliberately knows nothing of how tasks look.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from etude.records.task import Split
from etude.tasks.functions import Function

PRIORITY = (Split.HELD_OUT, Split.DEV, Split.RL, Split.SFT, Split.PRETRAIN)
"""Who keeps a function that two splits hold, first to last."""
_WEIGHTS = ((Split.RL, 0.52), (Split.HELD_OUT, 0.18), (Split.DEV, 0.11), (Split.SFT, 0.19))
_RICH_WEIGHTS = ((Split.RL, 0.75), (Split.SFT, 0.25))
_RICH = 12
"""A module with more testable functions than this is for RL or SFT: evaluation takes at most four of a module."""


def _unit(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def split_of(module: str, testable: int) -> Split:
    """Split of a module by name, given how many of its functions can be tasks."""
    if testable == 0 or module.startswith("stdlib."):
        return Split.PRETRAIN
    weights = _RICH_WEIGHTS if testable > _RICH else _WEIGHTS
    place = _unit(module)
    for split, weight in weights:
        place -= weight
        if place < 0:
            return split
    return weights[-1][0]


def deduplicate(functions: Iterable[Function]) -> list[Function]:
    """Keeps the first function of each digest: those of the standard library first, then by module name."""
    ordered = sorted(functions, key=lambda f: (not f.module.startswith("stdlib."), f.module, f.source))
    kept: dict[str, Function] = {}
    for function in ordered:
        kept.setdefault(function.digest, function)
    return list(kept.values())


def disjoint(
    functions: Iterable[Function], assigned: dict[str, Split], reserved: frozenset[str] = frozenset()
) -> dict[Split, list[Function]]:
    """Functions by split, with every signature in one split only (see PRIORITY) and none of `reserved`, signatures
    that may not be evaluated or trained on by RL (they lie in the pods), in held_out, dev or rl."""
    by_split: dict[Split, list[Function]] = {split: [] for split in PRIORITY}
    for function in functions:
        by_split[assigned.get(function.module, Split.PRETRAIN)].append(function)
    taken: dict[str, Split] = {}
    result: dict[Split, list[Function]] = {}
    for split in PRIORITY:
        result[split] = []
        for function in by_split[split]:
            protected = split in (Split.HELD_OUT, Split.DEV, Split.RL)
            if protected and function.signature in reserved:
                continue
            if taken.setdefault(function.signature, split) is split:
                result[split].append(function)
    return result
