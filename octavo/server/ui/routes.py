"""GET /: a page for people, with a chat and what the engine is doing.

The page is static and holds no secrets, so it is served without a key and asks for one itself. Its files are in the table
below, read once; no path of a request is looked up on disk. All comes from here, and what a model writes is never
markup: the policy sent along forbids both, even to the page's own script.
"""

import hashlib
import ipaddress
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.config.server_args import ServerArgs

# Path -> file of this folder and its type.
_FILES = {
    "/": ("index.html", "text/html"),
    "/ui/page.css": ("page.css", "text/css"),
    "/ui/page.js": ("page.js", "text/javascript"),
    "/ui/api.js": ("api.js", "text/javascript"),
    "/ui/markdown.js": ("markdown.js", "text/javascript"),
    "/ui/panel.js": ("panel.js", "text/javascript"),
}
PAGE_PATHS = frozenset(_FILES)

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'self'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # kept, and asked about by its tag: an upgrade shows at once
}


def is_wanted(args: ServerArgs, has_keys: bool) -> bool:
    """Whether the page is served: as the option says, else where a key or the address keeps strangers out."""
    if args.ui is not None:
        return args.ui
    return has_keys or args.uds is not None or is_loopback(args.host)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def page_routes(root_path: str, tasks: Sequence[str]) -> list[Route]:
    """The page under a proxy's `root_path`; `tasks` are those of a model that does not chat."""
    routes = []
    for path, (name, media_type) in _FILES.items():
        content = files(__package__).joinpath(name).read_text(encoding="utf-8")
        if path == "/":
            content = content.replace('<base href="./">', f'<base href="{escape(root_path.rstrip("/") or ".")}/">')
            content = content.replace('data-tasks=""', f'data-tasks="{escape(", ".join(tasks))}"')
        routes.append(Route(path, _File(content.encode(), media_type).answer, methods=["GET"]))
    return routes


class _File:
    """The answer to GET and HEAD of one file, or to the question whether it has changed."""

    def __init__(self, content: bytes, media_type: str):
        self.content = content
        self.media_type = media_type
        self.tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'

    async def answer(self, request: Request) -> Response:
        headers = {**_HEADERS, "etag": self.tag}
        if self.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        headers["content-length"] = str(len(self.content))
        body = b"" if request.method == "HEAD" else self.content
        return Response(body, headers=headers, media_type=self.media_type)
