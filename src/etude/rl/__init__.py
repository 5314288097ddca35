"""Floor 2: the mathematics of reinforcement learning, pure: advantage, KL, loss, length penalty, rewards, curriculum."""
