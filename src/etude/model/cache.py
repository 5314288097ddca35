"""Keys and values of running sequences in fixed slots, and attention over them for ragged batches.

Holds expanded keys and values as they were computed: a slot keeps its pages when the weights change under it (DESIGN 9, mode
`keep`). Which session owns a slot, and when it is given up, is the engine's business. Not safe for concurrent use.

Shapes: S slots, X capacity in tokens, M computed tokens, H heads, K query/key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from etude.model.config import ModelConfig
from etude.model.layout import padded_attention
from etude.records.errors import BadInput


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
        shape = (slots, config.num_attention_heads, max_tokens)
        layers = range(config.num_hidden_layers)
        self.keys = [torch.zeros(*shape, config.qk_head_dim, dtype=dtype, device=device) for _ in layers]
        self.values = [torch.zeros(*shape, config.v_head_dim, dtype=dtype, device=device) for _ in layers]
        self.lengths = torch.zeros(slots, dtype=torch.int64)
        """Tokens held by each slot; int64 on the CPU. Changed by `Decoder.extend`, `truncate` and `free` only."""

    def truncate(self, slot: int, n: int) -> None:
        """Forget all but the first `n` tokens of a slot."""
        held = int(self.lengths[self._checked(slot)])
        if not 0 <= n <= held:
            raise BadInput("key-value cache", f"length of slot {slot}", n, f"0 to {held}, the tokens it holds")
        self.lengths[slot] = n

    def free(self, slot: int) -> None:
        """Empty a slot."""
        self.lengths[self._checked(slot)] = 0

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
        held = cache.lengths.tolist()
        self.runs: list[tuple[int, int, int]] = []
        """(slot, tokens held before, new tokens) of each computed row, in order."""
        tokens: list[int] = []
        slot_M: list[int] = []
        position_M: list[int] = []
        seen: set[int] = set()
        lengths, slots = lengths_B.tolist(), slots_B.tolist()
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
            if start + count > cache.max_tokens:
                expected = f"at most {cache.max_tokens - start} more tokens in slot {slot}, which holds {start}"
                raise BadInput("decoder extend", f"lengths_B[{row}]", count, expected)
            self.runs.append((slot, start, count))
            tokens.extend(range(row * columns, row * columns + count))
            slot_M.extend([slot] * count)
            position_M.extend(range(start, start + count))
        device = cache.keys[0].device
        whole = len(tokens) == len(lengths) * columns
        self.keep_M = None if whole else torch.tensor(tokens, dtype=torch.int64, device=device)
        self.positions_M = torch.tensor(position_M, dtype=torch.int64, device=device)
        self._slot_M = torch.tensor(slot_M, dtype=torch.int64, device=device)

    def attend(self, layer: int, q_MHK: Tensor, k_MHK: Tensor, v_MHV: Tensor) -> Tensor:
        """Write the new keys and values, then let every new token see its slot up to itself; [M, H, V]."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self._slot_M, :, self.positions_M] = k_MHK
        values[self._slot_M, :, self.positions_M] = v_MHV
        scaled = q_MHK * q_MHK.shape[-1] ** -0.5
        out = torch.empty_like(v_MHV, memory_format=torch.contiguous_format)
        at = 0
        # One row at a time reads each slot's pages in place: gathering them into a batch would copy more than it saves.
        for slot, start, count in self.runs:
            end = start + count
            if count == 1:
                weights = torch.bmm(scaled[at].unsqueeze(1), keys[slot, :, :end].transpose(1, 2)).softmax(-1)
                out[at] = torch.bmm(weights, values[slot, :, :end]).squeeze(1)
            else:
                query = q_MHK[at : at + count].transpose(0, 1)[None]
                out[at : at + count] = self._attend_run(query, keys, values, slot, start, end)
            at += count
        return out

    def _attend_run(self, q_1HnK: Tensor, keys: Tensor, values: Tensor, slot: int, start: int, end: int) -> Tensor:
        k, v = keys[slot : slot + 1, :, :end], values[slot : slot + 1, :, :end]
        if start == 0:
            return padded_attention(q_1HnK, k, v, causal=True)[0].transpose(0, 1)
        mask = torch.ones(end - start, end, dtype=torch.bool, device=k.device).tril(start)
        return padded_attention(q_1HnK, k, v, mask=mask)[0].transpose(0, 1)

    def commit(self) -> None:
        """Count the new tokens as held: called once all layers have written."""
        for slot, start, count in self.runs:
            self.cache.lengths[slot] = start + count
