"""`octavo serve [MODEL]`: the HTTP server."""

import gc
import time
from collections.abc import Sequence

from octavo.config.args import EngineArgs
from octavo.config.options import option_fields
from octavo.config.parser import OptionParser
from octavo.config.server_args import ServerArgs
from octavo.engine.spawn import SpawnedCore


def parse(arguments: Sequence[str]) -> tuple[EngineArgs, ServerArgs]:
    """The engine's and the server's options from a command line."""
    parser = OptionParser(
        "octavo serve", "Serve a model over HTTP, with OpenAI's API.", (EngineArgs, ServerArgs), positional="model"
    )
    given = parser.parse_options(arguments)
    server_names = {field.name for field in option_fields(ServerArgs)}
    engine_args = EngineArgs(**{name: value for name, value in given.items() if name not in server_names})
    server_args = ServerArgs(**{name: value for name, value in given.items() if name in server_names})
    return engine_args, server_args


def run(arguments: Sequence[str]) -> int:
    """Parse, then serve until a signal says stop."""
    started = time.monotonic()
    engine_args, server_args = parse(arguments)
    core = SpawnedCore(engine_args.distributed_executor_backend or "uni")
    gc.disable()  # until the server is up: imports make a million objects and no garbage
    try:
        from octavo.server.launch import run_server  # as long as the core's own imports: side by side

        return run_server(engine_args, server_args, started, core)
    finally:
        gc.enable()  # where it never came up
        core.end()
