"""The HTTP routes of models that make vectors, classes and scores, over the whole engine."""

import asyncio
import base64
import json

import numpy as np
import openai
import pytest
import torch
import transformers

from octavo.server.batch import BatchRunner
from tests.pooling.checkpoints import TEXTS, write_encoder, write_tokenizer
from tests.pooling.serving import served

EMBEDDINGS = "/v1/embeddings"


@pytest.fixture(scope="module")
def emb(tmp_path_factory):
    """EMB: a random BERT whose embeddings may be cut to 8 or 16."""
    folder = tmp_path_factory.mktemp("emb")
    write_encoder("bert", folder, "AutoModel", matryoshka_dimensions=[8, 16])
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def rank(tmp_path_factory):
    """RANK: a random pair classifier of one label."""
    folder = tmp_path_factory.mktemp("rank")
    oracle = write_encoder("bert", folder, "AutoModelForSequenceClassification", num_labels=1)
    write_tokenizer(folder)
    return folder, oracle


async def vectors(client, **body):
    answer = await client.post(EMBEDDINGS, json=body)
    assert answer.status_code == 200, answer.text
    assert [item["index"] for item in answer.json()["data"]] == list(range(len(answer.json()["data"])))
    return [item["embedding"] for item in answer.json()["data"]]


async def floats_of(client, texts=TEXTS):
    return np.array(await vectors(client, input=texts))


async def test_base64_is_little_endian_float32(emb):
    """FC-141; the official client asks for it by itself."""
    async with served(emb) as (client, _):
        floats = await floats_of(client)
        coded = await vectors(client, input=TEXTS, encoding_format="base64")
        assert [len(base64.b64decode(text)) for text in coded] == [32 * 4] * len(TEXTS)
        decoded = np.array([np.frombuffer(base64.b64decode(text), "<f4") for text in coded])
        np.testing.assert_allclose(decoded, floats, atol=1e-6)
        official = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="x", http_client=client, max_retries=0)
        answer = await official.embeddings.create(model="tiny", input=TEXTS)
        np.testing.assert_allclose([item.embedding for item in answer.data], floats, atol=1e-6)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0


async def test_dimensions_are_cut_and_normalised_or_refused(emb):
    """FC-142"""
    async with served(emb) as (client, _):
        floats = await floats_of(client)
        cut = np.array(await vectors(client, input=TEXTS[0], dimensions=8))[0]
        np.testing.assert_allclose(cut, floats[0][:8] / np.linalg.norm(floats[0][:8]), atol=1e-6)
        for dimensions in (0, -1, 7, 64, True, 2.5, 2**40):
            assert (await client.post(EMBEDDINGS, json={"input": "a", "dimensions": dimensions})).status_code == 400


async def test_short_texts_beside_ones_that_are_cut(emb):
    """FC-143"""
    long = "login " * 300
    async with served(emb) as (client, _):
        assert (await client.post(EMBEDDINGS, json={"input": long})).status_code == 400
        alone = [(await vectors(client, input=text, truncate_prompt_tokens=-1))[0] for text in ("a", long)]
        for _ in range(20):
            for inputs in (["a", long], [long, "a"]):
                found = await vectors(client, input=inputs, truncate_prompt_tokens=-1)
                np.testing.assert_allclose(found, alone if inputs[0] == "a" else alone[::-1], atol=1e-5)


async def test_order_emptiness_and_unequal_lengths(emb):
    """FC-145"""
    mixed = [*TEXTS, ""]
    ids = [[0, 4, 5, 2], [0, 6, 2]]
    async with served(emb) as (client, _):
        together = await vectors(client, input=mixed)
        for text, vector in zip(mixed, together, strict=True):
            np.testing.assert_allclose((await vectors(client, input=text))[0], vector, atol=1e-5)
        both = await vectors(client, input=ids)
        np.testing.assert_allclose((await vectors(client, input=ids[1]))[0], both[1], atol=1e-5)
        assert (await client.post(EMBEDDINGS, json={"input": []})).status_code == 400
        # Many at once, of two at a time.
        pairs = [[mixed[i % 5], mixed[(i + 1) % 5]] for i in range(40)]
        answers = await asyncio.gather(*(vectors(client, input=pair) for pair in pairs))
        for pair, answer in zip(pairs, answers, strict=True):
            np.testing.assert_allclose(answer, [together[mixed.index(text)] for text in pair], atol=1e-5)


