"""The server around the gRPC service: keys, TLS, health, reflection, and the same way down as the HTTP server's."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from octavo.config.options import option_fields
from octavo.config.server_args import ServerArgs
from octavo.errors import ConfigError
from octavo.logger import hide_secrets
from octavo.metrics import StatCollector
from octavo.server.activity import Activity
from octavo.server.engine_client import EngineClient
from octavo.server.grpc.messages import SERVICE, Messages
from octavo.server.grpc.service import EngineService
from octavo.server.keys import KeyRing, api_keys
from octavo.server.prompts import PromptMaker

HEALTH_SECONDS = 1.0  # between looks at the engine
# Options that mean something here; any other that is set is refused.
_HONOURED = {
    *("grpc", "host", "port", "uds", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs"),
    *("shutdown_timeout", "uvicorn_log_level", "api_key", "api_key_file", "max_body_bytes"),
}
_HEALTH_METHODS = "/grpc.health.v1.Health/"

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]]


def check_args(args: ServerArgs) -> None:
    """Refuse options of the HTTP server that the gRPC server has no use for."""
    defaults = ServerArgs()
    for field in option_fields(ServerArgs):
        if field.name not in _HONOURED and getattr(args, field.name) != getattr(defaults, field.name):
            raise ConfigError(f"{field.name} has no effect with grpc; leave one of them out.", param=field.name)
    if args.ssl_cert_reqs == 1:
        raise ConfigError("ssl_cert_reqs=1 is not offered with grpc; use 0 or 2.", param="ssl_cert_reqs")


class GrpcServer:
    """Listens from `serve` until `should_exit` is set."""

    def __init__(
        self,
        engine: EngineClient,
        args: ServerArgs,
        stats: StatCollector | None = None,
        on_started: Callable[[], None] = lambda: None,
    ):
        check_args(args)
        self.engine = engine
        self.args = args
        self.on_started = on_started
        self.activity = Activity()
        self.force_exit = False
        self.port = 0
        self._exit = asyncio.Event()
        self._messages = Messages()
        self._service = EngineService(engine, PromptMaker(engine, args), self.activity, self._messages, stats)
        self._health = health.aio.HealthServicer()

    @property
    def should_exit(self) -> bool:
        return self._exit.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._exit.set()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen at the address of the one socket, which gives its place to gRPC's own."""
        assert sockets is not None
        (reserved,) = sockets
        address = reserved.getsockname()
        reserved.close()
        server = self._make_server()
        self._listen(server, address)
        await server.start()
        watcher = asyncio.create_task(self._watch_health())
        self.on_started()
        try:
            await self._exit.wait()
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
            await server.stop(grace=0)

    def _make_server(self) -> grpc.aio.Server:
        keys = api_keys(self.args)
        hide_secrets(keys)
        server = grpc.aio.server(
            interceptors=[_KeyCheck(KeyRing(keys))] if keys else [],
            options=[("grpc.max_receive_message_length", self.args.max_body_bytes), ("grpc.so_reuseport", 0)],
        )
        server.add_generic_rpc_handlers((self._service.handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server, pool=self._reflected())
        return server

    def _reflected(self) -> DescriptorPool:
        """All that reflection shows: the service's messages and those of the standard services."""
        pool = self._messages.pool
        for module in (health_pb2, reflection_pb2):
            pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
        return pool

    def _listen(self, server: grpc.aio.Server, address: Any) -> None:
        # A socket file that only this user may open, from the moment it is there.
        before = os.umask(0o177) if self.args.uds else None
        target = f"unix:{address}" if self.args.uds else _target(address)
        try:
            if self.args.ssl_certfile:
                self.port = server.add_secure_port(target, self._credentials())
            else:
                self.port = server.add_insecure_port(target)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {target}: {error}.", param="port") from None
        finally:
            if before is not None:
                os.umask(before)

    def _credentials(self) -> grpc.ServerCredentials:
        args = self.args
        assert args.ssl_keyfile is not None and args.ssl_certfile is not None
        pair = (Path(args.ssl_keyfile).read_bytes(), Path(args.ssl_certfile).read_bytes())
        authorities = Path(args.ssl_ca_certs).read_bytes() if args.ssl_ca_certs else None
        return grpc.ssl_server_credentials([pair], authorities, require_client_auth=args.ssl_cert_reqs == 2)

    async def _watch_health(self) -> None:
        """Keep what the standard health service says true."""
        states = health_pb2.HealthCheckResponse
        while True:
            status = states.NOT_SERVING
            with suppress(Exception):
                await self.engine.check_health()
                status = states.NOT_SERVING if self.activity.draining else states.SERVING
            for name in ("", SERVICE):
                await self._health.set(name, status)
            await asyncio.sleep(HEALTH_SECONDS)


def _target(address: tuple[Any, ...]) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _KeyCheck(grpc.aio.ServerInterceptor):
    """Ask for one of the keys in the metadata of every call but those of the health service."""

    def __init__(self, keys: KeyRing):
        self.keys = keys

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_HEALTH_METHODS):
            return handler
        metadata = {key: value for key, value in handler_call_details.invocation_metadata if isinstance(value, str)}
        if self.keys.match(metadata.get("authorization", ""), metadata.get("x-api-key", "")) is not None:
            return handler
        return _refusal(handler)


def _refusal(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    """A handler of the same kind that refuses."""

    async def refuse(request: Any, context: grpc.aio.ServicerContext) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "send one of the API keys: authorization: Bearer <key>.")

    async def refuse_stream(request: Any, context: grpc.aio.ServicerContext) -> Any:
        await refuse(request, context)
        yield

    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse_stream)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse_stream)
    return grpc.unary_unary_rpc_method_handler(refuse)
