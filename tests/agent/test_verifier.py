"""The verifier's judgement, with pods in memory: what is believed, what is the policy's, what is infrastructure."""

import json

import pytest

from etude.agent.verifier import load_cases, verify
from etude.records.errors import PodLost, TaskError, Unsupported
from etude.records.rollout import CauseClass
from etude.records.task import VerifierMode

CASES = {
    "module": "m",
    "function": "clamp",
    "visible": [["5, 1, 9", "5"]],
    "hidden": [["0, 1, 9", "1"], ["10, 1, 9", "9"]],
}
RIGHT = ["5", "1", "9"]
TESTS = {"cases.json": json.dumps(CASES).encode(), "driver.py": b"pass"}


@pytest.fixture
def judge(pods, make_task):
    """Verifies with the given answer of the pod: a dict of result fields, or a function of the nonce to channel bytes."""

    async def run(answer, changed=None, **task):
        def exec_answer(argv, options, files):
            if callable(answer):
                return {"channel": answer(json.loads(options["stdin"])["nonce"])}
            return answer

        pods.exec_answer = exec_answer
        return await verify(make_task(**{"tests": TESTS, **task}), changed or {}, pods)

    return run


def told(results):
    return lambda nonce: f"{nonce}\n{json.dumps(results)}".encode()


async def test_all_right_results_are_a_success(judge):
    verdict = await judge(told(RIGHT))
    assert verdict.success and (verdict.passed, verdict.total, verdict.detail) == (3, 3, "")


@pytest.mark.parametrize(
    ("answer", "passed", "words"),
    [
        (told(["5", "1", "1"]), 2, ""),
        (told(["5", "1"]), 0, "2 results for 3 inputs"),
        (told([*RIGHT, "9"]), 0, "4 results for 3 inputs"),
        (lambda nonce: json.dumps(RIGHT).encode(), 0, "without the nonce"),
        (lambda nonce: b"[]\n" + told(RIGHT)(nonce), 0, "without the nonce"),
        (lambda nonce: told(RIGHT)(nonce) + b"[]", 0, "not one list"),
        (lambda nonce: told(RIGHT)("0" * 32), 0, "without the nonce"),
        (lambda nonce: f"{nonce}\n[5, 1, 9]".encode(), 0, "not one list"),
        (lambda nonce: b"", 0, "ended the process"),
        ({"channel": b"", "exit_code": 0}, 0, "ended the process"),
        ({"timed_out": True}, 0, "timeout"),
        ({"out_of_memory": True}, 0, "out of memory"),
        ({"signal": 9, "exit_code": None}, 0, "ended the process"),
    ],
)
async def test_what_the_policy_caused_scores_nothing_with_a_reason(judge, answer, passed, words):
    verdict = await judge(answer)
    assert not verdict.success and verdict.cause is CauseClass.POLICY
    assert verdict.passed == passed and verdict.total == 3 and words in verdict.detail


async def test_expected_values_never_enter_the_pod(judge, pods):
    tests = dict(TESTS)
    tests["cases.json"] = json.dumps({**CASES, "hidden": [["0, 1, 9", "'secret-41'"]]}).encode()
    await judge(told(["5", "'secret-41'"]), tests=tests)
    (argv, options, files), *_ = pods.execs
    inside = b"\n".join([*files.values(), options["stdin"], *(word.encode() for word in argv)])
    assert b"secret-41" not in inside and "tests/cases.json" not in files
    assert argv[:3] == ["python", "-I", "-B"] and b"0, 1, 9" in options["stdin"]


async def test_only_allowed_changes_enter_the_clean_copy(judge, pods, make_task):
    await judge(told(RIGHT), {"m.py": b"new", "check.py": b"evil", "sitecustomize.py": b"evil"})
    files = pods.execs[0][2]
    assert files["m.py"] == b"new" and files["check.py"] == make_task().environment["check.py"]
    assert "sitecustomize.py" not in files


async def test_a_lost_pod_is_tried_once_more_and_then_infrastructure(judge, pods):
    pods.create_errors = [PodLost("gone")]
    assert (await judge(told(RIGHT))).success
    pods.create_errors = [PodLost("gone"), PodLost("gone")]
    verdict = await judge(told(RIGHT))
    assert not verdict.success and verdict.cause is CauseClass.INFRASTRUCTURE and "gone" in verdict.detail
    verdict = await judge({"exit_code": 127})
    assert verdict.cause is CauseClass.INFRASTRUCTURE and all(pod.closed for pod in pods.pods)


async def test_two_verifications_have_different_nonces(judge):
    seen = []
    for _ in range(2):
        await judge(lambda nonce: seen.append(nonce) or b"")
    assert len(set(seen)) == 2


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ({}, "cases.json"),
        ({"cases.json": b"{"}, "cases.json"),
        ({"cases.json": json.dumps({**CASES, "hidden": []}).encode()}, "hidden"),
        ({"cases.json": TESTS["cases.json"]}, "driver.py"),
    ],
)
async def test_tests_that_cannot_be_used_are_the_tasks_fault(judge, tests, words):
    with pytest.raises(TaskError, match=words):
        await judge(told(RIGHT), tests=tests)


async def test_what_is_not_there_is_refused_by_name(judge):
    with pytest.raises(Unsupported, match="final_state"):
        await judge(told(RIGHT), verifier_mode=VerifierMode.FINAL_STATE)
    with pytest.raises(Unsupported, match="vibes"):
        await judge(told(RIGHT), verifier="vibes")


def test_cases_are_read_as_the_task_wrote_them(make_task):
    cases = load_cases(make_task(tests=TESTS))
    assert cases.function == "clamp" and cases.hidden == (("0, 1, 9", "1"), ("10, 1, 9", "9"))


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.test_m" name="test_a"/>
<testcase classname="tests.test_m.TestB" name="test_c[1]">{}</testcase>
</testsuite></testsuites>"""
PLAN = {"ids": ["tests/test_m.py::test_a", "tests/test_m.py::TestB::test_c[1]"]}


@pytest.mark.parametrize(
    ("report", "passed", "words"),
    [
        (JUNIT.format(""), 2, ""),
        (JUNIT.format("<failure/>"), 1, ""),
        (JUNIT.format("<skipped/>"), 1, ""),
        (JUNIT.format("").replace("test_a", "test_x"), 1, ""),
        (
            JUNIT.format("").replace(
                'name="test_a"/>', 'name="test_a"/><testcase classname="tests.test_m" name="test_a"/>'
            ),
            1,
            "",
        ),
        ("", 0, "no JUnit report"),
        (JUNIT.format("") + JUNIT.format(""), 0, "no JUnit report"),
        ("<!DOCTYPE x>" + JUNIT.format(""), 0, "document type"),
    ],
)
async def test_pytest_needs_each_named_test_to_pass_exactly_once(judge, pods, report, passed, words):
    tests = {"pytest.json": json.dumps(PLAN).encode(), "repo/tests/test_m.py": b"pristine"}
    verdict = await judge(
        {"channel": report.encode()},
        {"tests/test_m.py": b"forged"},
        verifier="pytest",
        tests=tests,
        allowed_changes=("tests/test_m.py",),
    )
    assert (verdict.passed, verdict.total, verdict.success) == (passed, 2, passed == 2) and words in verdict.detail
    assert pods.execs[-1][2]["tests/test_m.py"] == b"pristine"


async def test_pytest_in_an_image_without_it_is_unsupported(judge):
    with pytest.raises(Unsupported, match="import pytest"):
        await judge({"exit_code": 1}, verifier="pytest", tests={"pytest.json": json.dumps(PLAN).encode()})
