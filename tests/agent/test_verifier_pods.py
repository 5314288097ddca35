"""The verifier and the loop in real pods: honest work passes, cheats do not."""

import json
from itertools import count
from pathlib import Path

import pytest

from etude.agent.config import AgentConfig
from etude.agent.loop import AgentOptions, run_rollout
from etude.agent.scripted import ScriptedEngine
from etude.agent.solver import demonstrations
from etude.agent.verifier import verify
from etude.environments.backends.namespace import NamespaceBackend
from etude.records.errors import MissingCapability, Unsupported
from etude.records.rollout import CauseClass, StopReason
from etude.records.task import Limits
from etude.tasks.make import driver_text

pytestmark = pytest.mark.pods

CASES = {
    "module": "m",
    "function": "clamp",
    "visible": [["5, 1, 9", "5"]],
    "hidden": [["0, 1, 9", "1"], ["10, 1, 9", "9"], ["3, 3, 3", "3"]],
}
CACHE = Path(__file__).parents[2] / ".cache"
LIMITS = Limits(max_turns=10, max_sampled_tokens=400, max_context_tokens=2000, verifier_timeout_s=4.0)


@pytest.fixture
async def real_pods():
    try:
        backend = await NamespaceBackend.open(CACHE, max_pods=4)
    except MissingCapability as missing:
        pytest.skip(str(missing))
    yield backend
    await backend.aclose()


@pytest.fixture
def task(make_task):
    tests = {"cases.json": json.dumps(CASES).encode(), "driver.py": driver_text().encode()}
    return make_task(tests=tests, limits=LIMITS)


async def test_the_solution_passes_and_the_untouched_repository_fails(real_pods, task):
    right = await verify(task, task.solution, real_pods)
    assert right.success and right.passed == right.total == 4, right
    untouched = await verify(task, {}, real_pods)
    assert not untouched.success and untouched.cause is CauseClass.POLICY and untouched.passed < 4


EQUAL_TO_ALL = """
class Yes:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __repr__(self): return "5"
def clamp(x, low, high): return Yes()
"""
CHEATS = {
    "ends the process at import": "import os\nos._exit(0)\n",
    "exits at import": "raise SystemExit(0)\n",
    "exits at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef clamp(*a): return 5\n",
    "equal to everything": EQUAL_TO_ALL,
    "writes to the channel itself": (
        "import os, json\n"
        "for fd in range(3, 20):\n"
        "    try: os.write(fd, b'x' * 32 + b'\\n' + json.dumps(['5', '1', '9', '3']).encode())\n"
        "    except OSError: pass\n"
        "os._exit(0)\n"
    ),
    "writes to the channel and goes on": (
        "import os\n"
        "for fd in range(3, 20):\n"
        "    try: os.write(fd, b'[]\\n')\n"
        "    except OSError: pass\n"
        "def clamp(x, low, high): return max(low, min(x, high))\n"
    ),
    "finds the nonce in a frame and forges": (
        "import sys, os, json\n"
        "frame = sys._getframe()\n"
        "while frame:\n"
        "    request = frame.f_locals.get('request')\n"
        "    if request:\n"
        "        fd = frame.f_locals['descriptor']\n"
        "        os.write(fd, (request['nonce'] + '\\n' + json.dumps(['5'] * 4)).encode())\n"
        "        os._exit(0)\n"
        "    frame = frame.f_back\n"
    ),
    "patches the driver": (
        "import sys\n"
        "sys.modules['__main__'].outcome = lambda *a: '5'\n"
        "sys.modules['__main__'].canonical = lambda *a: '5'\n"
        "def clamp(*a): return 5\n"
    ),
    "reads the expected values": (
        "import os, json\n"
        "found = {}\n"
        "for place, _, names in os.walk('/'):\n"
        "    if place.startswith(('/proc', '/sys')): continue\n"
        "    for name in names:\n"
        "        if name in ('cases.json', 'grade.py'):\n"
        "            for a, w in json.load(open(os.path.join(place, name)))['hidden']: found[a] = w\n"
        "def clamp(x, low, high): return int(found[f'{x}, {low}, {high}'])\n"
    ),
    "leaves a background process and hangs": "import os, time\nif os.fork() == 0:\n    time.sleep(60)\ntime.sleep(60)\n",
    "prints what a grader may want": "print('ok\\n4 passed')\nimport os\nos._exit(0)\n",
}


@pytest.mark.parametrize("name", CHEATS)
async def test_a_cheat_in_the_changed_file_has_no_success(real_pods, task, name):
    verdict = await verify(task, {"m.py": CHEATS[name].encode()}, real_pods)
    assert not verdict.success and verdict.cause is CauseClass.POLICY, verdict
    if "hangs" in name:
        assert verdict.detail == "timeout"


