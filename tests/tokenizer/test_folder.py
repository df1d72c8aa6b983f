"""Tokenizers from model folders: what the small files beside tokenizer.json change."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from octavo.config.engine import TokenizerConfig
from octavo.errors import ConfigError, LoadError
from octavo.tokenizer import IncrementalDetokenizer, Tokenizer, get_tokenizer
from octavo.types.sampling_params import SamplingParams
from tests.fixtures.tokenizers import byte_tokenizer, write_byte_tokenizer


def write(path: Path, config: dict[str, Any], rust: tokenizers.Tokenizer | None = None) -> Path:
    path.mkdir(exist_ok=True)
    (rust or byte_tokenizer()).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def load(path: Path, **options: Any) -> Tokenizer:
    return get_tokenizer(TokenizerConfig(str(path), **options))


@pytest.mark.parametrize("mode", ["auto", "hf"])
def test_both_ways_of_loading_agree(tmp_path: Path, mode: str) -> None:
    tokenizer = load(write_byte_tokenizer(tmp_path), mode=mode)
    text = "héllo the world <|im_end|>\n 12"
    assert tokenizer.encode(text) == tokenizer.hf.encode(text)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert tokenizer.all_special_ids == [0, 1, 2]
    assert len(tokenizer) == 512
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(("bos", "eos"), [(True, True), (True, False), (False, True), (False, False)])
def test_add_bos_and_eos(tmp_path: Path, bos: bool, eos: bool) -> None:
    config = {
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"},
        "add_bos_token": bos,
        "add_eos_token": eos,
    }
    tokenizer = load(write(tmp_path, config))
    plain = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == [1] * bos + plain + [2] * eos


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    rust = byte_tokenizer()
    rust.enable_truncation(2)
    rust.enable_padding(length=8)
    tokenizer = load(write(tmp_path, {}, rust))
    assert len(tokenizer.encode("a long text")) == len(tokenizer.encode("a long")) + 4


def test_tokens_named_beside_the_vocabulary(tmp_path: Path) -> None:
    config = {
        "added_tokens_decoder": {
            "512": {"content": "<tool>", "special": False, "normalized": False},
            "513": {"content": "<|pad|>", "special": True},
        },
        "pad_token": "<|pad|>",
        "unk_token": "<nowhere>",
        "additional_special_tokens": ["<tool>"],
    }
    tokenizer = load(write(tmp_path, config))
    assert tokenizer.encode("<tool><|pad|>") == [512, 513]
    assert tokenizer.pad_token_id == 513
    assert tokenizer.unk_token_id is None
    assert tokenizer.decode([512, 513]) == ""  # both are special: one by its flag, one by name
    assert len(tokenizer) == 514


def test_tokens_that_do_not_fit_are_named(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"600": {"content": "<tool>"}}}
    with pytest.raises(LoadError, match=r"'<tool>' should have id 600.*512"):
        load(write(tmp_path, config))


def test_chat_templates_of_every_place(tmp_path: Path) -> None:
    config = {"chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]}
    folder = write(tmp_path, config)
    assert load(folder).info.chat_templates == {"default": "D", "tool_use": "T"}
    (folder / "chat_template.jinja").write_text("file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert load(folder).info.chat_templates == {"default": "file", "tool_use": "T", "rag": "R"}
    assert load(folder, chat_template="given").info.chat_templates == {"default": "given"}
    assert load(folder, chat_template="rag").info.chat_templates == {"default": "R"}
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.json").write_text('{"chat_template": "processor"}')
    assert load(folder).chat_template == "processor"


@pytest.mark.parametrize("text", ["{", "[]"])
def test_damaged_files_are_named(tmp_path: Path, text: str) -> None:
    folder = write(tmp_path, {})
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(LoadError, match=r"tokenizer_config\.json"):
        load(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadError, match="tokenizer"):
        load(folder)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        get_tokenizer(TokenizerConfig(None))
    with pytest.raises(ConfigError, match="tokenizer_mode='mistral'"):
        load(tmp_path, mode="mistral")
    with pytest.raises(LoadError, match=r"^[^\n]*no tokenizer\.json[^\n]*--skip-tokenizer-init\)\.$"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="neither a folder"):
        get_tokenizer(TokenizerConfig("nobody/nothing"))


def test_a_folder_that_holds_a_gguf_only(tmp_path: Path, smollm2_gguf: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(smollm2_gguf)
    assert load(tmp_path).encode(" Paris") == [7042]


def test_a_sentencepiece_model_goes_through_transformers(tmp_path: Path) -> None:
    """transformers converts it with the help of protobuf; ids equal SentencePiece's own."""
    sentencepiece = pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf", reason="transformers needs protobuf to read a SentencePiece model")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(f"the cat number {i} sat on the mat" for i in range(200)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true}')
    tokenizer = load(tmp_path)
    processor = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    text = "the cat sat 🌶"
    assert tokenizer.encode(text, add_special_tokens=False) == processor.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.token_bytes is not None


def test_a_tokenizer_written_in_python(tmp_path: Path) -> None:
    """ByT5 has no Rust form: one byte a token, through transformers behind a lock."""
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(tmp_path)
    tokenizer = load(tmp_path)
    assert not tokenizer.is_fast and tokenizer.token_bytes is None
    text = "héllo 🌶"
    ids = tokenizer.encode(text)
    assert ids == [*(byte + 3 for byte in text.encode()), tokenizer.eos_token_id]
    assert tokenizer.encode_batch([text]) == [ids]
    assert tokenizer.backend.encode_pieces(["hé", "llo 🌶"], add_special_tokens=True) == ids
    assert tokenizer.decode([*ids, 10**6]) == text
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("x")[:-1], SamplingParams())
    assert "".join(detokenizer.update([i], finished=False).text for i in ids) == text
    assert (tokenizer.token_to_id("a"), tokenizer.id_to_token(100), tokenizer.id_to_token(10**6)) == (100, "a", None)


def test_loading_needs_neither_transformers_nor_torch(tmp_path: Path) -> None:
    """Start time counts: tokenizer.json is read directly."""
    script = (
        "import sys; from octavo.tokenizer import get_tokenizer; from octavo.config.engine import TokenizerConfig; "
        "get_tokenizer(TokenizerConfig(sys.argv[1])).encode_chat([{'role': 'user', 'content': 'x'}]); "
        "print([name for name in ('torch', 'transformers', 'gguf') if name in sys.modules])"
    )
    folder = write_byte_tokenizer(tmp_path)
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
