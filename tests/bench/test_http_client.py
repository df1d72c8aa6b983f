"""The load generator's HTTP: bodies in every framing and cut, connections used again, what goes wrong."""

import pytest

from octavo.bench.http_client import ChunkedDecoder, HttpClient, HttpError, server_sent_events
from octavo.errors import ClientError
from tests.bench.scripted import client_of, fake_engine_server, scripted_server

CHUNKED = b"5;name=value\r\nhello\r\n1\r\n \r\n10\r\n0123456789abcdef\r\n0\r\nTrailer: x\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_chunked_bodies_in_pieces_of_any_size(size: int):
    decoder = ChunkedDecoder()
    body = b"".join(decoder.feed(CHUNKED[i : i + size]) for i in range(0, len(CHUNKED), size))
    assert body == b"hello 0123456789abcdef"
    assert decoder.is_done


def test_a_chunk_of_no_size_is_an_error():
    with pytest.raises(HttpError, match="not the size of a chunk"):
        ChunkedDecoder().feed(b"what\r\n")


async def pieces(data: bytes, size: int):
    for i in range(0, len(data), size):
        yield data[i : i + size]


@pytest.mark.parametrize("size", [1, 5, 1000])
async def test_events_come_as_their_lines_are_complete(size: int):
    text = b': comment\n\ndata: {"a": 1}\r\n\r\nevent: x\ndata:two\n\ndata: [DONE]'
    assert [event async for event in server_sent_events(pieces(text, size))] == [b'{"a": 1}', b"two", b"[DONE]"]


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED, b"hello 0123456789abcdef"),
        (b"HTTP/1.0 200 OK\r\n\r\nto the end", b"to the end"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ],
)
async def test_every_framing_of_a_body(answer: bytes, body: bytes):
    async with scripted_server(answer) as (url, requests), client_of(url, headers={"X-Key": "k"}) as client:
        async with client.request("POST", "/route?a=b", b"{}", {"X-Id": "7"}) as response:
            assert await response.read() == body
        assert requests[0].startswith(b"POST /route?a=b HTTP/1.1\r\nHost: 127.0.0.1:")
        assert b"\r\nX-Key: k\r\n" in requests[0] and b"\r\nX-Id: 7\r\n" in requests[0]
        assert requests[0].endswith(b"Content-Length: 2\r\n\r\n{}")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello", "in the middle of an answer"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel", "in the middle of an answer"),
        (b"", "without an answer"),
        (b"SSH-2.0-what\r\n\r\n", "not the first line"),
    ],
)
async def test_what_is_no_whole_answer_is_an_error(answer: bytes, message: str):
    async with scripted_server(answer) as (url, _), client_of(url) as client:
        with pytest.raises(HttpError, match=message):
            async with client.request("GET", "/") as response:
                await response.read()


async def test_a_connection_is_used_again_and_replaced_when_the_server_closed_it():
    ok = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    async with scripted_server(ok, ok) as (url, requests), client_of(url) as client:
        for _ in range(2):  # the server closes each connection after its answer
            async with client.request("GET", "/") as response:
                assert response.status == 200
        assert len(requests) == 2
    async with fake_engine_server() as url, client_of(url) as client:
        for _ in range(3):
            async with client.request("GET", "/version") as response:
                await response.read()
            assert len(client._idle) == 1


def test_addresses_and_headers_are_checked():
    with pytest.raises(ClientError, match="not an http or https address"):
        HttpClient("localhost:8000")
    with pytest.raises(ClientError, match="line break"):
        HttpClient("http://a")._message("GET", "/", None, {"X": "a\r\nEvil: b"})
