"""The nouns of one sample's life: generation, tool call, rollout, group. Frozen, versioned, append-only.

A rollout is a chain of generations; the agent loop's state can be rebuilt from these records alone. Big arrays (routes,
masks) lie out of line, named by hash. Wire format is msgspec's MessagePack, disk format the same or JSON lines;
`RECORD_VERSION` stamps both and `decode_*` refuses another one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

import msgspec

from etude.records.errors import BadInput

RECORD_VERSION = 1
HARNESS_VERSION = "1"
"""Changes when the same policy would be measured otherwise: prompt, tools, limits, verifier."""

T = TypeVar("T", "Rollout", "Group", "EvaluationRecord")


class SpanKind(StrEnum):
    """What a stretch of tokens is; the length penalty counts by kind."""

    SYSTEM = "system"
    USER = "user"
    THINKING = "thinking"
    TOOL_CALL = "tool_call"
    TOOL_OUTPUT = "tool_output"
    FINAL = "final"
    SUMMARY = "summary"


class StopReason(StrEnum):
    """Why a rollout ended."""

    FINISH = "finish"
    """The policy called `finish`."""
    FINAL_MESSAGE = "final_message"
    """The policy ended an action without a tool call: its text is the final message."""
    MALFORMED = "malformed"
    """Too many actions in a row could not be parsed."""
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    """The rollout's budget of sampled tokens is spent."""
    CONTEXT_LIMIT = "context_limit"
    """The next prompt would not fit the context."""
    TIME_LIMIT = "time_limit"
    INFRASTRUCTURE = "infrastructure"
    """Something the policy cannot cause ended it; see `cause` and `error`."""
    CANCELLED = "cancelled"
    """The run was stopped before the rollout ended."""


class CauseClass(StrEnum):
    """Who caused the end (DESIGN decision 4): what the policy caused is scored, the rest is repaired or void."""

    POLICY = "policy"
    INFRASTRUCTURE = "infrastructure"


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of the generation's prompt + sampled ids, and their kind."""

    start: int
    end: int
    kind: SpanKind


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens were drawn. `temperature` 0 means greedy (log-probabilities are then those at temperature 1)."""

    temperature: float
    max_tokens: int
    seed: int
    stop_ids: tuple[int, ...]
    grammar: str = ""
    """Id of the tool-call grammar whose token masks were applied, or empty."""


class BlobRef(msgspec.Struct, frozen=True, kw_only=True):
    """An array kept out of line: sha256 hex of its raw C-order bytes, dtype name, shape."""

    digest: str
    dtype: str
    shape: tuple[int, ...]


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One action sampled by the policy.

    `prompt_ids` are all ids the engine had before the first sampled token; the next generation of a `turn` chain starts
    with `prompt_ids + sampled_ids`. `logprobs[i]` is that of the sampling distribution (temperature and mask applied),
    `policy_versions[i]` the version that the engine stamped. `routes` covers positions [0, len(prompt) + len(sampled) - 1)
    as uint8/uint16 [position, moe_layer, top_k]; `masks` packs the allowed-token bits, uint8 [sampled, ceil(vocab / 8)].
    """

    index: int
    link: str = "turn"
    """How it follows its predecessor: `turn` or `summary`."""
    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    spans: tuple[Span, ...]
    sampling: SamplingParams
    finish: str
    """`stop` or `length`."""
    engine_id: str
    recipe_id: str = "fp32"
    chat_format_id: str
    routes: BlobRef | None = None
    masks: BlobRef | None = None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of an action and its result, in the order of the calls."""

    generation: int
    """Index of the generation that made it."""
    name: str
    arguments: dict[str, str]
    ok: bool
    result: str
    """The text given back to the policy."""
    error: str = ""
    """Named error when the call failed (`bad_arguments`, `not_found`, `not_unique`, `timeout`, ...)."""
    duration_s: float = 0.0
    timed_out: bool = False
    out_of_memory: bool = False
    dropped_bytes: int = 0


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """The six inputs of the length penalty (SPEC R8), summed over the chain; re-fed context is not counted again."""

    thinking_tokens: int = 0
    tool_call_tokens: int = 0
    tool_output_tokens: int = 0
    final_tokens: int = 0
    tool_calls: int = 0
    turns: int = 0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the verifier found. `success` only if every hidden check passed."""

    success: bool
    passed: int
    total: int
    cause: CauseClass = CauseClass.POLICY
    detail: str = ""
    duration_s: float = 0.0


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds spent in each part of a rollout, and its start as a Unix time."""

    started_at: float = 0.0
    pod_s: float = 0.0
    engine_s: float = 0.0
    tools_s: float = 0.0
    verify_s: float = 0.0
    total_s: float = 0.0


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a task: the chain of generations, what the tools answered, why it ended, what it earned."""

    version: int = RECORD_VERSION
    id: str
    task_id: str
    attempt: int
    seed: int
    generations: tuple[Generation, ...]
    tool_calls: tuple[ToolCall, ...]
    stop_reason: StopReason
    cause: CauseClass = CauseClass.POLICY
    error: str = ""
    well_formed: bool = True
    """Every action parsed and every call had valid arguments (tool errors such as `not_unique` count as ill-formed)."""
    verdict: Verdict | None = None
    rewards: dict[str, float] = {}
    """Reward by component; `total` is what the group advantage uses."""
    effort: Effort = Effort()
    diff: dict[str, str] = {}
    """Changed repository files (path -> new text), as the verifier took them."""
    toolset_id: str = ""
    harness_version: str = HARNESS_VERSION
    backend: str = ""
    forked_from: tuple[str, int] | None = None
    retries: int = 0
    timings: Timings = Timings()


