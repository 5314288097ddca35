"""What a run says of itself: one JSON line per training step and per held-out probe in `metrics.jsonl`.

Figures are means over the step's rollouts unless named otherwise. Appended a whole line at a time; a torn last line
(the writer was killed) is passed over by the reader.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from etude.records.rollout import Group, Rollout
from etude.rl.habits import distinct_solutions
from etude.rl.rewards import TOTAL


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="kind"):
    """One training step. Times are seconds, `time_s` since the run's start; staleness counts steps."""

    step: int
    time_s: float
    policy_version: int
    groups: int
    rollouts: int
    success_mean: float
    best_of_k: float
    """Share of the step's groups with at least one success; K is the group size."""
    k: int
    reward_mean: float
    well_formed: float
    mixed_groups: float
    """Share of groups that hold both a success and a failure: those with signal from the verifier."""
    distinct_solutions: float
    kl: float
    entropy: float
    grad_norm: float
    importance_mean: float
    importance_max: float
    importance_clipped: float
    replaced_routes: float
    logprob_gap: float
    """Mean |trainer's log-prob - sampler's| over sampled tokens."""
    staleness_mean: float
    staleness_max: int
    turns_mean: float
    sampled_tokens_mean: float
    tool_calls: dict[str, float]
    """Calls per rollout by tool."""
    stop_reasons: dict[str, int]
    rollout_s_mean: float
    step_s: float
    wait_s: float
    """How long the trainer waited for a batch before this step."""
    rollouts_per_minute: float
    tokens_per_second: float
    groups_void: int
    in_flight: int
    queued: int
    apply_s: float = 0.0
    alarm: str = ""


class ProbeMetrics(msgspec.Struct, frozen=True, kw_only=True, tag="probe", tag_field="kind"):
    """A look at held-out tasks during training; it decides nothing."""

    step: int
    time_s: float
    policy_version: int
    tasks: int
    attempts: int
    mean: float
    best_of_k: float


Row = StepMetrics | ProbeMetrics


class GroupFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The part of `StepMetrics` that the step's groups alone decide."""

    groups: int
    rollouts: int
    success_mean: float
    best_of_k: float
    k: int
    reward_mean: float
    well_formed: float
    mixed_groups: float
    distinct_solutions: float
    turns_mean: float
    sampled_tokens_mean: float
    tool_calls: dict[str, float]
    stop_reasons: dict[str, int]
    rollout_s_mean: float


def solved(rollout: Rollout) -> bool:
    """The verifier passed it."""
    return rollout.verdict is not None and rollout.verdict.success


def sampled_tokens(rollout: Rollout) -> int:
    """Tokens that the policy sampled over the chain."""
    return sum(len(generation.sampled_ids) for generation in rollout.generations)


def group_figures(groups: Sequence[Group]) -> GroupFigures:
    """Figures of one batch of sealed groups."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    wins = [[solved(rollout) for rollout in group.rollouts] for group in groups]
    tools = Counter(call.name for rollout in rollouts for call in rollout.tool_calls)
    return GroupFigures(
        groups=len(groups),
        rollouts=len(rollouts),
        success_mean=fmean(fmean(row) for row in wins),
        best_of_k=fmean(any(row) for row in wins),
        k=len(wins[0]),
        reward_mean=fmean(rollout.rewards.get(TOTAL, 0.0) for rollout in rollouts),
        well_formed=fmean(rollout.well_formed for rollout in rollouts),
        mixed_groups=fmean(any(row) and not all(row) for row in wins),
        distinct_solutions=fmean(distinct_solutions(group) for group in groups),
        turns_mean=fmean(len(rollout.generations) for rollout in rollouts),
        sampled_tokens_mean=fmean(sampled_tokens(rollout) for rollout in rollouts),
        tool_calls={name: count / len(rollouts) for name, count in sorted(tools.items())},
        stop_reasons=dict(sorted(Counter(str(rollout.stop_reason) for rollout in rollouts).items())),
        rollout_s_mean=fmean(rollout.timings.total_s for rollout in rollouts),
    )


def append(path: Path, row: Row) -> None:
    """Adds one line with a single write."""
    line = msgspec.json.encode(row) + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def read(path: Path) -> Iterator[Row]:
    """Rows of a run, in order."""
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(Row)
    for line in path.read_bytes().split(b"\n")[:-1]:
        yield decoder.decode(line)
