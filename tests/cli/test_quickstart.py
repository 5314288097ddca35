"""The main job over real processes: Ray actors, an engine process, pods. Minutes long, so behind the slow marker."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from etude.coordinator.ledger import replay
from etude.coordinator.run import RUN_PREFIX
from etude.weightsync.store import open_store

pytestmark = [pytest.mark.slow, pytest.mark.pods]
KEYS = (
    "mean_before mean_after mean_change_low mean_change_high best4_before best4_after steps seconds groups_trained groups_void"
).split()


def test_a_short_quickstart_leaves_figures_report_policy_and_a_sound_ledger(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    overrides = [
        "coordinator.minutes=0.6",
        "coordinator.probe_every=0",
        "coordinator.groups_per_batch=2",
        "trainer.groups=2",
        "evaluation.tasks=6",
        f"runs='{tmp_path / 'runs'}'",
    ]
    command = [sys.executable, "-m", "etude.cli.main", "quickstart", "--seed", "3", "--json", str(figures), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(figures.read_text())
    assert all(found[key] is not None for key in KEYS)
    assert found["steps"] >= 1 and found["groups_trained"] == 2 * found["steps"]
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "report.html").stat().st_size > 10_000
    state = replay(open_store(run / "store"), RUN_PREFIX).state
    counts = state.check()
    assert counts.trained == found["groups_trained"] and counts.in_flight == 0
    shown = subprocess.run(
        [sys.executable, "-m", "etude.cli.main", "model", "show", str(run / "policy")], capture_output=True, text=True
    )
    assert shown.returncode == 0 and "deepseek_v3" in shown.stdout
