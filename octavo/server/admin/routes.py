"""Routes for operators and load balancers: is it alive, what is it, how busy is it."""

from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo import __version__
from octavo.server.answers import Json
from octavo.server.context import ServerContext
from octavo.server.openai.responses import LoadResponse, VersionResponse


async def health(request: Request) -> Response:
    """GET /health: 200 while the engine computes; 503 with the reason while it is restarted or sleeps."""
    await _server(request).engine.check_health()
    return Response()


async def health_ready(request: Request) -> Response:
    """GET /health/ready: the same, and 503 while the server shuts down: whether to send it requests."""
    _server(request).activity.check_open()
    return await health(request)


async def health_live(request: Request) -> Response:
    """GET /health/live: 503 only when the engine is gone for good. A restart from outside would lose what waits."""
    engine = _server(request).engine
    if engine.errored:
        await engine.check_health()
    return Response()


async def version(request: Request) -> Json:
    """GET /version"""
    return Json(VersionResponse(__version__))


async def load(request: Request) -> Json:
    """GET /load: requests in flight, this one aside."""
    return Json(LoadResponse(_server(request).activity.num_active - 1))


async def metrics(request: Request) -> Response:
    """GET /metrics: Prometheus text."""
    write, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(write(_server(request).registry), headers={"content-type": content_type})


def routes(with_load: bool) -> list[Route]:
    """The routes to mount; `/load` only when load tracking is on."""
    found = [
        Route("/health", health, methods=["GET"]),
        Route("/health/ready", health_ready, methods=["GET"]),
        Route("/health/live", health_live, methods=["GET"]),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/version", version, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
    return [*found, Route("/load", load, methods=["GET"])] if with_load else found


def _server(request: Request) -> ServerContext:
    return request.app.context
