"""`check` passes what is right and names each way of being wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from etude.records.errors import TaskError
from etude.records.rollout import Verdict
from etude.records.task import Split, Task
from etude.tasks import corpus
from etude.tasks.check import _jobs, _score, check, check_in_pods, check_set, solution_files
from etude.tasks.corpus import Row
from etude.tasks.harbor import from_files, to_files, with_id
from etude.tasks.make import repair_task


def _problems(*tasks: Task) -> list[str]:
    return [problem.text for problem in check(tasks, processes=1).problems]


def _with_cases(task: Task, **changes: object) -> Task:
    table = {**json.loads(task.tests["cases.json"]), **changes}
    return with_id(msgspec.structs.replace(task, tests={**task.tests, "cases.json": json.dumps(table).encode()}))


def test_made_tasks_are_right(row: Row) -> None:
    tasks = [repair_task(row, index) for index in range(3)]
    report = check(tasks, processes=1)
    assert report.problems == () and report.tasks == 3 and report.by_split == {"rl": 3} and report.modules == {"rl": 1}


def test_a_solution_that_fails_is_found(task: Task) -> None:
    path = task.allowed_changes[0]
    wrong = with_id(msgspec.structs.replace(task, solution={**task.solution, path: task.environment[path]}))
    assert any("the solution fails" in text for text in _problems(wrong))


def test_an_untouched_repository_that_passes_is_found(task: Task) -> None:
    path = task.allowed_changes[0]
    easy = with_id(msgspec.structs.replace(task, environment={**task.environment, path: task.solution[path]}))
    assert "the untouched repository passes every visible check" in _problems(easy)
    assert "the untouched repository passes every hidden check" in _problems(easy)


def test_too_few_hidden_failures_are_found(task: Task) -> None:
    table = json.loads(task.tests["cases.json"])
    failing = []
    for case in table["hidden"]:
        one = _with_cases(task, hidden=[case])
        if _score(_jobs(one)[2]).failed:
            failing.append(case)
    few = _with_cases(task, hidden=[case for case in table["hidden"] if case not in failing[1:]])
    assert _problems(few) == ["only 1 hidden checks fail on the untouched repository; expected 2"]


def test_a_hidden_input_that_is_visible_is_found(task: Task) -> None:
    table = json.loads(task.tests["cases.json"])
    assert any(
        "is visible too" in t for t in _problems(_with_cases(task, hidden=table["hidden"] + table["visible"][:1]))
    )


def test_no_hidden_cases_are_found(task: Task) -> None:
    assert any("0 hidden cases" in text for text in _problems(_with_cases(task, hidden=[])))


def test_a_task_without_tests_cannot_be_read(task: Task) -> None:
    files = {path: data for path, data in to_files(task).items() if not path.startswith("tests/")}
    with pytest.raises(TaskError, match=r"tests/test\.sh: file is 'missing'"):
        from_files(files, "t")


def test_a_solution_that_kills_its_process_is_a_problem_not_a_crash(task: Task) -> None:
    path = task.allowed_changes[0]
    fatal = {**task.solution, path: b"import os\nos._exit(0)\n"}
    assert any("died" in text for text in _problems(with_id(msgspec.structs.replace(task, solution=fatal))))


def test_two_splits_with_one_function_are_found(row: Row) -> None:
    first = repair_task(row, 0)
    second = with_id(msgspec.structs.replace(repair_task(row, 1), split=Split.DEV, module="other.module"))
    texts = [str(problem) for problem in check_set([first, second])]
    assert any(text.startswith("hash ") for text in texts) and any(
        text.startswith("signature clamp(") for text in texts
    )
    assert not any(text.startswith("module ") for text in texts)
    third = with_id(msgspec.structs.replace(repair_task(row, 1), split=Split.DEV))
    assert any(str(problem).startswith("module pkg.numbers_m") for problem in check_set([first, third]))


def test_a_corpus_that_holds_a_protected_function_is_found(row: Row, tmp_path: Path) -> None:
    task = repair_task(row, 0)
    leaked = msgspec.structs.replace(row, module="elsewhere", split=Split.PRETRAIN)
    files = corpus.paths(tmp_path)
    corpus._write(files["pretrain"], [msgspec.json.encode(leaked)])
    corpus._write(files["source_text"], [msgspec.json.encode({"module": "m", "package": "p", "text": row.source})])
    texts = [str(problem) for problem in check_set([task], corpus_folder=tmp_path)]
    assert any("pretrain" in text and "shares its hash" in text for text in texts)
    assert any("source_text" in text and "clamp(value,low,high)" in text for text in texts)
    clean = msgspec.structs.replace(leaked, digest="0", signature="other()")
    corpus._write(files["pretrain"], [msgspec.json.encode(clean)])
    files["source_text"].unlink()
    assert check_set([task], corpus_folder=tmp_path) == []


def test_a_task_from_a_module_in_the_image_is_found(row: Row) -> None:
    inside = with_id(msgspec.structs.replace(repair_task(row, 0), module="stdlib.textwrap"))
    assert [p.place for p in check_set([inside], image_modules=["textwrap", "json"])] == ["image module textwrap"]
    assert check_set([repair_task(row, 0)], image_modules=["textwrap", "json"]) == []
    lacking = msgspec.structs.replace(row, imports=("import shelve",))
    assert [p.text for p in check_set([repair_task(lacking, 0)], image_modules=["json"])] == [
        "imports shelve, which the image does not hold"
    ]


async def test_verdicts_from_pods_are_judged_the_same_way(row: Row) -> None:
    async def verify(task: Task, changed: Mapping[str, bytes]) -> Verdict:
        solved = msgspec.structs.replace(task, environment={**task.environment, **changed})
        score = _score(_jobs(msgspec.structs.replace(solved, solution={}))[0])
        return Verdict(success=score.failed == 0, passed=score.passed, total=score.total)

    tasks = [repair_task(row, index) for index in range(2)]
    assert (await check_in_pods(tasks, verify)).problems == ()
    path = tasks[0].allowed_changes[0]
    wrong = with_id(msgspec.structs.replace(tasks[0], solution={**tasks[0].solution, path: tasks[0].environment[path]}))
    assert any("the solution fails" in p.text for p in (await check_in_pods([wrong], verify)).problems)
    assert solution_files(tasks[0]).keys() == {path}
