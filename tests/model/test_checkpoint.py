from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from etude.model import checkpoint
from etude.model.checkpoint import (
    hf_names,
    hf_state,
    load_hf_state_,
    load_pretrained,
    read_config,
    save_pretrained,
)
from etude.model.config import ModelConfig
from etude.model.decoder import Decoder
from etude.records.errors import CheckpointError

Build = Callable[..., Decoder]


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def same(a: Decoder, b: Decoder) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_transformers_loads_what_we_save_with_equal_logits_and_greedy_tokens(
    variant: ModelConfig, decoder_of: Build, tmp_path: Path, oracle_logits: Any
) -> None:
    from transformers import AutoModelForCausalLM

    decoder = decoder_of(variant)
    save_pretrained(decoder, tmp_path / "saved")
    decoder = load_pretrained(tmp_path / "saved")
    theirs, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert type(theirs).__name__ == "DeepseekV3ForCausalLM"
    theirs.set_experts_implementation("eager")
    ids = torch.randint(0, variant.vocab_size, (1, 12), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        ours = decoder.logits(decoder(ids).hidden)
    torch.testing.assert_close(ours, oracle_logits(theirs, ids), rtol=1e-5, atol=1e-5 * float(ours.abs().max()))
    sequence = ids
    for _ in range(10):
        with torch.no_grad():
            best = decoder.logits(decoder(sequence).hidden[:, -1]).argmax(-1)
        sequence = torch.cat((sequence, best[:, None]), 1)
    generated = theirs.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert generated.tolist() == sequence.tolist()


@pytest.mark.parametrize("shard", ["50GB", "20KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_we_load_what_transformers_saves_one_file_or_shards(
    variant: ModelConfig, decoder_of: Build, oracle_of: Any, tmp_path: Path, shard: str, dtype: torch.dtype
) -> None:
    decoder = decoder_of(variant)
    oracle = oracle_of(decoder).to(dtype)
    oracle.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / checkpoint.INDEX_FILE).exists() == (shard == "20KB")
    loaded = load_pretrained(tmp_path)
    state = loaded.state_dict()
    for name, tensor in decoder.state_dict().items():
        assert torch.equal(state[name], tensor.to(dtype).float()), name
    ours, back = variant.to_hf(), loaded.config.to_hf()
    for token in ("bos_token_id", "eos_token_id"):
        ours.pop(token), back.pop(token)
    assert ours == back


def test_save_load_save_is_byte_equal(variant: ModelConfig, decoder_of: Build, tmp_path: Path) -> None:
    first = decoder_of(variant)
    save_pretrained(first, tmp_path / "a", {"tokenizer.json": b"{}"})
    second = load_pretrained(tmp_path / "a")
    save_pretrained(second, tmp_path / "b", {"tokenizer.json": b"{}"})
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    assert set(digest(tmp_path / "a")) == {"config.json", "model.safetensors", "tokenizer.json"}
    assert same(second, load_pretrained(tmp_path / "b"))
    assert read_config(tmp_path / "a") == variant
    bias = {name: tensor.dtype for name, tensor in load_file(tmp_path / "a/model.safetensors").items()}
    assert all((dtype == torch.float32) == name.endswith("e_score_correction_bias") for name, dtype in bias.items())


def test_hf_state_is_a_snapshot_that_round_trips_and_matches_hf_names(variant: ModelConfig, decoder_of: Build) -> None:
    source, target = decoder_of(variant, seed=1), decoder_of(variant, seed=2)
    for dtype in (torch.bfloat16, torch.float32):
        state = hf_state(source, dtype)
        assert [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()] == hf_names(variant, dtype)
        assert all(tensor.is_contiguous() for tensor in state.values())
        load_hf_state_(target, state)
        again = hf_state(target, dtype)
        assert all(torch.equal(again[name], state[name]) for name in state)
    assert same(source, target)
    kept = {name: tensor.clone() for name, tensor in state.items()}
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(state[name], kept[name]) for name in state)


def test_expert_names_on_disk_are_the_family_s_own(build: Build) -> None:
    names = {name for name, _, _ in hf_names(build().config)}
    assert {
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.2.mlp.experts.7.down_proj.weight",
        "model.layers.1.mlp.shared_experts.up_proj.weight",
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
        "model.norm.weight",
        "lm_head.weight",
    } <= names


def test_a_bad_state_is_refused_by_name_before_anything_changes(build: Build) -> None:
    decoder = build()
    before = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    for change, message in (
        ({name: None}, f"{name} is 'missing'"),
        ({"model.extra": torch.zeros(1)}, "model.extra is 'present'"),
        ({name: torch.zeros(3, 32)}, r"up_proj.weight.shape is \(3, 32\)"),
        ({name: torch.zeros(24, 32, dtype=torch.float16)}, "up_proj.weight.dtype is torch.float16"),
    ):
        state = {key: torch.zeros_like(tensor) for key, tensor in hf_state(decoder).items()} | change
        with pytest.raises(CheckpointError, match=message):
            load_hf_state_(decoder, {key: tensor for key, tensor in state.items() if tensor is not None}, "version 3")
    assert all(torch.equal(before[key], tensor) for key, tensor in decoder.state_dict().items())


