"""The shape of a decoder: a frozen record that reads and writes the `config.json` of a `deepseek_v3` Hugging Face folder.

Knows nothing of tensors, devices or training. What the architecture names but this decoder does not have (YaRN, quantised
weights, biased projections) is refused by name rather than ignored. Report: base model (Kimi K2, same architecture).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from etude.records.errors import BadInput, Unsupported

MODEL_TYPE = "deepseek_v3"
_KIMI_MODEL_TYPE = "kimi_k2"
_DEFAULT_THETA = 10000.0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes under the names of the family's `config.json`. Raises `BadInput` when they do not fit together."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the dense SwiGLU layers."""
    moe_intermediate_size: int
    """Width of one expert; the shared expert is `n_shared_experts` times as wide."""
    num_hidden_layers: int
    num_attention_heads: int
    n_routed_experts: int
    num_experts_per_tok: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    n_shared_experts: int = 1
    first_k_dense_replace: int = 1
    """The first so many layers are dense."""
    n_group: int = 1
    topk_group: int = 1
    """A token's experts come from its `topk_group` best of `n_group` groups."""
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    rope_theta: float = _DEFAULT_THETA
    rope_interleave: bool = True
    """True: rotary pairs lie side by side (the family's checkpoints); False: half a head apart."""
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        self.validate("model config")

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head: the part without position plus the rotary part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def num_moe_layers(self) -> int:
        """Layers with a router: the axis L of routes."""
        return max(0, self.num_hidden_layers - self.first_k_dense_replace)

    def validate(self, place: str) -> None:
        """Check sizes against each other; `BadInput` names `place`, field and value."""

        def need(ok: bool, field: str, expected: str) -> None:
            if not ok:
                raise BadInput(place, field, getattr(self, field), expected)

        for field in _POSITIVE:
            value = getattr(self, field)
            need(isinstance(value, int) and not isinstance(value, bool) and value > 0, field, "an integer above 0")
        rank = self.q_lora_rank
        need(rank is None or (isinstance(rank, int) and rank > 0), "q_lora_rank", "null or an integer above 0")
        need(self.first_k_dense_replace >= 0, "first_k_dense_replace", "0 or more")
        need(self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", "an even number")
        need(self.rope_theta > 0, "rope_theta", "a number above 0")
        need(self.rms_norm_eps > 0, "rms_norm_eps", "a number above 0")
        need(self.n_routed_experts <= 65536, "n_routed_experts", "at most 65536 (routes are uint16)")
        per_group, rest = divmod(self.n_routed_experts, self.n_group)
        need(rest == 0, "n_group", f"a divisor of n_routed_experts = {self.n_routed_experts}")
        need(self.n_group == 1 or per_group >= 2, "n_group", "groups of at least two experts")
        need(self.topk_group <= self.n_group, "topk_group", f"at most n_group = {self.n_group}")
        reachable = self.topk_group * per_group
        need(
            self.num_experts_per_tok <= reachable,
            "num_experts_per_tok",
            f"at most {reachable}, the experts in {self.topk_group} of {self.n_group} groups",
        )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], place: str = "config.json") -> ModelConfig:
        """Read the mapping of a Hugging Face `config.json` (old `rope_theta` or new `rope_parameters` spelling).

        Keys that do not touch the arithmetic are left aside. Raises `BadInput` (with `place`) for a missing or wrong
        value and `Unsupported` for a feature of the architecture that this decoder lacks.
        """
        model_type = raw.get("model_type")
        if model_type not in (MODEL_TYPE, _KIMI_MODEL_TYPE):
            raise BadInput(place, "model_type", model_type, f"{MODEL_TYPE!r} or {_KIMI_MODEL_TYPE!r}")
        heads = raw.get("num_attention_heads")
        kv_heads = raw.get("num_key_value_heads")
        if kv_heads is not None and kv_heads != heads:
            raise BadInput(place, "num_key_value_heads", kv_heads, f"num_attention_heads = {heads} (as MLA has it)")
        for key, fine in _ONLY:
            found = raw.get(key, fine)
            if found is not None and found != fine:
                raise Unsupported(f"{place}: {key} is {found!r}; this decoder has {fine!r} only")
        if raw.get("quantization_config"):
            raise Unsupported(f"{place}: quantization_config is set; only BF16 and FP32 weights can be read")
        values: dict[str, Any] = {name: raw[name] for name in (field.name for field in fields(cls)) if name in raw}
        for name, default in _HF_DEFAULTS.items():
            if values.get(name) is None:
                values[name] = default
        values.setdefault("q_lora_rank", _HF_QUERY_RANK)
        values["rope_theta"] = _rope_theta(raw, place)
        if isinstance(values.get("eos_token_id"), list):
            values["eos_token_id"] = tuple(values["eos_token_id"])
        for name in _POSITIVE:
            if values.get(name) is None:
                raise BadInput(place, name, None, "an integer above 0")
        for name, value in values.items():
            _check_type(place, name, value)
        try:
            return cls(**values)
        except BadInput as error:
            raise BadInput(place, error.field, error.value, error.expected) from None

    def to_hf(self) -> dict[str, Any]:
        """The mapping for `config.json`, as transformers, vLLM and SGLang read it (no MTP layers)."""
        out: dict[str, Any] = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": MODEL_TYPE}
        for field in fields(self):
            value = getattr(self, field.name)
            out[field.name] = list(value) if isinstance(value, tuple) else value
        out |= dict(_ONLY)
        out["num_key_value_heads"] = self.num_attention_heads
        out["num_nextn_predict_layers"] = 0
        out["rope_parameters"] = {"rope_type": "default", "rope_theta": self.rope_theta}
        return out


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "n_routed_experts",
    "num_experts_per_tok",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "max_position_embeddings",
)
_ONLY: tuple[tuple[str, Any], ...] = (
    ("hidden_act", "silu"),
    ("attention_bias", False),
    ("attention_dropout", 0.0),
    ("scoring_func", "sigmoid"),
    ("topk_method", "noaux_tc"),
    ("moe_layer_freq", 1),
)
# What transformers' class assumes for a key that the file leaves out or sets to null.
_HF_DEFAULTS: dict[str, Any] = {
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rope_interleave": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
# Left out it means this, null means no query latent.
_HF_QUERY_RANK = 1536
_BOOLS = ("norm_topk_prob", "rope_interleave", "tie_word_embeddings")
_FLOATS = ("routed_scaling_factor", "rope_theta", "rms_norm_eps", "initializer_range")


def _rope_theta(raw: Mapping[str, Any], place: str) -> float:
    theta = raw.get("rope_theta", _DEFAULT_THETA)
    for field in ("rope_scaling", "rope_parameters"):
        rope = raw.get(field)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise BadInput(place, field, rope, "null or an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise Unsupported(f"{place}: {field}.rope_type is {kind!r}; this decoder has 'default' only")
        theta = rope.get("rope_theta", theta)
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise BadInput(place, "rope_theta", theta, "a number above 0")
    return float(theta)


def _check_type(place: str, name: str, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    integer = isinstance(value, int) and not isinstance(value, bool)
    if name in _BOOLS:
        ok, expected = isinstance(value, bool), "true or false"
    elif name in _FLOATS:
        ok, expected = number, "a number"
    elif name in _POSITIVE or name == "first_k_dense_replace":
        ok, expected = integer, "an integer"
    elif name == "eos_token_id":
        many = isinstance(value, tuple) and all(isinstance(item, int) for item in value)
        ok, expected = value is None or integer or many, "null, an integer or a list of integers"
    else:
        ok, expected = value is None or integer, "null or an integer"
    if not ok:
        raise BadInput(place, name, value, expected)
