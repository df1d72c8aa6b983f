"""Tokenizers and templates that several tests use."""

from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.config.engine import TokenizerConfig
from octavo.tokenizer import Tokenizer, get_tokenizer
from octavo.tokenizer.gguf import tokenizer_from_metadata
from tests.tokenizer.vocabularies import sentencepiece_metadata


@pytest.fixture(scope="session")
def smol(smollm2_gguf: Path) -> Tokenizer:
    """SmolLM2's tokenizer from its GGUF."""
    return get_tokenizer(TokenizerConfig(str(smollm2_gguf)))


@pytest.fixture(scope="session")
def spm() -> Tokenizer:
    """A small SentencePiece vocabulary with byte fallback, as a Llama-2 GGUF describes its own."""
    return tokenizer_from_metadata(sentencepiece_metadata(), "spm.gguf")


@pytest.fixture(scope="session")
def template() -> Callable[[str], str]:
    """Read a chat template of tests/tokenizer/data by name."""
    folder = Path(__file__).parent / "data"
    return lambda name: (folder / f"{name}.jinja").read_text()
