"""Loads one typed config tree from defaults, TOML files and `key=value` overrides, and remembers where each value came from.

Each room defines its own section (a pydantic model); the command line composes the tree. This module only loads, merges
and reports: an unknown key is an error naming the nearest known one, a bad value an error naming field and value.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from etude.records.errors import ConfigError

Tree = TypeVar("Tree", bound=BaseModel)


class Setting(NamedTuple):
    """One leaf of the effective tree: dotted key, value, and its origin (`default`, a file, or `override`)."""

    key: str
    value: Any
    origin: str


def _sections(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    return {
        name: field.annotation
        for name, field in model.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }


def known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted keys of every leaf of the tree."""
    sections = _sections(model)
    for name in model.model_fields:
        if name in sections:
            yield from known_keys(sections[name], f"{prefix}{name}.")
        else:
            yield prefix + name


def _check_keys(model: type[BaseModel], values: dict[str, Any], place: str, prefix: str = "") -> None:
    sections = _sections(model)
    for key, value in values.items():
        dotted = prefix + key
        if key not in model.model_fields:
            leaves = list(known_keys(model, prefix)) + [prefix + name for name in model.model_fields]
            near = difflib.get_close_matches(dotted, leaves, n=1, cutoff=0.0)
            raise ConfigError(
                place, "key", dotted, f"a known key; the nearest is {near[0]!r}" if near else "a known key"
            )
        if key in sections:
            if not isinstance(value, dict):
                raise ConfigError(place, dotted, value, "a table of keys")
            _check_keys(sections[key], value, place, dotted + ".")


def _merge(base: dict[str, Any], top: dict[str, Any], origins: dict[str, str], place: str, prefix: str = "") -> None:
    for key, value in top.items():
        if isinstance(value, dict) and isinstance(base.get(key, {}), dict):
            _merge(base.setdefault(key, {}), value, origins, place, f"{prefix}{key}.")
        else:
            base[key] = value
            origins[prefix + key] = place


def _parse_override(text: str) -> dict[str, Any]:
    key, separator, raw = text.partition("=")
    key = key.strip()
    if not separator or not key:
        raise ConfigError("override", "argument", text, "key=value, for example trainer.learning_rate=1e-4")
    try:
        value = tomllib.loads(f"v = {raw.strip()}")["v"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    tree: dict[str, Any] = {}
    node = tree
    *parents, leaf = key.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
    node[leaf] = value
    return tree


def load(
    model: type[Tree], files: Sequence[str | Path] = (), overrides: Sequence[str] = ()
) -> tuple[Tree, dict[str, str]]:
    """The effective config and the origin of each key that is not a default.

    Later files win over earlier ones, overrides over files. Raises ConfigError naming file, key, value and what was expected.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for path in files:
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(str(path), "file", "missing", "a TOML config file") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(str(path), "content", str(error), "valid TOML") from error
        _check_keys(model, table, str(path))
        _merge(values, table, origins, str(path))
    for text in overrides:
        table = _parse_override(text)
        _check_keys(model, table, "override")
        _merge(values, table, origins, "override")
    try:
        return model.model_validate(values), origins
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(origins.get(key, "config"), key, first.get("input"), first["msg"]) from error


def settings(config: BaseModel, origins: dict[str, str], prefix: str = "") -> Iterator[Setting]:
    """Every leaf of the effective tree with its origin, in the tree's order."""
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from settings(value, origins, f"{prefix}{name}.")
        else:
            yield Setting(prefix + name, value, origins.get(prefix + name, "default"))
