"""An induction circuit as initial weights: the untrained decoder already continues a sequence it has seen before.

Copying is what a repair agent does first (it names a span of the file) and what gradient descent finds last in a model this
small. So the first two layers start as the textbook circuit (Olsson et al. 2022, "In-context learning and induction heads"),
written into ordinary tensors of the `deepseek_v3` layout; the trained result is a plain checkpoint. The residual stream is
split by dimension (`Layout`): a constant, the token, a short code of the previous token and one of the token before it.

- Layer 0, heads 0 and 1: attend one and two tokens back. Only the constant reaches the rotary key, and the rotary query is that
  constant turned by one (two) steps, so the score peaks at that distance whatever the content. They write the codes.
- Layer 1, heads 0-3: the query is the current token's code, the key the code that layer 0 wrote, so a head attends to what followed
  the last occurrences of this token; the code of the token before breaks ties. They add the found token's vector.
- Every other attention and feed-forward output is zero: a layer begins as the identity.

Works on family-named float32 tensors and knows nothing of the decoder's own parameter names. Low learning rates keep the
circuit alive (Muon <= 0.006); report: docs/starter.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.model.config import ModelConfig
from etude.records.errors import BadInput


@dataclass(frozen=True)
class Layout:
    """Which residual dimensions hold what. Codes are `previous` and `before` numbers long; `token` is the token's own vector."""

    token: int = 62
    previous: int = 22
    before: int = 10
    start: int = 2
    """Dimension 0 is the constant, dimension 1 stays free."""

    @property
    def token_dims(self) -> slice:
        return slice(self.start, self.start + self.token)

    @property
    def previous_dims(self) -> slice:
        return slice(self.start + self.token, self.start + self.token + self.previous)

    @property
    def before_dims(self) -> slice:
        return slice(self.previous_dims.stop, self.previous_dims.stop + self.before)


@dataclass(frozen=True)
class Strengths:
    """Amplitudes, in units that make scores a few nats: see `induction_weights`."""

    embedding: float = 0.08
    constant: float = 3.0
    position: float = 8.0
    match: float = 3.5
    match_before: float = 3.5
    copy: float = 3.0
    second_copy: float = 0.3


def _rms(squares: float, width: int) -> float:
    return math.sqrt(squares / width)


def _rotary_frequencies(config: ModelConfig) -> Tensor:
    half = torch.arange(0, config.qk_rope_head_dim, 2, dtype=torch.float32)
    return config.rope_theta ** (-half / config.qk_rope_head_dim)


