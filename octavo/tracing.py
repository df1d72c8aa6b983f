"""OpenTelemetry: a span `llm_request` for each request of the engine, under the caller's span where it names one.

The packages of octavo[otel] are imported when an endpoint is given. A caller's span comes in the headers `traceparent` and
`tracestate`; it travels in the task's context, which every task that serves the request inherits.
"""

import os
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.errors import ConfigError
from octavo.server.engine_client import EngineClient
from octavo.types.outputs import RequestMetrics, RequestOutput
from octavo.types.prompts import PromptType
from octavo.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

SPAN_NAME = "llm_request"


def make_provider(endpoint: str) -> "TracerProvider":
    """A provider that sends spans in batches to `endpoint`, and the last of them when the process ends."""
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

        exporter: SpanExporter
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            exporter = GrpcExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
        elif protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

            exporter = HttpExporter(endpoint=endpoint)
        else:
            raise ConfigError(
                f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL={protocol!r} is not known; use grpc or http/protobuf.",
                param="otlp_traces_endpoint",
            )
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint needs the packages of octavo[otel] ({error}).", param="otlp_traces_endpoint"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "octavo"}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class TraceContext:
    """Middleware: what is served runs in the context of the caller's span."""

    def __init__(self, app: ASGIApp):
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.app = app
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from opentelemetry import context

        if scope["type"] != "http" or "traceparent" not in (headers := Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        token = context.attach(self._propagator.extract(dict(headers)))
        try:
            await self.app(scope, receive, send)
        finally:
            context.detach(token)


class TracedEngine:
    """An engine whose requests are spans; everything else is the engine's own."""

    def __init__(self, engine: EngineClient, provider: "TracerProvider"):
        self._engine = engine
        self._tracer = provider.get_tracer("octavo")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, prompt: PromptType, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """The engine's, inside a span that begins with the request and ends with it, however it ends."""
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span(SPAN_NAME, kind=SpanKind.SERVER)
        self._describe_request(span, sampling_params, request_id)
        started, num_tokens = time.monotonic(), 0
        last: RequestOutput | None = None
        try:
            generated = self._engine.generate(prompt, sampling_params, request_id, priority=priority)
            async with aclosing(cast("AsyncGenerator[RequestOutput, None]", generated)) as outputs:
                async for last in outputs:
                    num_tokens += sum(len(output.token_ids) for output in last.outputs)
                    yield last
        except Exception as error:
            _record_failure(span, error)
            raise
        finally:
            if last is not None:
                span.set_attribute("gen_ai.usage.prompt_tokens", len(last.prompt_token_ids))
                _describe_times(span, last.metrics)
            span.set_attribute("gen_ai.usage.completion_tokens", num_tokens)
            span.set_attribute("gen_ai.latency.e2e", time.monotonic() - started)
            span.end()

    def _describe_request(self, span: "Span", params: SamplingParams, request_id: str) -> None:
        span.set_attribute("gen_ai.request.id", request_id)
        span.set_attribute("gen_ai.response.model", self._engine.config.model.served_model_names[0])
        for name in ("n", "temperature", "top_p", "max_tokens"):
            if (value := getattr(params, name)) is not None:
                span.set_attribute(f"gen_ai.request.{name}", value)


def _record_failure(span: "Span", error: Exception) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.record_exception(error)
    span.set_status(Status(StatusCode.ERROR, type(error).__name__))


def _describe_times(span: "Span", metrics: RequestMetrics | None) -> None:
    """Seconds between the moments of a request, as far as it came."""
    if metrics is None:
        return
    arrival, scheduled = metrics.arrival_time, metrics.first_scheduled_time
    first, last = metrics.first_token_time, metrics.last_token_time
    for name, start, end in (
        ("time_to_first_token", arrival, first),
        ("time_in_queue", arrival, scheduled),
        ("time_in_model_prefill", scheduled, first),
        ("time_in_model_decode", first, last),
        ("time_in_model_inference", scheduled, last),
    ):
        if start is not None and end is not None:
            span.set_attribute(f"gen_ai.latency.{name}", end - start)
