"""Fine-tuning data from demonstrations: rollout records become token sequences, exactly as the harness produced them.

Targets are the sampled tokens of right actions; a wrong edit stays as context, so the policy learns to try again and not to err.
Demonstrations come from outside (the scripted solver in the same harness) as a file of records; this module knows nothing
of pods or tasks.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

import zstandard

from etude.chat.format import RESULT_PASSED
from etude.pretrain.batches import Episode, PoolSource
from etude.records.errors import BadInput
from etude.records.rollout import Rollout, decode_rollout, encode

_LENGTH = struct.Struct("<I")


def write_demonstrations(path: str | Path, rollouts: Iterable[Rollout]) -> int:
    """Writes rollout records, each behind its length (uint32), in one zstd stream; returns how many."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    count = 0
    with temporary.open("wb") as raw, zstandard.ZstdCompressor(level=6).stream_writer(raw) as out:
        for rollout in rollouts:
            data = encode(rollout)
            out.write(_LENGTH.pack(len(data)) + data)
            count += 1
    temporary.replace(path)
    return count


def read_demonstrations(path: str | Path) -> list[Rollout]:
    """Reads `write_demonstrations` back. Raises BadInput when the file is missing or cut short."""
    path = Path(path)
    if not path.is_file():
        raise BadInput(str(path), "demonstrations", "missing", "a file of rollout records of the scripted solver")
    stream = zstandard.ZstdDecompressor().decompressobj()
    try:
        data = stream.decompress(path.read_bytes())
    except zstandard.ZstdError as error:
        raise BadInput(str(path), "content", str(error), "a zstd stream of rollout records") from error
    if not stream.eof:
        raise BadInput(str(path), "content", "cut short", "a whole zstd stream")
    rollouts, position = [], 0
    while position < len(data):
        (size,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        rollouts.append(decode_rollout(data[position : position + size], str(path)))
        position += size
    return rollouts


def right_actions(rollout: Rollout) -> list[bool]:
    """For each generation, whether it is worth imitating: an edit is, when the run that follows it passes; other actions are."""
    calls: dict[int, list[str]] = {}
    results: dict[int, str] = {}
    for call in rollout.tool_calls:
        calls.setdefault(call.generation, []).append(call.name)
        results[call.generation] = call.result
    right = []
    for generation in rollout.generations:
        names = calls.get(generation.index, [])
        if "edit_file" not in names:
            right.append(True)
            continue
        later = (g.index for g in rollout.generations if g.index > generation.index and "run" in calls.get(g.index, []))
        run = next(later, None)
        right.append(run is not None and results[run].strip() == RESULT_PASSED)
    return right


def demonstration_episode(rollout: Rollout, *, action_weight: float = 1.0) -> Episode | None:
    """The rollout's last prompt and action, one sequence; None when its chain does not grow by appending."""
    if not rollout.generations:
        return None
    last = rollout.generations[-1]
    ids = [*last.prompt_ids, *last.sampled_ids]
    episode = Episode("demonstration", ids, [0.0] * len(ids), [False] * len(ids))
    edits = {call.generation for call in rollout.tool_calls if call.name == "edit_file"}
    for generation, right in zip(rollout.generations, right_actions(rollout), strict=True):
        begin, end = len(generation.prompt_ids), len(generation.prompt_ids) + len(generation.sampled_ids)
        if tuple(ids[:begin]) != generation.prompt_ids or tuple(ids[begin:end]) != generation.sampled_ids:
            return None
        if right:
            episode.weights[begin:end] = [action_weight] * (end - begin)
            episode.edit[begin:end] = [generation.index in edits] * (end - begin)
    return episode


class DemonstrationPools(PoolSource):
    """Each pool: some demonstrations in a fresh random order each epoch, and as a reminder part of a pool of another source."""

    def __init__(
        self,
        episodes: Sequence[Episode],
        size: int,
        seed: int,
        *,
        other: PoolSource | None = None,
        other_share: float = 0.0,
    ) -> None:
        if not episodes:
            raise BadInput("demonstrations", "episodes", 0, "at least one demonstration")
        self.episodes, self.size, self.seed = list(episodes), size, seed
        self.other, self.other_share = other, other_share if other is not None else 0.0

    def pool(self, number: int) -> list[Episode]:
        """A pure function of the number."""
        own = max(1, round(self.size * (1 - self.other_share)))
        made: list[Episode] = []
        for epoch in range(number * own // len(self.episodes), ((number + 1) * own - 1) // len(self.episodes) + 1):
            order = list(range(len(self.episodes)))
            random.Random(f"{self.seed}/demonstrations/{epoch}").shuffle(order)
            first = epoch * len(order)
            made += [self.episodes[i] for i in order[max(0, number * own - first) : (number + 1) * own - first]]
        if self.other is not None and self.other_share > 0:
            made += self.other.pool(number)[: self.size - own]
        return made
