"""Fakes for the agent's tests: a small tokenizer, a repair task, pods in memory with faults on demand."""

import asyncio
import inspect
import textwrap
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from etude.chat.format import FIELD_TOKENS, THINK, TOOL_TOKENS
from etude.chat.tokenizer import Tokenizer
from etude.environments.pod import FileStat, PodRefused, PodSpec
from etude.records.errors import PodLost
from etude.records.task import Limits, Split, Task

BROKEN = "def clamp(x, low, high):\n    if x > low:\n        return low\n    return min(x, high)\n"
FIXED = BROKEN.replace("x > low", "x < low")
CHECK = "from m import clamp\ngot = clamp(5, 1, 9)\nprint('ok' if got == 5 else f'clamp(5, 1, 9) -> {got}, want 5')\n"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([inspect.getsource(textwrap), BROKEN * 3] * 2, vocab_size=600)


def build_task(**changes: object) -> Task:
    fields: dict[str, object] = {
        "id": "5" * 64,
        "name": "repair/clamp",
        "instruction": "fix clamp in m.py",
        "split": Split.DEV,
        "environment": {"m.py": BROKEN.encode(), "check.py": CHECK.encode()},
        "tests": {},
        "solution": {"m.py": FIXED.encode()},
        "allowed_changes": ("m.py",),
        "viewed_files": ("m.py",),
        "limits": Limits(max_turns=10, max_sampled_tokens=400, max_context_tokens=2000),
    }
    return Task(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def make_task() -> Callable[..., Task]:
    return build_task


class FakePod:
    """Files in memory. `edit_file` works against the original; `run` says `ok` once m.py is FIXED."""

    def __init__(self, backend: "FakePods", files: dict[str, bytes]) -> None:
        self.backend, self.files, self.original = backend, dict(files), dict(files)
        self.links: set[str] = set()
        self.closed = False

    async def call(self, tool: str, arguments: dict[str, object], options: dict[str, object]) -> dict[str, object]:
        backend = self.backend
        number = len(backend.calls)
        backend.calls.append((tool, dict(arguments), dict(options)))
        async with backend.called:
            backend.called.notify_all()
        if number in backend.lose_at:
            raise PodLost(f"fake pod lost at call {number}")
        backend.running += 1
        backend.most_running = max(backend.most_running, backend.running)
        await asyncio.sleep(backend.delays.get(tool, 0.0))
        backend.running -= 1
        backend.finished.append((tool, dict(arguments)))
        answer = {"ok": True, "text": "", "error": "", "changed": False, "timed_out": False, "oom": False, "dropped": 0}
        return {**answer, **(backend.answers.get(tool) or self._answer)(tool, arguments)}

    def _answer(self, tool: str, arguments: dict[str, object]) -> dict[str, object]:
        path = str(arguments.get("path", "m.py"))
        if tool == "edit_file":
            text = self.original[path].decode()
            found = text.count(str(arguments["old"]))
            if found != 1:
                error = "not_found" if found == 0 else "not_unique"
                return {"ok": False, "text": error.replace("_", " "), "error": error}
            self.files[path] = text.replace(str(arguments["old"]), str(arguments["new"])).encode()
            return {"text": "ok", "changed": True}
        if tool == "run":
            good = self.files["m.py"] == FIXED.encode()
            return {"text": "ok"} if good else {"text": "clamp(5, 1, 9) -> 1, want 5", "error": "failed", "ok": False}
        if tool == "read_file":
            return {"text": self.files[path].decode()} if path in self.files else {"ok": False, "error": "not_found"}
        return {"text": f"{path}:1:{arguments.get('pattern')}"}

    async def exec(self, argv: list[str], **options: object) -> SimpleNamespace:
        result = {
            "exit_code": 0,
            "signal": None,
            "timed_out": False,
            "out_of_memory": False,
            "stdout": b"",
            "stderr": b"",
            "channel": b"",
        }
        self.backend.execs.append((argv, options, dict(self.files)))
        change = self.backend.exec_answer(argv, options, self.files)
        if isinstance(change, BaseException):
            raise change
        return SimpleNamespace(**{**result, **change})

    async def stat(self, path: str) -> FileStat:
        if path not in self.files:
            raise PodRefused("not_found", path)
        return FileStat("symlink" if path in self.links else "file", len(self.files[path]), 0o644, 0)

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        return self.files[path]

    async def signal(self, target: str, signal: int) -> None:
        self.backend.signals.append((target, signal))

    async def close(self) -> None:
        self.closed = True


class FakePods:
    """A backend of `FakePod`s. `lose_at` names calls (counted over all pods) at which the pod is lost."""

    name = "fake"

    def __init__(self) -> None:
        self.pods: list[FakePod] = []
        self.calls: list[tuple[str, dict[str, object], dict[str, object]]] = []
        self.finished: list[tuple[str, dict[str, object]]] = []
        self.execs: list[tuple[list[str], dict[str, object], dict[str, bytes]]] = []
        self.signals: list[tuple[str, int]] = []
        self.lose_at: set[int] = set()
        self.create_errors: list[BaseException] = []
        self.delays: dict[str, float] = {}
        self.answers: dict[str, Callable[[str, dict[str, object]], dict[str, object]]] = {}
        self.exec_answer: Callable[..., object] = lambda argv, options, files: {}
        self.running = self.most_running = 0
        self.called = asyncio.Condition()

    async def reached(self, calls: int) -> None:
        """Returns once so many calls have begun."""
        async with asyncio.timeout(10):
            async with self.called:
                await self.called.wait_for(lambda: len(self.calls) >= calls)

    async def create(self, spec: PodSpec) -> FakePod:
        if self.create_errors:
            raise self.create_errors.pop(0)
        self.pods.append(FakePod(self, dict(spec.files)))
        return self.pods[-1]


@pytest.fixture
def pods() -> FakePods:
    return FakePods()


class Actions:
    """Writes actions as token ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def call(self, *calls: tuple[str, dict[str, str]], think: str = "", end: bool = True) -> list[int]:
        special, encode = self.tokenizer.special, self.tokenizer.encode
        ids = [special[THINK], *encode(think)] if think else []
        for name, fields in calls:
            ids.append(special[TOOL_TOKENS[name]])
            for field, value in fields.items():
                ids += [special[FIELD_TOKENS[field]], *encode(value)]
        return [*ids, self.tokenizer.end_id] if end else ids

    def edit(self, old: str = "x > low", new: str = "x < low") -> list[int]:
        return self.call(("edit_file", {"old": old, "new": new}))

    def run(self) -> list[int]:
        return self.call(("run", {}))

    def finish(self) -> list[int]:
        return self.call(("finish", {}))

    def say(self, text: str) -> list[int]:
        return [*self.tokenizer.encode(text), self.tokenizer.end_id]


@pytest.fixture
def actions(tokenizer: Tokenizer) -> Actions:
    return Actions(tokenizer)
