"""The starter's two optimisers: Muon for matrices, Adam for embeddings, norms and routers, under one warm-up/flat/decay schedule.

Muon (Jordan et al. 2024) replaces a matrix's momentum by a nearby orthogonal matrix. Same-shape matrices, the experts of a
stacked 3-D parameter included, share one batched Newton-Schulz iteration. Knows nothing of data or phases; a step is a pure
function of gradients and state, so a resumed run continues bit for bit (see `OptimizerPair.state_dict`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration: steep at 0, so small singular values grow fast; singular values end in about [0.7, 1.2]."""


def orthogonalize(matrices_NRC: Tensor, rounds: int = 5) -> Tensor:
    """The nearly orthogonal factor of each matrix, float [N, R, C] -> the same shape and dtype.

    For X = U S V^T it approximates U V^T: all singular values come out near 1. A zero matrix stays zero.
    """
    tall = matrices_NRC.shape[1] > matrices_NRC.shape[2]
    x: Tensor = matrices_NRC.transpose(1, 2) if tall else matrices_NRC
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    first, third, fifth = NEWTON_SCHULZ
    for _ in range(rounds):
        gram = x @ x.transpose(1, 2)
        x = first * x + torch.baddbmm(third * gram, gram, gram, alpha=fifth) @ x
    return x.transpose(1, 2) if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised per matrix; parameters are [R, C] or stacks [N, R, C].

    `stacked[i]` says how many matrices lie one below the other in parameter i (gate and up projections of an expert share one
    tensor, yet each is a map of its own). The step of a matrix grows with sqrt(max(1, rows / columns)), rows being outputs.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        stacked: Sequence[int] | None = None,
    ) -> None:
        super().__init__(list(parameters), {"lr": lr, "momentum": momentum})
        self._stacked = dict(zip(map(id, parameters), stacked or [1] * len(parameters), strict=True))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[tuple[nn.Parameter, Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(momentum, group["momentum"])
                shape = (parameter.shape[-2] // self._stacked[id(parameter)], parameter.shape[-1])
                by_shape.setdefault(shape, []).append((parameter, update.reshape(-1, *shape)))
            for (rows, columns), members in by_shape.items():
                updates = orthogonalize(torch.cat([update for _, update in members]))
                scale = max(1.0, rows / columns) ** 0.5
                parts = updates.split([update.shape[0] for _, update in members])
                for (parameter, _), part in zip(members, parts, strict=True):
                    parameter.add_(part.reshape(parameter.shape), alpha=-group["lr"] * scale)


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Muon's share: projections and experts. Embeddings, heads, norms, biases and router weights are Adam's."""
    others = ("embed", "lm_head", "router", ".gate.weight")
    return parameter.dim() >= 2 and not any(word in name for word in others)


class OptimizerPair:
    """Muon and Adam stepped as one. `scale` in [0, 1] multiplies both learning rates (the schedule's output)."""

    def __init__(self, model: nn.Module, *, muon_lr: float, adam_lr: float, adam_betas: tuple[float, float]) -> None:
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        matrices = [(name, parameter) for name, parameter in named if is_matrix(name, parameter)]
        stacked = [2 if "gate_up_proj" in name else 1 for name, _ in matrices]
        self.muon = Muon([parameter for _, parameter in matrices], muon_lr, stacked=stacked)
        rest = [parameter for name, parameter in named if not is_matrix(name, parameter)]
        self.adam = torch.optim.Adam(rest, adam_lr, betas=adam_betas)
        self._rates = (muon_lr, adam_lr)

    def step(self, scale: float) -> None:
        """One update from the gradients that are there, then drops them."""
        for optimizer, rate in zip((self.muon, self.adam), self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, in plain tensors."""
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Reads `state_dict` back."""
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])


def schedule(step: int, *, warmup: int, decay_start: int | None, decay_steps: int, floor: float) -> float:
    """Learning-rate scale of a step (from 0): linear warm-up, flat, and from `decay_start` on linear down to `floor`."""
    scale = min(1.0, (step + 1) / max(1, warmup))
    if decay_start is None or step < decay_start:
        return scale
    done = min(1.0, (step - decay_start + 1) / max(1, decay_steps))
    return scale * (1.0 - (1.0 - floor) * done)
