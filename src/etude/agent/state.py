"""Where a rollout stands, as a pure fold over its records: next prompt, spent budgets, edits tried, whether it ended.

The loop holds no state of its own: `Episode.replay` of any prefix of the records gives the state that the loop had
there, hence the same next tokens and the same remaining budgets. Knows nothing of engines or pods.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from etude.agent.config import AgentConfig
from etude.agent.prompt import Prompt, opening_prompt
from etude.agent.tools.registry import MALFORMED, REFUSED, ToolSet, is_well_formed
from etude.chat.bridge import append_results
from etude.chat.grammar import GRAMMAR_ID, GrammarSpec, make_spec
from etude.chat.parse import Action, parse_action
from etude.chat.tokenizer import Tokenizer
from etude.records.errors import BadInput
from etude.records.rollout import Effort, Generation, SamplingParams, Span, SpanKind, StopReason, ToolCall
from etude.records.task import Limits, Task


@dataclass(frozen=True)
class AgentState:
    """One point of a rollout. `next_ids` and `spans` are the whole next prompt; `stop` is set once it ended."""

    next_ids: tuple[int, ...]
    spans: tuple[Span, ...]
    fed: int = 0
    """How many of `next_ids` earlier prompts and actions already held."""
    turns: int = 0
    sampled_tokens: int = 0
    tool_s: float = 0.0
    malformed_in_a_row: int = 0
    well_formed: bool = True
    edits_tried: tuple[tuple[str, str], ...] = ()
    failing: bool = False
    """The last test run failed."""
    edited: bool = False
    """A file changed since the last test run."""
    effort: Effort = field(default_factory=Effort)
    stop: StopReason | None = None


@dataclass(frozen=True)
class Remaining:
    """Budgets left: turns, sampled tokens over the whole rollout, context tokens, tool seconds."""

    turns: int
    sampled_tokens: int
    context_tokens: int
    tool_s: float


class Episode:
    """The constants of one rollout (task, tool set, tokenizer, config) and the fold over its records."""

    def __init__(self, task: Task, *, seed: int, tokenizer: Tokenizer, config: AgentConfig, toolset: ToolSet) -> None:
        self.task, self.seed, self.tokenizer, self.config, self.toolset = task, seed, tokenizer, config, toolset
        if config.force_retry and not (config.grammar and "edit_file" in toolset.names):
            raise BadInput("agent", "force_retry", True, "`grammar` on and `edit_file` among the tools")
        self.limits = _limits(task.limits, config)
        self.prompt: Prompt = opening_prompt(task, tokenizer, config)

    def start(self) -> AgentState:
        """The state before the first action."""
        state = AgentState(next_ids=self.prompt.ids, spans=self.prompt.spans)
        return replace(state, stop=self._spent(state))

    def parse(self, sampled_ids: Sequence[int]) -> Action:
        """What the sampled ids say."""
        return parse_action(self.tokenizer, sampled_ids)

    def after(self, state: AgentState, generation: Generation, calls: Sequence[ToolCall]) -> AgentState:
        """The state after one action and the results of its calls. Raises BadInput when the records do not follow."""
        if state.stop is not None or generation.index != state.turns or generation.prompt_ids != state.next_ids:
            raise BadInput("rollout", f"generation {generation.index}", state.stop, f"the action of turn {state.turns}")
        action = self.parse(generation.sampled_ids)
        end = len(generation.prompt_ids) + len(generation.sampled_ids)
        new_ids, new_spans = append_results(
            self.tokenizer, generation.sampled_ids, [call.result for call in calls], start=end
        )
        malformed = bool(calls) and all(call.error == MALFORMED for call in calls)
        after = AgentState(
            next_ids=generation.prompt_ids + generation.sampled_ids + tuple(new_ids),
            spans=generation.spans + tuple(new_spans),
            fed=end,
            turns=state.turns + 1,
            sampled_tokens=state.sampled_tokens + len(generation.sampled_ids),
            tool_s=state.tool_s + sum(call.duration_s for call in calls),
            malformed_in_a_row=state.malformed_in_a_row + 1 if malformed else 0,
            well_formed=state.well_formed and all(is_well_formed(call) for call in calls),
            edits_tried=state.edits_tried + _edits(calls, state.edits_tried),
            failing=_last_run_failed(calls, state.failing),
            edited=_edited(calls, state.edited),
            effort=_effort(state.effort, generation, state.fed, calls),
        )
        return replace(after, stop=self._stop(after, action, calls))

    def replay(self, generations: Sequence[Generation], calls: Sequence[ToolCall]) -> AgentState:
        """The state after these records, from nothing but them."""
        state = self.start()
        for generation in generations:
            made = [call for call in calls if call.generation == generation.index]
            state = self.after(state, generation, made)
        return state

    def action_spans(self, state: AgentState, sampled_ids: Sequence[int]) -> tuple[Span, ...]:
        """Spans of prompt and action together; every sampled token lies in exactly one."""
        start, length = len(state.next_ids), len(sampled_ids)
        spans: list[Span] = []
        reached = 0
        for span in self.parse(sampled_ids).spans:
            if span.start > reached:
                if spans:
                    spans[-1] = Span(spans[-1].start, span.start, spans[-1].kind)
                else:
                    spans.append(Span(0, span.start, SpanKind.FINAL))
            spans.append(span)
            reached = span.end
        if reached < length:
            if spans:
                spans[-1] = Span(spans[-1].start, length, spans[-1].kind)
            else:
                spans.append(Span(0, length, SpanKind.FINAL))
        return state.spans + tuple(Span(start + span.start, start + span.end, span.kind) for span in spans)

    def remaining(self, state: AgentState) -> Remaining:
        """Budgets left at this point."""
        return Remaining(
            self.limits.max_turns - state.turns,
            self.limits.max_sampled_tokens - state.sampled_tokens,
            self.limits.max_context_tokens - len(state.next_ids),
            self.limits.agent_timeout_s - state.tool_s,
        )

    def sampling(self, state: AgentState) -> SamplingParams:
        """How the next action is drawn: its seed depends on the rollout's seed and the turn only."""
        left = self.remaining(state)
        digest = hashlib.sha256(f"{self.seed}:{state.turns}".encode()).digest()
        return SamplingParams(
            temperature=self.config.temperature,
            max_tokens=min(self.config.max_action_tokens, left.sampled_tokens, left.context_tokens),
            seed=int.from_bytes(digest[:8], "little") >> 1,
            stop_ids=(self.tokenizer.end_id,),
            grammar=GRAMMAR_ID if self.config.grammar else "",
        )

    def grammar(self, state: AgentState) -> GrammarSpec | None:
        """The token grammar of the next action, None when the config has it off.

        Edits against the original file are bound to the viewed file's tokens and never repeat one already tried;
        where edits build on each other, both rules would be wrong and are left out.
        """
        if not self.config.grammar:
            return None
        bound = bool(self.prompt.source_ids) and self.config.edit_base == "original"
        hidden = ["command", "message", "start", "count"]
        if len(self.task.viewed_files) == 1:
            hidden.append("path")
        return make_spec(
            self.tokenizer,
            self._allowed(state),
            hidden_fields=hidden,
            source_ids=self.prompt.source_ids if bound else (),
            forbidden_edits=state.edits_tried if bound else (),
            max_field_tokens=self.config.max_field_tokens,
            max_calls=self.config.max_calls,
        )

    def _allowed(self, state: AgentState) -> tuple[str, ...]:
        if not (self.config.force_retry and state.failing):
            return self.toolset.names
        barred = {"finish"} if state.edited else {"finish", "run"}
        return tuple(name for name in self.toolset.names if name not in barred)

    def _stop(self, after: AgentState, action: Action, calls: Sequence[ToolCall]) -> StopReason | None:
        if any(call.name == "finish" and call.ok for call in calls):
            return StopReason.FINISH
        if action.well_formed and not action.calls and action.text:
            return StopReason.FINAL_MESSAGE
        if after.malformed_in_a_row >= self.config.malformed_limit:
            return StopReason.MALFORMED
        return self._spent(after)

    def _spent(self, state: AgentState) -> StopReason | None:
        left = self.remaining(state)
        if left.turns <= 0:
            return StopReason.TURN_LIMIT
        if left.sampled_tokens <= 0:
            return StopReason.TOKEN_LIMIT
        if left.tool_s <= 0:
            return StopReason.TIME_LIMIT
        if left.context_tokens <= 0:
            return StopReason.CONTEXT_LIMIT
        return None


