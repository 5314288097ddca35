"""Proves that tasks are tasks: the solution passes, the untouched repository fails, hidden checks see more than visible ones,
and no split, corpus or pod image holds what another split evaluates.

Verdicts come either from child processes here (fast) or from pods through a callable handed in, so this room knows no
backend. Every problem is reported with its place; nothing stops at the first.
"""

from __future__ import annotations

import ast
import asyncio
import json
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from etude.records.errors import BadInput, TaskError
from etude.records.rollout import CauseClass, Verdict
from etude.records.task import Split, Task
from etude.tasks import corpus
from etude.tasks.canonical import outcome
from etude.tasks.functions import digest, functions_of, normalise, parameter_names, signatures_of
from etude.tasks.harbor import cases_of
from etude.tasks.make import QUOTAS
from etude.tasks.project import pytest_passes
from etude.tasks.sources import SourceModule
from etude.tasks.worker import WorkerPool

Progress = Callable[[str], None]
Verify = Callable[[Task, Mapping[str, bytes]], Awaitable[Verdict]]
"""Scores a task with changed files, as `agent.verifier.verify` does with a backend bound to it."""

MIN_HIDDEN_FAILING = 2
PROTECTED = (Split.RL, Split.DEV, Split.HELD_OUT)
_CALL_CPU_S = 1.0


class Problem(msgspec.Struct, frozen=True):
    """What does not hold, and where."""

    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


class CheckReport(msgspec.Struct, frozen=True):
    """Outcome of a check: `problems` is empty when all holds; the rest says what was looked at."""

    tasks: int
    problems: tuple[Problem, ...]
    by_split: dict[str, int]
    by_operator: dict[str, int]
    modules: dict[str, int]
    """Distinct source modules by split."""


class _Score(msgspec.Struct, frozen=True):
    passed: int
    total: int
    detail: str = ""

    @property
    def failed(self) -> int:
        return self.total - self.passed


def check(
    tasks: Sequence[Task], *, corpus_folder: Path | None = None, image_modules: Collection[str] = (), processes: int = 2,
    progress: Progress = lambda line: None,
) -> CheckReport:  # fmt: skip
    """Checks tasks in child processes. `corpus_folder` adds the proof against the corpora, `image_modules` (dotted names of
    the standard modules in the pod image) the one against the image."""
    problems, runnable = _static(tasks)
    jobs = [job for task in runnable for job in _jobs(task)]
    scores: list[_Score] = [_Score(0, 1, "the child process died or hung")] * len(jobs)
    with WorkerPool(_score, processes, limit_s=60.0) as pool:
        for done, (index, score) in enumerate(pool.map(jobs)):
            if score is not None:
                scores[index] = score
            if done % 3000 == 2999:
                progress(f"checked {(done + 1) // 3} of {len(runnable)} tasks")
    for task in tasks:
        if task.verifier == "pytest":
            problems += _pytest_problems(task)
    for number, task in enumerate(runnable):
        problems += judge(task, *scores[3 * number : 3 * number + 3])
    return _report(tasks, problems + check_set(tasks, corpus_folder=corpus_folder, image_modules=image_modules))


async def check_in_pods(
    tasks: Sequence[Task], verify: Verify, *, corpus_folder: Path | None = None, image_modules: Collection[str] = (),
    concurrency: int = 4, progress: Progress = lambda line: None,
) -> CheckReport:  # fmt: skip
    """The same with verdicts of `verify`, which runs each candidate in a pod (and bounds its own time)."""
    problems, runnable = _static(tasks)
    slots = asyncio.Semaphore(concurrency)
    done = 0

    async def one(task: Task) -> list[Problem]:
        nonlocal done
        visible, hidden = _variants(task)
        async with slots:
            scores = [await _pod_score(verify, task, solution_files(task))]
            scores += [await _pod_score(verify, variant, {}) for variant in (visible, hidden)]
        done += 1
        if done % 50 == 0:
            progress(f"checked {done} of {len(runnable)} tasks")
        return judge(task, *scores)

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(task)) for task in runnable]
    for task in running:
        problems += task.result()
    return _report(tasks, problems + check_set(tasks, corpus_folder=corpus_folder, image_modules=image_modules))


def judge(task: Task, solved: _Score, visible: _Score, hidden: _Score) -> list[Problem]:
    """Problems of one task, given the scores of its solution and of the untouched repository on either kind of case."""
    found = []
    if solved.failed or not solved.total or solved.detail:
        found.append(f"the solution fails {solved.failed} of {solved.total} checks {solved.detail}".strip())
    if not visible.failed and not visible.detail:
        found.append("the untouched repository passes every visible check")
    if not hidden.failed and not hidden.detail:
        found.append("the untouched repository passes every hidden check")
    elif hidden.failed < MIN_HIDDEN_FAILING:
        found.append(
            f"only {hidden.failed} hidden checks fail on the untouched repository; expected {MIN_HIDDEN_FAILING}"
        )
    return [Problem(task.name, text) for text in found]


