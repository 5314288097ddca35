"""The chain of stages: rows of protected modules stop it, finished stages are skipped, the result is a loadable folder."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
import zstandard

from etude.chat.tokenizer import Tokenizer
from etude.model.checkpoint import load_pretrained
from etude.pretrain.config import PhaseConfig, PretrainConfig
from etude.pretrain.corpus import CorpusRow, Failing, Mutant
from etude.pretrain.starter import Starter, load_split
from etude.records.errors import BadInput

torch.set_num_threads(1)


def row(number: int, module: str) -> CorpusRow:
    source = f"def f{number}(a, b):\n    if a < {number}:\n        return b + {number}\n    return a * b"
    broken = source.replace("b + ", "b - ")
    return CorpusRow(
        f"f{number}",
        source,
        [],
        module,
        "p 1",
        [Mutant("arithmetic", broken, Failing("0, 1", str(1 - number), str(1 + number)))],
    )


@pytest.fixture
def config(tmp_path: Path) -> PretrainConfig:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for split, base in (("pretrain", 0), ("sft", 50)):
        rows = [msgspec.json.encode(row(base + i, f"{split}_module.m{i}")) for i in range(24)]
        (corpus / f"{split}.jsonl.zst").write_bytes(zstandard.compress(b"\n".join(rows) + b"\n"))
    table = {f"{split}_module.m{i}": split for split in ("pretrain", "sft") for i in range(24)}
    (corpus / "splits.json").write_text(json.dumps(table | {"secret.module": "held_out"}))
    phase = PhaseConfig(budget_s=None, budget_tokens=1500, batch_tokens=400, pool_batches=4, evaluate_rows=2)
    return PretrainConfig(
        folder=str(tmp_path / "starter"),
        corpus=str(corpus),
        demonstrations=str(tmp_path / "demonstrations.zst"),
        vocab_size=400,
        aside=4,
        sft_aside=4,
        pretrain=phase,
        sft=phase,
    )


def test_pretraining_leaves_a_folder_that_loads_and_is_not_made_twice(config: PretrainConfig) -> None:
    said: list[str] = []
    out = Starter(config, said.append).pretrain()
    decoder, tokenizer = load_pretrained(out), Tokenizer.load(out)
    assert decoder.config.vocab_size == tokenizer.vocab_size <= 400
    assert decoder.config.eos_token_id == tokenizer.end_id
    before = (out / "model.safetensors").read_bytes()
    assert Starter(config, said.append).pretrain() == out
    assert "skipped" in said[-1] and (out / "model.safetensors").read_bytes() == before
    assert Starter(config, said.append).snapshot().is_dir()


def test_fine_tuning_without_demonstrations_says_what_is_missing(config: PretrainConfig) -> None:
    starter = Starter(config, lambda text: None)
    with pytest.raises(BadInput, match="demonstrations"):
        starter.sft()


@pytest.mark.parametrize("split", ["held_out", "dev", "rl"])
def test_a_row_of_a_protected_module_stops_the_chain(config: PretrainConfig, split: str) -> None:
    table = Path(config.corpus) / "splits.json"
    names = json.loads(table.read_text())
    table.write_text(json.dumps(names | {"pretrain_module.m3": split}))
    with pytest.raises(BadInput, match=r"pretrain_module\.m3"):
        Starter(config, lambda text: None).tokenizer()


def test_rows_held_aside_are_never_trained_on_and_always_the_same(config: PretrainConfig) -> None:
    first, second = load_split(config, "sft", 5), load_split(config, "sft", 5)
    names = [r.function for r in first.aside]
    assert names == [r.function for r in second.aside] and len(names) == 5
    assert not set(names) & {r.function for r in first.train} and len(first.train) == 19


def test_without_the_split_table_nothing_is_read(config: PretrainConfig) -> None:
    (Path(config.corpus) / "splits.json").unlink()
    with pytest.raises(BadInput, match="split table"):
        load_split(config, "pretrain", 0)
