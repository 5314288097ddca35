"""The `inference` section of the config: the engine's sizes and bounds, the server's place."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class EngineConfig(BaseModel):
    """Sizes and bounds of one engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    slots: int = Field(default=48, ge=1, description="Sessions whose pages are held at once.")
    max_session_tokens: int = Field(
        default=640, ge=2, description="Longest session, in tokens (prompts, sampled and results)."
    )
    prefill_tokens: int = Field(
        default=2048, ge=1, description="Prompt tokens (padding included) fed to one forward call."
    )
    share_prompts: bool = Field(default=True, description="Copy pages of a prompt that another session began with.")
    queue_limit: int = Field(default=256, ge=0, description="New sessions that may wait for a slot; more are `busy`.")
    queue_timeout_s: float = Field(default=60.0, gt=0, description="Longest wait for a slot before `busy`.")
    idle_timeout_s: float = Field(default=300.0, gt=0, description="A session without a request for so long is freed.")
    reconnect_grace_s: float = Field(
        default=5.0, ge=0, description="A generation whose client is gone is kept so long."
    )
    finished_requests: int = Field(
        default=1024, ge=0, description="Ended requests remembered for a repeated request id."
    )
    gather_s: float = Field(
        default=0.02,
        ge=0,
        description="Shortest time between two steps while sessions are between turns: their next requests join the batch.",
    )
    flush_tokens: int = Field(default=32, ge=1, description="Sampled tokens gathered before they are sent on.")
    apply_timeout_s: float = Field(default=300.0, gt=0, description="Longest fetch and verification of new weights.")
    drain_timeout_s: float = Field(default=120.0, gt=0, description="Longest wait for running requests in `drain`.")
    threads: int = Field(default=1, ge=1, description="torch threads of the forward pass.")


class InferenceConfig(EngineConfig):
    """One engine process (`etude serve inference`)."""

    model: str = Field(default="", description="Hugging Face folder of the policy to start with.")
    policy_version: int = Field(default=0, ge=0, description="Version stamped on tokens of the starting weights.")
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=0, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    ready_file: str = Field(
        default="", description="File that gets the ready line (JSON with host and port), or empty."
    )
    store: str = Field(default="", description="Object store that `apply` fetches from, or empty.")
    run_prefix: str = Field(default="", description="Prefix of the run's version chain in the store.")