def check_set(
    tasks: Sequence[Task], *, corpus_folder: Path | None = None, image_modules: Collection[str] = ()
) -> list[Problem]:
    """Problems of the set: splits that share a module, a syntax hash or a signature, with each other, with the corpora
    or with the image; too many tasks of a function or module."""
    repair = [task for task in tasks if task.category == "repair" and task.verifier == "cases"]
    keys = {task.id: _keys(task) for task in repair}
    problems = []
    owners: dict[str, dict[str, set[Split]]] = defaultdict(lambda: defaultdict(set))
    for task in repair:
        for kind, key in keys[task.id].items():
            owners[kind][key].add(task.split)
    for kind, table in owners.items():
        for key, splits in table.items():
            if len(splits) > 1:
                problems.append(Problem(f"{kind} {key}", "in splits " + ", ".join(sorted(splits))))
    problems += _quota_problems(repair)
    protected = {
        kind: {keys[t.id][kind] for t in repair if t.split in PROTECTED} for kind in ("module", "hash", "signature")
    }
    if corpus_folder is not None:
        problems += _corpus_problems(corpus_folder, protected)
    if image_modules:
        problems += _image_problems(image_modules, protected, repair)
    return problems


def solution_files(task: Task) -> dict[str, bytes]:
    """The changed files of the task's solution."""
    return {path: task.solution[path] for path in task.allowed_changes if path in task.solution}


def _pytest_problems(task: Task) -> list[Problem]:
    """Runs the project's own tests on the broken and on the solved tree, in temporary copies."""
    try:
        wanted = set(json.loads(task.tests["pytest.json"])["ids"])
    except (KeyError, ValueError, TypeError) as error:
        return [Problem(task.name, f"tests/pytest.json holds no `ids` ({type(error).__name__})")]
    restored = {path.removeprefix("repo/"): data for path, data in task.tests.items() if path.startswith("repo/")}
    solved = pytest_passes({**task.environment, **solution_files(task), **restored}, task.limits.verifier_timeout_s)
    broken = pytest_passes({**task.environment, **restored}, task.limits.verifier_timeout_s)
    found = [] if wanted <= solved else [f"the solution fails {len(wanted - solved)} of {len(wanted)} tests"]
    found += ["the untouched repository passes every test"] if wanted <= broken else []
    return [Problem(task.name, text) for text in found]


def _report(tasks: Sequence[Task], problems: Iterable[Problem]) -> CheckReport:
    modules: dict[str, set[str]] = defaultdict(set)
    for task in tasks:
        modules[task.split].add(task.module)
    return CheckReport(
        len(tasks), tuple(problems), dict(Counter(str(task.split) for task in tasks)),
        dict(Counter(task.operator for task in tasks).most_common()), {str(split): len(m) for split, m in modules.items()},
    )  # fmt: skip


def _static(tasks: Sequence[Task]) -> tuple[list[Problem], list[Task]]:
    problems: list[Problem] = []
    runnable: list[Task] = []
    for name, count in Counter(task.id for task in tasks).items():
        if count > 1:
            problems.append(Problem(name, f"{count} tasks with the same content"))
    for task in tasks:
        if task.verifier != "cases":
            continue
        try:
            _, _, visible, hidden = cases_of(task)
        except TaskError as error:
            problems.append(Problem(task.name, str(error)))
            continue
        shared = {args for args, _ in visible} & {args for args, _ in hidden}
        if not visible or not hidden:
            problems.append(
                Problem(task.name, f"{len(visible)} visible and {len(hidden)} hidden cases; expected some of both")
            )
        elif shared:
            problems.append(Problem(task.name, f"hidden input {min(shared)!r} is visible too"))
        elif not solution_files(task):
            problems.append(Problem(task.name, "the solution holds none of the files that may be changed"))
        else:
            runnable.append(task)
    return problems, runnable


_Job = tuple[str, str, list[tuple[str, str]]]


def _jobs(task: Task) -> list[_Job]:
    module, function, visible, hidden = cases_of(task)
    files = {**task.environment, **solution_files(task)}
    path = f"{module}.py"
    solved, broken = files.get(path, b"").decode(), task.environment.get(path, b"").decode()
    return [(solved, function, visible + hidden), (broken, function, visible), (broken, function, hidden)]


