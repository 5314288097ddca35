"""Which learning rate and batch turn recorded groups into better repair? Trains on the mixed groups of finished runs, without rollouts.

`python -m benchmarks.rl_recorded_groups runs/RUN [runs/RUN ...] --learning-rate 2e-5 --groups 8`

Before, during and after it measures the probability that the policy gives the smallest right edit as its first action on
dev tasks, under the grammar's masks: a figure of repair alone, without sampling noise, in seconds. Groups whose rollouts
all ended alike are left out, as they have no group advantage. The bar: the mean probability rises.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from etude.agent.config import AgentConfig
from etude.agent.prompt import opening_prompt
from etude.agent.solver import right_edit
from etude.chat.format import FIELD_TOKENS, TOOL_TOKENS
from etude.chat.grammar import Grammar, make_spec
from etude.chat.tokenizer import Tokenizer
from etude.coordinator.groups import GroupArchive
from etude.coordinator.metrics import solved
from etude.coordinator.run import RUN_PREFIX
from etude.model.checkpoint import load_pretrained
from etude.model.decoder import Decoder
from etude.records.errors import BadInput, EtudeError
from etude.records.rollout import decode_group
from etude.records.task import Split
from etude.tasks.archive import TaskSet
from etude.trainer.config import TrainerConfig
from etude.trainer.sequence import TrainSequence, group_sequences
from etude.trainer.step import PolicyTrainer
from etude.weightsync.store import open_store

ROWS_AT_ONCE = 24


@dataclass(frozen=True)
class Probe:
    """One dev task: prompt ids, the right first action, and the ids allowed at each of its places."""

    prompt: tuple[int, ...]
    action: tuple[int, ...]
    allowed_TV: torch.Tensor


def make_probes(tasks: TaskSet, tokenizer: Tokenizer) -> list[Probe]:
    """Dev tasks whose smallest right edit the grammar can say."""
    config, special, probes = AgentConfig(), tokenizer.special, []
    for task in tasks.split(Split.DEV):
        edit = right_edit(task, tokenizer, longest=config.max_field_tokens)
        if edit is None:
            continue
        prompt = opening_prompt(task, tokenizer, config)
        action = [special[TOOL_TOKENS["edit_file"]], special[FIELD_TOKENS["old"]], *edit[0]]
        action += [special[FIELD_TOKENS["new"]], *edit[1], tokenizer.end_id]
        grammar = Grammar(make_spec(tokenizer, config.tools, source_ids=prompt.source_ids), tokenizer)
        masks = []
        try:
            for token in action:
                masks.append(grammar.allowed().copy())
                grammar.advance(token)
        except BadInput:
            continue  # a span that only a longer `old` makes unique
        probes.append(Probe(prompt.ids, tuple(action), torch.from_numpy(np.array(masks))))
    return probes


def first_edit(decoder: Decoder, probes: Sequence[Probe]) -> tuple[float, float]:
    """Mean probability and median log-probability of the right first action."""
    found: list[float] = []
    with torch.no_grad():
        for begin in range(0, len(probes), ROWS_AT_ONCE):
            rows = probes[begin : begin + ROWS_AT_ONCE]
            ids = torch.zeros(len(rows), max(len(p.prompt) + len(p.action) for p in rows), dtype=torch.long)
            for row, probe in enumerate(rows):
                ids[row, : len(probe.prompt) + len(probe.action)] = torch.tensor(probe.prompt + probe.action)
            hidden = decoder(ids).hidden
            for row, probe in enumerate(rows):
                end = len(probe.prompt) + len(probe.action) - 1
                logits = decoder.logits(hidden[row, len(probe.prompt) - 1 : end])
                logits = logits.masked_fill(~probe.allowed_TV, float("-inf"))
                logprobs = torch.log_softmax(logits, -1)[torch.arange(len(probe.action)), torch.tensor(probe.action)]
                found.append(float(logprobs.sum()))
    return float(np.exp(found).mean()), float(np.median(found))


def mixed_groups(run: Path) -> list[tuple[TrainSequence, ...]]:
    """The run's groups with both outcomes, in the order drawn."""
    store = open_store(run / "store")
    archive = GroupArchive(store, RUN_PREFIX)
    groups = []
    for key in store.list(f"{RUN_PREFIX}/groups"):
        stored = archive.load(key.rsplit("/", 1)[-1])
        group = decode_group(stored.record)
        if len({solved(rollout) for rollout in group.rollouts}) == 2:
            groups.append((group.draw, group_sequences(group, stored.blobs.__getitem__)))
    return [sequences for _, sequences in sorted(groups, key=lambda pair: pair[0])]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one setting; exit code 1 when the probability of the right first edit did not rise."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rl_recorded_groups", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--model", default="data/starter")
    parser.add_argument("--tasks", default="data/tasks.tar.zst")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--groups", type=int, default=8, help="mixed groups of one step")
    parser.add_argument("--passes", type=int, default=1)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        probes = make_probes(TaskSet.open(given.tasks), Tokenizer.load(given.model))
        data = [group for run in given.runs for group in mixed_groups(run)]
        if len(data) < given.groups:
            raise BadInput("runs", "mixed groups", len(data), f"at least {given.groups}")
        config = TrainerConfig(
            learning_rate=given.learning_rate, groups=given.groups, kl_beta=0.0, measure_kl=False, threads=1
        )
        trainer = PolicyTrainer(load_pretrained(given.model), config)
    except EtudeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    before = first_edit(trainer.decoder, probes)
    print(f"{len(data)} mixed groups, {len(probes)} dev tasks, learning rate {given.learning_rate:g}")
    print(f"{'step':>5} {'p(right first edit)':>20} {'median log p':>13} {'entropy':>8}")
    print(f"{0:>5} {before[0]:>20.4f} {before[1]:>13.3f}")
    order, step, after = random.Random(0), 0, before
    for _ in range(given.passes):
        rows = list(range(len(data)))
        order.shuffle(rows)
        starts = range(0, len(rows) - given.groups + 1, given.groups)
        for start in starts:
            stats = trainer.step([data[row] for row in rows[start : start + given.groups]])
            step += 1
            if step % max(1, len(starts) // 4) == 0 or start == starts[-1]:
                after = first_edit(trainer.decoder, probes)
                print(f"{step:>5} {after[0]:>20.4f} {after[1]:>13.3f} {stats.entropy:>8.3f}", flush=True)
    print(
        json.dumps(
            {"before": before[0], "after": after[0], "groups": len(data), "steps": step, "bar": "after > before"}
        )
    )
    return 0 if after[0] > before[0] else 1


if __name__ == "__main__":
    raise SystemExit(main())
