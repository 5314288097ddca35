"""The store creates a key once, names its faults and refuses a backend that does not honour put-if-absent."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from etude.records.errors import BadInput, MissingCapability
from etude.weightsync.store import AlreadyExists, ObjectMissing, ObjectStore, StoreError, open_store


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_objects_come_back_and_lists_are_sorted(tmp_path: Path, form: str) -> None:
    store = open_store(form.format(tmp_path / "bucket"))
    for key in ("a/2", "a/1", "a/10", "b/1"):
        store.put(key, key.encode())
    store.put("a/1", b"new")
    assert store.get("a/1") == b"new"
    assert store.list("a") == ["a/1", "a/10", "a/2"]
    assert store.list("a", after="a/10") == ["a/2"]
    assert store.list("nothing") == []
    store.delete("a/1")
    store.delete("a/1")
    assert not store.exists("a/1") and store.exists("a/2")
    with pytest.raises(ObjectMissing, match="a/1"):
        store.get("a/1")


def test_of_many_writers_of_one_key_one_wins(tmp_path: Path) -> None:
    store = open_store(tmp_path)

    def create(i: int) -> bool:
        try:
            store.put_if_absent("key", str(i).encode())
        except AlreadyExists:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(32)))
    assert won.count(True) == 1
    assert store.get("key") == str(won.index(True)).encode()


def test_a_store_that_ignores_put_if_absent_is_refused_at_start(tmp_path: Path) -> None:
    """s3rver accepts `If-None-Match: *` and overwrites."""

    class Ignores(ObjectStore):
        def put_if_absent(self, key: str, data: bytes) -> None:
            self.put(key, data)

    good = open_store(tmp_path)
    with pytest.raises(MissingCapability, match="put-if-absent"):
        Ignores(good._backend, good.url).probe()
    assert good.list("probe") == []


def test_a_path_that_cannot_hold_a_store_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInput, match="object store"):
        open_store(tmp_path / "file" / "bucket")
    with pytest.raises(BadInput, match="object store"):
        open_store("nonsense://bucket")


def test_a_failing_backend_is_a_named_infrastructure_error(tmp_path: Path) -> None:
    store = open_store(tmp_path / "bucket")
    (tmp_path / "bucket" / "a").write_text("a file where a folder is needed")
    with pytest.raises(StoreError, match="a/b"):
        store.put("a/b", b"")


def test_importing_the_store_brings_no_torch() -> None:
    code = "import sys, etude.weightsync.store; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout == "False\n"
