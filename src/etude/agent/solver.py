"""A scripted solver that repairs tasks in the same harness as the policy: its demonstrations are ordinary rollouts.

It edits, runs the checks after each edit, tries again by itself after a failing run and finishes after a passing one;
a wrong edit is another plausible mutation of the same file. It never gives up. Knows the task's solution, which no
policy sees.
"""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import random
import re
from collections.abc import Callable, Iterator, Sequence

from etude.agent.loop import AgentOptions, run_rollout
from etude.agent.scripted import ScriptedEngine
from etude.chat.edits import minimal_edit
from etude.chat.format import FIELD_TOKENS, RESULT_PASSED, TOOL, TOOL_TOKENS
from etude.chat.tokenizer import Tokenizer
from etude.environments.pod import PodBackend
from etude.records.errors import InfrastructureError
from etude.records.rollout import Rollout, StopReason
from etude.records.task import Task

MAX_EDITS = 4
Edit = tuple[tuple[int, ...], tuple[int, ...]]
WrongTexts = Callable[[Task, str], Sequence[str]]
"""Plausible wrong versions of the viewed file, given the task and the file's broken text."""

_SWAPS: tuple[tuple[str, str], ...] = (
    (r" < ", " <= "),
    (r" <= ", " < "),
    (r" > ", " >= "),
    (r" >= ", " > "),
    (r" < ", " > "),
    (r" > ", " < "),
    (r" == ", " != "),
    (r" != ", " == "),
    (r" \+ ", " - "),
    (r" - ", " + "),
    (r" \* ", " // "),
    (r" // ", " * "),
    (r" and ", " or "),
    (r" or ", " and "),
    (r" is not ", " is "),
    (r" is (?!not )", " is not "),
    (r" not in ", " in "),
    (r"(?<!not) in (?=[^\n]*:\n)", " not in "),
    (r"\bnot (?!in\b)", ""),
    (r"\b(if|while) (?!not )", r"\1 not "),
    (r"\bTrue\b", "False"),
    (r"\bFalse\b", "True"),
)


def other_mutations(task: Task, text: str) -> list[str]:
    """Single small changes of `text` that still parse: operators, conditions and constants."""
    found: list[str] = []
    for pattern, replacement in _SWAPS:
        found += [text[: m.start()] + m.expand(replacement) + text[m.end() :] for m in re.finditer(pattern, text)]
    for match in re.finditer(r"(?<![\w.])\d{1,3}(?![\w.])", text):
        for value in (int(match[0]) + 1, int(match[0]) - 1):
            if value >= 0:
                found.append(text[: match.start()] + str(value) + text[match.end() :])
    return [candidate for candidate in dict.fromkeys(found) if candidate != text and _parses(candidate)]


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def solution_text(task: Task) -> str | None:
    """The viewed file as the solution has it, None when the task does not say."""
    if len(task.viewed_files) != 1:
        return None
    path = task.viewed_files[0]
    data = task.solution.get(path) or task.solution.get(path.rsplit("/", 1)[-1])
    return data.decode("utf-8") if data is not None else None


def right_edit(task: Task, tokenizer: Tokenizer, *, longest: int) -> Edit | None:
    """The smallest edit that solves the task, None when no edit of at most `longest` tokens a field does."""
    fixed = solution_text(task)
    if fixed is None:
        return None
    return _edit(tokenizer, task.environment[task.viewed_files[0]].decode("utf-8"), fixed, longest)


def _edit(tokenizer: Tokenizer, before: str, after: str, longest: int) -> Edit | None:
    edit = minimal_edit(tokenizer, tokenizer.encode(before), tokenizer.encode(after), longest=longest)
    if edit is None or len(edit[1]) > longest:
        return None
    return tuple(edit[0]), tuple(edit[1])


