"""What a finished (or stopped) run leaves for people: `summary.json` and `readable.json`, which the report page shows."""

from __future__ import annotations

from pathlib import Path

import msgspec


class SummaryLine(msgspec.Struct, frozen=True):
    """One row of the before/after table: shares in [0, 1]; the interval is that of the change, 95%, NaN-free or None."""

    name: str
    before: float
    after: float
    change_low: float | None = None
    change_high: float | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What the page says above the curves."""

    title: str
    run: str
    facts: dict[str, str] = {}
    """Short label -> value."""
    table: tuple[SummaryLine, ...] = ()
    notes: tuple[str, ...] = ()


class ReadableRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout as a person reads it; `parts` are (kind, text) in order."""

    title: str
    outcome: str
    solved: bool
    parts: tuple[tuple[str, str], ...]


def write_json(path: Path, value: object) -> None:
    """Writes any record or list of records as JSON, atomically."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1))
    temporary.replace(path)
