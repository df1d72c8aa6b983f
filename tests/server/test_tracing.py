"""Traces: spans as a collector receives them."""

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from octavo import tracing
from octavo.errors import ConfigError
from octavo.types.outputs import RequestMetrics
from tests.server.fake_engine import FakeEngine
from tests.server.http import chat_body, client_of, make_app

CHAT = "/v1/chat/completions"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(http.server.ThreadingHTTPServer):
    """Takes spans over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.spans: list[Span] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def providers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The providers made meanwhile; they are shut down at the end."""
    made: list[Any] = []
    make = tracing.make_provider

    def remember(endpoint: str) -> Any:
        made.append(make(endpoint))
        return made[-1]

    monkeypatch.setattr("octavo.server.app.make_provider", remember)
    yield made
    for provider in made:
        provider.shutdown()


def attributes(span: Span) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


async def test_each_request_is_a_span_under_its_callers(collector, providers):
    class Timed(FakeEngine):
        def _output(self, *args: Any) -> Any:
            output = super()._output(*args)
            output.metrics = RequestMetrics(1.0, 1.5, 2.0, 4.0, 3)
            return output

    async with client_of(app=make_app(Timed(), otlp_traces_endpoint=collector.endpoint)) as client:
        fields = {"temperature": 0.5, "top_p": 0.75, "max_tokens": 7}
        await client.post(CHAT, json=chat_body(**fields), headers={"traceparent": PARENT, "x-request-id": "r1"})
        await client.post(CHAT, json=chat_body(stream=True))
        await client.get("/health")
    assert providers[0].force_flush()
    child, root = collector.spans
    assert child.name == root.name == "llm_request"
    assert child.kind == Span.SPAN_KIND_SERVER
    assert (child.trace_id.hex(), child.parent_span_id.hex()) == (PARENT[3:35], PARENT[36:52])
    assert not root.parent_span_id and root.trace_id != child.trace_id
    found = attributes(child)
    assert found["gen_ai.request.id"] == "chatcmpl-r1" and found["gen_ai.response.model"] == "tiny"
    assert (found["gen_ai.request.temperature"], found["gen_ai.request.top_p"]) == (0.5, 0.75)
    assert (found["gen_ai.request.n"], found["gen_ai.request.max_tokens"]) == (1, 7)
    assert found["gen_ai.usage.completion_tokens"] == 7 < attributes(root)["gen_ai.usage.completion_tokens"]
    assert found["gen_ai.usage.prompt_tokens"] > 1
    times = {name: value for name, value in found.items() if name.startswith("gen_ai.latency.")}
    assert times.pop("gen_ai.latency.e2e") > 0
    assert times == {
        "gen_ai.latency.time_to_first_token": 1.0,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_in_model_prefill": 0.5,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.latency.time_in_model_inference": 2.5,
    }


async def test_a_failed_request_is_a_failed_span(collector, providers):
    app = make_app(FakeEngine(fail_after=2), otlp_traces_endpoint=collector.endpoint)
    async with client_of(app=app) as client:
        assert (await client.post(CHAT, json=chat_body())).status_code == 503
    assert providers[0].force_flush()
    (span,) = collector.spans
    assert span.status.code == span.status.STATUS_CODE_ERROR and span.events[0].name == "exception"


async def test_without_an_endpoint_there_is_nothing():
    app = make_app()
    assert isinstance(app.context.engine, FakeEngine)


def test_a_protocol_nobody_knows_is_refused(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "carrier-pigeon")
    with pytest.raises(ConfigError, match="carrier-pigeon"):
        make_app(otlp_traces_endpoint="http://127.0.0.1:1")
