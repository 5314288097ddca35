"""The induction circuit: untrained copying, the family's checkpoint layout, refusal of shapes that cannot hold it."""

import dataclasses

import pytest
import torch

from etude.model.checkpoint import hf_state, load_hf_state_
from etude.model.decoder import Decoder
from etude.pretrain.circuit import Strengths, induction_weights
from etude.pretrain.starter import fresh_decoder, starter_config
from etude.records.errors import BadInput

torch.set_num_threads(1)


def copied_share(decoder: Decoder, *, symbols: int, seed: int) -> float:
    """Share of a repeated random segment's tokens (after its first) that greedy prediction gets right."""
    random = torch.Generator().manual_seed(seed)
    segment, noise = 24, 30
    first, again = (torch.randint(32, 32 + symbols, (16, noise), generator=random) for _ in range(2))
    copied = torch.randint(32, 32 + symbols, (16, segment), generator=random)
    ids = torch.cat([first, copied, again, copied], 1)
    start = 2 * noise + segment
    with torch.no_grad():
        predicted = decoder.logits(decoder(ids).hidden[:, start:-1]).argmax(-1)
    return float((predicted == ids[:, start + 1 :]).float().mean())


@pytest.mark.parametrize("seed", [0, 1])
def test_untrained_weights_copy_repeated_segments(seed: int) -> None:
    decoder = fresh_decoder(starter_config(2048), seed)
    assert copied_share(decoder, symbols=2000, seed=seed) >= 0.6


def test_matching_two_tokens_resolves_what_one_token_leaves_open() -> None:
    config = starter_config(2048)
    decoder = Decoder(config)
    shares = []
    for match_before in (0.0, Strengths().match_before):
        weights = induction_weights(
            hf_state(decoder, dtype=torch.float32), config, strengths=Strengths(match_before=match_before)
        )
        load_hf_state_(decoder, weights)
        shares.append(copied_share(decoder, symbols=40, seed=3))
    assert shares[1] > shares[0] + 0.1


def test_a_plain_start_does_not_copy() -> None:
    torch.manual_seed(0)
    assert copied_share(Decoder(starter_config(2048)), symbols=2000, seed=0) < 0.05


def test_later_layers_begin_as_the_identity() -> None:
    weights = hf_state(fresh_decoder(starter_config(2048), 0), dtype=torch.float32)
    outputs = [name for name in weights if name.endswith(("o_proj.weight", "down_proj.weight"))]
    silent = {name for name in outputs if not weights[name].any()}
    assert set(outputs) - silent == {f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (0, 1)}


@pytest.mark.parametrize(("field", "value"), [("hidden_size", 64), ("kv_lora_rank", 64), ("q_lora_rank", 32)])
def test_a_shape_without_room_is_refused_by_name(field: str, value: int) -> None:
    config = dataclasses.replace(starter_config(2048), **{field: value})
    with pytest.raises(BadInput, match=field):
        induction_weights(hf_state(Decoder(config), dtype=torch.float32), config)
