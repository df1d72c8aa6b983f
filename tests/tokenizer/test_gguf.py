"""Tokenizers from GGUF metadata alone (FC-154). Expected ids are those of the models' own tokenizers."""

import logging
import random
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import LoadError
from octavo.tokenizer.gguf import end_token_ids, tokenizer_from_metadata
from octavo.tokenizer.pre_tokenizers import PRE_TOKENIZERS, find_pre_tokenizer
from octavo.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.second_reader import SecondReader
from tests.tokenizer.vocabularies import sentencepiece_metadata


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("\U0001f336", [10813, 230, 131]),
        ("DEFGHIJ", [33203, 23960, 57, 58]),
        ("STOPHERE", [48124, 56, 14298]),
        ("</think>", [9617, 17400, 46]),
        (" Paris", [7042]),
        ("\n\n", [1116]),
        ("x  12 3", [104, 256, 33, 34, 216, 35]),
        ("<|im_start|>user\n", [1, 4093, 198]),
        ("", []),
    ],
)
def test_smollm2_ids(smol: Tokenizer, text: str, ids: list[int]) -> None:
    assert smol.encode(text) == ids
    assert smol.decode(ids, skip_special_tokens=False) == text


def test_smollm2_facts(smol: Tokenizer) -> None:
    assert len(smol) == smol.vocab_size == 49152
    assert (smol.bos_token, smol.bos_token_id) == ("<|im_start|>", 1)
    assert (smol.eos_token, smol.eos_token_id) == ("<|im_end|>", 2)
    assert (smol.unk_token_id, smol.pad_token_id) == (0, 2)
    assert smol.info.end_token_ids == [2]
    assert smol.all_special_ids == list(range(17))
    assert smol.id_to_token(7042) == "ĠParis"
    assert smol.id_to_token(49152) is None
    assert smol.id_to_token(-1) is None
    assert smol.token_to_id("ĠParis") == 7042
    assert smol.chat_template is not None


def test_smollm2_agrees_with_transformers(smol: Tokenizer) -> None:
    """The transformers tokenizer made of the same file says the same, and can be changed without harm."""
    hf = smol.hf
    text = "Café 123  4567\n\n\tdéjà vu 🌶🌶 <|im_end|> naïve…"
    assert hf.encode(text) == smol.encode(text)
    assert hf.bos_token_id == 1 and hf.eos_token_id == 2
    hf("a much longer text", truncation=True, max_length=2)
    assert len(smol.encode("a much longer text")) > 2


def test_smollm2_agrees_with_a_second_reader(smol: Tokenizer, smollm2_gguf: Path) -> None:
    """FC-154: 200 strings of digits, emoji, blanks and whatever else stands between words."""
    reader = SecondReader(smollm2_gguf)
    parts = [
        "12",
        "3.14",
        "007",
        "٣",
        "½",
        "🌶",
        "👩‍👩‍👧",
        "e\u0301",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "\u00a0",
        "\r\n",
        "don't",
    ]
    parts += [
        "I'LL",
        "word",
        "Word",
        "naïve",
        "我们",
        "привет",
        "_x_",
        "==",
        "…",
        "</s>",
        "STOP",
        "x" * 20,
        "\x00",
        "\ufeff",
    ]
    rng = random.Random(154)
    for _ in range(200):
        text = "".join(rng.choice(parts) for _ in range(rng.randint(1, 12)))
        assert smol.encode(text) == reader.encode(text), repr(text)


