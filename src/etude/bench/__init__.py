"""Floor 5: suites, evaluation runs, their statistics and figures."""
