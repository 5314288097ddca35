from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, Field

from etude.records.config import load, settings
from etude.records.errors import ConfigError


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    learning_rate: float = Field(1e-3, gt=0)
    name: str = "adam"


class Root(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    optimizer: Inner = Inner()
    steps: int = 3


def test_later_files_and_overrides_win_and_origins_are_kept(tmp_path: Path) -> None:
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text("steps = 4\n[optimizer]\nlearning_rate = 0.5\n")
    second.write_text("[optimizer]\nlearning_rate = 0.25\n")
    config, origins = load(Root, [first, second], ["optimizer.name=sgd"])
    assert (config.steps, config.optimizer.learning_rate, config.optimizer.name) == (4, 0.25, "sgd")
    shown = {row.key: row.origin for row in settings(config, origins)}
    assert shown == {"optimizer.learning_rate": str(second), "optimizer.name": "override", "steps": str(first)}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.learning_rat=1", ["optimizer.learning_rat", "nearest is 'optimizer.learning_rate'"]),
        ("stepz=1", ["stepz", "'steps'"]),
        ("optimizer.learning_rate=-1", ["optimizer.learning_rate", "-1", "greater than 0"]),
        ("steps=many", ["steps", "many", "integer"]),
        ("optimizer=3", ["optimizer", "3", "table"]),
        ("steps", ["'steps'", "key=value"]),
    ],
)
def test_bad_override_names_key_value_and_expectation(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Root, overrides=[override])
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("content", [None, "steps = ", "step = 1\n"])
def test_bad_file_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "x.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"x\.toml"):
        load(Root, [path])
