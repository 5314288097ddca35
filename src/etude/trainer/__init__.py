"""Floor 3: the trainer: sequences from rollouts, packing, the optimiser step, checkpoints (SPEC T)."""
