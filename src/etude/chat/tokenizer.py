"""Byte-level BPE tokenizer: training, loading, lossless encode and decode.

Text never turns into a special token (a file that contains `<|end|>` is encoded as plain characters), every byte
string has ids, and each id has exactly one byte string, so `decode_bytes(encode(text)) == text.encode()`. Digits stand
alone; a newline and the indentation after it are one piece. Knows nothing of conversations (`bridge`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from etude.chat.format import BOS, END, PAD, SPECIAL_TOKENS
from etude.records.errors import CheckpointError

_PIECES = r"\n *| ?[A-Za-z]+|_+[A-Za-z]*| ?[0-9]| ?[^\sA-Za-z0-9_]{1,3}|[ \t\r]+|\s"


def _byte_alphabet() -> dict[str, int]:
    """The byte-level BPE alphabet of GPT-2: printable bytes stand for themselves, the others for code points from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


class Tokenizer:
    """Ids of text and back. `special` maps each special token to its id; ids below `len(special)` are special."""

    def __init__(self, backend: tokenizers.Tokenizer, place: str = "tokenizer.json") -> None:
        self._backend = backend
        self._backend.encode_special_tokens = True
        self.vocab_size: int = backend.get_vocab_size()
        vocabulary: dict[str, int] = backend.get_vocab()
        self.special: dict[str, int] = {token: vocabulary.get(token, -1) for token in SPECIAL_TOKENS}
        for index, token in enumerate(SPECIAL_TOKENS):
            if self.special[token] != index:
                raise CheckpointError(place, f"id of {token}", self.special[token], f"{index}")
        alphabet = _byte_alphabet()
        self.token_bytes: list[bytes] = [b""] * self.vocab_size
        for piece, index in vocabulary.items():
            if index >= len(SPECIAL_TOKENS):
                self.token_bytes[index] = bytes(alphabet[character] for character in piece)
        self.pad_id, self.bos_id, self.end_id = self.special[PAD], self.special[BOS], self.special[END]

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Reads `tokenizer.json` in a Hugging Face folder. Raises CheckpointError when it is missing or not ours."""
        path = Path(folder) / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(str(path), "file", "missing", "a tokenizer.json made by `etude`") from None
        except Exception as error:  # the library raises plain Exception on a malformed file
            raise CheckpointError(str(path), "content", str(error), "a readable tokenizer.json") from error
        return cls(backend, str(path))

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int = 2048) -> Tokenizer:
        """Trains byte-level BPE of `vocab_size` ids (special tokens and 256 bytes included) on the texts."""
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(_PIECES), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend)

    def save(self, folder: str | Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json` so that transformers' AutoTokenizer loads them."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": END,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 4096,
        }
        for name, text in (
            ("tokenizer.json", self._backend.to_str()),
            ("tokenizer_config.json", json.dumps(config, indent=1)),
        ):
            temporary = folder / (name + ".tmp")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(folder / name)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; special-token strings inside it stay text."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Exact bytes of the ids; special tokens give none."""
        return b"".join(self.token_bytes[index] for index in ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def show(self, ids: Sequence[int]) -> str:
        """Text for people, special tokens written out."""
        names = {index: token for token, index in self.special.items()}
        return "".join(names.get(index) or self.decode([index]) for index in ids)
