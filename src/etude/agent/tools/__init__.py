"""The tools an agent may call: which ones, with which options, how arguments are checked and results told."""
