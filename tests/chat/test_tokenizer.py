from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.chat.format import SPECIAL_TOKENS
from etude.chat.tokenizer import Tokenizer
from etude.records.errors import CheckpointError


@given(text=st.text(max_size=200))
def test_encoding_is_lossless(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode_bytes(tokenizer.encode(text)) == text.encode()


@pytest.mark.parametrize("token", SPECIAL_TOKENS[:12])
def test_special_token_text_never_becomes_a_special_id(tokenizer: Tokenizer, token: str) -> None:
    ids = tokenizer.encode(f"x = '{token}'")
    assert min(ids) >= len(SPECIAL_TOKENS)
    assert tokenizer.decode(ids) == f"x = '{token}'"


def test_each_digit_is_its_own_token(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("12345")) == 5


def test_saved_tokenizer_loads_with_equal_ids_here_and_in_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    text = "def f(x):\n    return x + 12\n"
    again = Tokenizer.load(tmp_path)
    assert again.encode(text) == tokenizer.encode(text)
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == tokenizer.encode(text)


@pytest.mark.parametrize("content", [None, "", "{", '{"version": "1.0"}'])
def test_missing_or_broken_file_is_one_clear_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