async def test_other_forms_and_hostile_bodies(emb):
    async with served(emb) as (client, app):
        floats = await floats_of(client)
        tokens = await client.post("/pooling", json={"input": TEXTS[0], "task": "token_embed"})
        assert np.array(tokens.json()["data"][0]["data"]).shape == (8, 32)
        cohere = await client.post("/v2/embed", json={"texts": TEXTS, "embedding_types": ["float", "ubinary"]})
        np.testing.assert_allclose(cohere.json()["embeddings"]["float"], floats, atol=1e-6)
        bits = np.unpackbits(np.array(cohere.json()["embeddings"]["ubinary"], dtype=np.uint8), axis=1)
        assert (bits == (floats > 0)).all()

        for body in ({"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 97}, {"truncate": "START"}, {"texts": []}):
            answer = await client.post("/v2/embed", json={"texts": ["a"], **body})
            assert answer.status_code == 400, (body, answer.text)
        for body in HOSTILE:
            answer = await client.post(EMBEDDINGS, json=body)
            assert answer.status_code in (400, 404), (body, answer.text)
            assert answer.json()["error"]["message"]
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"):
            refused = await client.post(path, json={"model": "tiny"})
            assert refused.status_code == 400 and "its tasks are embed" in refused.json()["error"]["message"], path
        assert (await client.post("/classify", json={"input": "a"})).status_code == 400
        np.testing.assert_allclose(await vectors(client, input=TEXTS), floats, atol=1e-6)

        lines = [
            {"custom_id": "1", "method": "POST", "url": EMBEDDINGS, "body": {"input": TEXTS[0]}},
            {"custom_id": "2", "method": "POST", "url": "/v1/score", "body": {"text_1": "a", "text_2": TEXTS}},
            {"custom_id": "3", "method": "POST", "url": "/v1/rerank", "body": {"query": "a", "documents": TEXTS}},
        ]
        written: list[bytes] = []
        runner = BatchRunner(app, written.append, max_concurrency=2, keeps_order=True, key=None)
        counts = await runner.run(json.dumps(line).encode() for line in lines)
        assert counts.num_answered == 3 and [json.loads(line)["custom_id"] for line in written] == ["1", "2", "3"]


HOSTILE = [
    {},
    {"input": None},
    {"input": []},
    {"input": [[]]},
    {"input": ["a", 1]},
    {"input": [1, "a"]},
    {"input": [[1], "a"]},
    {"input": [256]},
    {"input": [-1]},
    {"input": [True]},
    {"input": {"text": "a"}},
    {"input": 5},
    {"input": ["a"] * 2049},
    {"input": "a", "model": "other"},
    {"input": "a", "encoding_format": "bytes"},
    {"input": "a", "encoding_format": 5},
    {"input": "a", "truncate_prompt_tokens": 0},
    {"input": "a", "truncate_prompt_tokens": 97},
    {"input": "a", "truncate_prompt_tokens": -2},
    {"input": "a", "truncate_prompt_tokens": 1},
    {"input": "a", "prompt_name": "query"},
    {"input": "a", "request_id": "no spaces"},
    {"input": "a", "embed_dtype": "fp8"},
    {"input": "a", "truncation_side": "left"},
    {"input": "a", "messages": [{"role": "user", "content": "a"}]},
    {"messages": [{"role": "user", "content": "a"}]},
]


async def test_rerank_and_score(rank):
    """FC-146: sorted by score with the original index, `top_n` of them."""
    folder, oracle = rank
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        pairs = [tokenizer(TEXTS[0], text, return_tensors="pt", return_token_type_ids=True) for text in TEXTS]
        expected = [float(oracle(**pair).logits.sigmoid()) for pair in pairs]
    order = sorted(range(len(TEXTS)), key=lambda i: -expected[i])
    documents = [TEXTS[0], {"text": TEXTS[1]}, *TEXTS[2:]]
    async with served(folder) as (client, _):
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            for top_n, count in ((2, 2), (9, 4), (0, 4), (None, 4)):
                answer = await client.post(path, json={"query": TEXTS[0], "documents": documents, "top_n": top_n})
                results = answer.json()["results"]
                assert [result["index"] for result in results] == order[:count]
                assert [result["relevance_score"] for result in results] == pytest.approx(
                    [expected[i] for i in order[:count]], abs=1e-5
                )
                assert results[0]["document"] == {"text": TEXTS[order[0]]}
        bare = await client.post("/rerank", json={"query": "a", "documents": ["a"], "return_documents": False})
        assert "document" not in bare.json()["results"][0]
        for path in ("/score", "/v1/score"):
            for names in (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")):
                answer = await client.post(path, json=dict(zip(names, (TEXTS[0], TEXTS), strict=True)))
                assert [item["score"] for item in answer.json()["data"]] == pytest.approx(expected, abs=1e-5)
        labels = await client.post("/classify", json={"input": TEXTS[0]})
        assert labels.json()["data"][0]["label"] == "LABEL_0"
        for body in (
            {"query": "a", "documents": []},
            {"query": "a"},
            {"documents": ["a"]},
            {"query": "a", "documents": ["a"], "top_n": -1},
            {"query": "a", "documents": [{"image": "a"}]},
            {"query": "a", "documents": ["a" * 60000]},
            {"query": "a", "documents": ["a"], "instruction": "be kind"},
        ):
            assert (await client.post("/rerank", json=body)).status_code == 400, body
        for body in ({"text_1": "a"}, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, {"text_1": [], "text_2": "a"}):
            assert (await client.post("/score", json=body)).status_code == 400, body


async def test_a_model_that_makes_text_refuses(tiny_llama_dir):
    async with served(tiny_llama_dir, kv_cache_memory_bytes=4 << 20, block_size=16, max_num_seqs=2) as (client, _):
        for path in (EMBEDDINGS, "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v2/rerank"):
            answer = await client.post(path, json={"input": "a"})
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "unsupported_task", path
