"""The chat format's special tokens and constant texts: the one place that training data, harness and engine agree on.

A conversation is `<|bos|><|system|>text<|end|><|user|>instruction<|end|><|file|>path⏎text<|end|><|assistant|>`; the policy then
samples an action, `(tool_token (field_token value)*)* <|end|>` optionally after `<|think|>text`; the next prompt appends
`<|tool|>result<|end|>` for each call in order and `<|assistant|>`. One special token per tool and per field keeps a call
short enough for a policy of a few million parameters. Knows nothing of BPE (`tokenizer`) or of running tools (`agent`).
"""

from __future__ import annotations

CHAT_FORMAT_ID = "etude-chat-1"

PAD, BOS, SYSTEM, USER, FILE, ASSISTANT, TOOL, END, THINK = (
    "<|pad|>",
    "<|bos|>",
    "<|system|>",
    "<|user|>",
    "<|file|>",
    "<|assistant|>",
    "<|tool|>",
    "<|end|>",
    "<|think|>",
)
TOOLS = ("read_file", "edit_file", "run", "grep", "finish")
FIELDS = ("path", "old", "new", "command", "pattern", "message", "start", "count")
TOOL_TOKENS = {name: f"<|{name}|>" for name in TOOLS}
FIELD_TOKENS = {name: f"<|{name}|>" for name in FIELDS}

SPECIAL_TOKENS: tuple[str, ...] = (
    PAD,
    BOS,
    SYSTEM,
    USER,
    FILE,
    ASSISTANT,
    TOOL,
    END,
    THINK,
    *TOOL_TOKENS.values(),
    *FIELD_TOKENS.values(),
    *(f"<|reserved_{i}|>" for i in range(10)),
)
"""Ids 0 .. len - 1 of every Étude tokenizer, in this order."""

TOOL_FIELDS: dict[str, dict[str, bool]] = {
    "read_file": {"path": True, "start": False, "count": False},
    "edit_file": {"path": False, "old": True, "new": True},
    "run": {"command": False},
    "grep": {"pattern": True, "path": False},
    "finish": {"message": False},
}
"""Fields of each tool in the order they are written; True where required. `path` of `edit_file` defaults to the viewed file."""

SYSTEM_TEXT = "Repair the code."
RESULT_EDITED = "ok"
"""What `edit_file` answers when the edit was applied."""
RESULT_PASSED = "ok"
"""What the visible checks print when all pass."""
