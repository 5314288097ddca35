"""Statistics of evaluations: best-of-K, paired bootstrap over modules and tasks, distinct solutions. Pure numpy.

`successes` are bool arrays [tasks, attempts]. A paired comparison resamples source modules with replacement and then
tasks inside each drawn module, the same draw on both sides, so that tasks made from one file never count as independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from etude.records.errors import BadInput

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Interval(NamedTuple):
    """An estimate and its two-sided 95% bounds."""

    estimate: float
    low: float
    high: float

    @property
    def resolved(self) -> bool:
        """The interval excludes 0."""
        return self.low > 0 or self.high < 0


def best_of_k(solved: int, attempts: int, k: int) -> float:
    """Unbiased probability that at least one of `k` attempts solves a task solved in `solved` of `attempts` (pass@k of Chen et al.
    2021). Raises BadInput when k is larger than the number of attempts, where it is undefined."""
    if not 0 < k <= attempts or not 0 <= solved <= attempts:
        raise BadInput("best_of_k", "k", k, f"1 <= k <= {attempts} attempts and 0 <= {solved} solved <= attempts")
    return 1.0 - comb(attempts - solved, k) / comb(attempts, k)


def best_of_k_each(successes: Bools, k: int) -> Floats:
    """float64 [tasks]: `best_of_k` of each task."""
    attempts = successes.shape[1]
    return np.array([best_of_k(int(row.sum()), attempts, k) for row in successes], dtype=np.float64)


def solved_given_formed(successes: Bools, well_formed: Bools) -> Floats:
    """float64 [tasks]: share of the well-formed attempts that solved the task; NaN where none was well-formed."""
    formed = well_formed.sum(axis=1)
    solved = (successes & well_formed).sum(axis=1)
    return np.where(formed > 0, solved / np.maximum(formed, 1), np.nan)


def resample(modules: Sequence[str], rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """One bootstrap draw: task indices after drawing modules, then tasks inside each, with replacement."""
    names = sorted(set(modules))
    members = {name: np.flatnonzero([module == name for module in modules]) for name in names}
    drawn = rng.integers(0, len(names), size=len(names))
    return np.concatenate([rng.choice(members[names[i]], size=len(members[names[i]])) for i in drawn])


def bootstrap(
    statistic: Callable[[npt.NDArray[np.int64]], float],
    modules: Sequence[str],
    *,
    draws: int = 4000,
    seed: int = 0,
) -> Interval:
    """Percentile interval of `statistic(task indices)` over the two-level bootstrap. Raises BadInput on no tasks."""
    if not modules:
        raise BadInput("bootstrap", "tasks", 0, "at least one task")
    rng = np.random.default_rng(seed)
    everything = np.arange(len(modules))
    values = np.array([statistic(resample(modules, rng)) for _ in range(draws)])
    values = values[~np.isnan(values)]
    low, high = np.quantile(values, [0.025, 0.975]) if len(values) else (np.nan, np.nan)
    return Interval(float(statistic(everything)), float(low), float(high))


def mean_interval(per_task: Floats, modules: Sequence[str], *, draws: int = 4000, seed: int = 0) -> Interval:
    """Interval of the mean over tasks of a per-task figure [tasks] (a difference, when paired); NaN entries are left out."""
    return bootstrap(lambda index: _nan_mean(per_task[index]), modules, draws=draws, seed=seed)


def _nan_mean(values: Floats) -> float:
    kept = values[~np.isnan(values)]
    return float(kept.mean()) if len(kept) else float("nan")
