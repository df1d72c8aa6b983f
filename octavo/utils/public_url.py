"""Reading from a web address that somebody else chose, without reaching into private networks.

The name is resolved once, every address it has must be public, and the connection goes to the address that was checked,
so that a name cannot mean one machine to the check and another to the connection. Each redirect is checked anew.
"""

import http.client
import ipaddress
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import SplitResult, urljoin, urlsplit

from octavo.errors import ClientError

MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)


@contextmanager
def open_public_url(url: str, timeout: float) -> Iterator[http.client.HTTPResponse]:
    """The response of a GET, status 200. ClientError when the address is private or does not answer so."""
    for _ in range(MAX_REDIRECTS + 1):
        parts = urlsplit(url)
        connection = _connect(parts, timeout)
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", target, headers={"Accept": "*/*", "User-Agent": "octavo"})
            response = connection.getresponse()
            if response.status == 200:
                yield response
                return
            if response.status not in _REDIRECTS:
                raise ClientError(f"{parts.hostname} answers {response.status}.", param="url")
            url = urljoin(url, response.headers.get("location", ""))
        except (OSError, http.client.HTTPException) as error:
            raise ClientError(f"{parts.hostname} cannot be read: {error}.", param="url") from None
        finally:
            connection.close()
    raise ClientError(f"{url} is redirected more than {MAX_REDIRECTS} times.", param="url")


def _connect(parts: SplitResult, timeout: float) -> http.client.HTTPConnection:
    """A connection to one of the public addresses of the host; the host's name is used for TLS and the Host header."""
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ClientError(f"{parts.geturl()!r} is no http or https address.", param="url")
    is_tls = parts.scheme == "https"
    try:
        port = parts.port or (443 if is_tls else 80)
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise ClientError(f"{parts.hostname} cannot be resolved: {error}.", param="url") from None
    addresses = [str(address[4][0]) for address in found]
    for address in addresses:
        if not _is_public(address):
            raise ClientError(f"{parts.hostname} is a private address, which is not fetched from.", param="url")
    connection = http.client.HTTPConnection(parts.hostname, port, timeout=timeout)
    try:
        raw = _connect_to_any(addresses, port, timeout)
        context = ssl.create_default_context()
        connection.sock = context.wrap_socket(raw, server_hostname=parts.hostname) if is_tls else raw
    except OSError as error:
        raise ClientError(f"{parts.hostname} cannot be reached: {error}.", param="url") from None
    return connection


def _connect_to_any(addresses: list[str], port: int, timeout: float) -> socket.socket:
    """A connection to the first address that takes one; the last one's error when none does."""
    for address in addresses[:-1]:
        with suppress(OSError):
            return socket.create_connection((address, port), timeout)
    return socket.create_connection((addresses[-1], port), timeout)


def _is_public(address: str) -> bool:
    found = ipaddress.ip_address(address.split("%")[0])
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_global and not found.is_multicast
