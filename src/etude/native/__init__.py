"""Floor 1: the few C sources, compiled on first use; what needs one has a Python fallback and says so."""
