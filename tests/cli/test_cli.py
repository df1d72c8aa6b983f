"""The command `octavo`: subcommands, exit codes, and the two clients against a scripted server."""

import gc
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from octavo import __version__, cli
from octavo.errors import ConfigError


class ScriptedServer(ThreadingHTTPServer):
    """Answers completions from `chunks`, and remembers what it was sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.chunks: list[Any] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        self._reply({"data": [{"id": "first"}, {"id": "second"}]})

    def do_POST(self) -> None:
        self.server.keys.append(self.headers.get("Authorization"))
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.server.status != 200:
            self._reply({"error": {"message": "too long", "code": "x"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for chunk in self.server.chunks:
            data = chunk if isinstance(chunk, str) else json.dumps(chunk)
            self.wfile.write(f"data: {data}\n\n".encode())

    def _reply(self, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(self.server.status if self.command == "POST" else 200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    made = ScriptedServer()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


def chat_chunk(text: str | None) -> dict[str, Any]:
    return {"choices": [{"delta": {} if text is None else {"content": text}}]}


def test_usage_version_and_unknown_commands(capsys):
    assert cli.main([]) == 0
    usage = capsys.readouterr().out
    assert all(name in usage for name in cli.COMMANDS)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__
    assert cli.main(["launch"]) == 2
    assert "launch is not supported yet; there are serve" in capsys.readouterr().err
    assert cli.main(["sevre"]) == 2
    assert "sevre is not a command" in capsys.readouterr().err


def test_an_error_of_ours_is_one_line_and_exit_code_1(capsys):
    assert cli.main(["serve", "m", "--gpu-memory-utilization", "2"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("octavo: gpu_memory_utilization=2.0 is not allowed")
    assert captured.err.count("\n") == 1


def test_a_wrong_flag_is_exit_code_2(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["serve", "--enable-lora"])
    assert stop.value.code == 2


def test_serve_hands_both_option_sets_to_the_server(monkeypatch):
    launch = pytest.importorskip("octavo.server.launch")
    seen = []
    monkeypatch.setattr(launch, "run_server", lambda *args: seen.append(args) or 0)
    assert cli.main(["serve", "m", "--port", "0", "--seed", "9"]) == 0
    engine_args, server_args, started, core = seen[0]
    assert (engine_args.model, engine_args.seed, server_args.port) == ("m", 9, 0)
    assert started > 0
    assert core.process.poll() is not None  # spawned for the server, and gone with it

    def fail(*args: object) -> int:
        raise ConfigError("no such address.")

    monkeypatch.setattr(launch, "run_server", fail)
    assert cli.main(["serve", "m"]) == 1
    assert gc.isenabled()  # off while the server comes up


def test_quick_chat_streams_the_answer(server, capsys):
    server.chunks = [chat_chunk(None), chat_chunk("Hel"), chat_chunk("lo"), USAGE, "[DONE]"]
    words = ["chat", "--url", server.url, "-q", "hi", "--system-prompt", "be brief", "--api-key", "k", "--stats"]
    assert cli.main([*words, "--max-tokens", "5", "--temperature", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Hello"
    assert lines[1].startswith("[3 prompt tokens, 2 generated")
    body = server.bodies[0]
    assert body["model"] == "first"
    assert body["stream"] is True
    assert body["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert (body["max_tokens"], body["temperature"]) == (5, 0)
    assert server.keys == ["Bearer k"]


def test_chat_keeps_the_conversation(server, capsys, monkeypatch):
    server.chunks = [chat_chunk("A"), USAGE, "[DONE]"]
    typed = iter(["one", " ", "two"])
    monkeypatch.setattr("builtins.input", lambda prompt: _next_or_end(typed))
    assert cli.main(["chat", "--url", server.url, "--model-name", "second"]) == 0
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["one", "A", "two"]
    assert "max_tokens" not in server.bodies[0]
    assert server.bodies[0]["model"] == "second"


def _next_or_end(typed: Iterator[str]) -> str:
    for line in typed:
        return line
    raise EOFError


def test_complete(server, capsys):
    server.chunks = [{"choices": [{"text": " two"}]}, {"choices": [{"text": " three"}]}, USAGE, "[DONE]"]
    assert cli.main(["complete", "--url", server.url, "--quick", "one"]) == 0
    assert capsys.readouterr().out == " two three\n"
    assert server.bodies[0]["prompt"] == "one"


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([chat_chunk("A")], "ended the stream before the answer was complete"),
        ([chat_chunk("A"), {"error": {"message": "engine died"}}], "the server broke off: engine died"),
        (["{"], "broke"),
    ],
)
def test_a_stream_that_breaks_is_an_error(server, capsys, chunks, message):
    server.chunks = chunks
    assert cli.main(["chat", "--url", server.url, "-q", "hi"]) == 1
    assert message in capsys.readouterr().err


def test_what_the_server_refuses_is_shown_in_its_words(server, capsys):
    server.status = 400
    assert cli.main(["chat", "--url", server.url, "-q", "hi"]) == 1
    assert "answers 400: too long" in capsys.readouterr().err


def test_no_server(capsys):
    assert cli.main(["chat", "--url", "http://127.0.0.1:9/v1", "-q", "hi"]) == 1
    assert "start one with `octavo serve`" in capsys.readouterr().err
    assert cli.main(["chat", "--url", "localhost:8000", "-q", "hi"]) == 1
    assert "is not an http or https address" in capsys.readouterr().err


def test_collect_env_hides_secrets(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OCTAVO_API_KEY", "sk-secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert cli.main(["collect-env"]) == 0
    report = capsys.readouterr().out
    assert f"octavo {__version__}" in report
    assert "secret" not in report
    assert "HF_TOKEN=(set)" in report and "OMP_NUM_THREADS=1" in report
    assert "torch 2." in report
