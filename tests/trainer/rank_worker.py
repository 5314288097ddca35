"""One gloo rank of `test_gradient_invariance`: computes its share of the gradient, takes a step, rank 0 saves both.

Arguments: rank, world size, file of the rendezvous, output file.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from conftest import gradient_config, ragged_sequences, tiny_decoder

from etude.trainer.step import PolicyTrainer


def main(rank: int, world: int, rendezvous: str, output: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    found: dict[str, object] = {}
    sequences = ragged_sequences()
    for dtype in (torch.float64, torch.float32):
        for horizon in ("token", "sequence"):
            trainer = PolicyTrainer(
                tiny_decoder(dtype=dtype), gradient_config(kl_horizon=horizon), reference=tiny_decoder(1, dtype)
            )
            # uneven on purpose: one rank has the first three rollouts
            share = sequences[:3] if rank == 0 else sequences[3:]
            totals = trainer.compute_gradients(share)
            found[f"{dtype}/{horizon}"] = {
                "gradients": {n: p.grad for n, p in trainer.decoder.named_parameters()},
                "sums": totals.sums,
                "maxima": totals.maxima,
            }
    trainer = PolicyTrainer(tiny_decoder(), gradient_config(), reference=tiny_decoder(1))
    stats = trainer.step([sequences])
    found["step"] = {"masters": trainer.masters, "grad_norm": stats.grad_norm, "tokens": stats.tokens}
    torch.save(found, f"{output}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
