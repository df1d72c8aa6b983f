"""Responses kept in memory for later calls: bounded in bytes, each seen by the key that made it alone.

The least recently used go first. A response counts with its whole conversation, so what a chain of calls shares is
counted once for each of them: memory stays below the bound, never above.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import msgspec

from octavo.errors import ClientError
from octavo.server.responses.protocol import JsonObject, Response

Owner = int | None  # which of the server's API keys; None when it has none


class ResponseNotFoundError(ClientError):
    """The id is unknown here: never stored, another key's, deleted, or gone to make room."""

    status = 404
    code = "response_not_found"


@dataclass(eq=False)
class StoredResponse:
    """A response with the conversation that it ends. One made in the background lives here while it is made."""

    response: Response
    owner: Owner
    items: list[JsonObject]  # the input of this call
    messages: list[JsonObject]  # earlier turns, this input, and once it is complete the answer
    task: asyncio.Task[None] | None = None
    frames: list[bytes] | None = None  # its events so far, when it is streamed in the background
    size: int = 0  # bytes
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_running(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def has_ended(self) -> bool:
        return self.response.status not in ("queued", "in_progress")

    def tell(self) -> None:
        """Wake those who wait for more frames, or for the end."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, start: int) -> AsyncGenerator[bytes, None]:
        """The frames from number `start` on, as they come, to the last one."""
        assert self.frames is not None
        while True:
            changed = self._changed
            while start < len(self.frames):
                yield self.frames[start]
                start += 1
            if self.has_ended:
                return
            await changed.wait()


class ResponseStore:
    """At most `max_bytes` of responses; 0 keeps none."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()

    @property
    def is_enabled(self) -> bool:
        return self.max_bytes > 0

    def get(self, response_id: str, owner: Owner) -> StoredResponse:
        entry = self._entries.get(response_id)
        if entry is None or entry.owner != owner:
            raise ResponseNotFoundError(
                f"there is no response {response_id!r}: it was not stored, or has made room for newer ones.",
                param="response_id",
            )
        self._entries.move_to_end(response_id)
        return entry

    @property
    def is_full(self) -> bool:
        """Whether what runs in the background has taken more than there is."""
        return self.num_bytes > self.max_bytes

    def put(self, entry: StoredResponse) -> None:
        """Add an entry, or measure one again that is complete now."""
        self._entries[entry.response.id] = entry
        size = len(msgspec.json.encode((entry.response, entry.items, entry.messages)))
        self.grow(entry, size + sum(map(len, entry.frames or ())) - entry.size)

    def grow(self, entry: StoredResponse, num_bytes: int) -> None:
        """Count what an entry has got, and make room for it. Running ones stay; others go, oldest first."""
        if entry.response.id not in self._entries:
            return  # deleted while it ran
        entry.size += num_bytes
        self.num_bytes += num_bytes
        if not self.is_full:
            return
        for old in [entry for entry in self._entries.values() if not entry.is_running]:
            self.remove(old)
            if not self.is_full:
                return

    def remove(self, entry: StoredResponse) -> None:
        if self._entries.pop(entry.response.id, None) is not None:
            self.num_bytes -= entry.size

    def num_running(self, owner: Owner) -> int:
        """Responses that this key has made in the background."""
        return sum(entry.is_running and entry.owner == owner for entry in self._entries.values())
