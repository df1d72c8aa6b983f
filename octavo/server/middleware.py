"""What happens to every request before a route sees it: plain ASGI, outermost first.

    RootPath      one spelling of the path for everybody below, behind a prefixing proxy or not
    AccessLog     request id, one log line, HTTP metrics
    WebPages      only where no key is asked for: nothing from pages of other sites
    (CORS)        Starlette's own; outside the key check, since preflights carry no key
    ApiKey        every route but the public ones needs a key once keys are set
    Errors        whatever is raised below becomes the OpenAI error body
    Admission     counts requests in flight; 503 while the server drains, 429 for a key that has its share
    StallGuard    gives up on clients that stop sending or reading (stall_guard.py)

The public list is compared with the very path that the router matches, so no spelling of a path (slashes, case,
percent-encoding, root path) can be public for the one and private for the other.
"""

import ipaddress
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.logger import get_logger
from octavo.server.activity import Activity
from octavo.server.answers import ClientGoneError
from octavo.server.anthropic.errors import encode_problem, is_anthropic
from octavo.server.errors import HttpError, Problem, describe
from octavo.server.keys import KeyRing
from octavo.server.ui.routes import PAGE_PATHS

logger = get_logger(__name__)
access_logger = get_logger("octavo.access")

# Liveness, monitoring and the page's own files: no key, and served while the server drains.
PUBLIC_PATHS = PAGE_PATHS | {"/health", "/health/live", "/health/ready", "/ping", "/version", "/metrics"}

# The methods that metrics tell apart; a client may send any word.
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

_PRIVATE = (".localhost", ".internal")  # names that no stranger can register; containers know their host by one
_PORT = re.compile(r":\d*$")  # behind the name in a Host header
_REQUEST_ID = re.compile(r"[\w.:@/+=-]{1,128}", re.ASCII)

# (method, route, status, seconds) of each answered request.
HttpObserver = Callable[[str, str, int, float], None]


async def send_problem(found: Problem, scope: Scope, send: Send) -> None:
    """Write an error answer, in the shape of the API that was called."""
    body = encode_problem(found, scope["path"])
    headers = {"content-type": "application/json", "content-length": str(len(body)), **found.headers}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": found.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


class RootPath:
    """Strip the proxy's prefix from the path, whether or not the proxy did."""

    def __init__(self, app: ASGIApp, root_path: str | None):
        self.app = app
        self.prefix = "/" + (root_path or "").strip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.prefix != "/" and scope["type"] in ("http", "websocket"):
            path = scope["path"]
            if path == self.prefix or path.startswith(self.prefix + "/"):
                path = path[len(self.prefix) :] or "/"
            scope = {**scope, "path": path, "root_path": ""}
        await self.app(scope, receive, send)


class AccessLog:
    """Give each request its id (`scope["state"]["request_id"]`), log it when it ends, and report it to `observe`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        enabled: bool = True,
        quiet_paths: Iterable[str] = (),
        echo_request_id: bool = False,
        observe: HttpObserver | None = None,
    ):
        self.app = app
        self.enabled = enabled
        self.quiet_paths = frozenset(quiet_paths)
        self.echo_request_id = echo_request_id
        self.observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started = time.monotonic()
        status = 499  # nobody answered: the client left first

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self.echo_request_id:
                    MutableHeaders(raw=message["headers"])["x-request-id"] = request_id
                if is_anthropic(scope["path"]):
                    MutableHeaders(raw=message["headers"])["request-id"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            self._report(scope, status, time.monotonic() - started, request_id)

    def _report(self, scope: Scope, status: int, seconds: float, request_id: str) -> None:
        if self.enabled and scope["path"] not in self.quiet_paths:
            client = scope.get("client") or ("-",)
            path = scope["path"].encode("unicode_escape").decode()
            access_logger.info("%s %s %s %d %.3fs %s", client[0], scope["method"], path, status, seconds, request_id)
        if self.observe is not None and scope["path"] not in PUBLIC_PATHS:
            # The route's own path, not the client's: the number of label values stays bounded.
            route = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in METHODS else "other"
            self.observe(method, route, status, seconds)


class WebPages:
    """Keep the pages of other sites from driving a server on this machine that asks for no key.

    A page can have its own name resolve to a loopback address (DNS rebinding) and talk to us as to its own server: the
    Host header then has that name. And any page may post to any address, with its Origin.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str], origins: Iterable[str]):
        self.app = app
        self.hosts = frozenset(host.lower() for host in hosts)
        self.origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            complaint = self._of_hosts(headers.getlist("host"))
            if complaint is None and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
                complaint = self._of_origin(headers.get("origin"), headers.get("host"))
            if complaint is not None:
                await send_problem(describe(HttpError(403, complaint, code="web_page_refused")), scope, send)
                return
        await self.app(scope, receive, send)

    def _of_hosts(self, hosts: list[str]) -> str | None:
        for host in hosts:
            name = _PORT.sub("", host).lower()
            is_known = name in self.hosts or name.endswith(_PRIVATE) or _is_address(name)
            if not is_known and "*" not in self.hosts:
                return (
                    f"this server does not answer to the name {name!r:.140}; start it with --allowed-hosts to let it."
                )
        return None

    def _of_origin(self, origin: str | None, host: str | None) -> str | None:
        if origin is None or origin.partition("://")[2] == host or not self.origins.isdisjoint((origin, "*")):
            return None
        return f"pages of {origin!r:.140} may not call this server; start it with --allowed-origins to let them."


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


class ApiKey:
    """Ask for one of the keys, as `Authorization: Bearer` or `X-API-Key`, on every path that is not public."""

    def __init__(self, app: ASGIApp, keys: KeyRing):
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in PUBLIC_PATHS:
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        key = self.keys.match(headers.get("authorization", ""), headers.get("x-api-key", ""))
        if key is not None:
            scope.setdefault("state", {})["api_key"] = key
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "unauthorized"})
        else:
            error = HttpError(
                401,
                "this server needs an API key: send Authorization: Bearer <key>, or X-API-Key: <key>.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            await send_problem(describe(error), scope, send)


class Errors:
    """Turn what the inner application raises into an error answer, unless an answer has begun."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = False

        async def watch(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except ClientGoneError:
            return
        except Exception as error:
            found = describe(error)
            if not begun:
                await send_problem(found, scope, send)


class Admission:
    """Count requests in flight; refuse new ones while draining, and those of a key that has `max_per_key` running.

    Public paths are neither counted nor refused.
    """

    def __init__(self, app: ASGIApp, activity: Activity, max_per_key: int | None = None):
        self.app = app
        self.activity = activity
        self.max_per_key = max_per_key
        self._num_by_key: Counter[int] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PUBLIC_PATHS:
            await self.app(scope, receive, send)
            return
        with self.activity:
            if self.max_per_key is None:
                await self.app(scope, receive, send)
            else:
                await self._count_by_key(self.max_per_key, scope, receive, send)

    async def _count_by_key(self, maximum: int, scope: Scope, receive: Receive, send: Send) -> None:
        key = scope["state"]["api_key"]
        if self._num_by_key[key] >= maximum:
            raise HttpError(
                429,
                f"this API key has {maximum} requests running, the most allowed; try again when one has ended.",
                code="too_many_requests",
            )
        self._num_by_key[key] += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._num_by_key[key] -= 1
