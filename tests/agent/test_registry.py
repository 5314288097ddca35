"""Strict checks of tool arguments, and what a tool set's identity depends on."""

import pytest

from etude.agent.config import AgentConfig
from etude.agent.tools.registry import BAD_ARGUMENTS, MALFORMED, Prepared, ToolCallFault, ToolSet
from etude.chat.parse import ParsedCall
from etude.records.errors import BadInput

ALL = ToolSet(("read_file", "edit_file", "run", "grep", "finish"), {})


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("edit_file", {"old": "a", "new": "b", "pathh": "m.py"}, "unknown pathh"),
        ("edit_file", {"old": "a"}, "missing new"),
        ("edit_file", {"old": "", "new": "b"}, "empty old"),
        ("edit_file", {"old": "a", "new": "a"}, "new equals old"),
        ("edit_file", {"old": "a", "new": "\ufffd"}, "new not UTF-8"),
        ("edit_file", {"old": "a", "new": "\ud800"}, "new not UTF-8"),
        ("edit_file", {"old": "a", "new": 5}, "new must be text"),
        ("edit_file", {"old": "a", "new": None}, "new must be text"),
        ("edit_file", '{"old": "a", "new": "b"}', "arguments must be an object"),
        ("read_file", {"path": "m.py", "start": "two"}, "start must be a number"),
        ("read_file", {"path": "a\0b"}, "path holds a zero byte"),
        ("read_file", {}, "missing path"),
        ("grep", {"pattern": ""}, "empty pattern"),
        ("run", {"command": ""}, "empty command"),
        ("delete", {}, "no tool delete"),
    ],
)
def test_a_bad_argument_is_refused_in_words_the_policy_can_act_on(make_task, name, arguments, words):
    fault = ALL.check_arguments(name, arguments, make_task())
    assert fault == ToolCallFault(BAD_ARGUMENTS, words)


def test_a_fault_of_form_is_malformed(make_task):
    call = ParsedCall(name="edit_file", arguments={}, error="missing old")
    assert ALL.check(call, make_task()) == ToolCallFault(MALFORMED, "missing old")


def test_a_tool_left_out_of_the_set_is_refused(make_task):
    tools = ToolSet(("edit_file", "finish"), {})
    assert isinstance(tools.check_arguments("run", {}, make_task()), ToolCallFault)


def test_defaults_are_the_viewed_file_and_the_tasks_test_command(make_task):
    task = make_task()
    edit = ALL.check_arguments("edit_file", {"old": "a", "new": ""}, task)
    run = ALL.check_arguments("run", {}, task)
    read = ALL.check_arguments("read_file", {"path": "m.py", "count": "3"}, task)
    assert isinstance(edit, Prepared) and edit.arguments["path"] == "m.py" and "path" not in edit.written
    assert isinstance(run, Prepared) and run.arguments == {"command": task.test_command}
    assert isinstance(read, Prepared) and read.arguments["count"] == 3
    two = make_task(viewed_files=("m.py", "check.py"))
    assert ALL.check_arguments("edit_file", {"old": "a", "new": "b"}, two) == ToolCallFault(
        BAD_ARGUMENTS, "missing path"
    )


def test_the_identity_of_a_tool_set_is_its_names_and_options():
    config = AgentConfig()
    assert ToolSet.of(config).toolset_id == ToolSet.of(AgentConfig()).toolset_id
    changed = [
        ToolSet.of(AgentConfig(edit_base="current")),
        ToolSet.of(AgentConfig(tools=("edit_file", "run"))),
        ToolSet.of(AgentConfig(tools=("run", "edit_file", "finish"))),
    ]
    assert len({ToolSet.of(config).toolset_id, *(tools.toolset_id for tools in changed)}) == 4


def test_unknown_and_repeated_tools_are_bad_input():
    with pytest.raises(BadInput, match="one of"):
        ToolSet(("fly",), {})
    with pytest.raises(BadInput, match="each once"):
        ToolSet(("run", "run"), {})
    with pytest.raises(BadInput, match="a tool of this set"):
        ToolSet(("run",), {"edit_file": {}})
