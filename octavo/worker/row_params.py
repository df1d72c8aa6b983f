"""`RowParams`: a few numbers a permanent row, on the device, with a twin on the host."""

import numpy as np
import torch

from octavo.worker.rows import upload

_NUMPY = {torch.float32: np.float32, torch.int32: np.int32, torch.int64: np.int64}


class RowParams:
    """Named device tensors of one number a row; `set` changes the host's twin, `flush` sends all changes in one copy.

    The device tensors keep their addresses, so captured graphs may read them.

        one buffer:  [field 0 of every row][field 1 of every row]…   each padded to 8 bytes
    """

    def __init__(self, num_rows: int, device: torch.device, fields: dict[str, tuple[torch.dtype, float]]):
        """`fields` maps a name to its dtype and to the value of a row nobody has set."""
        sizes = [-(-num_rows * dtype.itemsize // 8) * 8 for dtype, _ in fields.values()]
        self._device = device
        self._host = np.zeros(sum(sizes), dtype=np.uint8)
        self._buffer = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        self._neutral = {name: value for name, (_, value) in fields.items()}
        self._dirty = True
        self._host_fields: dict[str, np.ndarray] = {}
        self._fields: dict[str, torch.Tensor] = {}
        start = 0
        for (name, (dtype, neutral)), size in zip(fields.items(), sizes, strict=True):
            end = start + num_rows * dtype.itemsize
            self._host_fields[name] = self._host[start:end].view(_NUMPY[dtype])
            self._host_fields[name][:] = neutral
            self._fields[name] = self._buffer[start:end].view(dtype)
            start += size
        self.flush()

    def __getitem__(self, name: str) -> torch.Tensor:
        """The field on the device, [num_rows]; as of the last flush."""
        return self._fields[name]

    def set(self, row: int, **values: float) -> None:
        """Change fields of one row."""
        for name, value in values.items():
            self._host_fields[name][row] = value
        self._dirty = True

    def reset(self, row: int) -> None:
        """Give a row the values of one that nobody has set."""
        self.set(row, **self._neutral)

    def flush(self) -> None:
        """Send the changes, ordered before whatever is launched next. Does not wait."""
        if self._dirty:
            # A copy of the twin: the device may still be reading when the next change comes.
            self._buffer.copy_(upload(self._host.copy(), self._device), non_blocking=True)
            self._dirty = False
