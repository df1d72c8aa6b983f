"""Routes that take profiles, mounted where a profiler is configured."""

from starlette.requests import Request
from starlette.routing import Route

from octavo.server.answers import Json


async def start_profile(request: Request) -> Json:
    """POST /start_profile; 409 while a profile is being taken."""
    await request.app.context.engine.start_profile()
    return Json({"status": "profiling"})


async def stop_profile(request: Request) -> Json:
    """POST /stop_profile: ends it and says where it was written; 409 without one."""
    return Json({"status": "stopped", "files": await request.app.context.engine.stop_profile()})


def routes() -> list[Route]:
    """The routes to mount."""
    return [
        Route("/start_profile", start_profile, methods=["POST"]),
        Route("/stop_profile", stop_profile, methods=["POST"]),
    ]
