"""Floor 6: pictures of a run. Reads files, writes reports; changes no run."""
