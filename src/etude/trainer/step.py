"""The optimiser step: policy gradient over micro-batches and ranks, Adam on FP32 masters (SPEC R1-R5; DESIGN 2, 3, 7, 10).

The live decoder holds the BF16-rounded values of the masters, in FP32, so that the forward is the function that engines
serve; its gradient goes to the masters unchanged. Knows nothing of rollouts' origin, of staleness or of publishing.

Shapes: N sampled tokens of a micro-batch.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from etude.model.checkpoint import hf_state
from etude.model.decoder import Decoder, RouteReplay
from etude.records.errors import BadInput, CheckpointError, IntegrityError, Unsupported
from etude.rl.kl import k1, kl_advantage
from etude.rl.loss import importance_weights, policy_gradient_loss, sampled_logprobs, weight_statistics
from etude.trainer.batch import MicroBatch, build_micro_batch
from etude.trainer.checkpoint import TrainerState
from etude.trainer.config import TrainerConfig
from etude.trainer.packing import CostModel, balance, canonical_order, plan_micro_batches
from etude.trainer.sequence import TrainSequence


class StepRefused(IntegrityError):
    """The gradient is not finite: nothing was updated."""


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """One step, over all ranks. Means are over the sampled tokens that were computed; see `skipped_sequences`."""

    step: int
    """Number of steps done, this one included."""
    loss: float
    kl: float | None
    """Mean of k1 = log pi - log pi_ref; None when no reference was evaluated."""
    entropy: float
    """Mean entropy of the sampling distribution (temperature and mask applied), nats."""
    grad_norm: float
    """Before clipping."""
    importance_mean: float
    importance_max: float
    importance_clipped: float
    """Share of tokens whose pi / mu was over the cap."""
    replaced: float
    """Share of replayed experts that the policy's plausibility filter replaced."""
    reference_replaced: float
    logp_gap_mean: float
    """Mean |log pi - log mu|: sampler against trainer, staleness included."""
    logp_gap_max: float
    tokens: int
    """Sampled tokens, each counted once, skipped sequences included."""
    sequences: int
    skipped_sequences: int
    """Sequences that cannot move the gradient (advantage 0 and no KL) and were not computed."""
    micro_batches: int
    seconds: float
    learning_rate: float


_SUMS = (
    "loss",
    "kl",
    "entropy",
    "weight",
    "clipped",
    "gap",
    "computed_tokens",
    "tokens",
    "sequences",
    "skipped",
    "micro_batches",
    "replaced",
    "considered",
    "reference_replaced",
    "reference_considered",
)
_MAXIMA = ("weight", "gap")


@dataclass
class StepSums:
    """Sums and maxima over tokens, so that micro-batches and ranks add up."""

    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMS, 0.0))
    maxima: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_MAXIMA, 0.0))

    def mean(self, name: str, over: str = "computed_tokens") -> float:
        """Sum of `name` by sum of `over`; 0 when there is nothing to average."""
        return self.sums[name] / self.sums[over] if self.sums[over] else 0.0


