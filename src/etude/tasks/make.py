"""Repair tasks from corpus rows: a small repository with one broken function, visible checks, hidden tests, a solution.

Which mutants become tasks is chosen without any policy: at most a few a function with rare operators first, capped by
module in the evaluation splits. The texts that run in a pod are the sources of `canonical`, `checker`, `driver` and `grader`.
Deliberately knows nothing of how functions were found or of a user's own project (`project`).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from etude.chat.repair_texts import repair_instruction
from etude.environments.image import STDLIB_MODULES
from etude.records.errors import BadInput
from etude.records.task import Split, Task
from etude.tasks import corpus, sources
from etude.tasks.archive import write_archive
from etude.tasks.harbor import with_id
from etude.tasks.inputs import Case

Progress = Callable[[str], None]

MAX_VISIBLE = 10
IMAGE_MODULES = frozenset(STDLIB_MODULES) | {"posixpath"}
"""What a task's code may import in a pod (`os` brings posixpath)."""
_CODECS = frozenset(["utf-8", "utf8", "utf_8", "ascii", "us-ascii", "latin-1", "latin1", "iso-8859-1"])
_TEST_SH = '#!/bin/sh\nexec python3 -I -B "$(dirname "$0")/grade.py"\n'
_TAKEN = frozenset(sys.stdlib_module_names) | {"check", "driver", "grade", "canonical"}


class Quota(msgspec.Struct, frozen=True):
    """How many tasks a split takes: mutants a function, tasks a module, tasks in all (0: no bound)."""

    per_function: int
    per_module: int
    total: int = 0


QUOTAS = {Split.RL: Quota(3, 60), Split.DEV: Quota(1, 4, 240), Split.HELD_OUT: Quota(1, 4, 400), Split.SFT: Quota(3, 0)}


def repair_task(row: corpus.Row, index: int) -> Task:
    """The task made from mutant `index` of a testable row. Hidden and visible inputs are disjoint; the mutant fails the
    first visible case and at least two hidden ones. Raises BadInput for a row without cases or such a mutant."""
    mutant = row.mutants[index]
    if not row.cases or mutant.failing is None or len(mutant.fails) < 3:
        raise BadInput(
            f"{row.module}.{row.function}", "mutant", mutant.operator, "a mutant that fails at least three cases"
        )
    visible, hidden = _divide(row, mutant)
    stem = file_stem(row.module)
    path = f"{stem}.py"
    failing = (mutant.failing.args, mutant.failing.got, mutant.failing.want)
    solution = file_text(row.imports, row.source)
    tests = {
        "test.sh": _TEST_SH.encode(),
        "grade.py": _text("grader").encode(),
        "driver.py": driver_text().encode(),
        "cases.json": _json({"module": stem, "function": row.function, "visible": visible, "hidden": hidden}),
    }
    task = Task(
        id="",
        name=_name(row, mutant),
        instruction=repair_instruction(row.function, path, failing),
        split=row.split,
        environment={
            path: file_text(row.imports, mutant.text).encode(),
            "check.py": check_text(stem, row.function, visible).encode(),
        },
        tests=tests,
        solution={
            path: solution.encode(),
            "solve.sh": f'#!/bin/sh\ncp "$(dirname "$0")/{path}" /repo/{path}\n'.encode(),
        },
        allowed_changes=(path,),
        viewed_files=(path,),
        operator=mutant.operator,
        module=row.module,
        function=row.function,
        source=row.package,
        licence=row.licence,
    )
    return with_id(task)


