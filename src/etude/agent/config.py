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

    system: str = Field(SYSTEM_TEXT, description="System message of every prompt; a few words for a small policy.")
    tools: tuple[str, ...] = Field(("edit_file", "run", "finish"), description="Tools on offer, in prompt order.")
    edit_base: Literal["original", "current"] = Field(
        "original", description="What an edit applies to: the file as the task placed it, or as it is now."
    )
    grammar: bool = Field(True, description="Mask the sampling by the grammar of tool calls.")
    max_field_tokens: int = Field(24, gt=0, description="Longest value of a call's field under the grammar, in tokens.")
    max_calls: int = Field(1, gt=0, description="Most calls in one action; further ones are refused.")
    temperature: float = Field(1.0, ge=0, description="Sampling temperature; 0 is greedy.")
    max_action_tokens: int = Field(64, gt=0, description="Most tokens sampled in one action.")
    malformed_limit: int = Field(2, gt=0, description="Malformed actions in a row that end a rollout.")
    output_chars: int = Field(400, ge=32, description="Longest tool result shown to the policy, in characters.")
    output_tokens: int = Field(96, ge=8, description="Longest tool result shown to the policy, in tokens.")
    max_turns: int | None = Field(None, gt=0, description="Overrides the task's limit of turns.")
    max_sampled_tokens: int | None = Field(None, gt=0, description="Overrides the task's budget of sampled tokens.")
    max_context_tokens: int | None = Field(None, gt=0, description="Overrides the task's context limit, in tokens.")
    agent_timeout_s: float | None = Field(None, gt=0, description="Overrides the task's budget of tool seconds.")
    engine_idle_s: float = Field(120.0, gt=0, description="Longest wait for the next token of a generation, seconds.")
    engine_attempts: int = Field(3, gt=0, description="Times that one generation is asked for before giving up.")
    pod_attempts: int = Field(2, gt=0, description="Pods that one rollout may use: the first, and rebuilt ones.")
    pod_start_s: float = Field(30.0, gt=0, description="Longest wait for a pod to start, seconds.")
    pod_grace_s: float = Field(10.0, gt=0, description="Wait beyond a tool's own timeout before the pod counts as lost.")
    changed_file_bytes: int = Field(1 << 20, gt=0, description="Largest changed file that the verifier takes, bytes.")
