"""The agent's section of the config tree: how a rollout acts. What it earns is `rl.config`'s.

Knows nothing of tasks or engines; a task's own limits stand unless a field here overrides them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from etude.chat.format import SYSTEM_TEXT


class AgentConfig(BaseModel):
    """How one rollout acts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    system: str = Field(
        default=SYSTEM_TEXT, description="System message of every prompt; a few words for a small policy."
    )
    tools: tuple[str, ...] = Field(
        default=("edit_file", "run", "finish"), description="Tools on offer, in prompt order."
    )
    edit_base: Literal["original", "current"] = Field(
        default="original", description="What an edit applies to: the file as the task placed it, or as it is now."
    )
    grammar: bool = Field(default=True, description="Mask the sampling by the grammar of tool calls.")
    force_retry: bool = Field(
        default=False, description="Baseline: after a failing run only another edit is allowed; needs `grammar`."
    )
    max_field_tokens: int = Field(
        default=24, gt=0, description="Longest value of a call's field under the grammar, in tokens."
    )
    max_calls: int = Field(default=1, gt=0, description="Most calls in one action; further ones are refused.")
    temperature: float = Field(default=1.0, ge=0, description="Sampling temperature; 0 is greedy.")
    max_action_tokens: int = Field(default=64, gt=0, description="Most tokens sampled in one action.")
    malformed_limit: int = Field(default=2, gt=0, description="Malformed actions in a row that end a rollout.")
    output_chars: int = Field(default=400, ge=32, description="Longest tool result shown to the policy, in characters.")
    output_tokens: int = Field(default=96, ge=8, description="Longest tool result shown to the policy, in tokens.")
    max_turns: int | None = Field(default=None, gt=0, description="Overrides the task's limit of turns.")
    max_sampled_tokens: int | None = Field(
        default=None, gt=0, description="Overrides the task's budget of sampled tokens."
    )
    max_context_tokens: int | None = Field(
        default=None, gt=0, description="Overrides the task's context limit, in tokens."
    )
    agent_timeout_s: float | None = Field(
        default=None, gt=0, description="Overrides the task's budget of tool seconds."
    )
    engine_idle_s: float = Field(
        default=120.0, gt=0, description="Longest wait for the next token of a generation, seconds."
    )
    engine_attempts: int = Field(
        default=3, gt=0, description="Times that one generation is asked for before giving up."
    )
    pod_attempts: int = Field(
        default=2, gt=0, description="Pods that one rollout may use: the first, and rebuilt ones."
    )
    pod_start_s: float = Field(
        default=700.0, gt=0, description="Longest wait for a pod, its turn in the backend's queue included, seconds."
    )
    pod_grace_s: float = Field(
        default=10.0, gt=0, description="Wait beyond a tool's own timeout before the pod counts as lost."
    )
    changed_file_bytes: int = Field(
        default=1 << 20, gt=0, description="Largest changed file that the verifier takes, bytes."
    )
