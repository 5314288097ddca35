"""How long one optimiser step takes on one thread: 32 rollouts of about 250 ids with a 2M-parameter MoE policy.

Beside it the peer: the same loss by plain autograd, one rollout after another with full-vocabulary logits at every
position. Bars: a step without KL <= 3 s of processor time. Run: `python -m benchmarks.trainer_step`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from etude.model.decoder import Decoder, RouteReplay
from etude.pretrain.starter import starter_config
from etude.trainer.config import TrainerConfig
from etude.trainer.sequence import TokenRow, TrainSequence
from etude.trainer.step import PolicyTrainer

VOCAB, GROUPS, GROUP_SIZE = 2048, 4, 8
BAR_S = 3.0


def rollouts(rng: np.random.Generator) -> list[list[TrainSequence]]:
    """Groups whose members share a prompt of about 180 ids and act for 40 to 100 more, two thirds of them sampled."""
    groups = []
    for g in range(GROUPS):
        prompt = rng.integers(0, VOCAB, int(rng.integers(140, 220)))
        members = []
        for i in range(GROUP_SIZE):
            ids = np.concatenate((prompt, rng.integers(0, VOCAB, int(rng.integers(40, 101)))))
            n = len(ids)
            sampled = (np.arange(n) >= len(prompt)) & (np.arange(n) % 3 > 0)
            allowed = rng.random((int(sampled.sum()), VOCAB)) < 0.3
            allowed[np.arange(len(allowed)), ids[sampled]] = True
            row = TokenRow(
                ids=ids,
                sampled=sampled,
                mu=np.where(sampled, -6.0, 0.0),
                versions=np.zeros(n, np.uint32),
                temperature=np.ones(n, np.float32),
                routes=rng.random((n - 1, 4, 8)).argsort(-1)[..., :2].astype(np.uint8),
                routes_valid=np.ones(n - 1, bool),
                masks=np.packbits(allowed, axis=1),
            )
            members.append(TrainSequence(f"r{i}", f"g{g}", (row,), float(rng.normal())))
        groups.append(members)
    return groups


def plain_pass(decoder: Decoder, groups: list[list[TrainSequence]]) -> None:
    """Forward and backward of the bare loss, one rollout at a time."""
    for sequence in (sequence for group in groups for sequence in group):
        (row,) = sequence.rows
        assert row.routes is not None
        replay = RouteReplay(torch.from_numpy(row.routes)[None], 0.5, torch.ones(1, row.length - 1, dtype=torch.bool))
        logits = decoder.logits(decoder(torch.from_numpy(row.ids[:-1])[None], replay=replay).hidden)
        logp = torch.log_softmax(logits[0], -1).gather(-1, torch.from_numpy(row.ids[1:, None]))[:, 0]
        torch.autograd.backward(-(logp * torch.from_numpy(row.sampled[1:])).sum() * sequence.advantage)


def processor_seconds(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median processor and wall seconds."""
    cpu, wall = [], []
    for _ in range(repeats):
        c, w = time.process_time(), time.perf_counter()
        work()
        cpu.append(time.process_time() - c)
        wall.append(time.perf_counter() - w)
    return float(np.median(cpu)), float(np.median(wall))


def main() -> int:
    """Prints the table and the line of JSON; 1 when the bar is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=int, default=4096, help="micro-batch token slots")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    groups = rollouts(np.random.default_rng(0))
    tokens = sum(s.tokens for group in groups for s in group)
    found: dict[str, float] = {"tokens": tokens}
    for name, beta, layout in (("no_kl", 0.0, "padded"), ("kl", 0.001, "padded"), ("packed_no_kl", 0.0, "packed")):
        torch.manual_seed(0)
        config = TrainerConfig.model_validate(
            {
                "kl_beta": beta,
                "measure_kl": beta > 0,
                "layout": layout,
                "groups": GROUPS,
                "micro_batch_tokens": arguments.budget,
            }
        )
        trainer = PolicyTrainer(Decoder(starter_config(VOCAB)), config)
        trainer.step(groups)
        found[f"{name}_s"], found[f"{name}_wall_s"] = processor_seconds(
            lambda t=trainer: t.step(groups), arguments.repeats
        )
    found["plain_s"], found["plain_wall_s"] = processor_seconds(
        lambda: plain_pass(trainer.decoder, groups), arguments.repeats
    )
    for name in ("no_kl", "kl", "packed_no_kl", "plain"):
        bar = f"   bar {BAR_S:.1f} s" if name == "no_kl" else ""
        seconds = found[f"{name}_s"]
        print(
            f"{name:>14}  {seconds:6.2f} s processor  {found[name + '_wall_s']:6.2f} s wall  {tokens / seconds:7.0f} ids/s{bar}"
        )
    print(json.dumps({key: round(value, 4) for key, value in found.items()}))
    return 0 if found["no_kl_s"] <= BAR_S else 1


if __name__ == "__main__":
    sys.exit(main())
