"""The task noun: what a rollout is asked to do, and where its folder lies. On disk a task is a Harbor-format folder.

Knows nothing of how tasks are made (`tasks`) or verified (`agent.verifier`).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class VerifierMode(StrEnum):
    """How a task is scored (DESIGN decision 13)."""

    PRISTINE = "pristine"
    """Hidden tests in a fresh pod, on a clean copy plus the allowed changed files."""
    FINAL_STATE = "final_state"
    """Hidden tests in a fork of the agent's pod with every agent process dead."""


class Split(StrEnum):
    """The five splits, disjoint by source module."""

    PRETRAIN = "pretrain"
    SFT = "sft"
    RL = "rl"
    DEV = "dev"
    HELD_OUT = "held_out"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one rollout: turns and sampled tokens are counts, times are seconds, memory is bytes."""

    max_turns: int = 10
    max_sampled_tokens: int = 192
    max_context_tokens: int = 512
    agent_timeout_s: float = 60.0
    tool_timeout_s: float = 5.0
    verifier_timeout_s: float = 20.0
    memory_bytes: int = 256 << 20
    processes: int = 32


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One task. `id` is the content hash of its folder (sha256, hex): the single-epoch key.

    `environment` and `tests` map paths relative to the agent's repository (environment) or to `tests/` onto bytes;
    `allowed_changes` are the repository paths that the verifier takes from the agent's pod.
    """

    id: str
    name: str
    instruction: str
    split: Split
    environment: dict[str, bytes]
    tests: dict[str, bytes]
    solution: dict[str, bytes]
    allowed_changes: tuple[str, ...]
    viewed_files: tuple[str, ...] = ()
    """Repository files shown in the prompt as recently viewed (SPEC H2)."""
    test_command: str = "python -B check.py"
    """What the `run` tool runs when the policy names no command."""
    image: str = "python-small"
    """Name of the environment image; a backend resolves it to a content digest."""
    verifier_mode: VerifierMode = VerifierMode.PRISTINE
    verifier: str = "cases"
    """`cases` (inputs and expected values, compared outside the process under test) or `pytest`."""
    category: str = "repair"
    operator: str = ""
    """Mutation operator, for a repair task; never shown to the policy."""
    module: str = ""
    """Source module the task was made from, the unit of the splits and of the bootstrap."""
    function: str = ""
    source: str = ""
    """Package name and version (or `python-stdlib 3.11`) the code came from."""
    licence: str = ""
    limits: Limits = msgspec.field(default_factory=Limits)
