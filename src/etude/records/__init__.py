"""Floor 0: the nouns that flow between rooms, the errors and the config loader. Imports nothing of ours above it."""
