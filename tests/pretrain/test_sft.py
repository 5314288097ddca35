"""Demonstrations: records survive the file, right actions are targets, wrong edits are context only."""

from pathlib import Path

import pytest

from etude.pretrain.batches import Episode, PoolSource
from etude.pretrain.sft import (
    DemonstrationPools,
    demonstration_episode,
    read_demonstrations,
    right_actions,
    write_demonstrations,
)
from etude.records.errors import BadInput
from etude.records.rollout import Generation, Rollout, SamplingParams, StopReason, ToolCall


def rollout() -> Rollout:
    """Wrong edit (10), failing run (11), right edit (12), passing run (13), finish (14); results are 90s."""
    ids: list[int] = [1, 2, 3]
    generations = []
    for index, action in enumerate(([10, 0], [11, 0], [12, 0], [13, 0], [14, 0])):
        generations.append(
            Generation(
                index=index,
                prompt_ids=tuple(ids),
                sampled_ids=tuple(action),
                logprobs=(0.0, 0.0),
                policy_versions=(0, 0),
                spans=(),
                sampling=SamplingParams(temperature=1.0, max_tokens=8, seed=0, stop_ids=(0,)),
                finish="stop",
                engine_id="script",
                chat_format_id="x",
            )
        )
        ids += [*action, 90 + index]
    calls = [("edit_file", "ok"), ("run", "f(1) -> 2, want 3"), ("edit_file", "ok"), ("run", "ok"), ("finish", "")]
    return Rollout(
        id="r",
        task_id="t",
        attempt=0,
        seed=0,
        generations=tuple(generations),
        tool_calls=tuple(
            ToolCall(generation=i, name=name, arguments={}, ok=True, result=result)
            for i, (name, result) in enumerate(calls)
        ),
        stop_reason=StopReason.FINISH,
    )


def test_only_the_edit_whose_run_passes_is_a_target() -> None:
    assert right_actions(rollout()) == [False, True, True, True, True]
    episode = demonstration_episode(rollout())
    assert episode is not None
    targets = {index for index, weight in zip(episode.ids, episode.weights, strict=True) if weight}
    assert targets == {11, 12, 13, 14, 0}
    assert [index for index, marked in zip(episode.ids, episode.edit, strict=True) if marked] == [12, 0]


def test_records_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "d.zst"
    assert write_demonstrations(path, [rollout(), rollout()]) == 2
    assert read_demonstrations(path) == [rollout(), rollout()]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadInput):
        read_demonstrations(path)
    with pytest.raises(BadInput, match="missing"):
        read_demonstrations(tmp_path / "none")


class Other(PoolSource):
    def pool(self, number: int) -> list[Episode]:
        return [Episode("other", [number]) for _ in range(10)]


def test_an_epoch_shows_each_demonstration_once_and_the_share_of_reminders_holds() -> None:
    made = [Episode("demonstration", [index]) for index in range(14)]
    pools = DemonstrationPools(made, 10, 3, other=Other(), other_share=0.3)
    drawn = [pools.pool(number) for number in range(4)]
    own = [e.ids[0] for pool in drawn for e in pool if e.domain == "demonstration"]
    assert sorted(own) == sorted([*range(14), *range(14)])
    assert all(sum(e.domain == "other" for e in pool) == 3 for pool in drawn)
