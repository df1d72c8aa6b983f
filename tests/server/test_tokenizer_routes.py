"""/tokenize and /detokenize (FC-012)."""

import random

from tests.server.fake_engine import FakeEngine, make_tokenizer
from tests.server.http import chat_body, client_of, error_of


async def test_tokenize_text():
    async with client_of() as client:
        body = (await client.post("/tokenize", json={"prompt": "Hi all", "return_token_strs": True})).json()
    ids = make_tokenizer().encode("Hi all")
    assert body["tokens"] == ids and body["count"] == len(ids) and body["max_model_len"] == 128
    assert body["token_strs"] == make_tokenizer().convert_ids_to_tokens(ids)


async def test_count_of_messages_is_that_of_the_chat():
    async with client_of() as client:
        tokens = (await client.post("/tokenize", json=chat_body("How?"))).json()
        usage = (await client.post("/v1/chat/completions", json=chat_body("How?"))).json()["usage"]
        without = (await client.post("/tokenize", json=chat_body("How?", add_generation_prompt=False))).json()
    assert tokens["count"] == len(tokens["tokens"]) == usage["prompt_tokens"] > without["count"]


async def test_refusals():
    async with client_of() as client:
        for body in ({}, {"messages": []}, {**chat_body(), "prompt": "x"}, {"prompt": 5}, chat_body(tools=[{"x": 1}])):
            error_of(await client.post("/tokenize", json=body), 400)
        for tokens in ([-1], [10**9], ["a"], [True], [1.5], None):
            assert error_of(await client.post("/detokenize", json={"tokens": tokens}), 400)["param"].startswith(
                "tokens"
            )
        assert error_of(await client.post("/detokenize", json={}), 400)["param"] == "tokens"
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": []})):
            error_of(await client.post(path, json={**body, "model": "nope"}), 404)
    async with client_of(FakeEngine(texts=None)) as client:
        error_of(await client.post("/tokenize", json={"prompt": "x"}), 400)
        error_of(await client.post("/detokenize", json={"tokens": [5]}), 400)


async def test_round_trip():
    rng = random.Random(7)
    texts = [
        "",
        *(
            "".join(chr(rng.choice((rng.randrange(32, 127), rng.randrange(0xA0, 0xD7FF), 0x1F336))) for _ in range(20))
            for _ in range(50)
        ),
    ]
    async with client_of() as client:
        for text in texts:
            tokens = (await client.post("/tokenize", json={"prompt": text})).json()["tokens"]
            assert (await client.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": text}
