"""Faster arithmetic for the training step on processors with BF16 tiles (AMX); the same weights, the same function, rounded products.

FP32 matrices are multiplied with BF16 inputs and FP32 sums when `low_precision` is entered. The library prepares a kernel for each new
shape, which costs more than the product of a small model: so experts work on padded stacks whose sizes come in steps, and
attention on plain batched products. Used for pretraining only: the RL trainer and the engine stay in FP32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from etude.model.decoder import Decoder
from etude.model.moe import Experts, SparseFeedForward

ROW_STEP = 256
"""Stacks of tokens grow in steps of so many rows."""


class PaddedExperts(nn.Module):
    """`Experts` with each expert's tokens padded to the fullest expert's number, rounded up: one batched product a projection."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj

    def forward(self, x_MD: Tensor, experts_Mk: Tensor, gates_Mk: Tensor) -> tuple[Tensor, Tensor]:
        count, width = self.gate_up_proj.shape[0], x_MD.shape[1]
        expert_P = experts_Mk.flatten()
        order_P = expert_P.argsort(stable=True)
        counts_E = torch.bincount(expert_P, minlength=count)
        fullest = -(-int(counts_E.max()) // ROW_STEP) * ROW_STEP
        starts_E = counts_E.cumsum(0) - counts_E
        sorted_P = expert_P[order_P]
        place_P = sorted_P * fullest + torch.arange(len(order_P)) - starts_E[sorted_P]
        # Every place of the stack reads some token; places past an expert's end read token 0 with gate 0.
        token_S = torch.zeros(count * fullest, dtype=torch.int64)
        token_S[place_P] = order_P // experts_Mk.shape[1]
        gates_S = x_MD.new_zeros(count * fullest).index_copy(0, place_P, gates_Mk.flatten()[order_P])
        stack_ECD = x_MD.index_select(0, token_S).view(count, fullest, width)
        gate, up = torch.bmm(stack_ECD, self.gate_up_proj.transpose(1, 2)).chunk(2, -1)
        inner = F.silu(gate) * up * gates_S.view(count, fullest, 1)
        out_SD = torch.bmm(inner, self.down_proj.transpose(1, 2)).flatten(0, 1)
        return torch.zeros_like(x_MD).index_add(0, token_S, out_SD), counts_E


def use_padded_experts(decoder: Decoder) -> None:
    """Swaps the experts' computation in place; parameters and their names stay."""
    for module in decoder.modules():
        if isinstance(module, SparseFeedForward) and isinstance(module.experts, Experts):
            module.experts = PaddedExperts(module.experts)  # type: ignore[assignment]


@contextmanager
def low_precision(enabled: bool) -> Iterator[None]:
    """BF16 products inside, if `enabled` and the library has them; the former setting is put back."""
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    if not enabled:
        yield
        return
    settings.fp32_precision = "bf16"
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        settings.fp32_precision = before
