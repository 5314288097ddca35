"""Floor 1: tokenizer, append-only prompt bridge, tool-call parsing and grammar. No torch."""
