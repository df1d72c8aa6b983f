"""Prompts: lengths as asked, the same for the same seed, files whole and cut."""

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import datasets
from octavo.bench.datasets import DatasetArgs, Sample, load_samples, objects_of_array
from octavo.errors import ClientError, ConfigError
from octavo.tokenizer.tokenizer import Tokenizer
from tests.server.fake_engine import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


def load(tokenizer: Tokenizer | None, seed: int = 0, vocab_size: int | None = None, **args: Any) -> list[Sample]:
    return load_samples(DatasetArgs(**{"num_prompts": 6} | args), seed, tokenizer, vocab_size=vocab_size)


def count(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


def test_random_lengths(tokenizer: Tokenizer):
    samples = load(tokenizer, random_input_len=30, random_output_len=9, random_prefix_len=12)
    assert len(samples) == 6 and len({s.prompt for s in samples}) == 6
    assert all(s.prompt_len == count(tokenizer, s.prompt) == len(s.token_ids or []) for s in samples)
    assert {s.prompt_len for s in samples} == {42} and {s.output_len for s in samples} == {9}
    heads = {s.prompt[:12] for s in samples}
    assert len(heads) == 1, "a prefix of 12 one-character tokens"
    assert samples == load(tokenizer, random_input_len=30, random_output_len=9, random_prefix_len=12)
    assert samples != load(tokenizer, 1, random_input_len=30, random_output_len=9, random_prefix_len=12)


def test_random_lengths_spread(tokenizer: Tokenizer):
    ratio = json.dumps({"input": 0.5, "output": 0.25})
    samples = load(tokenizer, num_prompts=200, random_input_len=20, random_output_len=8, random_range_ratio=ratio)
    assert (min(s.prompt_len for s in samples), max(s.prompt_len for s in samples)) == (10, 30)
    assert (min(s.output_len for s in samples), max(s.output_len for s in samples)) == (6, 10)
    for wrong in ("1", "-0.1", "wide", '{"input": 0.5}'):
        with pytest.raises(ConfigError, match="random_range_ratio"):
            DatasetArgs(random_range_ratio=wrong)


def test_random_with_a_real_vocabulary(smollm2_gguf: Path):
    from octavo.tokenizer.gguf import load_gguf_tokenizer

    real = load_gguf_tokenizer(smollm2_gguf)
    samples = load(real, input_len=100, random_prefix_len=50, num_prompts=20)
    assert {s.prompt_len for s in samples} == {150}
    assert all(count(real, s.prompt) == 150 for s in samples)


def test_random_without_a_tokenizer_is_ids():
    samples = load(None, vocab_size=50, random_input_len=7, random_prefix_len=3)
    assert all(s.prompt == "" and len(s.token_ids or []) == s.prompt_len == 10 for s in samples)
    assert len({tuple((s.token_ids or [])[:3]) for s in samples}) == 1
    assert all(0 <= token_id < 50 for s in samples for token_id in s.token_ids or [])
    with pytest.raises(ClientError, match="need a tokenizer"):
        load(None)
    with pytest.raises(ClientError, match="dataset_name=sonnet needs a tokenizer"):
        load(None, dataset_name="sonnet")


def test_prefix_repetition(tokenizer: Tokenizer):
    samples = load(
        tokenizer,
        num_prompts=10,
        dataset_name="prefix_repetition",
        prefix_repetition_prefix_len=20,
        prefix_repetition_suffix_len=5,
        prefix_repetition_num_prefixes=3,
    )
    # Where both parts meet, this vocabulary, which has few whole words, may join two characters.
    assert {s.prompt_len for s in samples} <= {24, 25}
    prefixes = [s.prompt[:20] for s in samples]
    assert sorted(prefixes.count(p) for p in set(prefixes)) == [3, 3, 4]
    assert len({s.prompt for s in samples}) == 10


def test_sonnet(tokenizer: Tokenizer):
    samples = load(tokenizer, dataset_name="sonnet", sonnet_input_len=400, sonnet_prefix_len=150)
    assert all(400 - 60 < s.prompt_len <= 400 and s.output_len == 150 for s in samples)
    first_lines = {tuple(s.prompt.splitlines()[:4]) for s in samples}
    assert len(first_lines) == 1 and len({s.prompt for s in samples}) == 6
    with pytest.raises(ClientError, match="cannot be that short"):
        load(tokenizer, dataset_name="sonnet", sonnet_input_len=30)


def conversation(question: str, answer: str) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


CONVERSATIONS = [
    conversation("How are you today?", "Well, thank you."),
    {"conversations": [{"from": "human", "value": "alone"}]},
    conversation("Hm", "too short a question"),
    conversation("A long one " * 200, "is left out"),
    conversation('Brackets ]}, "quotes" and é?', "All are text."),
]


@pytest.mark.parametrize("cut", [0, 1, 40])
@pytest.mark.parametrize("read_characters", [1, 16, 1 << 20])
def test_sharegpt_whole_and_cut(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int, read_characters: int
):
    """The copy of the file that people use ends in the middle of a conversation."""
    monkeypatch.setattr(datasets, "_READ_CHARACTERS", read_characters)
    path = tmp_path / "sharegpt.json"
    text = json.dumps(CONVERSATIONS, ensure_ascii=False, indent=1)
    path.write_text(text[: len(text) - cut], encoding="utf-8")
    samples = load(tokenizer, dataset_name="sharegpt", dataset_path=str(path), disable_shuffle=True, no_oversample=True)
    expected = [CONVERSATIONS[0]] + ([CONVERSATIONS[4]] if cut < 40 else [])
    turns = [entry["conversations"] for entry in expected]
    assert [s.prompt for s in samples] == [question["value"] for question, _ in turns]
    assert [s.output_len for s in samples] == [count(tokenizer, answer["value"]) for _, answer in turns]


def test_a_cut_is_told_and_other_json_refused(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    assert list(objects_of_array(io.StringIO('[{"a": 1}, {"b"'), "file")) == [{"a": 1}]
    assert "file is cut off or damaged after 1 objects" in caplog.text
    with pytest.raises(ClientError, match="not a JSON array"):
        list(objects_of_array(io.StringIO('{"a": 1}'), "file"))
    with pytest.raises(ClientError, match="holds a int"):
        list(objects_of_array(io.StringIO("[1]"), "file"))


def test_few_conversations_are_repeated(tokenizer: Tokenizer, tmp_path: Path):
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(CONVERSATIONS), encoding="utf-8")
    samples = load(tokenizer, dataset_name="sharegpt", dataset_path=str(path), sharegpt_output_len=11)
    assert len(samples) == 6 and len({s.prompt for s in samples}) == 2
    assert {s.output_len for s in samples} == {11}


def test_custom_lines(tokenizer: Tokenizer, tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "One", "output_tokens": 3}\n\n{"prompt": "Two", "output_tokens": 4}\n')
    options = {"dataset_name": "custom", "dataset_path": str(path), "disable_shuffle": True, "no_oversample": True}
    plain = load(tokenizer, **options, skip_chat_template=True, custom_output_len=-1)
    assert [(s.prompt, s.output_len) for s in plain] == [("One", 3), ("Two", 4)]
    templated = load(tokenizer, **options)
    assert templated[0].prompt == tokenizer.encode_chat([{"role": "user", "content": "One"}]).text
    assert templated[0].prompt_len == count(tokenizer, templated[0].prompt) and templated[0].output_len == 256
    path.write_text('{"prompt": "One"}\n')
    with pytest.raises(ClientError, match="line 1"):
        load(tokenizer, **options, custom_output_len=-1)
    path.write_text("")
    with pytest.raises(ClientError, match="no usable prompt"):
        load(tokenizer, **options)
    with pytest.raises(ClientError, match="needs --dataset-path"):
        load(tokenizer, dataset_name="custom")