class GroupState(StrEnum):
    """Where a drawn group is (DESIGN decision 4: draws = in flight + queued + trained + void)."""

    IN_FLIGHT = "in_flight"
    QUEUED = "queued"
    TRAINED = "trained"
    VOID = "void"


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The fixed number of rollouts of one task, sealed: whole or not at all. `advantages[i]` belongs to `rollouts[i]`."""

    version: int = RECORD_VERSION
    id: str
    draw: int
    """Sequence number of the draw within the run."""
    task_id: str
    rollouts: tuple[Rollout, ...]
    advantages: tuple[float, ...]
    oldest_version: int
    """Smallest policy version among the sampled tokens."""


class EvaluationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one evaluation pins and found."""

    version: int = RECORD_VERSION
    id: str
    weights_digest: str
    policy_version: int
    harness_version: str
    toolset_id: str
    task_ids: tuple[str, ...]
    attempts: int
    seed: int
    temperature: float
    successes: tuple[tuple[bool, ...], ...]
    """Per task, per attempt."""
    well_formed: tuple[tuple[bool, ...], ...]


def encode(record: msgspec.Struct) -> bytes:
    """MessagePack bytes of any record."""
    return msgspec.msgpack.encode(record)


def _decode(data: bytes, kind: type[T], place: str) -> T:
    try:
        record = msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:  # ValidationError is a DecodeError
        raise BadInput(place, kind.__name__, f"{len(data)} bytes", f"a {kind.__name__} record ({error})") from error
    if record.version != RECORD_VERSION:
        raise BadInput(place, "version", record.version, f"record version {RECORD_VERSION}")
    return record


def decode_rollout(data: bytes, place: str = "rollout") -> Rollout:
    """Reads `encode(rollout)` back. Raises BadInput when it is no rollout or of another version."""
    return _decode(data, Rollout, place)


def decode_group(data: bytes, place: str = "group") -> Group:
    """Reads `encode(group)` back. Raises BadInput when it is no group or of another version."""
    return _decode(data, Group, place)


def decode_evaluation(data: bytes, place: str = "evaluation") -> EvaluationRecord:
    """Reads `encode(evaluation)` back. Raises BadInput when it is none or of another version."""
    return _decode(data, EvaluationRecord, place)
