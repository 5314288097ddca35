"""Bad input ends with one clear line that names file, field, value and expectation, exit code 2, and nothing half-written."""

import shutil
import socket
import sys
from pathlib import Path

import pytest

from etude.cli.main import main

ROOT = Path(__file__).parents[2]


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["etude", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0), capsys.readouterr().err.strip()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["config", "show", "coordinator.stepz=3"], ["coordinator.stepz", "coordinator.steps"]),
        (["config", "show", "-c", "missing.toml"], ["missing.toml", "expected"]),
        (["quickstart", "trainer.learning_rate=-1"], ["trainer.learning_rate", "-1", "greater than 0"]),
        (["quickstart", "trainer.groups=3"], ["trainer.groups", "3", "groups_per_batch"]),
        (["quickstart", "model=/nowhere"], ["/nowhere", "model", "expected"]),
        (["quickstart", "tasks=/nowhere"], ["/nowhere", "tasks", "expected"]),
        (["quickstart", "evaluation.tasks=100000"], ["evaluation", "tasks", "100000", "at most"]),
        (["train", "coordinator.split='nothing'"], ["nothing", "expected"]),
        (["runs", "report", "/nowhere"], ["/nowhere", "summary.json", "expected"]),
        (["tasks", "check", "/nowhere"], ["/nowhere", "expected"]),
        (["model", "show", "/nowhere"], ["/nowhere", "expected"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    words: list[str],
) -> None:
    if arguments[0] in ("quickstart", "train"):
        arguments = [*arguments, f"runs='{tmp_path / 'runs'}'"]
    code, line = run(monkeypatch, capsys, *arguments)
    assert code == 2
    assert len(line.splitlines()) == 1
    assert all(word in line for word in words), line
    assert not list(tmp_path.rglob("*")), "something was written"


def test_corrupt_checkpoint_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "data" / "starter", tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    code, line = run(monkeypatch, capsys, "model", "show", str(tmp_path / "model"))
    assert code == 2 and "model.safetensors" in line and "expected" in line


def test_busy_port_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        model = str(ROOT / "data" / "starter")
        code, line = run(monkeypatch, capsys, "serve", "inference", "--model", model, "--port", str(port))
    assert code == 2 and f"127.0.0.1:{port}" in line and "free port" in line


def test_task_folder_without_tests_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from etude.tasks.archive import TaskSet
    from etude.tasks.harbor import write_folder

    task = next(iter(TaskSet.open(ROOT / "data" / "tasks.tar.zst")))
    write_folder(task, tmp_path / "task")
    shutil.rmtree(tmp_path / "task" / "tests")
    code, line = run(monkeypatch, capsys, "tasks", "check", str(tmp_path / "task"))
    assert code == 2 and "tests" in line and "expected" in line