def _check(config: ModelConfig, layout: Layout) -> None:
    needs = {
        "hidden_size": (config.hidden_size, layout.before_dims.stop),
        "kv_lora_rank": (config.kv_lora_rank, layout.token + layout.previous + layout.before),
        "qk_nope_head_dim": (config.qk_nope_head_dim, layout.previous + layout.before),
        "v_head_dim": (config.v_head_dim, max(layout.previous, (layout.token + 1) // 2)),
        "num_attention_heads": (config.num_attention_heads, 2),
        "num_hidden_layers": (config.num_hidden_layers, 2),
    }
    for field, (value, least) in needs.items():
        if value < least:
            raise BadInput("induction circuit", field, value, f"at least {least}")
    if config.q_lora_rank is not None:
        raise BadInput("induction circuit", "q_lora_rank", config.q_lora_rank, "null (a full query projection)")


class _Attention:
    """Views of one layer's tensors, by head: query [H, nope + rope, D], expansion [H, nope + v, C], output [D, H, v]."""

    def __init__(self, state: dict[str, Tensor], config: ModelConfig, layer: int) -> None:
        prefix, heads = f"model.layers.{layer}.self_attn.", config.num_attention_heads
        self.nope = config.qk_nope_head_dim
        self.query_HQD = state[prefix + "q_proj.weight"].view(heads, -1, config.hidden_size)
        self.latent_CD = state[prefix + "kv_a_proj_with_mqa.weight"][: config.kv_lora_rank]
        self.rotary_key_RD = state[prefix + "kv_a_proj_with_mqa.weight"][config.kv_lora_rank :]
        self.expand_HXC = state[prefix + "kv_b_proj.weight"].view(heads, -1, config.kv_lora_rank)
        self.output_DHV = state[prefix + "o_proj.weight"].view(config.hidden_size, heads, -1)


@torch.no_grad()
def induction_weights(
    state: dict[str, Tensor],
    config: ModelConfig,
    *,
    seed: int = 0,
    layout: Layout | None = None,
    strengths: Strengths | None = None,
) -> dict[str, Tensor]:
    """Initial weights with the circuit. `state` gives the family's names and shapes; values are float32 and new.

    Raises BadInput when the shape is too small to hold the circuit or uses a low-rank query.
    """
    layout, strengths = layout or Layout(), strengths or Strengths()
    _check(config, layout)
    random = torch.Generator().manual_seed(seed)
    fresh = {name: _plain_start(name, tensor, random) for name, tensor in state.items()}
    width, unit = config.hidden_size, strengths.embedding

    embedding_VD = fresh["model.embed_tokens.weight"]
    embedding_VD.zero_()
    embedding_VD[:, 0] = strengths.constant * unit
    embedding_VD[:, layout.token_dims] = torch.randn(config.vocab_size, layout.token, generator=random) * unit
    code_PT = torch.linalg.qr(torch.randn(layout.token, layout.previous, generator=random)).Q.T.contiguous()

    squares = strengths.constant**2 + layout.token
    scale = _rms(squares, width)
    _write_codes(_Attention(fresh, config, 0), config, layout, strengths, code_PT, strengths.constant / scale)

    squares += layout.previous + layout.before
    _write_induction(_Attention(fresh, config, 1), layout, strengths, code_PT)
    if "lm_head.weight" in fresh:
        fresh["lm_head.weight"].copy_(embedding_VD)
    return fresh


def _plain_start(name: str, tensor: Tensor, random: torch.Generator) -> Tensor:
    """Norms 1, router bias 0, outputs 0 (so that a layer starts as the identity), the rest normal with sd 1/sqrt(fan in)."""
    if tensor.dim() == 1:
        return torch.zeros(tensor.shape) if name.endswith("bias") else torch.ones(tensor.shape)
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return torch.zeros(tensor.shape)
    return torch.randn(tensor.shape, generator=random) / math.sqrt(tensor.shape[-1])


def _write_codes(
    attention: _Attention, config: ModelConfig, layout: Layout, strengths: Strengths, code_PT: Tensor, constant: float
) -> None:
    """Layer 0: head 0 writes the previous token's code, head 1 the start of the code of the token before that."""
    token, nope = layout.token, attention.nope
    attention.latent_CD.zero_()
    attention.latent_CD[:token, layout.token_dims] = torch.eye(token)
    # interleaved rotary pairs: the even row of a pair is its first coordinate, the odd row its second
    key = 7.0 / constant
    attention.rotary_key_RD.zero_()
    attention.rotary_key_RD[0::2, 0] = key
    frequency = _rotary_frequencies(config)
    amplitude = torch.where(frequency > 0.03, strengths.position / constant, 0.0)
    latent_sd = math.sqrt(config.kv_lora_rank / token)
    for head, (back, dims) in enumerate(((1, layout.previous_dims), (2, layout.before_dims))):
        size = dims.stop - dims.start
        attention.query_HQD[head] = 0
        attention.query_HQD[head, nope + 0 :: 2, 0] = amplitude * torch.cos(back * frequency)
        attention.query_HQD[head, nope + 1 :: 2, 0] = -amplitude * torch.sin(back * frequency)
        attention.expand_HXC[head, nope:] = 0
        attention.expand_HXC[head, nope : nope + size, :token] = code_PT[:size]
        attention.output_DHV[dims, head, :size] = torch.eye(size) * strengths.embedding / latent_sd


def _write_induction(attention: _Attention, layout: Layout, strengths: Strengths, code_PT: Tensor) -> None:
    """Layer 1: heads in pairs, each head of a pair copies half of the token's vector; the first pair strongly and by two tokens."""
    previous, before, nope = layout.previous, layout.before, attention.nope
    codes = previous + before
    attention.latent_CD.zero_()
    attention.latent_CD[:previous, layout.previous_dims] = torch.eye(previous)
    attention.latent_CD[previous:codes, layout.before_dims] = torch.eye(before)
    attention.latent_CD[codes : codes + layout.token, layout.token_dims] = torch.eye(layout.token)
    attention.rotary_key_RD[:] = 0
    attention.rotary_key_RD[0::2, 0] = 1.0
    half = (layout.token + 1) // 2
    for head in range(min(4, attention.query_HQD.shape[0])):
        attention.query_HQD[head] = 0
        attention.expand_HXC[head] = 0
        attention.expand_HXC[head, :previous, :previous] = torch.eye(previous)
        attention.query_HQD[head, :previous, layout.token_dims] = strengths.match * code_PT
        if head < 2:
            attention.expand_HXC[head, previous:codes, previous:codes] = torch.eye(before)
            first = layout.previous_dims.start
            attention.query_HQD[head, previous:codes, first : first + before] = strengths.match_before * torch.eye(
                before
            )
        begin = 0 if head % 2 == 0 else half
        size = min(half, layout.token - begin)
        attention.expand_HXC[head, nope : nope + size, codes + begin : codes + begin + size] = torch.eye(size)
        strength = strengths.copy if head < 2 else strengths.second_copy
        rows = slice(layout.start + begin, layout.start + begin + size)
        attention.output_DHV[rows, head, :size] = torch.eye(size) * strengths.embedding * strength
