"""The checkpoints that tests are built on do what they promise, judged by transformers."""

from pathlib import Path

import pytest
import torch

from tests.fixtures.checkpoints import write_position_gpt2
from tests.fixtures.tokenizers import CHAT_TEMPLATE, IM_END, byte_tokenizer

AutoModelForCausalLM = pytest.importorskip("transformers").AutoModelForCausalLM


def continue_greedily(path: Path, prompt: list[int], num_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_byte_tokenizer_spells_everything():
    tokenizer = byte_tokenizer()
    for text in ("Hello, world!\n", "naïve 🌶 日本語", "the other tension"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("there").ids) < 5
    assert tokenizer.encode("<|im_end|>").ids == [IM_END]


def test_random_llama_loads_in_transformers_and_is_not_degenerate(tiny_llama_dir):
    first = continue_greedily(tiny_llama_dir, [5, 6, 7], 16)
    second = continue_greedily(tiny_llama_dir, [9, 300, 7], 16)
    assert first != second
    assert len(set(first)) > 4


def test_chain_follows_its_successors(chain_llama_dir):
    tokenizer = byte_tokenizer()
    out = continue_greedily(chain_llama_dir, tokenizer.encode("xyz\n").ids, 37)
    assert tokenizer.decode(out, skip_special_tokens=False) == "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789<|im_end|>"


def test_position_gpt2_follows_its_script(tmp_path):
    script = [0, 0, 10, 11, 11, 11, 12, 10, IM_END]
    path = write_position_gpt2(tmp_path / "pos", script)
    assert continue_greedily(path, [40, 50], 7) == script[2:]


def test_tokenizer_folder_serves_transformers(tiny_llama_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer("Hi").input_ids == byte_tokenizer().encode("Hi").ids