class RepairScript:
    """The solver's mind for one rollout: called with all ids so far, gives the ids of the next action.

    Each edit but the last allowed one is wrong with `wrong_probability`, while wrong edits last.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Tokenizer,
        *,
        rng: random.Random,
        wrong_probability: float,
        wrong_texts: WrongTexts = other_mutations,
        longest: int = 24,
    ) -> None:
        right = right_edit(task, tokenizer, longest=longest)
        if right is None:
            raise ValueError("no edit of the viewed file solves the task")
        self._right, self._tokenizer, self._rng, self._p = right, tokenizer, rng, wrong_probability
        broken = task.environment[task.viewed_files[0]].decode("utf-8")
        fixed = solution_text(task)
        texts = [text for text in wrong_texts(task, broken) if text not in (broken, fixed)]
        rng.shuffle(texts)
        self._wrong = self._distinct(broken, texts, longest)
        self._edits = 0
        self._solved = False
        self._last = ""

    def _distinct(self, broken: str, texts: Sequence[str], longest: int) -> Iterator[Edit]:
        used = {self._right}
        for text in texts:
            edit = _edit(self._tokenizer, broken, text, longest)
            if edit is not None and edit not in used:
                used.add(edit)
                yield edit

    def __call__(self, ids: tuple[int, ...]) -> list[int]:
        if self._last == "edit_file":
            return self._call("run")
        if self._last == "run" and last_result(self._tokenizer, ids) == RESULT_PASSED:
            return self._call("finish")
        if self._solved or self._edits >= MAX_EDITS:  # the checks fail on the solution: no demonstration
            return self._call("finish")
        self._edits += 1
        edit = self._right
        if self._edits < MAX_EDITS and self._rng.random() < self._p:
            edit = next(self._wrong, self._right)
        self._solved = edit == self._right
        return self._call("edit_file", ("old", edit[0]), ("new", edit[1]))

    def _call(self, tool: str, *fields: tuple[str, tuple[int, ...]]) -> list[int]:
        special = self._tokenizer.special
        ids = [special[TOOL_TOKENS[tool]]]
        for name, value in fields:
            ids += [special[FIELD_TOKENS[name]], *value]
        self._last = tool
        return [*ids, self._tokenizer.end_id]


def last_result(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Text of the last tool result among the ids, empty when there is none."""
    tool_id = tokenizer.special[TOOL]
    positions = [position for position, index in enumerate(ids) if index == tool_id]
    if not positions:
        return ""
    body = list(ids[positions[-1] + 1 :])
    return tokenizer.decode(body[: body.index(tokenizer.end_id)]) if tokenizer.end_id in body else ""


async def demonstrations(
    tasks: Sequence[Task],
    *,
    tokenizer: Tokenizer,
    pods: PodBackend,
    n: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
    options: AgentOptions | None = None,
    wrong_probability: float = 0.35,
    wrong_texts: WrongTexts = other_mutations,
    concurrency: int = 4,
) -> list[Rollout]:
    """`n` solved rollouts over `tasks` in turn, from `seed` alone; tasks without a short solving edit are left out.

    Rollouts that the infrastructure ended or that were not solved by a passing run are left out too, so fewer may come
    back. `progress(done, n)` is called after each. Raises InfrastructureError when none came through.
    """
    base = options or AgentOptions(verify=False)
    longest = base.config.max_field_tokens
    usable = [task for task in tasks if right_edit(task, tokenizer, longest=longest) is not None]
    if not usable:
        return []
    gate = asyncio.Semaphore(concurrency)
    done = 0

    async def one(index: int) -> Rollout:
        nonlocal done
        task = usable[index % len(usable)]
        async with gate:
            script = RepairScript(
                task,
                tokenizer,
                rng=random.Random(f"{seed}:{task.id}:{index}"),
                wrong_probability=wrong_probability,
                wrong_texts=wrong_texts,
                longest=longest,
            )
            rollout = await run_rollout(
                task,
                attempt=index // len(usable),
                seed=seed,
                engine=ScriptedEngine(script, tokenizer=tokenizer),
                pods=pods,
                tokenizer=tokenizer,
                options=dataclasses.replace(base),
            )
        done += 1
        if progress is not None:
            progress(done, n)
        return rollout

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(index)) for index in range(n)]
    rollouts = [task.result() for task in running]
    lost = [rollout for rollout in rollouts if rollout.stop_reason is StopReason.INFRASTRUCTURE]
    if lost and len(lost) == len(rollouts):
        raise InfrastructureError(f"no demonstration came through: {lost[0].error}")
    return [rollout for rollout in rollouts if is_solved(rollout)]


def is_solved(rollout: Rollout) -> bool:
    """Whether the rollout finished after a passing run of the visible checks."""
    runs = [call for call in rollout.tool_calls if call.name == "run"]
    return rollout.stop_reason is StopReason.FINISH and bool(runs) and runs[-1].result.strip() == RESULT_PASSED
