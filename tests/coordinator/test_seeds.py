"""Seeds depend on run, task and attempt alone, and on each of them."""

from __future__ import annotations

import subprocess
import sys

from etude.coordinator.seeds import order_seed, rollout_seed


def test_equal_inputs_give_equal_seeds_in_another_process() -> None:
    code = "from etude.coordinator.seeds import rollout_seed; print(rollout_seed(7, 'task', 3))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout
    assert int(other) == rollout_seed(7, "task", 3)


def test_every_input_matters_and_seeds_fit_63_bits() -> None:
    seeds = [rollout_seed(run, task, attempt) for run in range(6) for task in ("a", "b", "a1") for attempt in range(12)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in [*seeds, order_seed(0)])
    assert order_seed(1) != order_seed(2)


def test_the_pure_half_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys, etude.coordinator.ledger, etude.coordinator.seeds, etude.coordinator.staleness;"
        "print([name for name in ('torch', 'ray') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout == "[]\n"
