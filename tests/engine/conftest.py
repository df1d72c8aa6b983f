"""Fixtures of the engine's tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.config.engine import TokenizerConfig
from octavo.tokenizer import Tokenizer, get_tokenizer
from tests.fixtures.tokenizers import write_byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return get_tokenizer(TokenizerConfig(path=str(tokenizer_dir)))


@pytest.fixture(scope="session")
def spell(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Text to one token a character."""
    return lambda text: [token_id for character in text for token_id in tokenizer.encode(character)]
