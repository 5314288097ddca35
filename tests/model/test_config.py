from __future__ import annotations

from collections.abc import Callable

import pytest

from etude.model.config import ModelConfig
from etude.model.decoder import Decoder
from etude.records.errors import BadInput, Unsupported

Build = Callable[..., Decoder]


def test_a_config_survives_its_own_file(variant: ModelConfig) -> None:
    assert ModelConfig.from_hf(variant.to_hf()) == variant


def test_transformers_reads_the_same_sizes_and_writes_them_back(variant: ModelConfig) -> None:
    from transformers import DeepseekV3Config

    theirs = DeepseekV3Config(**{k: v for k, v in variant.to_hf().items() if k != "architectures"})
    back = ModelConfig.from_hf(theirs.to_dict())
    assert back.to_hf() | {"bos_token_id": 0, "eos_token_id": 0} == variant.to_hf() | {
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def test_the_old_spelling_of_the_rotary_base_and_kimi_s_model_type_are_read(variant: ModelConfig) -> None:
    raw = variant.to_hf() | {"rope_theta": 50000.0, "rope_scaling": None, "model_type": "kimi_k2"}
    del raw["rope_parameters"]
    assert ModelConfig.from_hf(raw).rope_theta == 50000.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 32}}, "yarn"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "yarn"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"scoring_func": "softmax"}, "scoring_func"),
    ],
)
def test_what_the_decoder_lacks_is_refused_by_name(build: Build, change: dict[str, object], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        ModelConfig.from_hf(build().config.to_hf() | change)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"n_group": 8, "topk_group": 1}, "n_group"),
        ({"topk_group": 2}, "topk_group"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ({"q_lora_rank": 1.5}, "q_lora_rank"),
        ({"eos_token_id": "end"}, "eos_token_id"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
    ],
)
def test_sizes_that_do_not_fit_name_place_and_field(build: Build, change: dict[str, object], field: str) -> None:
    with pytest.raises(BadInput) as caught:
        ModelConfig.from_hf(build().config.to_hf() | change, place="folder/config.json")
    assert str(caught.value).startswith(f"folder/config.json: {field} is")
