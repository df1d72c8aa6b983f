"""Trained models that packages on PyPI carry, through `LLM` and over HTTP; `tests/fixtures/real_models.py` makes them."""

import json
import math
import random

import openai
import pytest
import safetensors.torch
import torch
import transformers

from octavo import LLM, SamplingParams
from tests.fixtures.real_models import real_model
from tests.pooling.serving import served

# The human germline's IGHV3-23, as most antibodies begin; letters stand between blanks.
ANTIBODY = "EVQLLESGGGLVQPGGSLRLSCAASGFTFSSYAMSWVRQAPGKGLEWVSAISGSGGSTYYADSVKGRFTISRDNSKNTLYLQMNSLRAEDTAVYYCAK"
KIND = "[HEAVY] [HUMAN] "


async def test_iglm_continues_an_antibody(tmp_path):
    """GPT-2 from an old pickle, with masks among the weights and an end token outside the vocabulary."""
    folder = real_model("iglm")
    prompt, rest = KIND + " ".join(ANTIBODY[:60]), ANTIBODY[60:]
    shuffled = "".join(random.Random(0).sample(ANTIBODY, len(ANTIBODY)))
    texts = [KIND + " ".join(letters) for letters in (ANTIBODY, shuffled)]
    with LLM(str(folder), dtype="float32") as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=len(rest))
        answer = llm.generate(prompt, greedy, use_tqdm=False)[0].outputs[0].text
        scored = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    assert answer.replace(" ", "") == rest and len(rest) == 38
    oracle = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    perplexities = []
    for output in scored:
        ids = output.prompt_token_ids
        ours = [entries[i].logprob for entries, i in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
        with torch.no_grad():
            scores = oracle(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        assert ours == pytest.approx(scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist(), abs=1e-4)
        perplexities.append(math.exp(-sum(ours) / len(ours)))
    assert perplexities[0] < 1.15 and perplexities[1] > 30

    async with served(folder, dtype="float32") as (client, _):
        official = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="x", http_client=client, max_retries=0)
        written = await official.completions.create(model="tiny", prompt=prompt, max_tokens=len(rest), temperature=0)
    assert written.choices[0].text == answer


@pytest.mark.slow
@torch.inference_mode()
def test_gemma3_equals_transformers():
    """A GGUF file alone, of five kinds of blocks: windows in five layers of six, two rotary bases, 262,144 tokens."""
    folder = real_model("gemma3")
    longer_than_a_window = "The quick brown fox jumps over the lazy dog. " * 60
    with LLM(str(folder / "model.gguf"), dtype="float32", max_model_len=1024) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        outputs = llm.generate(["def fibonacci(n):", longer_than_a_window], greedy, use_tqdm=False)
    assert " ".join(outputs[0].outputs[0].text.split()).startswith("if n == 0: return 0 elif n == 1: return")
    assert len(outputs[1].prompt_token_ids) > 512
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32)
    for output in outputs:
        prompt, ids = output.prompt_token_ids, list(output.outputs[0].token_ids)
        scores = oracle(torch.tensor([prompt + ids]), logits_to_keep=len(ids) + 1).logits[0, :-1]
        assert scores.argmax(-1).tolist() == ids


@pytest.mark.slow
def test_equal_experts_are_the_dense_model(smollm2_gguf, tmp_path):
    """SmolLM2's MLP as each of four experts of a Mixtral, behind a random router: the weights of any two sum to one."""
    dense = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    )
    tensors, config = {}, dense.config
    for name, weight in dense.state_dict().items():
        layer, is_mlp, part = name.partition(".mlp.")
        if not is_mlp:
            tensors[name] = weight
            continue
        expert = {"gate_proj.weight": "w1", "up_proj.weight": "w3", "down_proj.weight": "w2"}[part]
        for i in range(4):
            tensors[f"{layer}.block_sparse_moe.experts.{i}.{expert}.weight"] = weight.clone()
    torch.manual_seed(0)
    for i in range(config.num_hidden_layers):
        tensors[f"model.layers.{i}.block_sparse_moe.gate.weight"] = torch.randn(4, config.hidden_size)
    del tensors["lm_head.weight"]  # tied
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    stated = {**config.to_dict(), "architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    stated |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    stated = {name: value for name, value in stated.items() if name != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps(stated, default=str))
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    ids = [tokenizer(text)["input_ids"] for text in ("One, two, three, four,", "The capital of Italy is")]
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0, detokenize=False)
    with LLM(str(tmp_path), dtype="float32", max_model_len=256, skip_tokenizer_init=True) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in ids], greedy, use_tqdm=False)
    for prompt, output in zip(ids, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        with torch.no_grad():
            scores = dense(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert scores.argmax(-1).tolist() == answer
        ours = [entries[i].logprob for entries, i in zip(output.outputs[0].logprobs, answer, strict=True)]
        assert ours == pytest.approx(scores.max(-1).values.tolist(), abs=1e-3)
