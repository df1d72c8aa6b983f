"""Files of requests: `octavo run-batch`."""

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main
from octavo.cli.run_batch import parse
from octavo.cli.run_batch import run as run_batch
from octavo.errors import ClientError, ConfigError
from octavo.server.batch import BatchRunner
from octavo.utils import public_url
from octavo.utils.public_url import open_public_url
from tests.server.fake_engine import FakeEngine, make_tokenizer
from tests.server.http import chat_body, make_app

CHAT = "/v1/chat/completions"


def line(custom_id: str = "a", url: str = CHAT, **changes: Any) -> bytes:
    body = {"prompt": "x"} if url == "/v1/completions" else {"input": "x"} if "responses" in url else chat_body()
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body} | changes).encode() + b"\n"


async def run(lines: list[bytes], engine: FakeEngine | None = None, **options: Any) -> list[dict]:
    written: list[bytes] = []
    options = {"max_concurrency": 4, "keeps_order": True, "key": None} | options
    runner = BatchRunner(make_app(engine), written.append, **options)
    counts = await runner.run(lines)
    answers = [json.loads(text) for text in written]
    assert all(text.endswith(b"\n") for text in written)
    good = sum((answer["response"] or {}).get("status_code") == 200 for answer in answers)
    assert (counts.num_answered, counts.num_failed) == (good, len(answers) - good)
    return answers


async def test_each_route_answers_as_over_http():
    urls = (CHAT, "/v1/completions", "/v1/responses")
    answers = await run([line(url, url) for url in urls] + [b"\n", b"  \n"])
    assert [answer["custom_id"] for answer in answers] == list(urls)
    objects = [answer["response"]["body"]["object"] for answer in answers]
    assert objects == ["chat.completion", "text_completion", "response"]
    assert all(answer["error"] is None and answer["response"]["status_code"] == 200 for answer in answers)
    assert len({answer["id"] for answer in answers}) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{bad\n", "malformed"),
        (b"[1]\n", "object"),
        (b"\xff\n", "malformed"),
        (line(method="GET"), "post"),
        (line(url="/v1/models"), "/v1/models"),
        (line(url="/health"), "/health"),
        (line(body=chat_body(stream=True)), "stream"),
        (line(body=[1]), "body"),
        (line("good"), "used before"),
    ],
)
async def test_a_bad_line_is_told_and_the_others_go_on(text, words):
    good, bad, last = await run([line("good"), text, line("last")])
    assert good["error"] is last["error"] is None
    assert bad["response"] is None and bad["error"]["code"] == "invalid_line"
    assert bad["error"]["message"].startswith("line 2: ") and words in bad["error"]["message"].lower()


async def test_a_refused_body_has_the_status_of_http():
    (answer,) = await run([line(body=chat_body(temperature=9))])
    assert answer["response"]["status_code"] == 400
    assert answer["response"]["body"]["error"]["param"] == "temperature"


async def test_order_and_concurrency():
    """The first prompt is answered last; one order keeps its place, the other does not."""
    gate = asyncio.Event()

    class Slow(FakeEngine):
        async def _steps(self, token_ids, params):
            if len(self.prompts) == 10:
                gate.set()
            if "slow" in make_tokenizer().decode(token_ids):
                await gate.wait()
            running.append(len(self.running))
            async for outputs in super()._steps(token_ids, params):
                yield outputs

    lines = [line("slow", body=chat_body("slow"))] + [line(str(i)) for i in range(9)]
    for keeps_order in (True, False):
        gate.clear()
        running: list[int] = []
        ids = [a["custom_id"] for a in await run(lines, Slow(), keeps_order=keeps_order, max_concurrency=3)]
        assert max(running) <= 3
        assert sorted(ids) == sorted(["slow", *map(str, range(9))])
        assert ids[0] == "slow" if keeps_order else ids[0] != "slow"


