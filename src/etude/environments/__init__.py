"""Floor 2: pods. Where an agent's tools act and where a verifier runs its tests; imports neither torch nor Ray."""
