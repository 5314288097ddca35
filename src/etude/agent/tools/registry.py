"""Which tools a rollout has, with which options, and whether a call's arguments make sense (SPEC H1, H6).

A refused call never reaches the pod: it becomes an error in a few words that a small policy can act on. The tools
themselves run inside the pod (`environments`); this module knows their names, fields and defaults only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from etude.agent.config import AgentConfig
from etude.agent.tools.output import shorten
from etude.chat.format import TOOL_FIELDS
from etude.chat.parse import ParsedCall
from etude.chat.tokenizer import Tokenizer
from etude.records.errors import BadInput
from etude.records.rollout import ToolCall
from etude.records.task import Task

READ_ONLY = frozenset({"read_file", "grep"})
"""Tools that change nothing: neighbours of this kind in one action run at the same time."""
MALFORMED = "malformed"
"""Named error of an action or call that could not be parsed."""
BAD_ARGUMENTS = "bad_arguments"
"""Named error of a call whose arguments make no sense."""
NOT_RUN = "not_run"
"""Named error of a call behind `finish` or beyond the limit of calls."""
REFUSED = frozenset({MALFORMED, BAD_ARGUMENTS, NOT_RUN})
"""Named errors of calls that never reached the pod."""
FAILED = "failed"
"""Named error (of the pod's tools) of a command that ended badly: an answer, not a fault of the call."""
_HARMLESS = frozenset({"", FAILED, "timeout", "out_of_memory", "no_processes", "disk_full", NOT_RUN})
_NUMBERS = frozenset({"start", "count"})


def is_well_formed(call: ToolCall) -> bool:
    """Whether the call was one that its tool could carry out (a failing test run is)."""
    return call.error in _HARMLESS


@dataclass(frozen=True)
class Prepared:
    """A call that passed the checks, with its defaults filled in."""

    name: str
    written: dict[str, str]
    """The arguments as the policy wrote them."""
    arguments: dict[str, object]
    """What goes to the pod."""

    @property
    def read_only(self) -> bool:
        """Whether it may run beside its read-only neighbours."""
        return self.name in READ_ONLY


@dataclass(frozen=True)
class ToolSet:
    """The tools of one environment and each one's options. `toolset_id` is stamped on every rollout."""

    names: tuple[str, ...]
    options: Mapping[str, Mapping[str, object]]

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in TOOL_FIELDS:
                raise BadInput("agent.tools", "name", name, f"one of {', '.join(TOOL_FIELDS)}")
        if not self.names or len(set(self.names)) != len(self.names):
            raise BadInput("agent.tools", "names", self.names, "at least one tool, each once")
        for name in self.options:
            if name not in self.names:
                raise BadInput("agent.tools", "options", name, f"a tool of this set ({', '.join(self.names)})")

    @classmethod
    def of(cls, config: AgentConfig) -> ToolSet:
        """The tool set that the config asks for."""
        options: dict[str, Mapping[str, object]] = {}
        if "edit_file" in config.tools:
            options["edit_file"] = MappingProxyType({"base": config.edit_base})
        return cls(config.tools, MappingProxyType(options))

    @property
    def toolset_id(self) -> str:
        """sha256 hex of names and options, the first 16 characters."""
        told = {"names": list(self.names), "options": {name: dict(value) for name, value in self.options.items()}}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]

    def check(self, call: ParsedCall, task: Task) -> Prepared | ToolCallFault:
        """The call ready to run, or what is wrong with it."""
        if call.error:
            return ToolCallFault(MALFORMED, call.error)
        return self.check_arguments(call.name, call.arguments, task)

    def check_arguments(self, name: str, arguments: object, task: Task) -> Prepared | ToolCallFault:
        """The same for arguments of any origin, which may be anything at all."""
        if name not in self.names:
            return ToolCallFault(BAD_ARGUMENTS, f"no tool {name[:20]}")
        if not isinstance(arguments, dict):
            return ToolCallFault(BAD_ARGUMENTS, "arguments must be an object")
        fields = TOOL_FIELDS[name]
        for field, value in arguments.items():
            if field not in fields:
                return ToolCallFault(BAD_ARGUMENTS, f"unknown {str(field)[:20]}")
            if problem := _value_problem(name, field, value):
                return ToolCallFault(BAD_ARGUMENTS, problem)
        for field, required in fields.items():
            if required and field not in arguments:
                return ToolCallFault(BAD_ARGUMENTS, f"missing {field}")
        if name == "edit_file" and arguments["old"] == arguments["new"]:
            return ToolCallFault(BAD_ARGUMENTS, "new equals old")
        complete: dict[str, object] = dict(arguments)
        if name == "edit_file" and "path" not in arguments:
            if len(task.viewed_files) != 1:
                return ToolCallFault(BAD_ARGUMENTS, "missing path")
            complete["path"] = task.viewed_files[0]
        if name == "run":
            complete.setdefault("command", task.test_command)
        for field in _NUMBERS & set(complete):
            complete[field] = int(str(complete[field]))
        return Prepared(name, dict(arguments), complete)

    def options_of(self, name: str) -> dict[str, object]:
        """The options of one tool, as they go to the pod."""
        return dict(self.options.get(name, {}))


@dataclass(frozen=True)
class ToolCallFault:
    """Why a call was refused: a named error and the words for the policy."""

    error: str
    text: str


def _value_problem(name: str, field: str, value: object) -> str:
    if not isinstance(value, str):
        return f"{field} must be text"
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return f"{field} not UTF-8"
    if "�" in value:
        return f"{field} not UTF-8"
    if "\0" in value:
        return f"{field} holds a zero byte"
    if not value and not (name == "edit_file" and field == "new") and field != "message":
        return f"empty {field}"
    if field in _NUMBERS and not (value.strip().isascii() and value.strip().isdigit() and len(value) <= 9):
        return f"{field} must be a number"
    return ""


def refused(fault: ToolCallFault, *, generation: int, name: str, arguments: dict[str, str]) -> ToolCall:
    """The record of a call that never ran, its result telling the policy why."""
    return ToolCall(
        generation=generation,
        name=name,
        arguments=arguments,
        ok=False,
        result=f"error: {fault.text}",
        error=fault.error,
    )


def told(
    prepared: Prepared,
    reply: Mapping[str, object],
    tokenizer: Tokenizer,
    config: AgentConfig,
    *,
    generation: int,
    duration_s: float,
) -> ToolCall:
    """The record of a call that ran in the pod: its text shortened to the config's bounds, its flags kept."""
    error = str(reply.get("error") or "")
    text = str(reply.get("text") or "") or (error.replace("_", " ") if error else "")
    shown = shorten(text, tokenizer, max_chars=config.output_chars, max_tokens=config.output_tokens)
    dropped = reply.get("dropped") or 0
    return ToolCall(
        generation=generation,
        name=prepared.name,
        arguments=prepared.written,
        ok=bool(reply.get("ok")),
        result=shown.text,
        error=error,
        duration_s=duration_s,
        timed_out=bool(reply.get("timed_out")),
        out_of_memory=bool(reply.get("oom")),
        dropped_bytes=shown.dropped_bytes + (dropped if isinstance(dropped, int) else 0),
    )
