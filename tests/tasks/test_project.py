"""Tasks from a user's own project: the mutated tree fails its tests, the original passes, nothing else changed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from etude.records.errors import BadInput
from etude.tasks.check import check
from etude.tasks.harbor import from_files, to_files, with_id
from etude.tasks.project import make_from_project, pytest_passes

CODE = '''"""Shapes."""


def area(width, height):
    # both sides count
    if width < 0 or height < 0:
        raise ValueError("negative")
    return width * height
'''
TESTS = """from shapes import area
import pytest


def test_area():
    assert area(3, 4) == 12


class TestNegative:
    def test_raises(self):
        with pytest.raises(ValueError):
            area(-1, 2)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # The small project needs no plugins, and loading them is most of a run.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "p/tests").mkdir(parents=True)
    (tmp_path / "p/shapes.py").write_text(CODE)
    (tmp_path / "p/tests/test_shapes.py").write_text(TESTS)
    return tmp_path / "p"


def test_tasks_of_a_project_fail_mutated_and_pass_restored(project: Path) -> None:
    before = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    tasks = make_from_project(project, limit=2, progress=lambda line: None)
    assert len(tasks) == 2 and {path: path.read_bytes() for path in project.rglob("*") if path.is_file()} == before
    for task in tasks:
        assert from_files(to_files(task), task.name) == task
        broken, solved = task.environment["shapes.py"].decode(), task.solution["shapes.py"].decode()
        assert solved == CODE
        assert sum(a != b for a, b in zip(broken.split("\n"), solved.split("\n"))) == 1
        assert "# both sides count" in broken
        assert task.verifier == "pytest" and "repo/tests/test_shapes.py" in task.tests
    assert check(tasks[:1]).problems == ()
    same = msgspec.structs.replace(tasks[0], environment={**tasks[0].environment, "shapes.py": CODE.encode()})
    assert [p.text for p in check([with_id(same)]).problems] == ["the untouched repository passes every test"]
    ids = pytest_passes({**tasks[0].environment, "shapes.py": CODE.encode()}, 60)
    assert ids == {"tests/test_shapes.py::test_area", "tests/test_shapes.py::TestNegative::test_raises"}


def test_a_project_without_passing_tests_is_bad_input(project: Path) -> None:
    (project / "tests/test_shapes.py").write_text("def test_no():\n    assert False\n")
    with pytest.raises(BadInput, match="passing pytest tests"):
        make_from_project(project, progress=lambda line: None)
    with pytest.raises(BadInput, match="--repo"):
        make_from_project(project / "nowhere")
