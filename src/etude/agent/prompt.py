"""The opening prompt of a rollout (SPEC H2): system message, recently viewed files, the task. Short on purpose.

Which tools a policy may call is told by the tools' special tokens and, where the grammar is on, by the masks; a prompt
names them only when the config's system text does. Knows the task's files, not its tests.
"""

from __future__ import annotations

from dataclasses import dataclass

from etude.agent.config import AgentConfig
from etude.chat.bridge import file_parts, first_prompt
from etude.chat.tokenizer import Tokenizer
from etude.records.errors import TaskError
from etude.records.rollout import Span
from etude.records.task import Task


@dataclass(frozen=True)
class Prompt:
    """The opening ids, their spans, and the ids of the only viewed file as they stand in the prompt (empty otherwise)."""

    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    source_ids: tuple[int, ...]


def viewed_texts(task: Task) -> list[tuple[str, str]]:
    """Path and text of each viewed file. Raises TaskError when one is missing or not UTF-8."""
    texts = []
    for path in task.viewed_files:
        data = task.environment.get(path)
        if data is None:
            raise TaskError(task.name, "viewed_files", path, "a file of the environment")
        try:
            texts.append((path, data.decode("utf-8")))
        except UnicodeDecodeError as error:
            raise TaskError(task.name, f"viewed file {path}", str(error), "UTF-8 text") from error
    return texts


def opening_prompt(task: Task, tokenizer: Tokenizer, config: AgentConfig) -> Prompt:
    """The first prompt of `task`. Raises TaskError when a viewed file cannot be shown."""
    files = viewed_texts(task)
    ids, spans = first_prompt(tokenizer, system=config.system, instruction=task.instruction.strip(), files=files)
    source = file_parts(tokenizer, *files[0])[1] if len(files) == 1 else []
    return Prompt(tuple(ids), tuple(spans), tuple(source))
