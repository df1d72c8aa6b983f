"""Routes that steer the engine, mounted with `enable_admin_routes` only: pause, resume, reset, and what is configured."""

import os
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from octavo import __version__, envs
from octavo.engine.async_llm import PauseMode
from octavo.errors import ClientError
from octavo.logger import HIDDEN
from octavo.server.answers import Json
from octavo.server.context import ServerContext
from octavo.server.errors import HttpError

_SECRET_VARIABLES = frozenset({"OCTAVO_API_KEY"})
_SECRET_OPTIONS = frozenset({"api_key"})


async def server_info(request: Request) -> Json:
    """GET /server_info: the version, the resolved configuration, the server's options and the variables that are set."""
    server = _server(request)
    options = {name: _shown(name, value) for name, value in vars(server.args).items()}
    variables = {
        name: HIDDEN if name in _SECRET_VARIABLES else os.environ[name] for name in envs.VARIABLES if name in os.environ
    }
    config = msgspec.to_builtins(server.engine.config)
    return Json({"version": __version__, "config": config, "server": options, "environment": variables})


async def reset_prefix_cache(request: Request) -> Json:
    """POST /reset_prefix_cache: forget cached prefixes; 409 while requests hold some of them."""
    if not await _server(request).engine.reset_prefix_cache():
        raise HttpError(409, "requests are running; the prefix cache was left as it is.", code="requests_running")
    return Json({"reset": True})


async def pause(request: Request) -> Json:
    """POST /pause?mode=abort|wait|keep&clear_cache=true|false"""
    mode = cast(PauseMode, request.query_params.get("mode", "abort"))  # checked by the engine
    clear_cache = _flag(request, "clear_cache", True)
    await _server(request).engine.pause_generation(mode=mode, clear_cache=clear_cache)
    return Json({"status": "paused"})


async def resume(request: Request) -> Json:
    """POST /resume"""
    await _server(request).engine.resume_generation()
    return Json({"status": "resumed"})


async def is_paused(request: Request) -> Json:
    """GET /is_paused"""
    return Json({"is_paused": await _server(request).engine.is_paused()})


def routes() -> list[Route]:
    """The routes to mount."""
    return [
        Route("/server_info", server_info, methods=["GET"]),
        Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
        Route("/pause", pause, methods=["POST"]),
        Route("/resume", resume, methods=["POST"]),
        Route("/is_paused", is_paused, methods=["GET"]),
    ]


def _server(request: Request) -> ServerContext:
    return request.app.context


def _shown(name: str, value: Any) -> Any:
    return HIDDEN if name in _SECRET_OPTIONS and value else value


def _flag(request: Request, name: str, default: bool) -> bool:
    text = request.query_params.get(name)
    if text is None:
        return default
    if text.lower() not in ("true", "false", "1", "0"):
        raise ClientError(f"{name}={text!r} must be true or false.", param=name)
    return text.lower() in ("true", "1")
