"""`build_app`: routes, what they share, and the middleware around them."""

from typing import cast

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.config.server_args import ServerArgs
from octavo.errors import ConfigError
from octavo.logger import hide_secrets
from octavo.metrics import HttpCollector, StatCollector, make_registry
from octavo.server.admin import control, profile
from octavo.server.admin.routes import routes as admin_routes
from octavo.server.admin.unserved import ROUTES as UNSERVED_ROUTES
from octavo.server.anthropic.routes import ROUTES as ANTHROPIC_ROUTES
from octavo.server.context import ServerContext
from octavo.server.docs import docs_routes
from octavo.server.engine_client import EngineClient
from octavo.server.keys import KeyRing, api_keys
from octavo.server.middleware import AccessLog, Admission, ApiKey, Errors, RootPath, WebPages
from octavo.server.openai.routes import ROUTES as OPENAI_ROUTES
from octavo.server.output_formats import make_formats
from octavo.server.pooling.routes import ROUTES as POOLING_ROUTES
from octavo.server.pooling.routes import refused
from octavo.server.prompts import PromptMaker
from octavo.server.responses.routes import ROUTES as RESPONSES_ROUTES
from octavo.server.responses.routes import STORE_ROUTES
from octavo.server.responses.store import ResponseStore
from octavo.server.stall_guard import StallGuard
from octavo.server.tokens.routes import ROUTES as TOKENS_ROUTES
from octavo.server.ui.routes import is_loopback, is_wanted, page_routes
from octavo.tracing import TraceContext, TracedEngine, make_provider


class Application:
    """An ASGI application; `context` is what its routes share and what a shutdown steers."""

    def __init__(self, context: ServerContext, routes: list[BaseRoute], http: HttpCollector):
        self.context = context
        self.routes = routes
        args = context.args
        keys = api_keys(args)
        if args.max_concurrency_per_key is not None and not keys:
            raise ConfigError(
                "max_concurrency_per_key counts requests by API key, but there is none; set api_key, or leave it out.",
                param="max_concurrency_per_key",
            )
        app: ASGIApp = StallGuard(Router(routes, redirect_slashes=False), args.client_stall_timeout)
        app = Errors(Admission(app, context.activity, args.max_concurrency_per_key))
        if keys:
            hide_secrets(keys)
            app = ApiKey(app, KeyRing(keys))
        if args.allowed_origins:
            app = CORSMiddleware(
                app,
                allow_origins=args.allowed_origins,
                allow_methods=args.allowed_methods,
                allow_headers=args.allowed_headers,
                allow_credentials=args.allow_credentials,
            )
        if not keys and args.uds is None and is_loopback(args.host):
            app = WebPages(app, ["localhost", args.host, *args.allowed_hosts], args.allowed_origins)
        app = AccessLog(
            app,
            enabled=not args.disable_uvicorn_access_log,
            quiet_paths=("/health", "/metrics"),  # probes, scrapes and the page ask for ever
            echo_request_id=args.enable_request_id_headers,
            observe=http.observe,
        )
        self._app = RootPath(app if args.otlp_traces_endpoint is None else TraceContext(app), args.root_path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        await self._app(scope, receive, send)


def _routes_of_tasks(engine: EngineClient) -> list[Route]:
    """The routes of what the model makes, text or else; those of the other kind say that it does not."""
    pooling = engine.config.pooling
    makers = [*RESPONSES_ROUTES, *ANTHROPIC_ROUTES]
    if pooling is None:
        reason = "it generates text; use /v1/completions or /v1/chat/completions."
        return [*OPENAI_ROUTES, *makers, *refused(POOLING_ROUTES, reason)]
    makers += [route for route in OPENAI_ROUTES if route.path in ("/v1/completions", "/v1/chat/completions")]
    others = [route for route in OPENAI_ROUTES if route not in makers]
    return [*others, *POOLING_ROUTES, *refused(makers, f"its tasks are {', '.join(pooling.tasks)}.")]


def build_app(engine: EngineClient, args: ServerArgs, stats: StatCollector | None = None) -> Application:
    """Make the application that serves `engine`; `stats` is the engine's stat logger, shown at /metrics."""
    if args.otlp_traces_endpoint is not None:
        engine = cast(EngineClient, TracedEngine(engine, make_provider(args.otlp_traces_endpoint)))
    http = HttpCollector()
    registry = make_registry(http, *([stats] if stats is not None else []))
    formats = make_formats(engine, args)
    context = ServerContext(
        engine,
        args,
        PromptMaker(engine, args, formats.tools),
        formats,
        registry,
        ResponseStore(args.responses_store_bytes),
    )
    routes: list[BaseRoute] = [
        *_routes_of_tasks(engine),
        *admin_routes(args.enable_server_load_tracking),
    ]
    if args.responses_store_bytes:
        routes += STORE_ROUTES
    if args.enable_scale_out:
        routes += TOKENS_ROUTES
    if args.enable_admin_routes:
        routes += control.routes()
    if engine.config.profiler is not None:
        routes += profile.routes()
    if is_wanted(args, bool(api_keys(args))):
        pooling = engine.config.pooling
        routes += page_routes(args.root_path, pooling.tasks if pooling is not None else ())
    if not args.disable_fastapi_docs:
        routes += docs_routes()
    routes += UNSERVED_ROUTES
    return Application(context, routes, http)
