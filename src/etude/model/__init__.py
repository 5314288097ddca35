"""Floor 2: the policy's decoder (MLA + sparse MoE, the `deepseek_v3` architecture) and its checkpoints."""