class PolicyTrainer:
    """Owns the policy's masters, its optimiser and the frozen reference.

    `decoder` is taken over: its parameters become the rounded values (float64 decoders keep float64 masters, for tests).
    `reference` is the run's starting checkpoint, taken over and rounded too; None copies the decoder as given, which is
    right for a fresh run only.
    """

    def __init__(self, decoder: Decoder, config: TrainerConfig, reference: Decoder | None = None) -> None:
        if not config.freeze_router_bias:
            raise Unsupported("trainer.freeze_router_bias = false: router biases are frozen during RL")
        if config.threads:
            torch.set_num_threads(config.threads)
        self.decoder, self.config = decoder, config
        self.decoder.eval()
        self._live = dict(decoder.named_parameters())
        self.masters = {name: live.detach().clone() for name, live in self._live.items()}
        for name, master in self.masters.items():
            if master.dtype not in (torch.float32, torch.float64):
                raise BadInput("trainer", f"dtype of {name}", str(master.dtype), "float32 masters")
        self._optimizer = torch.optim.Adam(
            list(self.masters.values()),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.adam_epsilon,
        )
        self.steps_done = 0
        self._reference = copy.deepcopy(decoder) if reference is None else reference
        self._reference.requires_grad_(False).eval()
        _round_(dict(self._reference.named_parameters()))
        self._reference_digest = _digest(self._reference)
        self._uses_reference = config.kl_beta > 0 or config.measure_kl
        self._refresh_live()

    def compute_gradients(self, sequences: Sequence[TrainSequence]) -> StepSums:
        """Leaves the gradient of the loss in the decoder's parameters, summed over ranks, and returns summed statistics.

        `sequences` are this rank's share, possibly empty; every rank must call. The gradient does not depend on how
        sequences are split into micro-batches, rows or ranks, but for rounding.
        """
        config = self.config
        for live in self._live.values():
            live.grad = torch.zeros_like(live)
        ordered = canonical_order(sequences)
        totals = StepSums()
        computed = [s for s in ordered if s.sampled_tokens and (config.kl_beta > 0 or s.advantage != 0.0)]
        totals.sums["sequences"] = len(ordered)
        totals.sums["skipped"] = len(ordered) - len(computed)
        totals.sums["tokens"] = sum(sequence.sampled_tokens for sequence in ordered)
        plans = plan_micro_batches(
            computed,
            config.micro_batch_tokens,
            config.layout,
            whole_chains=config.kl_beta > 0 and config.kl_horizon == "sequence",
        )
        for plan in plans:
            self._accumulate(build_micro_batch(computed, plan), totals)
        totals.sums["micro_batches"] = len(plans)
        self._sum_over_ranks(totals)
        return totals

    def step(self, groups: Sequence[Sequence[TrainSequence]]) -> StepStats:
        """One update from the step's groups. With several ranks every rank passes all groups and computes its share.

        Raises BadInput when the number of groups or the size of one is not the config's (the denominator counts on
        both), StepRefused when loss or gradient is not finite: masters, moments and step are then as before.
        """
        started = time.perf_counter()
        config = self.config
        if len(groups) != config.groups:
            raise BadInput("trainer step", "groups", len(groups), f"trainer.groups = {config.groups}")
        for group in groups:
            if len(group) != config.group_size:
                raise BadInput("trainer step", "group size", len(group), f"trainer.group_size = {config.group_size}")
        sequences = canonical_order([sequence for group in groups for sequence in group])
        totals = self.compute_gradients([sequences[index] for index in self._share(sequences)])
        norm = self._checked_norm(totals)
        scale = min(1.0, config.max_grad_norm / norm) if norm > 0 else 1.0
        for name, live in self._live.items():
            assert live.grad is not None
            self.masters[name].grad = live.grad.mul_(scale)
        self._optimizer.step()
        for name, live in self._live.items():
            self.masters[name].grad = live.grad = None
        self._refresh_live()
        self.steps_done += 1
        return self._statistics(totals, norm, time.perf_counter() - started)

    def published_state(self) -> dict[str, Tensor]:
        """The weights that engines serve, under Hugging Face names: BF16, router biases FP32; copies."""
        return {name: tensor.clone() for name, tensor in hf_state(self.decoder).items()}

    def state(self) -> TrainerState:
        """Everything that a later process needs to go on bit-equal; tensors are copies."""
        tensors: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            tensors[f"master/{name}"] = master.clone()
            for key, value in self._optimizer.state.get(master, {}).items():
                tensors[f"adam.{key}/{name}"] = value.detach().clone()
        tensors["rng/torch"] = torch.get_rng_state()
        return TrainerState(self.steps_done, tensors, self._reference_digest)

    def load_state(self, state: TrainerState, place: str = "trainer checkpoint") -> None:
        """Goes on from `state`. Raises CheckpointError, before anything changed, when a tensor is missing, unknown or of
        another shape or dtype, or when the run's reference is another model than this trainer's.
        """
        if state.reference_digest != self._reference_digest:
            raise CheckpointError(
                place, "reference_digest", state.reference_digest, f"the starting checkpoint {self._reference_digest}"
            )
        expected = {f"master/{name}": master for name, master in self.masters.items()}
        if state.steps_done > 0:
            for name, master in self.masters.items():
                expected[f"adam.step/{name}"] = torch.zeros((), dtype=torch.float32)
                expected[f"adam.exp_avg/{name}"] = expected[f"adam.exp_avg_sq/{name}"] = master
        expected["rng/torch"] = torch.get_rng_state()
        for name in sorted(expected.keys() | state.tensors.keys()):
            if name not in state.tensors or name not in expected:
                raise CheckpointError(
                    place, name, "missing" if name in expected else "unknown", "exactly the trainer's tensors"
                )
            got, want = state.tensors[name], expected[name]
            if got.shape != want.shape or got.dtype != want.dtype:
                raise CheckpointError(
                    place, name, f"{got.dtype} {tuple(got.shape)}", f"{want.dtype} {tuple(want.shape)}"
                )
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(state.tensors[f"master/{name}"])
        self._optimizer.state.clear()
        if state.steps_done > 0:
            for name, master in self.masters.items():
                self._optimizer.state[master] = {
                    key: state.tensors[f"adam.{key}/{name}"].clone() for key in ("step", "exp_avg", "exp_avg_sq")
                }
        torch.set_rng_state(state.tensors["rng/torch"])
        self.steps_done = state.steps_done
        self._refresh_live()

    def _accumulate(self, batch: MicroBatch, totals: StepSums) -> None:
        config, sums = self.config, totals.sums
        logp_N, entropy_N, filtered = self._logprobs(self.decoder, batch)
        sums["replaced"] += filtered[0]
        sums["considered"] += filtered[1]
        advantage_N = batch.advantage_N.to(logp_N.dtype)
        detached_N = logp_N.detach()
        if self._uses_reference:
            with torch.no_grad():
                reference_N, _, filtered = self._logprobs(self._reference, batch)
            sums["reference_replaced"] += filtered[0]
            sums["reference_considered"] += filtered[1]
            k_N = k1(detached_N, reference_N)
            sums["kl"] += float(k_N.double().sum())
            if config.kl_beta > 0:
                every_N = torch.ones_like(k_N, dtype=torch.bool)
                terms = [
                    kl_advantage(k_N[start:end], every_N[start:end], config.kl_horizon, config.kl_beta)
                    for start, end in batch.chains
                ]
                advantage_N = advantage_N + torch.cat(terms)
        mu_N = batch.mu_N.to(logp_N.dtype)
        weight_N = importance_weights(logp_N, mu_N, config.importance_cap)
        loss = policy_gradient_loss(logp_N, weight_N, advantage_N, config.denominator)
        torch.autograd.backward(loss)
        weights = weight_statistics(logp_N, mu_N, weight_N, config.importance_cap)
        gap_N = (detached_N - mu_N).abs()
        sums["loss"] += float(loss.detach())
        sums["entropy"] += float(entropy_N.double().sum())
        sums["weight"] += weights.total
        sums["clipped"] += weights.clipped
        sums["gap"] += float(gap_N.double().sum())
        sums["computed_tokens"] += len(gap_N)
        totals.maxima["weight"] = max(totals.maxima["weight"], weights.largest)
        totals.maxima["gap"] = max(totals.maxima["gap"], float(gap_N.max()))

    def _logprobs(self, decoder: Decoder, batch: MicroBatch) -> tuple[Tensor, Tensor, tuple[int, int]]:
        """Log-probabilities and entropies at the sampled positions [N]; replaced and considered replayed experts."""
        replay = None
        if batch.routes_BTLk is not None and self.config.replay_routes:
            replay = RouteReplay(batch.routes_BTLk, self.config.plausibility_alpha, batch.routes_valid_BT)
        output = decoder(batch.ids_BT, segments_BT=batch.segments_BT, replay=replay)
        logits_NV = decoder.logits(output.hidden.flatten(0, 1).index_select(0, batch.at_N))
        allowed_NV = batch.allowed_NV(logits_NV.shape[1])
        got = sampled_logprobs(logits_NV, batch.target_N, batch.temperature_N, allowed_NV)
        return got.logp_N, got.entropy_N, (int(output.replaced), int(output.considered))

    def _share(self, sequences: Sequence[TrainSequence]) -> tuple[int, ...]:
        if not _distributed():
            return tuple(range(len(sequences)))
        cost = cost_model(self.decoder)
        return balance([cost.sequence(s) for s in sequences], dist.get_world_size())[dist.get_rank()]

    def _sum_over_ranks(self, totals: StepSums) -> None:
        if not _distributed():
            return
        gradients = [live.grad for live in self._live.values() if live.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, op=dist.ReduceOp.SUM)
        for gradient, part in zip(gradients, torch.split(flat, [gradient.numel() for gradient in gradients])):
            gradient.copy_(part.view_as(gradient))
        summed = torch.tensor([totals.sums[name] for name in _SUMS], dtype=torch.float64)
        largest = torch.tensor([totals.maxima[name] for name in _MAXIMA], dtype=torch.float64)
        dist.all_reduce(summed, op=dist.ReduceOp.SUM)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        totals.sums = dict(zip(_SUMS, summed.tolist()))
        totals.maxima = dict(zip(_MAXIMA, largest.tolist()))

    def _checked_norm(self, totals: StepSums) -> float:
        squares = {}
        for name, live in self._live.items():
            assert live.grad is not None
            squares[name] = float(live.grad.double().square().sum())
        culprits = [
            name for name, square in {"the loss": totals.sums["loss"], **squares}.items() if not isfinite(square)
        ]
        if culprits:
            for live in self._live.values():
                live.grad = None
            raise StepRefused(
                f"trainer step {self.steps_done + 1}: {len(culprits)} of {len(squares)} gradients are not finite, first "
                f"{culprits[0]} (loss {totals.sums['loss']:g}, largest |log pi - log mu| {totals.maxima['gap']:g}); "
                "nothing was updated"
            )
        return float(sum(squares.values()) ** 0.5)

    @torch.no_grad()
    def _refresh_live(self) -> None:
        for name, live in self._live.items():
            live.copy_(self.masters[name])
        _round_(self._live)

    def _statistics(self, totals: StepSums, norm: float, seconds: float) -> StepStats:
        return StepStats(
            step=self.steps_done,
            loss=totals.sums["loss"],
            kl=totals.mean("kl") if self._uses_reference else None,
            entropy=totals.mean("entropy"),
            grad_norm=norm,
            importance_mean=totals.mean("weight"),
            importance_max=totals.maxima["weight"],
            importance_clipped=totals.mean("clipped"),
            replaced=totals.mean("replaced", "considered"),
            reference_replaced=totals.mean("reference_replaced", "reference_considered"),
            logp_gap_mean=totals.mean("gap"),
            logp_gap_max=totals.maxima["gap"],
            tokens=int(totals.sums["tokens"]),
            sequences=int(totals.sums["sequences"]),
            skipped_sequences=int(totals.sums["skipped"]),
            micro_batches=int(totals.sums["micro_batches"]),
            seconds=seconds,
            learning_rate=self.config.learning_rate,
        )


def cost_model(decoder: Decoder) -> CostModel:
    """Multiply-adds of a forward: `linear` a token (parameters that it uses), `quadratic` a pair of positions (causal)."""
    config = decoder.config
    used = sum(parameter.numel() for parameter in decoder.parameters())
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    used -= config.num_moe_layers * (config.n_routed_experts - config.num_experts_per_tok) * expert
    pair = config.num_hidden_layers * config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
    return CostModel(float(used), pair / 2)


@torch.no_grad()
def _round_(parameters: dict[str, torch.nn.Parameter]) -> None:
    for parameter in parameters.values():
        parameter.copy_(parameter.to(torch.bfloat16))


def _digest(decoder: Decoder) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(decoder.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.detach().float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
