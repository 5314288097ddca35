"""Floor 7: one command per capability; composes the config tree; no logic."""
