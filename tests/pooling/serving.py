"""A whole engine behind its HTTP application, in this process."""

from contextlib import asynccontextmanager

import httpx

from octavo.config.args import EngineArgs
from octavo.config.server_args import ServerArgs
from octavo.engine.async_llm import AsyncLLM
from octavo.server.app import build_app


@asynccontextmanager
async def served(folder, **options):
    """(client, application) of a server for the model in `folder`."""
    options = {"dtype": "float32", **options}
    engine = AsyncLLM.from_engine_args(EngineArgs(model=str(folder), served_model_name="tiny", **options))
    try:
        app = build_app(engine, ServerArgs())
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as client:
            yield client, app
    finally:
        engine.shutdown()
