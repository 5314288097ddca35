"""The loss of a batch, what a batch says about the policy, and the load-balancing step of the routers.

Logits are computed only where a target has weight. Knows nothing of where batches come from or of optimisers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from etude.model.decoder import Decoder
from etude.pretrain.batches import Batch


@dataclass(frozen=True)
class Loss:
    """`total` is the weighted mean over targets, with its graph; `edit` the plain mean over tokens of right edits, a float."""

    total: Tensor
    edit: float
    router_counts_LE: Tensor


def batch_loss(decoder: Decoder, batch: Batch) -> Loss:
    """Weighted cross-entropy of next tokens, natural logarithm."""
    ids_BT = torch.from_numpy(batch.ids_BT)
    output = decoder(ids_BT[:, :-1])
    weights = torch.from_numpy(batch.weights_BT)[:, 1:].flatten()
    chosen = weights.nonzero().squeeze(1)
    weights = weights[chosen]
    hidden = output.hidden.flatten(0, 1).index_select(0, chosen)
    targets = ids_BT[:, 1:].flatten()[chosen]
    entropies = F.cross_entropy(decoder.logits(hidden), targets, reduction="none")
    edits = torch.from_numpy(batch.edit_BT)[:, 1:].flatten()[chosen]
    edit = float(entropies.detach()[edits].mean()) if bool(edits.any()) else float("nan")
    return Loss((entropies * weights).sum() / weights.sum(), edit, output.router_counts)


@torch.no_grad()
def balance_routers(decoder: Decoder, counts_LE: Tensor, rate: float) -> None:
    """Moves each router's correction bias by `rate` towards experts that got fewer tokens than the mean (DeepSeek-V3, 2.1.2)."""
    biases = [buffer for name, buffer in decoder.named_buffers() if name.endswith("e_score_correction_bias")]
    for bias_E, counts_E in zip(biases, counts_LE.float(), strict=True):
        bias_E.add_(rate * torch.sign(counts_E.mean() - counts_E))


@dataclass
class Tally:
    """Sums over one domain of an evaluation."""

    targets: int = 0
    loss: float = 0.0
    edit_tokens: int = 0
    edit_loss: float = 0.0
    episodes: int = 0
    exact: int = 0

    def report(self) -> dict[str, float]:
        """Means; `exact` is the share of episodes whose right edit greedy decoding gives token for token."""
        out = {"loss": self.loss / max(1, self.targets)}
        if self.edit_tokens:
            out |= {"edit_loss": self.edit_loss / self.edit_tokens, "exact": self.exact / self.episodes}
        return out


@dataclass
class Evaluation:
    """Results by domain."""

    domains: dict[str, Tally] = field(default_factory=dict)

    def report(self) -> dict[str, dict[str, float]]:
        """Means by domain."""
        return {name: tally.report() for name, tally in sorted(self.domains.items())}


@torch.no_grad()
def evaluate(decoder: Decoder, batches: Iterable[Batch]) -> Evaluation:
    """Loss by domain and greedy exact-edit rate.

    Greedy decoding repeats a target exactly if and only if every target token is the most likely one given the target's own
    prefix, so one forward pass decides it.
    """
    result = Evaluation()
    for batch in batches:
        ids_BT = torch.from_numpy(batch.ids_BT)
        hidden_BTD = decoder(ids_BT[:, :-1]).hidden
        for row, domain in enumerate(batch.domains):
            weights, edits = (torch.from_numpy(x[row, 1:]) for x in (batch.weights_BT, batch.edit_BT))
            chosen = (weights > 0).nonzero().squeeze(1)
            logits = decoder.logits(hidden_BTD[row, chosen])
            targets, edit = ids_BT[row, 1:][chosen], edits[chosen]
            entropies = F.cross_entropy(logits, targets, reduction="none")
            tally = result.domains.setdefault(domain, Tally())
            tally.targets += len(targets)
            tally.loss += float(entropies.sum())
            tally.episodes += 1
            tally.edit_tokens += int(edit.sum())
            tally.edit_loss += float(entropies[edit].sum())
            tally.exact += bool((logits.argmax(-1) == targets)[edit].all()) and bool(edit.any())
    return result
