"""One small interface over object stores: whole objects, listed by prefix, created at most once.

Knows nothing of what it stores and never imports torch. `put_if_absent` is the only commit primitive of this package
(manifests, ledger objects, epochs), so a store that ignores it is refused when it is opened (DESIGN decision 8).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, from_url

from etude.records.errors import BadInput, EtudeError, InfrastructureError, MissingCapability


class AlreadyExists(EtudeError):
    """`put_if_absent` met an object of that key: someone else created it first."""


class ObjectMissing(EtudeError):
    """No object has that key."""


class StoreError(InfrastructureError):
    """The store did not answer or refused: full disk, missing rights, lost network. The outcome of a put is unknown."""


class ObjectStore:
    """Whole-object reads and writes under slash-separated keys. Methods may be called from any thread.

    All raise StoreError when the store fails.
    """

    def __init__(self, backend: Any, url: str) -> None:
        self._backend = backend
        self.url = url

    def put(self, key: str, data: bytes) -> None:
        """Writes or replaces an object; a reader sees the old bytes or the new ones."""
        with self._named(key):
            obstore.put(self._backend, key, data)

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Creates an object. Raises AlreadyExists, and changes nothing, when the key is taken."""
        with self._named(key):
            obstore.put(self._backend, key, data, mode="create")

    def get(self, key: str) -> bytes:
        """The object's bytes. Raises ObjectMissing."""
        with self._named(key):
            return bytes(obstore.get(self._backend, key).bytes())

    def exists(self, key: str) -> bool:
        """Whether the key is taken."""
        try:
            with self._named(key):
                obstore.head(self._backend, key)
        except ObjectMissing:
            return False
        return True

    def list(self, prefix: str, after: str | None = None) -> list[str]:
        """Sorted keys inside the folder `prefix`, only those greater than `after` when it is given."""
        with self._named(prefix):
            found = [item["path"] for batch in obstore.list(self._backend, prefix, offset=after) for item in batch]
        return sorted(found)

    def delete(self, key: str) -> None:
        """Removes an object; a missing one is no error."""
        try:
            with self._named(key):
                obstore.delete(self._backend, key)
        except ObjectMissing:
            pass

    async def get_async(self, key: str) -> bytes:
        """`get` in a worker thread."""
        return await asyncio.to_thread(self.get, key)

    async def put_if_absent_async(self, key: str, data: bytes) -> None:
        """`put_if_absent` in a worker thread. After a cancelled wait the outcome is unknown."""
        await asyncio.to_thread(self.put_if_absent, key, data)

    def probe(self) -> None:
        """Proves by writing that the store creates a key once only. Raises MissingCapability or StoreError."""
        key = f"probe/{uuid.uuid4().hex}"
        try:
            self.put_if_absent(key, b"first")
            try:
                self.put_if_absent(key, b"second")
            except AlreadyExists:
                second = "refused"
            else:
                second = "accepted"
            if second == "accepted" or self.get(key) != b"first":
                raise MissingCapability(
                    self.url, "put-if-absent", f"second create of one key {second}", "a store that creates a key once"
                )
        finally:
            self.delete(key)

    @contextmanager
    def _named(self, key: str) -> Iterator[None]:
        try:
            yield
        except AlreadyExistsError as error:
            raise AlreadyExists(f"{self.url}: {key} already exists") from error
        except FileNotFoundError as error:
            raise ObjectMissing(f"{self.url}: no object {key}") from error
        except (BaseError, OSError) as error:
            raise StoreError(f"{self.url}: {key}: {str(error).splitlines()[0]}") from error


def open_store(url: str | Path, *, probe: bool = True) -> ObjectStore:
    """Opens a folder (made when missing) or any URL that obstore knows (`file:///...`, `memory:///`, `s3://...`).

    Raises BadInput when it cannot be opened and MissingCapability when it does not honour put-if-absent.
    """
    text = str(url)
    try:
        if "://" in text and not text.startswith("file://"):
            store = ObjectStore(from_url(text), text)
        else:
            folder = Path(text.removeprefix("file://")).absolute()
            store = ObjectStore(LocalStore(str(folder), mkdir=True), f"file://{folder}")
    except (BaseError, OSError, ValueError) as error:
        raise BadInput("object store", "url", text, f"a folder or store that opens ({error})") from error
    if probe:
        try:
            store.probe()
        except StoreError as error:
            raise BadInput("object store", "url", text, f"a writable store ({error})") from error
    return store
