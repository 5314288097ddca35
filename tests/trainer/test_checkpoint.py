"""Checkpoints: whole or not there, strict on the way back, and a resumed run ends bit-equal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.records.errors import CheckpointError
from etude.trainer import checkpoint as checkpoint_module
from etude.trainer.checkpoint import (
    TrainerState,
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from etude.trainer.step import PolicyTrainer

Make = Callable[..., Any]


def _state(step: int, size: int = 8) -> TrainerState:
    return TrainerState(step, {"master/a": torch.full((size,), float(step)), "rng/torch": torch.get_rng_state()}, "ref")


def test_a_resumed_trainer_goes_on_bit_equal(
    tmp_path: Path, make_decoder: Make, make_sequences: Make, make_config: Make
) -> None:
    whole = PolicyTrainer(make_decoder(0), make_config())
    for seed in range(4):
        whole.step([make_sequences(seed)])
    first = PolicyTrainer(make_decoder(0), make_config())
    for seed in range(2):
        first.step([make_sequences(seed)])
    folder = save_checkpoint(tmp_path, first.state())
    second = PolicyTrainer(make_decoder(0), make_config())
    second.load_state(load_checkpoint(folder))
    assert second.steps_done == 2
    for seed in range(2, 4):
        stats = second.step([make_sequences(seed)])
    assert stats.step == 4
    for name, master in whole.masters.items():
        assert torch.equal(master, second.masters[name])
        assert torch.equal(dict(second.decoder.named_parameters())[name], master.bfloat16().float())


def test_a_state_before_the_first_step_loads_too(tmp_path: Path, make_decoder: Make, make_config: Make) -> None:
    trainer = PolicyTrainer(make_decoder(0), make_config())
    trainer.load_state(load_checkpoint(save_checkpoint(tmp_path, trainer.state())))
    assert trainer.steps_done == 0


def test_loading_is_strict_and_changes_nothing_when_it_refuses(
    make_decoder: Make, make_sequences: Make, make_config: Make
) -> None:
    trainer = PolicyTrainer(make_decoder(0), make_config())
    trainer.step([make_sequences()])
    state = trainer.state()
    masters = {name: master.clone() for name, master in trainer.masters.items()}
    name = "adam.exp_avg/norm.weight"
    wrong = {
        "missing": {k: v for k, v in state.tensors.items() if k != name},
        "unknown": {**state.tensors, "master/extra": torch.zeros(1)},
        "float64": {**state.tensors, name: state.tensors[name].double()},
        "(3,)": {**state.tensors, name: torch.zeros(3)},
    }
    for word, tensors in wrong.items():
        with pytest.raises(CheckpointError) as caught:
            trainer.load_state(replace(state, tensors={k: v + 1 for k, v in tensors.items()}))
        assert word in str(caught.value)
    with pytest.raises(CheckpointError, match="reference_digest"):
        trainer.load_state(replace(state, reference_digest="another"))
    assert all(torch.equal(masters[n], trainer.masters[n]) for n in masters)


@pytest.mark.parametrize("failing", ["_write", "_sync_folder"])
def test_a_write_that_fails_leaves_the_older_checkpoint_and_nothing_else(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, _state(1))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_module, failing, full)
    with pytest.raises(CheckpointError, match="No space left"):
        save_checkpoint(tmp_path, _state(2))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert load_checkpoint(tmp_path / "step-00000001").steps_done == 1


_KILLED = """
import os, signal, sys, torch
from etude.trainer import checkpoint
from etude.trainer.checkpoint import TrainerState, save_checkpoint
stop_after = int(sys.argv[2])
calls = 0
def counted(call):
    def run(*arguments, **named):
        global calls
        if calls == stop_after:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1
        return call(*arguments, **named)
    return run
os.fsync, os.rename = counted(os.fsync), counted(os.rename)
save_checkpoint(sys.argv[1], TrainerState(2, {"master/a": torch.full((8,), 9.0)}, "ref"))
"""


def test_kill_9_at_any_call_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    # fsync tensors, fsync record, fsync folder, rename old away, rename new in, fsync root
    save_checkpoint(tmp_path, _state(1))
    save_checkpoint(tmp_path, _state(2))
    for stop_after in (1, 3, 4):
        done = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path), str(stop_after)], timeout=60, check=False)
        assert done.returncode == -signal.SIGKILL
        newest = latest_checkpoint(tmp_path)
        assert newest is not None
        assert load_checkpoint(newest).steps_done in (1, 2)
        assert load_checkpoint(tmp_path / "step-00000001").steps_done == 1
    save_checkpoint(tmp_path, _state(3))
    prune_checkpoints(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_a_step_saved_again_is_the_newer_lineage(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, _state(1, size=8))
    save_checkpoint(tmp_path, _state(1, size=5))
    assert len(load_checkpoint(tmp_path / "step-00000001").tensors["master/a"]) == 5


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "meta", "version"])
def test_damage_is_named_by_file(damage: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, _state(1))
    tensors, meta = folder / "state.safetensors", folder / "state.json"
    data = tensors.read_bytes()
    if damage == "cut":
        tensors.write_bytes(data[:-3])
    elif damage == "flip":
        tensors.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "gone":
        os.unlink(tensors)
    elif damage == "meta":
        meta.write_text("{")
    else:
        meta.write_text(meta.read_text().replace('"version":1', '"version":7'))
    with pytest.raises(CheckpointError, match=r"state\.(json|safetensors)"):
        load_checkpoint(folder)


def test_oldest_are_pruned_and_the_newest_is_found(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "none") is None
    for step in (3, 10, 7):
        save_checkpoint(tmp_path, _state(step))
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000010"
    prune_checkpoints(tmp_path, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000007", "step-00000010"]
    with pytest.raises(CheckpointError, match="keep"):
        prune_checkpoints(tmp_path, keep=0)
