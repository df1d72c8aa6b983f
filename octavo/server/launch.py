"""`run_server`: from options to a listening server, and back down in order.

Up: bind the socket (a busy port must not cost a model load), start the engine, listen. Down: the first SIGTERM or
SIGINT drains (new work gets 503, running requests have `shutdown_timeout` seconds), what is left is told so, then
listener, engine and socket file go. A second signal skips the waiting.
"""

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import resource
import signal
import socket
import ssl
import stat
import time
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn

from octavo.config.args import EngineArgs
from octavo.config.server_args import ServerArgs
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.protocol import StartReport
from octavo.engine.spawn import SpawnedCore
from octavo.errors import ConfigError, EngineAsleepError, EngineDeadError
from octavo.logger import get_logger
from octavo.metrics import StatCollector, StatLine
from octavo.server.activity import Activity
from octavo.server.app import build_app
from octavo.server.engine_client import EngineClient
from octavo.server.http_protocol import http_protocol
from octavo.server.keys import api_keys
from octavo.server.output_formats import named_formats

if TYPE_CHECKING:
    from octavo.server.grpc.listener import GrpcServer

logger = get_logger(__name__)

LAST_WORDS_SECONDS = 2.0  # for telling those who are cut off
HEALTH_SECONDS = 1.0  # between looks at the engine
LINGER_SECONDS = 3.0  # how long a server whose engine died still answers, with 503, before it exits
RESERVED_FILES = 256  # besides connections: the core's sockets, libraries, logs
INTERRUPTED_STATUS = 130  # of a start that a signal stopped


def run_server(
    engine_args: EngineArgs, args: ServerArgs, started: float | None = None, core: SpawnedCore | None = None
) -> int:
    """Serve until a signal says stop; the process' exit status (0: stopped as asked, 1: the engine died).

    `started` is `time.monotonic()` when the process began, for the report of the start; `core` is the engine's process
    where that was spawned already. Raises ConfigError when the address cannot be had, and whatever the start of the
    engine raises.
    """
    started = time.monotonic() if started is None else started
    _check_tls(args)
    if args.grpc:
        _check_grpc(args)
    # A wrong name or file must not cost a model load.
    named_formats(args)
    api_keys(args)
    with bound_socket(args) as listener, _sigterm_interrupts():
        try:
            engine = AsyncLLM.from_engine_args(engine_args, core=core)
            try:
                return _run(engine, args, listener, started)
            finally:
                engine.shutdown()
        except KeyboardInterrupt:
            return INTERRUPTED_STATUS


def _run(engine: AsyncLLM, args: ServerArgs, listener: socket.socket, started: float) -> int:
    try:
        import uvloop
    except ImportError:
        loop_factory = None
    else:
        loop_factory = uvloop.new_event_loop
    _allow_open_files(args.max_connections + RESERVED_FILES)
    address = listener.getsockname()
    stats = _count(engine)

    def on_started() -> None:
        _report_start(engine.report, time.monotonic() - started)
        _announce(args, address)
        gc.freeze()  # what is there by now stays: no collection need walk it
        gc.enable()

    server: Server
    if args.grpc:
        server = _grpc_server(engine, args, stats, on_started)
        activity = server.activity
    else:
        app = build_app(engine, args, stats)
        server, activity = make_server(app, args, on_started), app.context.activity
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(serve(server, listener, engine, activity, args.shutdown_timeout))


def _allow_open_files(wanted: int) -> None:
    """Raise this process' limit of open files as far as its user may: a connection is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        logger.warning(
            "the system allows %d open files; max_connections=%d needs %d", hard, wanted - RESERVED_FILES, wanted
        )


def _count(engine: AsyncLLM) -> StatCollector | None:
    """Have the engine's statistics counted and logged, unless that is switched off."""
    config = engine.config
    if config.observability.disable_log_stats:
        return None
    stats = StatCollector(config.model.served_model_names[0], config.model.max_model_len)
    stats.set_cache_config(config.cache, engine.report.num_blocks)
    engine.stat_loggers += [stats, StatLine()]
    return stats


def _report_start(report: StartReport, seconds: float) -> None:
    """Say what memory is for and where the time went."""
    if report.memory_plan:
        logger.info("memory plan:\n%s", report.memory_plan)
    phases = "".join(f", {name.replace('_', ' ')} {spent:.2f} s" for name, spent in report.seconds.items())
    logger.info("ready after %.2f s%s, the rest imports and processes", seconds, phases)


def _grpc_server(
    engine: AsyncLLM, args: ServerArgs, stats: StatCollector | None, on_started: Callable[[], None]
) -> "GrpcServer":
    from octavo.server.grpc.listener import GrpcServer

    return GrpcServer(engine, args, stats, on_started)


class Server(Protocol):
    """What listens: it serves until it should exit."""

    should_exit: bool
    force_exit: bool

    async def serve(self, sockets: list[socket.socket] | None = None) -> None: ...


