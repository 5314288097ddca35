"""The agent's tools: properties of edits on bytes, and the calls in a pod. The library runs on the host too, on a plain folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.environments.backends.namespace import NamespaceBackend
from etude.environments.client import AgentPod
from etude.environments.pod import PodSpec
from etude.environments.podagent import paths, tools

letters = st.text(alphabet="ab\n\r\té", max_size=12)


@settings(deadline=None)
@given(letters, letters, letters, letters, st.binary(max_size=3), st.binary(max_size=3))
def test_an_edit_changes_its_place_and_no_other_byte(
    before: str, old: str, new: str, after: str, head: bytes, tail: bytes
) -> None:
    base = head + (before + old + after).encode() + tail
    try:
        data = tools.edited(base, old, new)
    except tools.ToolError as error:
        assert error.error in {"not_unique", "no_change", "bad_arguments"}
        places = sum(base.startswith(old.encode(), at) for at in range(len(base)))
        assert (error.error == "not_unique") == (old != "" and old != new and places > 1)
        return
    at = base.find(old.encode())
    wrote = new.encode()
    if b"\r\n" in base and base.count(b"\n") == base.count(b"\r\n"):
        wrote = wrote.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
    assert data == base[:at] + wrote + base[at + len(old.encode()) :]


@settings(deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "\tc", ""]), min_size=2, max_size=6), st.sampled_from(["x", "x\ny", "\n"]))
def test_line_ends_of_a_crlf_file_are_kept(lines: list[str], new: str) -> None:  # 5.1
    base = "\r\n".join([*lines, "here", "there", ""]).encode()
    data = tools.edited(base, "here\nthere", new)
    assert data.count(b"\n") == data.count(b"\r\n")


@pytest.mark.parametrize(
    ("base", "old", "error"),
    [
        (b"abc", "d", "not_found"),
        (b"abab", "ab", "not_unique"),
        (b"aaa", "aa", "not_unique"),
        (b"abc", "", "bad_arguments"),
        (b"abc", "new", "no_change"),
        (b"abc", "\ud800", "bad_arguments"),
    ],
)
def test_what_cannot_be_edited_is_named(base: bytes, old: str, error: str) -> None:  # 5.4
    with pytest.raises(tools.ToolError) as caught:
        tools.edited(base, old, "new")
    assert caught.value.error == error and len(caught.value.text) < 40


def test_bom_tabs_and_foreign_encodings_are_kept() -> None:  # 5.2, 5.3, 5.4
    base = b"\xef\xbb\xbf\tx = 1  # caf\xe9\r\n\ty = 2\r\n"
    assert tools.edited(base, "x = 1", "x = 3") == base.replace(b"x = 1", b"x = 3")


def test_carriage_returns_overwrite() -> None:  # 5.11
    assert tools.overwritten("10%\r50%\rdone\nnext\r\n") == "done\nnext\n"
    assert tools.overwritten("abcdef\rxy") == "xycdef"


@settings(deadline=None)
@given(st.text(max_size=200), st.integers(2, 60))
def test_shortened_text_keeps_both_ends_and_counts_the_rest(text: str, limit: int) -> None:  # 5.9, 5.10
    short, dropped = tools.shorten(text, limit)
    if dropped:
        marker = f"\n[{dropped} characters dropped]\n"
        assert marker in short and len(short) == limit + len(marker) and dropped == len(text) - limit
        assert text.startswith(short[: limit - limit // 2]) and text.endswith(short[len(short) - limit // 2 :])
    else:
        assert short == text


def test_paths_stay_inside_whatever_the_links_say(tmp_path: Path) -> None:
    root = tmp_path / "repo"
    (root / "d").mkdir(parents=True)
    (tmp_path / "secret").write_text("s")
    (root / "m.py").write_text("m")
    for name, target in (
        ("out", "/etc"),
        ("up", ".."),
        ("in", "d/../m.py"),
        ("loop", "loop"),
        ("abs", str(root / "m.py")),
        ("far", "up/secret"),
    ):
        os.symlink(target, root / name)
    for good in ("m.py", "./d/../m.py", "in", "abs", str(root / "m.py"), "d/new", "d//x"):
        full, shown = paths.inside(str(root), good)
        assert full == str(root / shown)
    assert paths.inside(str(root), "in")[1] == "m.py" and paths.inside(str(root), ".")[1] == "."
    for bad in (
        "..",
        "../secret",
        "/etc/passwd",
        "out/passwd",
        "up/secret",
        "far",
        "loop",
        "d/../../x",
        "",
        "m\0",
        str(root) + "x",
        "/",
    ):
        with pytest.raises(paths.Outside):
            paths.inside(str(root), bad)


def test_grep_shows_the_match_in_a_long_line(tmp_path: Path) -> None:  # 5.7, 5.8
    (tmp_path / "long.txt").write_text("x" * 600_000 + "needle" + "y" * 49_000)
    (tmp_path / "many.txt").write_text("needle\n" * 100)
    (tmp_path / "binary").write_bytes(b"\0needle")
    found = tools.grep(str(tmp_path), {"pattern": "needle"}, tools.DEFAULTS)
    lines = str(found["text"]).splitlines()
    assert lines[0].startswith("long.txt:1: ...") and "needle" in lines[0] and len(lines[0]) < 240
    assert lines[-1] == "[51 more matches]" and found["dropped"] and "binary" not in str(found["text"])
    assert tools.grep(str(tmp_path), {"pattern": "ne+d", "path": "many.txt"}, {**tools.DEFAULTS, "matches": 1})[
        "text"
    ] == ("many.txt:1: needle\n[99 more matches]")
    assert tools.grep(str(tmp_path), {"pattern": "absent"}, tools.DEFAULTS)["text"] == "no match"


FILES = {
    "m.py": b"def f(x):\n    return x + 1\n",
    "check.py": b"from m import f\nassert f(1) == 3, f(1)\nprint('ok')\n",
}


@pytest.mark.pods
async def test_edit_of_the_original_replaces_the_earlier_edit(pod_of_files: AgentPod) -> None:
    options = {"path": "m.py", "base": "original"}
    first = await pod_of_files.call("edit_file", {"old": "x + 1", "new": "x + 9"}, options)
    assert first["ok"] and first["changed"] == ["m.py"] and first["text"] == "ok"
    assert not (await pod_of_files.call("run", {}))["ok"]
    second = await pod_of_files.call("edit_file", {"path": "m.py", "old": "x + 1", "new": "x + 2"}, options)
    assert second["ok"] and await pod_of_files.read("m.py") == FILES["m.py"].replace(b"+ 1", b"+ 2")
    again = await pod_of_files.call("edit_file", {"old": "x + 1", "new": "x + 2"}, options)
    assert (again["error"], again["changed"]) == ("no_change", [])
    gone = await pod_of_files.call("edit_file", {"old": "x + 2", "new": "x"}, options)
    assert gone["error"] == "not_found"
    current = await pod_of_files.call("edit_file", {"old": "x + 2", "new": "2 + x"}, {"path": "m.py"})
    assert current["ok"]
    ran = await pod_of_files.call("run", {})
    assert (ran["ok"], ran["text"], ran["error"]) == (True, "ok", "")


@pytest.fixture
async def pod_of_files(backend: NamespaceBackend) -> AgentPod:
    return await backend.create(PodSpec(files=FILES, modes={"m.py": 0o755}))


@pytest.mark.pods
async def test_every_wrong_call_is_a_short_named_error(pod_of_files: AgentPod) -> None:
    await pod_of_files.exec(["ln", "-s", "/etc/passwd", "link"])
    wrong: list[tuple[str, dict[str, object], str]] = [
        ("edit_file", {"path": "none.py", "old": "a", "new": "b"}, "bad_path"),
        ("edit_file", {"path": "../etc/passwd", "old": "a", "new": "b"}, "bad_path"),
        ("edit_file", {"path": "link", "old": "root", "new": "b"}, "bad_path"),
        ("edit_file", {"path": ".", "old": "root", "new": "b"}, "bad_path"),
        ("edit_file", {"path": "m.py", "old": "x"}, "bad_arguments"),
        ("edit_file", {"path": "m.py", "old": "x", "new": "y"}, "not_unique"),
        ("edit_file", {"path": "m.py", "old": "zz", "new": "y"}, "not_found"),
        ("edit_file", {"path": "m.py", "old": "+ 1", "new": "+ 1"}, "no_change"),
        ("edit_file", {"path": "m.py", "old": ["x"], "new": "y"}, "bad_arguments"),
        ("read_file", {"path": "/etc/passwd"}, "bad_path"),
        ("read_file", {"path": "link"}, "bad_path"),
        ("read_file", {"path": "m.py", "start": "x"}, "bad_arguments"),
        ("read_file", {"path": "m.py", "start": 9}, "bad_arguments"),
        ("read_file", {"file": "m.py"}, "bad_arguments"),
        ("grep", {"pattern": "("}, "bad_pattern"),
        ("grep", {}, "bad_arguments"),
        ("grep", {"pattern": "x", "path": "/"}, "bad_path"),
        ("teleport", {}, "unknown_tool"),
    ]
    for tool, arguments, error in wrong:
        answer = await pod_of_files.call(tool, arguments)
        assert (answer["ok"], answer["error"], answer["changed"]) == (False, error, []), (tool, arguments)
        assert 0 < len(str(answer["text"])) < 80
    assert await pod_of_files.read("m.py") == FILES["m.py"] and (await pod_of_files.stat("m.py")).mode == 0o755


@pytest.mark.pods
async def test_reading_and_searching_tools(pod_of_files: AgentPod) -> None:
    assert (await pod_of_files.call("read_file", {}, {"path": "m.py"}))["text"] == FILES["m.py"].decode()
    assert (await pod_of_files.call("read_file", {"path": "m.py", "start": "2", "count": 1}))[
        "text"
    ] == "    return x + 1"
    assert (await pod_of_files.call("grep", {"pattern": "ret.*x"}))["text"] == "m.py:2:     return x + 1"
    assert (await pod_of_files.call("grep", {"pattern": "abs.nt", "path": "none"}))["text"] == "no match"
    await pod_of_files.write("slow", b"a" * 60 + b"!")
    slow = await pod_of_files.call("grep", {"pattern": "(a+)+$", "path": "slow"}, {"timeout_ms": 300})
    assert slow["timed_out"] and slow["error"] == "timeout"


@pytest.mark.pods
async def test_run_tells_how_the_command_ended(pod_of_files: AgentPod) -> None:
    async def run(command: str, **options: object) -> tuple[object, object, object]:
        answer = await pod_of_files.call("run", {"command": command}, options)
        return answer["text"], answer["error"], answer["dropped"]

    assert await run("true") == ("ok", "", 0)
    assert await run("exit 3") == ("exit code 3", "failed", 0)
    assert await run("echo a >&2; echo b; exit 1") == ("a\nb", "failed", 0)
    assert await run("kill -9 $$") == ("killed by signal 9", "failed", 0)
    assert await run("echo part; sleep 60 & sleep 60", timeout_ms=400) == ("part\ntimeout after 0.4 s", "timeout", 0)
    assert await run("printf 'a\\rb\\n\\377'") == ("b\n\ufffd", "", 0)
    text, _, dropped = await run("seq 100000", text_limit=40, output_limit=1000)
    assert (
        str(text).startswith("1\n2\n")
        and str(text).endswith("100000")
        and isinstance(dropped, int)
        and dropped > 500_000
    )
    assert "characters dropped]" in str(text)
    answer = await pod_of_files.call("run", {"command": "echo x >> log; cat log"}, request_id="r")
    assert (
        await pod_of_files.call("run", {"command": "echo x >> log; cat log"}, request_id="r") == answer
        and answer["text"] == "x"
    )
