"""API keys: where they come from, and which of them a request brings."""

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from octavo import envs
from octavo.config.server_args import ServerArgs
from octavo.errors import ConfigError


class KeyRing:
    """The keys that are let in, as digests."""

    def __init__(self, keys: Iterable[str]):
        self._digests = [_digest(key) for key in keys]

    def match(self, authorization: str, x_api_key: str) -> int | None:
        """Which key a request brings, as `Authorization: Bearer` or as `X-API-Key`; None when neither is one."""
        scheme, _, bearer = authorization.partition(" ")
        given = [_digest(bearer.strip() if scheme.lower() == "bearer" else ""), _digest(x_api_key.strip())]
        # Digests have one length, and every key is compared: the time taken tells nothing about the keys.
        matches = [
            hmac.compare_digest(given[0], digest) | hmac.compare_digest(given[1], digest) for digest in self._digests
        ]
        return matches.index(True) if any(matches) else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def api_keys(args: ServerArgs) -> list[str]:
    """The keys of the options, else the one of the environment; empty: the server is open."""
    keys = [args.api_key] if isinstance(args.api_key, str) else list(args.api_key or ())
    if args.api_key_file is not None:
        keys += _read_keys(args.api_key_file)
    if any(not key.strip() for key in keys):
        raise ConfigError("api_key is empty, which every client would bring; leave it out or set one.", param="api_key")
    if keys:
        return keys
    return [envs.OCTAVO_API_KEY] if envs.OCTAVO_API_KEY else []


def _read_keys(path: str) -> list[str]:
    """The keys in a file, one a line; lines that are blank or begin with # hold none."""
    try:
        lines = [line.strip() for line in Path(path).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file {path} cannot be read: {error}.", param="api_key_file") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"api_key_file {path} holds no key; write one a line.", param="api_key_file")
    return keys
