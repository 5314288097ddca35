"""Paths of a repository: resolved by hand, symlinks followed only while they stay inside. Standard library only."""

import posix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_LINKS = 40
SKIPPED = frozenset((".git", "__pycache__"))


class Outside(Exception):
    """The path leaves the repository."""


def inside(root: str, path: str) -> tuple[str, str]:
    """(absolute path without symlinks, path relative to `root`). Raises Outside; the last parts need not exist."""
    if "\0" in path or not path:
        raise Outside(path)
    todo = [part for part in reversed(path.split("/")) if part not in ("", ".")]
    at = "" if path.startswith("/") else root
    links = 0
    while todo:
        part = todo.pop()
        if part == "..":
            at = at.rpartition("/")[0]
            continue
        here = at + "/" + part
        try:
            target = posix.readlink(here)
        except (OSError, ValueError):
            at = here
            continue
        links += 1
        if links > MOST_LINKS:
            raise Outside(path)
        if target.startswith("/"):
            at = ""
        todo += [piece for piece in reversed(target.split("/")) if piece not in ("", ".")]
    if at != root and not at.startswith(root + "/"):
        raise Outside(path)
    return at, at[len(root) + 1 :] or "."


def walk(full: str, shown: str) -> "Iterator[tuple[str, str]]":
    """(absolute, shown) paths of the regular files at or below `full`, sorted; symlinks are not followed."""
    try:
        entries = sorted(posix.scandir(full), key=lambda entry: entry.name)
    except NotADirectoryError:
        yield full, shown
        return
    except OSError:
        return
    for entry in entries:
        name = entry.name if shown == "." else shown + "/" + entry.name
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in SKIPPED:
                yield from walk(entry.path, name)
        elif entry.is_file(follow_symlinks=False):
            yield entry.path, name