async def test_lines_are_read_as_there_is_room():
    engine = FakeEngine(hold_after=0)
    taken = 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        for number in range(10_000):
            taken += 1
            yield line(str(number))

    runner = BatchRunner(make_app(engine), lambda text: None, max_concurrency=2, keeps_order=True, key=None)
    task = asyncio.create_task(runner.run(endless()))
    await engine.reached.wait()
    for _ in range(100):
        await asyncio.sleep(0)
    assert taken < 50 and len(engine.running) == 2
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_key_of_the_environment_does_not_stand_in_the_way(monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    assert (await run([line()], key="secret"))[0]["response"]["status_code"] == 200


def test_command_line(tmp_path):
    words = ["-i", "in.jsonl", "-o", str(tmp_path / "out"), "--model", "m", "--max-concurrency", "3"]
    engine, server, batch = parse([*words, "--response-role", "bot", "--seed", "4"])
    assert (engine.model, engine.seed, server.response_role, batch.max_concurrency) == ("m", 4, "bot", 3)
    for wrong in (["--host", "x"], ["--api-key", "x"]):
        with pytest.raises(SystemExit):
            parse([*words, *wrong])
    for wrong in (["--model", "m"], ["-i", "x", "-o", "x"], ["-i", "x", "-o", "https://a.example/b"]):
        with pytest.raises(ConfigError):
            parse(wrong)
    with pytest.raises(ConfigError, match="cannot be read"):
        run_batch(["-i", str(tmp_path / "none"), "-o", str(tmp_path / "out"), "--model", "m"])


def test_the_command_on_a_real_model(chain_llama_dir: Path, tmp_path: Path):
    (tmp_path / "in.jsonl").write_bytes(line("one", body=chat_body(temperature=0)) + b"nonsense\n")
    words = ["run-batch", str(chain_llama_dir), "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert (
        main([*words, "--kv-cache-memory-bytes", "16M", "--max-num-seqs", "2", "--max-num-batched-tokens", "256"]) == 0
    )
    answer, error = [json.loads(text) for text in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    message = answer["response"]["body"]["choices"][0]["message"]
    assert message["content"] == "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    assert error["error"]["code"] == "invalid_line"


# --- web addresses ---------------------------------------------------------------------------------------------------


@pytest.fixture
def web() -> Iterator["http.server.HTTPServer"]:
    """A server on loopback that counts its visits: /data has lines, /away redirects to /data, /loop to itself."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.visits += 1  # type: ignore[attr-defined]
            if self.path == "/data":
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"one\ntwo\n")
            elif self.path in ("/away", "/loop"):
                self.send_response(302)
                self.send_header("location", "/data" if self.path == "/away" else "/loop")
                self.end_headers()
            else:
                self.send_error(404)

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    server.visits = 0  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "169.254.169.254"]
)
def test_private_addresses_are_not_visited(web, host):
    with (
        pytest.raises(ClientError, match=r"private|resolved"),
        open_public_url(f"http://{host}:{web.server_port}/data", 1),
    ):
        pass
    assert web.visits == 0


def test_every_redirect_is_checked(web, monkeypatch):
    answers = iter([True, False])
    monkeypatch.setattr(public_url, "_is_public", lambda address: next(answers))
    with pytest.raises(ClientError, match="private"), open_public_url(f"http://127.0.0.1:{web.server_port}/away", 5):
        pass
    assert web.visits == 1


def test_public_addresses_are_read(web, monkeypatch):
    monkeypatch.setattr(public_url, "_is_public", lambda address: True)
    base = f"http://127.0.0.1:{web.server_port}"
    with open_public_url(f"{base}/away", 5) as response:
        assert list(response) == [b"one\n", b"two\n"]
    for path, words in (("/none", "answers 404"), ("/loop", "redirected")):
        with pytest.raises(ClientError, match=words), open_public_url(base + path, 5):
            pass
    for url in ("file:///etc/hostname", "ftp://a.example/x", "http://"):
        with pytest.raises(ClientError, match="no http"), open_public_url(url, 5):
            pass