def test_missing_and_corrupt_folders_are_named_by_file_and_field(build: Build, tmp_path: Path) -> None:
    decoder = build()
    weights, config = tmp_path / "c" / "model.safetensors", tmp_path / "c" / "config.json"

    def expect(*parts: str) -> None:
        with pytest.raises(CheckpointError) as caught:
            load_pretrained(tmp_path / "c")
        for part in parts:
            assert part in str(caught.value)
        assert "\n" not in str(caught.value)

    def fresh() -> dict[str, torch.Tensor]:
        save_pretrained(decoder, tmp_path / "c")
        return load_file(weights)

    expect(str(tmp_path / "c"), "folder", "missing")
    fresh()
    weights.unlink()
    expect("model.safetensors", "missing")
    fresh()
    config.unlink()
    expect("config.json", "No such file")
    fresh()
    config.write_text('{"model_type": ')
    expect("config.json", "JSON")
    fresh()
    config.write_text(json.dumps({"model_type": "llama"}))
    expect("config.json", "model_type", "llama")
    fresh()
    config.write_text(json.dumps(decoder.config.to_hf() | {"n_group": 3}))
    expect("config.json", "n_group", "3", "divisor")
    fresh()
    config.write_text(json.dumps(decoder.config.to_hf() | {"hidden_size": "wide"}))
    expect("config.json", "hidden_size", "wide")
    fresh()
    weights.write_bytes(weights.read_bytes()[:-100])
    expect("model.safetensors", "complete safetensors file")
    fresh()
    weights.write_bytes(b"\0" * 50)
    expect("model.safetensors", "complete safetensors file")
    for name, changed, message in (
        ("model.norm.weight", torch.zeros(31), "model.norm.weight.shape"),
        ("model.norm.weight", torch.full((32,), float("nan")), "not finite"),
        ("model.norm.weight", torch.zeros(32, dtype=torch.float16), "F16"),
        ("model.layers.9.x", torch.zeros(2), "model.layers.9.x"),
    ):
        save_file(fresh() | {name: changed}, weights)
        expect("model.safetensors", message)
    left = fresh()
    del left["model.layers.2.mlp.experts.0.down_proj.weight"]
    save_file(left, weights)
    expect("model.layers.2.mlp.experts.0.down_proj.weight", "missing")
    index = tmp_path / "c" / "model.safetensors.index.json"
    weights.unlink()
    for placed, message in (
        ({}, "weight_map"),
        ({"model.norm.weight": "../model.safetensors"}, "plain name"),
        ({"model.norm.weight": "gone.safetensors"}, "gone.safetensors"),
    ):
        index.write_text(json.dumps({"weight_map": placed}))
        expect(message)


def test_layers_of_multi_token_prediction_are_left_aside_when_announced(build: Build, tmp_path: Path) -> None:
    decoder = build()
    save_pretrained(decoder, tmp_path / "c")
    weights = tmp_path / "c" / "model.safetensors"
    save_file(load_file(weights) | {"model.layers.3.eh_proj.weight": torch.zeros(2)}, weights)
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.eh_proj\.weight"):
        load_pretrained(tmp_path / "c")
    described = decoder.config.to_hf() | {"num_nextn_predict_layers": 1}
    (tmp_path / "c" / "config.json").write_text(json.dumps(described))
    assert load_pretrained(tmp_path / "c").config == decoder.config


def test_a_failed_save_keeps_the_old_folder_and_leaves_nothing_behind(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_pretrained(build(seed=1), tmp_path / "c")
    before = digest(tmp_path / "c")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(CheckpointError, match="No space left"):
            save_pretrained(build(seed=2), tmp_path / "c")
    assert digest(tmp_path / "c") == before and [path.name for path in tmp_path.iterdir()] == ["c"]
    save_pretrained(build(seed=2), tmp_path / "c", {"tokenizer.json": b"1"})
    assert digest(tmp_path / "c") != before and [path.name for path in tmp_path.iterdir()] == ["c"]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "config.json").write_text("{}")
    (tmp_path / "notes" / "mine.py").write_text("keep")
    with pytest.raises(CheckpointError, match="something else"):
        save_pretrained(build(), tmp_path / "notes")
    with pytest.raises(CheckpointError, match="tokenizer_files"):
        save_pretrained(build(), tmp_path / "d", {"../x": b""})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "notes"]


def test_publishing_and_applying_a_two_million_parameter_state_is_quick(build: Build) -> None:
    decoder = build(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=96,
        num_hidden_layers=5,
        kv_lora_rank=96,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        tie_word_embeddings=True,
    )
    seconds = []
    for _ in range(5):
        start = time.process_time()
        load_hf_state_(decoder, hf_state(decoder))
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.05
