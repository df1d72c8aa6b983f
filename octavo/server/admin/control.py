"""Routes that steer the engine, mounted with `enable_admin_routes` only: pause, resume, sleep, reset, and what is
configured."""

import asyncio
import os
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from octavo import __version__, envs
from octavo.engine.sleep import PauseMode
from octavo.errors import ClientError
from octavo.logger import HIDDEN
from octavo.server.answers import Json
from octavo.server.context import ServerContext
from octavo.server.errors import HttpError

_SECRET_VARIABLES = frozenset({"OCTAVO_API_KEY"})
_SECRET_OPTIONS = frozenset({"api_key"})


async def server_info(request: Request) -> Json:
    """GET /server_info: version, resolved configuration, the server's options, the variables that are set, what runs."""
    server = _server(request)
    options = {name: _shown(name, value) for name, value in vars(server.args).items()}
    variables = {
        name: HIDDEN if name in _SECRET_VARIABLES else os.environ[name] for name in envs.VARIABLES if name in os.environ
    }
    config = msgspec.to_builtins(server.engine.config)
    runtime = {"num_tasks": len(asyncio.all_tasks())}  # of this event loop; the same number again when all is quiet
    answer = {"version": __version__, "config": config, "server": options, "environment": variables, "runtime": runtime}
    return Json(answer)


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


async def sleep(request: Request) -> Json:
    """POST /sleep?level=0|1|2&mode=abort|wait|keep"""
    level = _integer(request, "level", 1)
    mode = cast(PauseMode, request.query_params.get("mode", "abort"))
    await _server(request).engine.sleep(level, mode)
    return Json({"status": "asleep", "level": level})


async def wake_up(request: Request) -> Json:
    """POST /wake_up?tags=weights&tags=kv_cache; without tags: everything. The answer says whether something still sleeps."""
    engine = _server(request).engine
    await engine.wake_up(request.query_params.getlist("tags") or None)
    return Json({"is_sleeping": await engine.is_sleeping()})


async def is_sleeping(request: Request) -> Json:
    """GET /is_sleeping"""
    return Json({"is_sleeping": await _server(request).engine.is_sleeping()})


def routes() -> list[Route]:
    """The routes to mount."""
    return [
        Route("/server_info", server_info, methods=["GET"]),
        Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
        Route("/pause", pause, methods=["POST"]),
        Route("/resume", resume, methods=["POST"]),
        Route("/is_paused", is_paused, methods=["GET"]),
        Route("/sleep", sleep, methods=["POST"]),
        Route("/wake_up", wake_up, methods=["POST"]),
        Route("/is_sleeping", is_sleeping, methods=["GET"]),
    ]


def _server(request: Request) -> ServerContext:
    return request.app.context


def _shown(name: str, value: Any) -> Any:
    return HIDDEN if name in _SECRET_OPTIONS and value else value


def _integer(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ClientError(f"{name}={text!r} must be an integer.", param=name) from None


def _flag(request: Request, name: str, default: bool) -> bool:
    text = request.query_params.get(name)
    if text is None:
        return default
    if text.lower() not in ("true", "false", "1", "0"):
        raise ClientError(f"{name}={text!r} must be true or false.", param=name)
    return text.lower() in ("true", "1")
