"""Task folders and archives: what is written is read back, and what is missing is named."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import msgspec
import pytest
import zstandard

from etude.chat.repair_texts import failure_line
from etude.records.errors import TaskError
from etude.records.task import Split, Task
from etude.tasks.archive import TaskSet, write_archive
from etude.tasks.corpus import Row
from etude.tasks.harbor import cases_of, from_files, read_folder, to_files, with_id, write_folder
from etude.tasks.make import repair_task


def test_a_task_and_its_folder_are_the_same(task: Task, tmp_path: Path) -> None:
    write_folder(task, tmp_path / task.name)
    assert read_folder(tmp_path / task.name) == task
    assert from_files(to_files(task), task.name) == task


def test_the_id_is_the_content_hash_of_the_folder(task: Task, tmp_path: Path) -> None:
    folder = tmp_path / "t"
    write_folder(task, folder)
    (folder / "environment/repo/check.py").write_text("print('ok')\n")
    assert read_folder(folder).id != task.id
    with pytest.raises(TaskError, match="content hash"):
        to_files(msgspec.structs.replace(task, instruction="another"))


@pytest.mark.parametrize("name", ["test.sh", "cases.json", "driver.py"])
def test_a_folder_without_tests_is_a_task_error_that_names_file_and_field(
    task: Task, tmp_path: Path, name: str
) -> None:
    write_folder(task, tmp_path / "t")
    (tmp_path / "t/tests" / name).unlink()
    with pytest.raises(TaskError) as caught:
        read_folder(tmp_path / "t")
    assert str(tmp_path / "t/tests" / name) in str(caught.value)
    assert caught.value.field == "file" and caught.value.value == "missing"


@pytest.mark.parametrize(
    ("path", "old", "new", "field"),
    [
        ("task.toml", 'schema_version = "1.4"', 'schema_version = "7"', "schema_version"),
        ("task.toml", 'split = "rl"', 'split = "rll"', "metadata"),
        ("task.toml", 'verifier = "cases"', 'verifier = "hope"', "metadata.verifier"),
        ("task.toml", "max_turns = 10", 'max_turns = "ten"', "metadata.limits"),
        ("task.toml", "[task]", "[task", "TOML"),
    ],
)
def test_a_bad_field_is_named(task: Task, path: str, old: str, new: str, field: str) -> None:
    files = to_files(task)
    assert old.encode() in files[path]
    files[path] = files[path].replace(old.encode(), new.encode())
    with pytest.raises(TaskError) as caught:
        from_files(files, "folder")
    assert caught.value.field == field and caught.value.place == f"folder/{path}"


def test_an_archive_gives_back_its_tasks_and_has_the_same_bytes_each_time(row: Row, tmp_path: Path) -> None:
    tasks = [repair_task(row, index) for index in range(3)]
    write_archive(tasks, tmp_path / "a.tar.zst")
    write_archive(reversed(tasks), tmp_path / "b.tar.zst")
    assert (tmp_path / "a.tar.zst").read_bytes() == (tmp_path / "b.tar.zst").read_bytes()
    opened = TaskSet.open(tmp_path / "a.tar.zst")
    assert {t.id: t for t in opened} == {t.id: t for t in tasks}
    assert len(opened.split(Split.RL)) == 3 and opened.split(Split.DEV) == ()
    assert opened.get(tasks[1].name) == opened.get(tasks[1].id[:12]) == tasks[1]
    with pytest.raises(TaskError, match="one of its 3 tasks"):
        opened.get("no such task")


def test_tar_itself_reads_the_archive(row: Row, tmp_path: Path) -> None:
    task = repair_task(row, 0)
    write_archive([task], tmp_path / "a.tar.zst")
    plain = tmp_path / "a.tar"
    plain.write_bytes(
        zstandard.ZstdDecompressor().decompress((tmp_path / "a.tar.zst").read_bytes(), max_output_size=1 << 26)
    )
    with tarfile.open(plain) as tar:
        tar.extractall(tmp_path / "out", filter="data")
    assert TaskSet.open(tmp_path / "out" / task.name).get(task.id) == task


def test_a_damaged_archive_is_a_task_error(row: Row, tmp_path: Path) -> None:
    path = tmp_path / "a.tar.zst"
    write_archive([repair_task(row, 0)], path)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"not an archive", b""):
        path.write_bytes(damaged)
        with pytest.raises(TaskError):
            list(TaskSet.open(path))


def _run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-B", *command], cwd=folder, capture_output=True, text=True, timeout=20)


def test_the_folder_works_as_a_program(task: Task, tmp_path: Path) -> None:
    folder = tmp_path / "t"
    write_folder(task, folder)
    repo, logs = folder / "environment/repo", tmp_path / "logs"
    _, function, visible, _ = cases_of(task)
    broken = _run(repo, "check.py")
    args, want = visible[0]
    got = task.instruction.split(" returned ")[1].split(", expected ")[0]
    assert broken.returncode == 1 and broken.stdout == failure_line(function, args, got, want) + "\n"
    grade = ["bash", str(folder / "tests/test.sh")]
    environment = {"REPO": str(repo), "LOGS": str(logs), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    subprocess.run(grade, env=environment, check=True, timeout=30, capture_output=True)
    assert (logs / "reward.txt").read_text() == "0.0"
    path = task.allowed_changes[0]
    (repo / path).write_bytes(task.solution[path])
    assert _run(repo, "check.py").stdout == "ok\n"
    subprocess.run(grade, env=environment, check=True, timeout=30, capture_output=True)
    assert (logs / "reward.txt").read_text() == "1.0"


def test_hidden_inputs_are_others_than_the_visible_ones_and_names_are_short(row: Row) -> None:
    for index in range(len(row.mutants)):
        task = repair_task(row, index)
        _, _, visible, hidden = cases_of(task)
        assert not {a for a, _ in visible} & {a for a, _ in hidden}
        assert len(visible) >= 3 and len(hidden) >= 6
        assert task.instruction.startswith("fix clamp in numbers_m.py: clamp(") and "expected" in task.instruction


def test_an_id_survives_with_id_again(task: Task) -> None:
    assert with_id(task) == task