# The words that each way of cutting makes of one text.
_TEXT = "It's 12345  ab\n\n  x=é+HTMLPage 我们"


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["It", "'s", " 12345", " ", " ab", "\n\n ", " x", "=", "é", "+", "HTMLPage", " 我们"]),
        (
            "smollm",
            ["It", "'s", " ", "1", "2", "3", "4", "5", " ", " ab", "\n\n ", " x", "=", "é", "+", "HTMLPage", " 我们"],
        ),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " ", " ab", "\n\n", " ", " x", "=é", "+HTMLPage", " 我们"]),
        (
            "qwen2",
            ["It", "'s", " ", "1", "2", "3", "4", "5", " ", " ab", "\n\n", " ", " x", "=é", "+HTMLPage", " 我们"],
        ),
        ("gpt-4o", ["It's", " ", "123", "45", " ", " ab", "\n\n", " ", " x", "=é", "+HTMLPage", " 我们"]),
        (
            "tekken",
            ["It", "'s", " ", "1", "2", "3", "4", "5", " ", " ab", "\n\n", " ", " x", "=é", "+HTMLPage", " 我们"],
        ),
        (
            "deepseek-v3",
            ["It", "'s", " ", "123", "45", " ", " ab", "\n\n", " ", " x", "=", "é", "+HTMLPage", " ", "我们"],
        ),
        (
            "deepseek-coder",
            ["It", "'", "s", " ", *"12345", " ", " ab", "\n", "\n", " ", " x", "=", "é", "+", "HTMLPage", " ", "我们"],
        ),
        ("falcon", ["It", "'", "s", " ", "123", "45", " ", " ab", "\n\n ", " x", "=", "é", "+", "HTMLPage", " 我们"]),
        ("bloom", ["It's", " 12345", " ", " ab", "\n\n ", " x=é+HTMLPage", " 我们"]),
    ],
)
def test_words(pre: str, words: list[str]) -> None:
    cuts = find_pre_tokenizer(pre).build().pre_tokenize_str(_TEXT)
    assert [_TEXT[start:end] for _, (start, end) in cuts] == words


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_row_keeps_the_text(name: str) -> None:
    """Each pattern is valid, and cutting loses nothing."""
    text = "a'LL B1234 ｆｕｌｌ．width…\r\n \t— ২৩৪ ‘quoted’ e\u0301 👩‍👩‍👧 カタカナ가나다\n"
    cuts = PRE_TOKENIZERS[name].build().pre_tokenize_str(text)
    assert "".join(text[start:end] for _, (start, end) in cuts) == text


def test_unknown_pre_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(LoadError, match=r"tokenizer.ggml.pre='nonesuch'.*smollm"):
        find_pre_tokenizer("nonesuch")


def test_missing_pre_tokenizer_warns(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    assert find_pre_tokenizer(None) is PRE_TOKENIZERS["default"]
    assert "names no pre-tokenizer" in caplog.text


@pytest.mark.parametrize("kind", ["t5", "bert", "rwkv", None])
def test_other_vocabularies_are_refused(kind: str | None) -> None:
    with pytest.raises(LoadError, match=f"{kind!r}"):
        tokenizer_from_metadata({"tokenizer.ggml.model": kind}, "model.gguf")


@pytest.mark.parametrize("missing", ["tokens", "scores"])
def test_missing_metadata_is_named(missing: str) -> None:
    metadata = sentencepiece_metadata()
    del metadata[f"tokenizer.ggml.{missing}"]
    with pytest.raises(LoadError, match=f"tokenizer.ggml.{missing}"):
        tokenizer_from_metadata(metadata, "model.gguf")


def _pieces(tokenizer: Tokenizer, text: str, **options: Any) -> list[str | None]:
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text, **options))


def test_sentencepiece_ids(spm: Tokenizer) -> None:
    assert _pieces(spm, "the cats") == ["<s>", "▁the", "▁cat", "s"]
    assert _pieces(spm, "the cats", add_special_tokens=False) == ["▁the", "▁cat", "s"]
    assert _pieces(spm, "z", add_special_tokens=False) == ["▁", "<0x7A>"]
    assert _pieces(spm, "é🌶", add_special_tokens=False) == ["▁", "é", "<0xF0>", "<0x9F>", "<0x8C>", "<0xB6>"]
    assert _pieces(spm, "</s>cat<tool>", add_special_tokens=False) == ["</s>", "▁cat", "<tool>"]
    assert spm.decode(spm.encode("the z 🌶  é")) == "the z 🌶  é"


def test_sentencepiece_flags() -> None:
    plain = tokenizer_from_metadata(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False), "x.gguf")
    assert _pieces(plain, "the cat") == ["t", "he", "▁cat"]
    both = tokenizer_from_metadata(sentencepiece_metadata(add_eos_token=True), "x.gguf")
    assert _pieces(both, "the") == ["<s>", "▁the", "</s>"]


def test_end_tokens() -> None:
    metadata = {
        "tokenizer.ggml.tokens": ["<|end_of_text|>", "<|eot_id|>", "a", "<|eom_id|>", "<|end|>"],
        "tokenizer.ggml.token_type": [3, 3, 1, 3, 1],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eom_token_id": 3,
    }
    # Stated ones first, then well-known names; the last looks like one but is ordinary text.
    assert end_token_ids(metadata) == [0, 3, 1]


def test_named_chat_templates() -> None:
    metadata = sentencepiece_metadata() | {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "with tools",
    }
    tokenizer = tokenizer_from_metadata(metadata, "x.gguf")
    assert tokenizer.info.chat_templates == {"default": "plain", "tool_use": "with tools"}
