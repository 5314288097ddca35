"""Floor 4: the agent. Prompt, loop, tools, verifier, reward, solver, trajectory; no torch, no Ray."""
