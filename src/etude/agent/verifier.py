"""Scores what a rollout left, mode `pristine`: a fresh pod on a clean copy plus the allowed changed files.

Kind `cases`: only inputs enter the pod; expected values stay here and are compared here, and results come back on a
channel of their own behind a nonce, so nothing that the code under test prints, returns or fakes is believed. Kind
`pytest`: exact test ids from a JUnit report on that channel, with pristine tests. A fault of the policy's code scores
0 with a reason; a fault of the pod is infrastructure. DESIGN decision 13; knows nothing of rewards.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from etude.environments.pod import ExecResult, Pod, PodBackend, PodRefused, PodSpec
from etude.records.errors import InfrastructureError, PodLost, TaskError, Unsupported
from etude.records.rollout import CauseClass, Verdict
from etude.records.task import Task, VerifierMode

ATTEMPTS = 2
"""Pods that one verification may use."""
CHANNEL_BYTES = 1 << 20
OUTPUT_BYTES = 16 << 10
POD_GRACE_S = 15.0
POD_START_S = 700.0
"""Longest wait for a pod, its turn in the backend's queue included."""
_PROJECT_ENV = {"PYTHONPATH": "/repo:/repo/src"}
RESTORED = "repo/"
"""Prefix of the files below `tests/` that kind `pytest` restores over the repository."""


