"""One training phase: steps until its budget ends, with a log, checkpoints, evaluations and an exact resume.

The rate warms up, stays flat and falls linearly at the end (WSD): the decay begins when the budget's last share begins, or at once
when `decay_now` appears in the folder (its content, if any, is the decay's length in minutes). The moment it began is
part of the state, so a resumed run falls along the same line. Knows nothing of what the episodes are.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from etude.model.decoder import Decoder
from etude.pretrain.batches import Batch, Cursor, PoolSource, Stream
from etude.pretrain.config import PhaseConfig
from etude.pretrain.objective import balance_routers, batch_loss, evaluate
from etude.pretrain.optimizer import OptimizerPair, schedule
from etude.records.errors import BadInput, CheckpointError

STATE_VERSION = 1
DECAY_FILE = "decay_now"


@dataclass
class Progress:
    """How far a phase is. `seconds` counts training time over all its sessions."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    decay_start: int | None = None
    decay_steps: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    done: bool = False


class Phase:
    """Trains `decoder` in place. `source` gives pools of episodes; `on_decay` is called when the decay begins (or is resumed)."""

    def __init__(
        self,
        name: str,
        decoder: Decoder,
        source: PoolSource,
        config: PhaseConfig,
        folder: str | Path,
        *,
        seed: int = 0,
        pad_id: int = 0,
        validation: Callable[[], Iterable[Batch]] | None = None,
        on_decay: Callable[[], None] | None = None,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.decoder, self.source, self.config, self.folder = name, decoder, source, config, Path(folder)
        self.seed, self.pad_id, self.validation, self.on_decay = seed, pad_id, validation, on_decay
        self.say, self.clock = say, clock
        self.progress = Progress()
        self.optimizers = OptimizerPair(
            decoder, muon_lr=config.muon_lr, adam_lr=config.adam_lr, adam_betas=config.adam_betas
        )

    @property
    def state_path(self) -> Path:
        return self.folder / f"{self.name}.state.pt"

    def resume(self) -> bool:
        """Loads the phase's checkpoint if there is one. Raises CheckpointError when it cannot be used."""
        if not self.state_path.exists():
            return False
        state = _read_state(self.state_path)
        try:
            self.decoder.load_state_dict(state["decoder"])
            self.optimizers.load_state_dict(state["optimizers"])
            self.progress = Progress(**{**state["progress"], "cursor": Cursor(**state["progress"]["cursor"])})
        except (RuntimeError, KeyError, ValueError, TypeError) as error:
            raise CheckpointError(
                str(self.state_path), "content", str(error)[:200], "a state of this phase and model"
            ) from error
        if self.progress.decay_start is not None and self.on_decay is not None:
            self.on_decay()
        return True

    def save(self) -> None:
        """Writes the checkpoint: a temporary file, then a rename."""
        self.folder.mkdir(parents=True, exist_ok=True)
        progress: dict[str, Any] = {**vars(self.progress), "cursor": vars(self.progress.cursor)}
        state = {
            "version": STATE_VERSION,
            "decoder": self.decoder.state_dict(),
            "optimizers": self.optimizers.state_dict(),
            "progress": progress,
        }
        temporary = self.state_path.with_suffix(".tmp")
        torch.save(state, temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(self.state_path)

    def run(self, max_steps: int | None = None) -> Progress:
        """Steps until the budget ends or `max_steps` more are done; always leaves a checkpoint, also on an interrupt."""
        config, progress = self.config, self.progress
        stream = Stream(
            self.source,
            seed=self.seed,
            batch_tokens=config.batch_tokens,
            pad_id=self.pad_id,
            cursor=progress.cursor,
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        with _only_one(self.folder / f"{self.name}.lock"):
            return self._run(stream, max_steps)

    def _run(self, stream: Stream, max_steps: int | None) -> Progress:
        config, progress = self.config, self.progress
        last_step = None if max_steps is None else progress.step + max_steps
        saved = evaluated = now = self.clock()
        spoken = -math.inf
        log_path = self.folder / f"{self.name}.log.jsonl"
        try:
            with log_path.open("a", encoding="utf-8") as log:
                while not progress.done and progress.step != last_step:
                    self._maybe_decay(stream)
                    line = self._step(stream)
                    before, now = now, self.clock()
                    progress.seconds += now - before
                    line["seconds"] = round(progress.seconds, 2)
                    log.write(json.dumps(line) + "\n")
                    progress.done = self._finished()
                    if now - spoken >= 10:
                        spoken = now
                        self.say(self._sentence(line))
                    if self.validation is not None and (progress.done or now - evaluated >= config.evaluate_s):
                        report = evaluate(self.decoder, self.validation()).report()
                        log.write(json.dumps({"step": progress.step, "tokens": progress.tokens, "eval": report}) + "\n")
                        self.say(f"{self.name} step {progress.step} evaluation " + _flat(report))
                        evaluated = now
                        now = self.clock()
                    if now - saved >= config.checkpoint_s:
                        log.flush()
                        self.save()
                        saved = now = self.clock()
        finally:
            self.save()
        return progress

    def _step(self, stream: Stream) -> dict[str, Any]:
        config, progress = self.config, self.progress
        batch = stream.next()
        scale = schedule(
            progress.step,
            warmup=config.warmup_steps,
            decay_start=progress.decay_start,
            decay_steps=progress.decay_steps,
            floor=config.floor,
        )
        loss = batch_loss(self.decoder, batch)
        loss.total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), config.clip)
        self.optimizers.step(scale)
        if config.router_bias_rate:
            balance_routers(self.decoder, loss.router_counts_LE, config.router_bias_rate * scale)
        progress.step += 1
        progress.tokens += batch.tokens
        progress.cursor = stream.cursor
        return {
            "step": progress.step,
            "tokens": progress.tokens,
            "loss": round(loss.total.item(), 4),
            "edit_loss": round(loss.edit, 4),
            "scale": round(scale, 4),
            "norm": round(float(norm), 3),
        }

    def _spent(self) -> float:
        """Share of the budget used; the larger one where both tokens and seconds bound the phase."""
        config, progress = self.config, self.progress
        shares = [0.0]
        if config.budget_tokens is not None:
            shares.append(progress.tokens / config.budget_tokens)
        if config.budget_s is not None:
            shares.append(progress.seconds / config.budget_s)
        return max(shares)

    def _maybe_decay(self, stream: Stream) -> None:
        config, progress = self.config, self.progress
        if progress.decay_start is not None:
            return
        asked = self.folder / DECAY_FILE
        if asked.exists():
            minutes = asked.read_text(encoding="utf-8").strip()
            pace = progress.step / max(progress.seconds, 1e-9)
            steps = (
                float(minutes) * 60 * pace if minutes else progress.step * config.decay_share / (1 - config.decay_share)
            )
        elif self._spent() >= 1 - config.decay_share and progress.step > 0:
            steps = progress.step * config.decay_share / max(1e-9, 1 - config.decay_share)
            if config.decay_share == 1:
                return
        else:
            return
        progress.decay_start, progress.decay_steps = progress.step, max(1, round(steps))
        self.say(f"{self.name}: decay begins at step {progress.step}, for {progress.decay_steps} steps")
        if self.on_decay is not None:
            self.on_decay()
            stream.refresh()

    def _finished(self) -> bool:
        progress = self.progress
        return progress.decay_start is not None and progress.step >= progress.decay_start + progress.decay_steps

    def _sentence(self, line: dict[str, Any]) -> str:
        progress = self.progress
        pace = progress.tokens / max(progress.seconds, 1e-9)
        if progress.decay_start is not None:
            left = progress.decay_start + progress.decay_steps - progress.step
            eta = left * progress.seconds / max(1, progress.step)
        else:
            spent = self._spent()
            eta = progress.seconds * (1 - spent) / spent if spent > 0 else math.nan
        return (
            f"{self.name} step {line['step']}  {line['tokens'] / 1e6:.2f}M tokens  loss {line['loss']:.3f}  "
            f"edit {line['edit_loss']:.3f}  rate x{line['scale']:.2f}  {pace:.0f} tokens/s  left {eta / 60:.1f} min"
        )


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Holds a lock file; two processes that trained in one folder would overwrite each other's checkpoint."""
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BadInput(str(path.parent), "lock", path.name, "a folder in which no other process trains") from error
        yield


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
        version = state["version"]
    except (OSError, RuntimeError, KeyError, EOFError, ValueError, TypeError, pickle.UnpicklingError) as error:
        raise CheckpointError(str(path), "content", str(error)[:200], "a state that a training phase wrote") from error
    if version != STATE_VERSION:
        raise CheckpointError(str(path), "version", version, f"version {STATE_VERSION}")
    return state


def load_weights(path: Path, decoder: Decoder) -> int:
    """Loads only the weights of a phase's checkpoint and returns its step. Raises CheckpointError when it cannot."""
    state = _read_state(path)
    try:
        decoder.load_state_dict(state["decoder"])
    except RuntimeError as error:
        raise CheckpointError(str(path), "decoder", str(error)[:200], "weights of this model's shape") from error
    return int(state["progress"]["step"])


def _flat(report: dict[str, dict[str, float]]) -> str:
    return "  ".join(
        f"{domain}: " + " ".join(f"{key} {value:.3f}" for key, value in values.items())
        for domain, values in report.items()
    )