async def serve(
    server: Server,
    listener: socket.socket,
    engine: EngineClient,
    activity: Activity,
    shutdown_timeout: float,
) -> int:
    """Listen until a signal or the engine's death; the exit status."""
    signalled, hurried = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        activity.drain()  # at once: what arrives from now on is refused
        (hurried if signalled.is_set() else signalled).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    tasks = {
        "listening": asyncio.create_task(server.serve(sockets=[listener])),
        "signal": asyncio.create_task(signalled.wait()),
        "death": asyncio.create_task(_wait_for_death(engine)),
    }
    await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
    died = tasks["death"].done() and not signalled.is_set()
    if died:
        await _wait_either(signalled.wait(), asyncio.sleep(LINGER_SECONDS))
    await drain(activity, 0.0 if died else shutdown_timeout, hurried)
    server.should_exit = True
    server.force_exit = True  # whoever was waited for has been; idle connections are not worth waiting for
    await tasks["listening"]
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    return 1 if died else 0


async def drain(activity: Activity, timeout: float, hurried: asyncio.Event) -> None:
    """Refuse new work, let running requests end for `timeout` seconds or until `hurried`, then end them."""
    activity.drain()
    if activity.num_active:
        logger.info("stopping: %d requests may run for %g s more", activity.num_active, timeout)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await _wait_either(activity.wait_idle(), hurried.wait())
    activity.stop()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_WORDS_SECONDS):
            await activity.wait_idle()


async def _wait_for_death(engine: EngineClient) -> None:
    """Return when the engine is gone for good; a silent one (a step that hangs) may come back and is only reported."""
    while not engine.errored:
        with contextlib.suppress(EngineDeadError, EngineAsleepError):
            await engine.check_health()
        await asyncio.sleep(HEALTH_SECONDS)
    logger.error("the engine died; the server stops in %g s", LINGER_SECONDS)


async def _wait_either(*waits: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _QuietServer(uvicorn.Server):
    """Uvicorn without its own signal handling: signals drain here, they do not close the listener."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None] | None):
        super().__init__(config)
        self.on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.on_started is not None:
            self.on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: Any, args: ServerArgs, on_started: Callable[[], None] | None = None) -> _QuietServer:
    """The HTTP server for `app`, to be run by `serve`; `on_started` is called once it listens."""
    logging.getLogger("uvicorn").handlers = logging.getLogger("octavo").handlers
    tls = {
        name: getattr(args, name)
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers")
        if getattr(args, name)
    }
    config = uvicorn.Config(
        app,
        http=http_protocol(args.max_connections, args.client_stall_timeout),
        ws="none",
        lifespan="off",
        log_level=args.uvicorn_log_level,
        log_config=None,
        access_log=False,  # middleware.AccessLog writes a line of its own
        server_header=False,
        **tls,
    )
    return _QuietServer(config, on_started)


def _check_tls(args: ServerArgs) -> None:
    """Refuse unusable TLS files before a model is loaded for nothing."""
    if not args.ssl_certfile:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile)
        if args.ssl_ca_certs:
            context.load_verify_locations(args.ssl_ca_certs)
        if args.ssl_ciphers:
            context.set_ciphers(args.ssl_ciphers)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the TLS files cannot be used: {error}.", param="ssl_certfile") from None


def _check_grpc(args: ServerArgs) -> None:
    """Refuse what the gRPC server cannot do before a model is loaded for nothing."""
    try:
        from octavo.server.grpc.listener import check_args
    except ImportError as error:
        raise ConfigError(f"grpc needs the packages of octavo[grpc] ({error}).", param="grpc") from None
    check_args(args)


@contextlib.contextmanager
def bound_socket(args: ServerArgs) -> Iterator[socket.socket]:
    """The address of the options, taken but not listening yet; a socket file is removed at the end."""
    if args.uds:
        with _unix_socket(args.uds) as listener:
            yield listener
        return
    try:
        found = socket.getaddrinfo(args.host, args.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"host {args.host!r} cannot be resolved: {error.strerror}.", param="host") from None
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            listener.bind(address)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {args.host}:{args.port}: {error.strerror}; choose another --port, or "
                "stop what uses it.",
                param="port",
            ) from None
        yield listener


@contextlib.contextmanager
def _unix_socket(path: str) -> Iterator[socket.socket]:
    """A socket file that only this user may open. A file left by a server that is gone is replaced."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        _remove_stale(path)
        try:
            listener.bind(path)
        except OSError as error:
            raise ConfigError(f"cannot listen on {path}: {error.strerror}.", param="uds") from None
        try:
            os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
            yield listener
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _remove_stale(path: str) -> None:
    """Remove a socket file that nobody listens on; refuse one that is in use, and leave other files alone."""
    if not os.path.exists(path):
        return
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise ConfigError(f"{path} exists and is no socket; choose another --uds.", param="uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        else:
            raise ConfigError(f"another server listens on {path}; choose another --uds, or stop it.", param="uds")


def _announce(args: ServerArgs, address: Any) -> None:
    """Say where the server is, and warn when everybody who can reach it may use it."""
    if args.uds:
        logger.info("serving on unix:%s", args.uds)
        return
    host, port = address[:2]
    scheme = ("grpc" if args.grpc else "http") + ("s" if args.ssl_certfile else "")
    shown = f"[{host}]" if ":" in host else host
    logger.info("serving on %s://%s:%d", scheme, shown, port)
    if not ipaddress.ip_address(host).is_loopback and not api_keys(args):
        logger.warning(
            "everybody who can reach %s:%d may use this server; set --api-key, or listen on --host 127.0.0.1",
            shown,
            port,
        )


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """While the engine starts, SIGTERM ends it the way Ctrl-C does, so that nothing is left behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
