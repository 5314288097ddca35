"""A rollout as text that a person can read, at its end or while it happens.

Reads records only; special tokens are written out where the policy wrote them. Nothing parses this text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from etude.chat.parse import Action, parse_action
from etude.chat.tokenizer import Tokenizer
from etude.records.rollout import Generation, Rollout, ToolCall, Verdict
from etude.records.task import Task


class Watcher(Protocol):
    """Told of every action and every result while a rollout runs."""

    def acted(self, generation: Generation, action: Action) -> None:
        """The policy has acted; its calls have not run yet."""
        ...

    def answered(self, call: ToolCall) -> None:
        """A call has its result."""
        ...


class TextWatcher:
    """Writes each action and result to `write` as it comes (`etude eval --show`)."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def acted(self, generation: Generation, action: Action) -> None:
        """See `Watcher.acted`."""
        self._write(action_text(generation, action))

    def answered(self, call: ToolCall) -> None:
        """See `Watcher.answered`."""
        self._write(result_text(call))


def _indented(text: str, mark: str) -> str:
    lines = text.split("\n") if text else ["(nothing)"]
    return "\n".join(f"{mark}{line}" for line in lines)


def opening_text(task: Task) -> str:
    """What the policy was asked, and the files it sees."""
    parts = [f"task {task.name} ({task.id[:12]})", _indented(task.instruction.strip(), "  ")]
    for path in task.viewed_files:
        text = task.environment.get(path, b"").decode("utf-8", errors="replace").rstrip("\n")
        parts.append(f"file {path}\n{_indented(text, '  | ')}")
    return "\n".join(parts)


def action_text(generation: Generation, action: Action) -> str:
    """One action: thinking, calls with their arguments, final text."""
    count = len(generation.sampled_ids)
    versions = sorted(set(generation.policy_versions))
    made_by = f"version {versions[0]}" if len(versions) == 1 else f"versions {versions}"
    parts = [f"action {generation.index + 1} ({count} tokens, {made_by if versions else 'no version'})"]
    if action.thinking:
        parts.append(_indented(action.thinking, "  ~ "))
    if action.text:
        parts.append(_indented(action.text, "  says "))
    for call in action.calls:
        shown = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
        parts.append(f"  {call.name}({shown})" + (f"   [{call.error}]" if call.error else ""))
    if action.error:
        parts.append(f"  [{action.error}]")
    return "\n".join(parts)


def result_text(call: ToolCall) -> str:
    """One call's result with its flags."""
    flags = [call.error] if call.error else []
    flags += ["timed out"] if call.timed_out else []
    flags += ["out of memory"] if call.out_of_memory else []
    flags += [f"{call.dropped_bytes} bytes left out"] if call.dropped_bytes else []
    head = f"  {call.name or 'action'}: {'ok' if call.ok else 'failed'}" + (f" ({', '.join(flags)})" if flags else "")
    return f"{head}\n{_indented(call.result, '    > ')}"


def verdict_text(verdict: Verdict) -> str:
    """One line about the hidden checks."""
    word = "solved" if verdict.success else "not solved"
    return f"{word}: {verdict.passed} of {verdict.total} hidden checks" + (
        f" ({verdict.detail})" if verdict.detail else ""
    )


def ending_text(rollout: Rollout) -> str:
    """Why it ended, what it earned, what it changed."""
    parts = [f"ended: {rollout.stop_reason}" + (f" - {rollout.error}" if rollout.error else "")]
    if rollout.verdict is not None:
        parts.append(verdict_text(rollout.verdict))
    if rollout.rewards:
        parts.append("reward: " + ", ".join(f"{name} {value:+.3f}" for name, value in rollout.rewards.items()))
    parts += [f"changed: {path}" for path in rollout.diff]
    return "\n".join(parts)


def render(rollout: Rollout, tokenizer: Tokenizer, task: Task | None = None) -> str:
    """The whole rollout as text, with its task's opening when `task` is given."""
    parts = [opening_text(task)] if task is not None else []
    for generation in rollout.generations:
        parts.append(action_text(generation, parse_action(tokenizer, generation.sampled_ids)))
        parts += [result_text(call) for call in rollout.tool_calls if call.generation == generation.index]
    parts.append(ending_text(rollout))
    return "\n".join(parts) + "\n"