class Cases(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tests/cases.json`: (arguments, expected result) as texts; the visible ones are those of the repository's check."""

    module: str
    function: str
    visible: tuple[tuple[str, str], ...]
    hidden: tuple[tuple[str, str], ...]


class PytestPlan(msgspec.Struct, frozen=True):
    """`tests/pytest.json`: the test ids that must all pass."""

    ids: tuple[str, ...]


def load_cases(task: Task) -> Cases:
    """The cases of a task. Raises TaskError when they are missing, malformed or none is hidden."""
    cases = _load(task, "cases.json", Cases)
    if not cases.hidden:
        raise TaskError(task.name, "tests/cases.json: hidden", [], "at least one hidden case")
    return cases


async def verify(task: Task, changed: Mapping[str, bytes], pods: PodBackend) -> Verdict:
    """Runs the hidden checks of `task` on a clean copy of its environment with `changed` laid over it.

    Of `changed` only `task.allowed_changes` are taken. Pod failures are tried again once, then the verdict's cause is
    INFRASTRUCTURE. Raises TaskError for tests that cannot be read and Unsupported for a mode or kind, or a `pytest`
    task in an image without pytest.
    """
    if task.verifier_mode is not VerifierMode.PRISTINE:
        raise Unsupported(f"verifier mode {task.verifier_mode} (task {task.name})")
    if task.verifier not in _KINDS:
        raise Unsupported(f"verifier kind {task.verifier} (task {task.name})")
    began = time.monotonic()
    files = dict(task.environment)
    files.update({path: data for path, data in changed.items() if path in task.allowed_changes})
    lost = ""
    for _ in range(ATTEMPTS):
        try:
            passed, total, detail = await _KINDS[task.verifier](task, files, pods)
        except InfrastructureError as error:
            lost = f"{type(error).__name__}: {error}"
            continue
        success = total > 0 and passed == total and not detail
        return Verdict(success=success, passed=passed, total=total, detail=detail, duration_s=time.monotonic() - began)
    return Verdict(
        success=False,
        passed=0,
        total=0,
        cause=CauseClass.INFRASTRUCTURE,
        detail=lost,
        duration_s=time.monotonic() - began,
    )


_Score = tuple[int, int, str]


async def _run(
    task: Task,
    files: dict[str, bytes],
    pods: PodBackend,
    argv: list[str],
    stdin: bytes,
    *,
    probe: list[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> ExecResult:
    """One command in a fresh pod, its channel open. Raises InfrastructureError, or Unsupported when `probe` fails."""
    timeout_s = task.limits.verifier_timeout_s
    spec = PodSpec(
        image=task.image, files=files, memory_bytes=task.limits.memory_bytes, processes=task.limits.processes
    )

    async def inside(pod: Pod) -> ExecResult:
        if probe is not None:
            found = await pod.exec(probe, timeout_s=timeout_s, output_limit=OUTPUT_BYTES)
            if found.exit_code != 0:
                raise Unsupported(f"image {task.image} cannot run `{' '.join(probe)}` (task {task.name})")
        return await pod.exec(
            argv, env=env, stdin=stdin, timeout_s=timeout_s, output_limit=OUTPUT_BYTES, channel_limit=CHANNEL_BYTES
        )

    bound_s = 2 * timeout_s + POD_GRACE_S
    try:
        async with asyncio.timeout(POD_START_S):
            pod = await pods.create(spec)
        try:
            async with asyncio.timeout(bound_s):
                result = await inside(pod)
        finally:
            await _close(pod)
    except PodRefused as refusal:
        raise InfrastructureError(f"the verifier's pod: {refusal}") from refusal
    except TimeoutError:
        raise PodLost(f"the verifier's pod did not start or answer within {bound_s} s") from None
    if result.exit_code in (126, 127) and not result.channel:
        raise InfrastructureError(f"the verifier's pod cannot run {argv[0]}")
    return result


async def _close(pod: Pod) -> None:
    try:
        async with asyncio.timeout(POD_GRACE_S):
            await pod.close()
    except (InfrastructureError, TimeoutError):
        pass


async def _cases(task: Task, files: dict[str, bytes], pods: PodBackend) -> _Score:
    cases = load_cases(task)
    driver = task.tests.get("driver.py")
    if driver is None:
        raise TaskError(task.name, "tests/driver.py", "missing", "the script that calls the function under test")
    checks = cases.visible + cases.hidden
    nonce = secrets.token_hex(16)
    question = {
        "module": cases.module,
        "function": cases.function,
        "inputs": [arguments for arguments, _ in checks],
        "nonce": nonce,
    }
    argv = ["python", "-I", "-B", "-c", driver.decode("utf-8")]
    result = await _run(task, files, pods, argv, json.dumps(question).encode())
    if fault := _fault(result):
        return 0, len(checks), fault
    answers = _answers(result.channel, nonce)
    if isinstance(answers, str):
        return 0, len(checks), answers
    if len(answers) != len(checks):
        return 0, len(checks), f"{len(answers)} results for {len(checks)} inputs"
    passed = sum(answer == expected for answer, (_, expected) in zip(answers, checks))
    return passed, len(checks), ""


def _fault(result: ExecResult) -> str:
    if result.timed_out:
        return "timeout"
    if result.out_of_memory:
        return "out of memory"
    return ""


def _answers(channel: bytes, nonce: str) -> list[str] | str:
    """The results, or why what arrived is not believed: anything but the nonce line and one list of texts."""
    if not channel:
        return "no results: the code under test ended the process"
    head, _, body = channel.partition(b"\n")
    if head != nonce.encode():
        return "results without the nonce"
    try:
        return msgspec.json.decode(body, type=list[str])
    except msgspec.DecodeError:
        return "results that are not one list of texts"


async def _pytest(task: Task, files: dict[str, bytes], pods: PodBackend) -> _Score:
    plan = _load(task, "pytest.json", PytestPlan)
    if not plan.ids:
        raise TaskError(task.name, "tests/pytest.json: ids", [], "at least one test id")
    restored = {path.removeprefix(RESTORED): data for path, data in task.tests.items() if path.startswith(RESTORED)}
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "junit_family=xunit2"]
    argv = ["python", "-B", "-m", "pytest", *options, "--junit-xml=/proc/self/fd/3", *plan.ids]
    probe = ["python", "-B", "-c", "import pytest"]
    result = await _run(task, {**files, **restored}, pods, argv, b"", probe=probe, env=_PROJECT_ENV)
    if fault := _fault(result):
        return 0, len(plan.ids), fault
    outcomes = _junit(result.channel)
    if isinstance(outcomes, str):
        return 0, len(plan.ids), outcomes
    return sum(outcomes.get(_junit_name(name)) == [True] for name in plan.ids), len(plan.ids), ""


def _junit(report: bytes) -> dict[tuple[str, str], list[bool]] | str:
    """Outcomes by (class name, test name); a skip is no pass. A text says why the report is not believed."""
    if b"<!DOCTYPE" in report:
        return "a JUnit report with a document type"
    try:
        root = ElementTree.fromstring(report)
    except ElementTree.ParseError:
        return "no JUnit report: the code under test ended the process or wrote into it"
    outcomes: dict[tuple[str, str], list[bool]] = {}
    for case in root.iter("testcase"):
        key = (case.get("classname", ""), case.get("name", ""))
        bad = any(child.tag in ("failure", "error", "skipped") for child in case)
        outcomes.setdefault(key, []).append(not bad)
    return outcomes


def _junit_name(test_id: str) -> tuple[str, str]:
    path, *names = test_id.split("::")
    module = path.removesuffix(".py").replace("/", ".")
    return ".".join([module, *names[:-1]]), names[-1] if names else ""


T = TypeVar("T", Cases, PytestPlan)


def _load(task: Task, name: str, kind: type[T]) -> T:
    data = task.tests.get(name)
    if data is None:
        raise TaskError(task.name, f"tests/{name}", "missing", f"the checks of verifier kind {task.verifier}")
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise TaskError(task.name, f"tests/{name}", str(error), "a readable file of checks") from error


_KINDS = {"cases": _cases, "pytest": _pytest}