def _score(job: _Job) -> _Score:
    text, name, cases = job
    namespace: dict[str, object] = {"__name__": "candidate"}
    try:
        exec(text, namespace)
        function = namespace[name]
    except BaseException as error:
        return _Score(0, len(cases), f"({type(error).__name__} on import)")
    passed = 0
    for args, want in cases:
        got = outcome(function, args, _CALL_CPU_S)
        passed += got == want
        if got == "timeout":
            break
    return _Score(passed, len(cases))


async def _pod_score(verify: Verify, task: Task, changed: Mapping[str, bytes]) -> _Score:
    verdict = await verify(task, changed)
    lost = verdict.cause is CauseClass.INFRASTRUCTURE
    return _Score(verdict.passed, verdict.total, f"(pod: {verdict.detail})" if lost else "")


def _variants(task: Task) -> tuple[Task, Task]:
    module, function, visible, hidden = cases_of(task)
    made = []
    for cases in (visible, hidden):
        table = {"module": module, "function": function, "visible": [], "hidden": cases}
        made.append(msgspec.structs.replace(task, tests={**task.tests, "cases.json": json.dumps(table).encode()}))
    return made[0], made[1]


def _keys(task: Task) -> dict[str, str]:
    module = task.module
    text = next((data.decode() for path, data in solution_files(task).items() if path.endswith(".py")), "")
    try:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name == task.function:
                signature = f"{node.name}({','.join(parameter_names(node.args))})"
                return {"module": module, "hash": digest(normalise(node)), "signature": signature}
    except (SyntaxError, ValueError):
        pass
    return {"module": module, "hash": f"unparsed {task.id}", "signature": f"unparsed {task.id}"}


def _quota_problems(tasks: Sequence[Task]) -> list[Problem]:
    functions = Counter((task.split, task.module, task.function) for task in tasks)
    modules = Counter((task.split, task.module) for task in tasks)
    problems = []
    for (split, module, function), count in functions.items():
        if split in QUOTAS and count > QUOTAS[split].per_function:
            problems.append(
                Problem(
                    f"{module}.{function}", f"{count} tasks in {split}; expected at most {QUOTAS[split].per_function}"
                )
            )
    for (split, module), count in modules.items():
        bound = QUOTAS[split].per_module if split in QUOTAS else 0
        if bound and count > bound:
            problems.append(Problem(module, f"{count} tasks in {split}; expected at most {bound}"))
    return problems


def _corpus_problems(folder: Path, protected: Mapping[str, set[str]]) -> list[Problem]:
    problems = []
    files = corpus.paths(folder)
    for name in ("pretrain", "sft"):
        if files[name].exists():
            for row in corpus.read_rows(files[name]):
                for kind, key in (("module", row.module), ("hash", row.digest), ("signature", row.signature)):
                    if key in protected[kind]:
                        problems.append(
                            Problem(
                                f"{files[name].name}: {row.module}.{row.function}",
                                f"shares its {kind} with a protected task",
                            )
                        )
    if files["source_text"].exists():
        for module, text in corpus.read_texts(files["source_text"]):
            if module in protected["module"]:
                problems.append(Problem(f"{files['source_text'].name}: {module}", "is the module of a protected task"))
            for key in signatures_of(text) & protected["signature"]:
                problems.append(Problem(f"{files['source_text'].name}: {module}", f"holds {key} of a protected task"))
    return problems


def _image_problems(
    image_modules: Collection[str], protected: Mapping[str, set[str]], tasks: Sequence[Task]
) -> list[Problem]:
    problems = []
    for task in tasks:
        for data in solution_files(task).values():
            for line in data.decode().split("\n"):
                if line.startswith(("import ", "from ")) and line.split()[1] not in {*image_modules, "posixpath"}:
                    problems.append(Problem(task.name, f"imports {line.split()[1]}, which the image does not hold"))
    root = Path(sysconfig.get_paths()["stdlib"])
    for name in sorted(image_modules):
        if f"stdlib.{name}" in protected["module"]:
            problems.append(Problem(f"image module {name}", "is the module of a protected task"))
        for path in (root / Path(*name.split(".")).with_suffix(".py"), root / Path(*name.split(".")) / "__init__.py"):
            if path.is_file():
                text = path.read_text("utf-8")
                shared = signatures_of(text) & protected["signature"]
                module = SourceModule(name, "", "", text)
                hashes = {f.digest for f in functions_of(module)} & protected["hash"]
                for key in sorted(shared | hashes):
                    problems.append(Problem(f"image module {name}", f"holds {key} of a protected task"))
    return problems


def require_clean(report: CheckReport, place: str) -> None:
    """Raises BadInput with the first problems when the report has any."""
    if report.problems:
        first = "; ".join(map(str, report.problems[:3]))
        raise BadInput(place, "tasks", f"{len(report.problems)} problems", f"none ({first})")
