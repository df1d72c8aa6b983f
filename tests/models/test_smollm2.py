"""The real SmolLM2-135M from its GGUF against transformers in float32: 20 prompts, 64 greedy tokens each."""

import pytest
import torch
import transformers

from octavo import LLM, SamplingParams

PROMPTS = [
    "One, two, three, four,",  # a wrong row order of q and k shows here, and hardly anywhere else
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "Water boils at a temperature of",
    "The three primary colours are",
    "import numpy as np\n\n",
    "Q: What is 12 + 30?\nA:",
    "Dear Sir or Madam,\n\n",
    "Photosynthesis is the process by which",
    "1, 1, 2, 3, 5, 8,",
    "La capitale de l'Italie est",
    "In 1969, the first human",
    "# Shopping list\n\n- milk\n-",
    "The opposite of hot is",
    '{"name": "Ada", "age": ',
    "She opened the door and saw",
    "E = mc^2 means that",
    "🌶 is a",
    "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.fixture(scope="module")
def answers(smollm2_gguf):
    """Our answers, all prompts in one batch."""
    with LLM(str(smollm2_gguf), dtype="float32", max_model_len=512, max_num_seqs=32) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=1)
        return llm.generate(PROMPTS, params, use_tqdm=False)


@torch.inference_mode()
def test_greedy_tokens_and_logprobs_equal_transformers(smollm2_gguf, answers):
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    ).eval()
    for output in answers:
        prompt, ids = output.prompt_token_ids, output.outputs[0].token_ids
        # Every token is the oracle's choice after ours up to it, so by induction the whole answer is the oracle's.
        scores = oracle(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert scores.argmax(-1).tolist() == ids, output.prompt
        for token_id, entries, row in zip(ids, output.outputs[0].logprobs, scores, strict=True):
            assert entries[token_id].logprob == pytest.approx(float(row[token_id]), abs=1e-3)


def test_text_goes_on_as_it_should(answers):
    assert answers[0].outputs[0].text.startswith(" five, six, seven, eight")
    assert answers[1].outputs[0].text.startswith(" Paris")
