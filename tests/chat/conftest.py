"""A small tokenizer shared by the chat tests."""

import inspect
import textwrap

import pytest

from etude.chat.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([inspect.getsource(textwrap)] * 2, vocab_size=600)
