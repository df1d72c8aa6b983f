"""A server process around the scripted engine: `python -m tests.server.serve_fake '{"port": 0, …}' '{"hold_after": 1}'`.

Says "ready PORT" on stdout once it listens, and "reached" when an answer waits.
"""

import asyncio
import json
import sys

from octavo.config.server_args import ServerArgs
from octavo.server.app import build_app
from octavo.server.launch import bound_socket, make_server, serve
from tests.server.fake_engine import FakeEngine


async def main(args: ServerArgs, options: dict[str, int]) -> int:
    with bound_socket(args) as listener:
        engine = FakeEngine(**options)
        app = build_app(engine, args)
        address = listener.getsockname()

        def on_started() -> None:
            print("ready", address if isinstance(address, str) else address[1], flush=True)

        server = make_server(app, args, on_started)
        reporter = asyncio.create_task(report(engine))
        try:
            return await serve(server, listener, engine, app.context.activity, args.shutdown_timeout)
        finally:
            reporter.cancel()


async def report(engine: FakeEngine) -> None:
    await engine.reached.wait()
    print("reached", flush=True)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(ServerArgs(**json.loads(sys.argv[1])), json.loads(sys.argv[2]))))