def _limits(limits: Limits, config: AgentConfig) -> Limits:
    named = ("max_turns", "max_sampled_tokens", "max_context_tokens", "agent_timeout_s")
    changes = {name: getattr(config, name) for name in named if getattr(config, name) is not None}
    return msgspec.structs.replace(limits, **changes)


def _last_run_failed(calls: Sequence[ToolCall], failing: bool) -> bool:
    for call in calls:
        if call.name == "run" and call.error not in REFUSED:
            failing = not call.ok
    return failing


def _edited(calls: Sequence[ToolCall], edited: bool) -> bool:
    for call in calls:
        if call.name == "run" and call.error not in REFUSED:
            edited = False
        elif call.name == "edit_file" and call.ok:
            edited = True
    return edited


def _edits(calls: Sequence[ToolCall], tried: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    new: list[tuple[str, str]] = []
    for call in calls:
        edit = (call.arguments.get("old", ""), call.arguments.get("new", ""))
        if call.name == "edit_file" and call.error != MALFORMED and edit[0] and edit not in tried and edit not in new:
            new.append(edit)
    return tuple(new)


def _effort(effort: Effort, generation: Generation, fed: int, calls: Sequence[ToolCall]) -> Effort:
    """Adds one action: its own tokens by kind and the tool output that is new in its prompt, each token once."""
    counts = dict.fromkeys(SpanKind, 0)
    prompt_end = len(generation.prompt_ids)
    for span in generation.spans:
        begin = max(span.start, fed)
        sampled = max(0, span.end - max(begin, prompt_end))
        if span.kind is SpanKind.TOOL_OUTPUT:
            counts[span.kind] += max(0, min(span.end, prompt_end) - begin)
        else:
            counts[span.kind] += sampled
    return Effort(
        thinking_tokens=effort.thinking_tokens + counts[SpanKind.THINKING],
        tool_call_tokens=effort.tool_call_tokens + counts[SpanKind.TOOL_CALL],
        tool_output_tokens=effort.tool_output_tokens + counts[SpanKind.TOOL_OUTPUT],
        final_tokens=effort.final_tokens + counts[SpanKind.FINAL],
        tool_calls=effort.tool_calls + sum(1 for call in calls if call.name),
        turns=effort.turns + 1,
    )