def runs_in_image(row: corpus.Row) -> bool:
    """Whether the image has every module and every codec that the row's function needs."""
    if not all(line.split()[1] in IMAGE_MODULES for line in row.imports):
        return False
    codecs = [
        node.args[0].value
        for node in ast.walk(ast.parse(row.source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("encode", "decode")
        if node.args and isinstance(node.args[0], ast.Constant)
    ]
    return all(str(codec).lower() in _CODECS for codec in codecs)


def file_stem(module: str) -> str:
    """Short module name of the repository's one file; never a standard module's, which it would hide."""
    stem = re.sub(r"\W", "_", module.rsplit(".", 1)[-1].strip("_").lower()) or "m"
    return stem + "_m" if stem in _TAKEN or not stem.isidentifier() else stem


def file_text(imports: Sequence[str], source: str) -> str:
    """The repository's one file: imports, an empty line, the function."""
    head = "".join(line + "\n" for line in imports)
    return (head + "\n" if head else "") + source + "\n"


def driver_text() -> str:
    """The whole script that calls the candidate in the pod."""
    return _text("canonical") + "\n\n" + _alone("driver")


def check_text(module: str, function: str, visible: Sequence[tuple[str, str]]) -> str:
    """`check.py`: prints the first failing visible case and exits 1, or `ok` and exits 0."""
    cases = "".join(f"    ({args!r}, {want!r}),\n" for args, want in visible)
    head = f"MODULE = {module!r}\nFUNCTION = {function!r}\nCASES = [\n{cases}]\n\n"
    return head + _text("canonical") + "\n\n" + _alone("checker")


def select(rows: Iterable[corpus.Row], quota: Quota) -> list[tuple[corpus.Row, int]]:
    """(row, mutant index) pairs within the quota. Functions in the order of their digests; each takes the operators
    that are rarest so far."""
    used: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    functions: Counter[tuple[str, str]] = Counter()
    chosen: list[tuple[corpus.Row, int]] = []
    for row in sorted(rows, key=lambda row: row.digest):
        by_operator: dict[str, list[int]] = {}
        for index, mutant in enumerate(row.mutants):
            if mutant.failing is not None and len(mutant.fails) >= 3:
                by_operator.setdefault(mutant.operator, []).append(index)
        # Methods of two classes may share a name: they count as one function.
        for _ in range(quota.per_function - functions[row.module, row.function]):
            if not by_operator or (quota.per_module and modules[row.module] >= quota.per_module):
                break
            if quota.total and len(chosen) >= quota.total:
                return chosen
            operator = min(by_operator, key=lambda name: (used[name], name))
            chosen.append((row, by_operator.pop(operator)[0]))
            used[operator] += 1
            modules[row.module] += 1
            functions[row.module, row.function] += 1
    return chosen


def make_tasks(corpus_folder: Path, split: Split, quota: Quota | None = None) -> list[Task]:
    """Tasks of one split from the corpus files (SFT tasks come from `sft.jsonl.zst` and are not shipped)."""
    files = corpus.paths(corpus_folder)
    path = files["sft"] if split is Split.SFT else files["tasks"]
    rows = [row for row in corpus.read_rows(path) if row.split is split and runs_in_image(row)]
    return [repair_task(row, index) for row, index in select(rows, quota or QUOTAS[split])]


def make_archive(
    corpus_folder: Path, archive: Path, notice: Path | None = None, *, source_folder: Path | None = None,
    progress: Progress = print,
) -> dict[str, int]:  # fmt: skip
    """Writes the shipped archive (RL, dev, held-out) with the licence texts of its code, and its notice; builds the corpus
    first when it is missing. Returns the number of tasks by split."""
    source_folder = source_folder or corpus_folder.with_name("sources")
    if not all(path.exists() for path in corpus.paths(corpus_folder).values()):
        corpus.build(corpus_folder, source_folder, progress=progress)
    tasks: list[Task] = []
    counts = {}
    for split in (Split.RL, Split.DEV, Split.HELD_OUT):
        made = make_tasks(corpus_folder, split)
        counts[str(split)] = len(made)
        tasks += made
        progress(f"{split}: {len(made)} tasks from {len({task.module for task in made})} modules")
    origins = {task.source for task in tasks}
    pins = tuple(pin for pin in sources.read_pins() if f"{pin.name} {pin.version}" in origins)
    wheels = sources.fetch(source_folder, pins, progress)
    licences = {f"{pin.name}-{pin.version}": sources.licence_text(wheel, pin) for pin, wheel in zip(pins, wheels)}
    size = write_archive(tasks, archive, licences)
    progress(f"{archive}: {len(tasks)} tasks, {size / 1e6:.2f} MB")
    if notice is not None:
        notice.write_text(notice_text(tasks), "utf-8")
    return counts


def notice_text(tasks: Iterable[Task]) -> str:
    """Third-party notice: packages, versions and licences of the functions inside the tasks."""
    origin: dict[tuple[str, str], set[str]] = {}
    for task in tasks:
        origin.setdefault((task.source, task.licence), set()).add(f"{task.module}.{task.function}")
    pins = {f"{pin.name} {pin.version}": pin for pin in sources.read_pins()}
    lines = [
        "# Code inside `tasks.tar.zst`",
        "",
        "Each task holds one function of a package below, in normal form (without comments, docstrings, annotations and "
        "decorators) and broken by one mutation, with the unbroken function as its solution. The functions stay under the "
        "licences of their packages; `task.toml` names the module, package, version and licence of each. The full licence "
        "texts are in the archive's folder `licences/`; the distributions are pinned by sha256 in `src/etude/tasks/sources.toml`.",
        "",
        "| package | licence | functions | distribution |",
        "|---|---|---|---|",
    ]
    for (source, licence), functions in sorted(origin.items()):
        file = pins[source].file if source in pins else ""
        lines.append(f"| {source} | {licence} | {len(functions)} | `{file}` |")
    return "\n".join(lines) + "\n"


def _divide(row: corpus.Row, mutant: corpus.RowMutant) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    rng = random.Random(f"{row.digest}\n{mutant.text}")
    failing = [index for index, _ in mutant.fails]
    shown = next(
        index for index in failing if mutant.failing is not None and row.cases[index].args == mutant.failing.args
    )
    others = [index for index in failing if index != shown]
    passing = [index for index in range(len(row.cases)) if index not in set(failing)]
    rng.shuffle(others)
    rng.shuffle(passing)
    count = min(MAX_VISIBLE, max(3, len(row.cases) // 3))
    more_failing = min(len(others) - 2, round(count * len(failing) / len(row.cases)) - 1)
    more_failing = max(0, more_failing, min(len(others) - 2, count - 1 - len(passing)))
    visible = [shown, *others[:more_failing]]
    visible += passing[: count - len(visible)]
    rest = sorted(set(range(len(row.cases))) - set(visible))
    return [_pair(row.cases[i]) for i in visible], [_pair(row.cases[i]) for i in rest]


def _pair(case: Case) -> tuple[str, str]:
    return case.args, case.want


def _name(row: corpus.Row, mutant: corpus.RowMutant) -> str:
    stem = "-".join([file_stem(row.module), row.function.strip("_") or "f", mutant.operator]).replace("_", "-").lower()
    return f"{stem[:56]}-{hashlib.sha256(f'{row.module} {mutant.text}'.encode()).hexdigest()[:8]}"


def _json(value: object) -> bytes:
    return json.dumps(value, indent=0).encode()


@functools.cache
def _text(name: str) -> str:
    return Path(__file__).with_name(f"{name}.py").read_text("utf-8")


def _alone(name: str) -> str:
    """A script's text without comments at its top, our imports and the stand-ins for what comes before it."""
    lines = [line for line in _text(name).split("\n") if not line.startswith(("from etude", "MODULE, ", "# "))]
    return "\n".join(lines).lstrip("\n")