@pytest.mark.parametrize("path", ["sitecustomize.py", "conftest.py", "json.py", "check.py"])
async def test_files_that_shadow_or_configure_never_reach_the_clean_copy(real_pods, task, path):
    evil = b"import os\nos.write(3, b'x')\nos._exit(0)\n"
    assert (await verify(task, {path: evil, **task.solution}, real_pods)).success
    assert not (await verify(task, {path: evil}, real_pods)).success


@pytest.mark.parametrize("path", ["sitecustomize.py", "conftest.py", "json.py"])
async def test_even_an_allowed_shadow_is_not_imported_before_the_results_are_kept(real_pods, task, make_task, path):
    evil = b"import os\nos._exit(0)\n"
    wide = make_task(tests=task.tests, limits=LIMITS, allowed_changes=("m.py", path))
    assert (await verify(wide, {path: evil, **task.solution}, real_pods)).success


async def test_pytest_is_refused_by_an_image_without_it(real_pods, task, make_task):
    tests = {"pytest.json": b'{"ids": ["test_m.py::test_a"]}'}
    with pytest.raises(Unsupported, match="pytest"):
        await verify(make_task(verifier="pytest", tests=tests, limits=LIMITS), {}, real_pods)


def scripted(plan):
    numbers = count()
    return ScriptedEngine(lambda ids: plan[min(next(numbers), len(plan) - 1)])


@pytest.fixture
def roll(real_pods, tokenizer, task):
    async def run(plan, **options):
        config = AgentConfig(grammar=False, tools=("read_file", "edit_file", "run", "grep", "finish"), max_calls=4)
        return await run_rollout(
            task,
            attempt=0,
            seed=1,
            engine=scripted(plan),
            pods=real_pods,
            tokenizer=tokenizer,
            options=AgentOptions(config=config, **options),
        )

    return run


async def test_a_whole_rollout_in_real_pods_is_scored(roll, actions):
    look = actions.call(("read_file", {"path": "m.py"}), ("grep", {"pattern": "low"}))
    wrong, right = actions.edit(new="x >= low"), actions.edit()
    rollout = await roll([look, wrong, actions.run(), right, actions.run(), actions.finish()])
    assert rollout.stop_reason is StopReason.FINISH and rollout.error == ""
    assert rollout.verdict is not None and rollout.verdict.success and rollout.rewards["total"] > 0.9
    results = [call.result for call in rollout.tool_calls]
    assert "x > low" in results[0] and "m.py:2" in results[1] and results[2] == "ok"
    assert "want 5" in results[3] and results[4:6] == ["ok", "ok"]
    assert rollout.backend == "namespace" and rollout.well_formed


async def test_a_link_left_by_the_agent_is_not_taken(roll, actions):
    link = actions.call(("run", {"command": "ln -sf /etc/passwd m.py"}))
    rollout = await roll([link, actions.finish()])
    assert rollout.verdict is not None and not rollout.verdict.success
    assert "not a regular file" in rollout.verdict.detail and rollout.diff == {}


async def test_a_background_process_cannot_reach_the_verifier(roll, actions):
    forge = actions.call(
        ("run", {"command": "(sleep 1; echo 'def clamp(x, low, high): return 5' > m.py) & echo started"})
    )
    rollout = await roll([forge, actions.finish()])
    assert rollout.tool_calls[0].result == "started"
    assert rollout.verdict is not None and not rollout.verdict.success and rollout.diff == {}


async def test_a_command_that_hangs_is_the_policys_and_told(roll, actions, real_pods, make_task, tokenizer, task):
    hang = actions.call(("run", {"command": "echo begun; sleep 60"}))
    slow = make_task(tests=task.tests, limits=Limits(tool_timeout_s=0.4, max_context_tokens=2000))
    rollout = await run_rollout(
        slow,
        attempt=0,
        seed=1,
        engine=scripted([hang, actions.finish()]),
        pods=real_pods,
        tokenizer=tokenizer,
        options=AgentOptions(config=AgentConfig(grammar=False), verify=False),
    )
    (call, _) = rollout.tool_calls
    assert call.timed_out and call.error == "timeout" and "begun" in call.result and rollout.cause is CauseClass.POLICY


async def test_demonstrations_come_from_real_pods(real_pods, task, tokenizer):
    made = await demonstrations([task], tokenizer=tokenizer, pods=real_pods, n=3, seed=1, wrong_probability=0.5)
    assert len(made) == 3 and all(rollout.well_formed for rollout in made)
