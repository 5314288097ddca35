"""Latents of running sequences in fixed slots, and attention over them for ragged batches.

A slot holds what MLA caches: the normalised latent and the rotated shared key of each token and layer, as they were computed
(DESIGN 9, mode `keep`); the current weights expand them. Which session owns a slot, and when it is given up, is the
engine's business. Not safe for concurrent use. Source: DeepSeek-V2 section 2.1 (weight absorption when decoding).

Shapes: S slots, X capacity in tokens, M computed tokens (m of short runs), H heads, Q queries of a run (tokens * H), C latent width,
W = C + rotary width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from etude.model.config import ModelConfig
from etude.model.layout import LatentHeads, expand_latents, padded_attention
from etude.records.errors import BadInput

SHORT_RUN = 32
"""New tokens of a row up to which its queries go to the latents; beyond, expanding the row's latents costs less."""


class KVCache:
    """Static storage for `slots` sequences of at most `max_tokens` tokens each, float32 unless told otherwise."""

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        max_tokens: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if not 0 < max_tokens <= config.max_position_embeddings:
            expected = f"1 to max_position_embeddings = {config.max_position_embeddings}"
            raise BadInput("key-value cache", "max_tokens", max_tokens, expected)
        if slots < 1:
            raise BadInput("key-value cache", "slots", slots, "at least 1")
        self.slots, self.max_tokens = slots, max_tokens
        width = config.kv_lora_rank + config.qk_rope_head_dim
        self.pages_LSXW = torch.zeros(config.num_hidden_layers, slots, max_tokens, width, dtype=dtype, device=device)
        """What is stored; at a slot's length and beyond it is stale."""
        self.lengths = torch.zeros(slots, dtype=torch.int64)
        """Tokens held by each slot; int64 on the CPU. Changed by `Decoder.extend`, `truncate`, `copy` and `free` only."""
        # Views made once: making them anew costs more than the small products of a decode step.
        self._flat_L = [pages.flatten(0, 1) for pages in self.pages_LSXW]
        self._keys_LS = [[page.t() for page in pages] for pages in self.pages_LSXW]
        self._latents_LS = [[page[:, : config.kv_lora_rank] for page in pages] for pages in self.pages_LSXW]

    def truncate(self, slot: int, n: int) -> None:
        """Forget all but the first `n` tokens of a slot."""
        held = int(self.lengths[self._checked(slot)])
        if not 0 <= n <= held:
            raise BadInput("key-value cache", f"length of slot {slot}", n, f"0 to {held}, the tokens it holds")
        self.lengths[slot] = n

    def free(self, slot: int) -> None:
        """Empty a slot."""
        self.lengths[self._checked(slot)] = 0

    def copy(self, source: int, target: int, n: int) -> None:
        """Make `target` hold the first `n` tokens of `source`, so that a shared prompt is computed once."""
        held = int(self.lengths[self._checked(source)])
        if not 0 <= n <= held:
            raise BadInput("key-value cache", f"tokens to copy from slot {source}", n, f"0 to {held}")
        self.pages_LSXW[:, self._checked(target), :n] = self.pages_LSXW[:, source, :n]
        self.lengths[target] = n

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise BadInput("key-value cache", "slot", slot, f"0 to {self.slots - 1}")
        return slot


class CacheLayout:
    """Layout of one `extend`: new tokens, right-padded to N columns, go to the ends of their slots.

    Rows with slot -1 or length 0, and columns past a row's length, are left out of the computation altogether.
    """

    def __init__(self, cache: KVCache, columns: int, lengths_B: Tensor, slots_B: Tensor) -> None:
        self.cache = cache
        self._runs: list[tuple[int, int, int, int]] = []
        held = cache.lengths.tolist()
        kept: list[int] = []
        position_M: list[int] = []
        place_M: list[int] = []
        seen: set[int] = set()
        lengths, slots = lengths_B.tolist(), slots_B.tolist()
        if len(lengths) != len(slots):
            raise BadInput("decoder extend", "slots_B", f"{len(slots)} rows", f"{len(lengths)}, as lengths_B has")
        for row, (count, slot) in enumerate(zip(lengths, slots)):
            if not -1 <= slot < cache.slots:
                raise BadInput("decoder extend", f"slots_B[{row}]", slot, f"-1 or 0 to {cache.slots - 1}")
            if not 0 <= count <= columns:
                raise BadInput("decoder extend", f"lengths_B[{row}]", count, f"0 to {columns}, the columns of ids_BN")
            if slot < 0 or count == 0:
                continue
            if slot in seen:
                raise BadInput("decoder extend", f"slots_B[{row}]", slot, "each slot once")
            seen.add(slot)
            start = held[slot]
            end = start + count
            if end > cache.max_tokens:
                expected = f"at most {cache.max_tokens - start} more tokens in slot {slot}, which holds {start}"
                raise BadInput("decoder extend", f"lengths_B[{row}]", count, expected)
            self._runs.append((len(kept), slot, start, end))
            kept.extend(range(row * columns, row * columns + count))
            position_M.extend(range(start, end))
            place_M.extend(range(slot * cache.max_tokens + start, slot * cache.max_tokens + end))
        device = cache.pages_LSXW.device
        self.keep_M = None
        if len(kept) < len(lengths) * columns:
            self.keep_M = torch.tensor(kept, dtype=torch.int64, device=device)
        self.positions_M = torch.tensor(position_M, dtype=torch.int64, device=device)
        self._place_M = torch.tensor(place_M, dtype=torch.int64, device=device)
        self._short = [run for run in self._runs if run[3] - run[2] <= SHORT_RUN]
        self._long = [run for run in self._runs if run[3] - run[2] > SHORT_RUN]
        self._short_sizes = [end - start for _, _, start, end in self._short]
        self._short_M = None
        if self._long:
            rows = [at + i for (at, _, _, _), size in zip(self._short, self._short_sizes) for i in range(size)]
            self._short_M = torch.tensor(rows, dtype=torch.int64, device=device)
        self._biases: list[Tensor | None] | None = None

    def attend(self, layer: int, heads: LatentHeads) -> Tensor:
        """Write the new latents and keys, then let every new token see its slot up to itself; [M, H, V]."""
        new_MW = torch.cat((heads.latent_MC, heads.k_rope_Mr), -1)
        self.cache._flat_L[layer].index_copy_(0, self._place_M, new_MW)
        if self._short_M is None:
            return self._attend_short(layer, heads, heads.q_nope_MHn, heads.q_rope_MHr)
        nope = heads.q_nope_MHn.shape[-1]
        count, head_count = heads.q_nope_MHn.shape[:2]
        out_MHV = new_MW.new_zeros(count, head_count, heads.expansion_HOC.shape[1] - nope)
        if self._short:
            short = self._short_M
            q_nope, q_rope = heads.q_nope_MHn.index_select(0, short), heads.q_rope_MHr.index_select(0, short)
            out_MHV.index_copy_(0, short, self._attend_short(layer, heads, q_nope, q_rope))
        for at, slot, start, end in self._long:
            rows = slice(at, at + end - start)
            q_MHK = torch.cat((heads.q_nope_MHn[rows], heads.q_rope_MHr[rows]), -1)
            out_MHV[rows] = self._attend_run(layer, q_MHK, heads.expansion_HOC, nope, slot, start, end)
        return out_MHV

    def _attend_short(self, layer: int, heads: LatentHeads, q_nope_mHn: Tensor, q_rope_mHr: Tensor) -> Tensor:
        """Rows with few new tokens: queries go down to the latents instead of every cached latent up to the heads."""
        nope, latent_width = q_nope_mHn.shape[-1], heads.latent_MC.shape[-1]
        count, head_count = q_nope_mHn.shape[:2]
        down_HnC, up_HVC = heads.expansion_HOC[:, :nope], heads.expansion_HOC[:, nope:]
        absorbed_mHC = torch.bmm(q_nope_mHn.transpose(0, 1), down_HnC).transpose(0, 1)
        query_mHW = torch.cat((absorbed_mHC, q_rope_mHr), -1).mul_((nope + q_rope_mHr.shape[-1]) ** -0.5)
        keys_S, latents_S = self.cache._keys_LS[layer], self.cache._latents_LS[layer]
        mixed_mHC = query_mHW.new_empty(count, head_count, latent_width)
        if self._biases is None:
            self._biases = [_causal_bias(query_mHW, start, end) for _, _, start, end in self._short]
        sizes = [size * head_count for size in self._short_sizes]
        queries, outputs = query_mHW.flatten(0, 1).split(sizes), mixed_mHC.flatten(0, 1).split(sizes)
        # One row at a time reads its slot in place: gathering slots into a batch would copy more than it saves.
        for (_, slot, _, end), bias_QX, query_QW, mixed_QC in zip(self._short, self._biases, queries, outputs):
            keys_WX = keys_S[slot].narrow(1, 0, end)
            score_QX = torch.mm(query_QW, keys_WX) if bias_QX is None else torch.addmm(bias_QX, query_QW, keys_WX)
            torch.mm(score_QX.softmax(-1), latents_S[slot].narrow(0, 0, end), out=mixed_QC)
        return torch.bmm(mixed_mHC.transpose(0, 1), up_HVC.transpose(1, 2)).transpose(0, 1)

    def _attend_run(
        self, layer: int, q_nHK: Tensor, expansion_HOC: Tensor, nope: int, slot: int, start: int, end: int
    ) -> Tensor:
        """A row with many new tokens: its cached latents are expanded to keys and values."""
        page_XW = self.cache.pages_LSXW[layer, slot, :end]
        latent_XC, k_rope_Xr = page_XW.split((expansion_HOC.shape[-1], q_nHK.shape[-1] - nope), -1)
        k, v = expand_latents(latent_XC, k_rope_Xr, expansion_HOC, nope)
        q, k, v = (x.transpose(0, 1)[None] for x in (q_nHK, k, v))
        if start == 0:
            return padded_attention(q, k, v, causal=True)[0].transpose(0, 1)
        mask = torch.ones(end - start, end, dtype=torch.bool, device=k.device).tril(start)
        return padded_attention(q, k, v, mask=mask)[0].transpose(0, 1)

    def commit(self) -> None:
        """Count the new tokens as held: called once all layers have written."""
        for _, slot, _, end in self._runs:
            self.cache.lengths[slot] = end


def _causal_bias(query_mHW: Tensor, start: int, end: int) -> Tensor | None:
    """-inf where a new token would see one after it, [(end - start) * H, end]; None for a single token."""
    if end - start == 1:
        return None
    later_nX = torch.full((end - start, end), float("-inf"), dtype=query_mHW.dtype, device=query_mHW.device)
    return later_nX.triu_(start + 1).repeat_interleave(query_mHW.shape[1], 0)
