"""Which requests a core was computing when it died: a few bytes in a file that outlives the process.

The core notes the rows of each step before it starts and crosses them out when the step is through. What is left in the
file after a crash, whatever crashed, is what was in flight. One memory write a step, no system call.

    [width]  [count, name, name, …]  [count, name, …]  …      int64; a step owns slot step_id % NUM_SLOTS
"""

import mmap
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

import numpy as np

from octavo.logger import get_logger
from octavo.types.step import SchedulerOutput

logger = get_logger(__name__)

FLIGHT_RECORD = "flight"  # the file's name inside a core's private folder
NUM_SLOTS = 4  # at least as many as steps can be in flight


class FlightRecorder:
    """The core's end: `begin` before a step is launched, `end` once its result has been taken in."""

    def __init__(self, path: Path, max_num_seqs: int):
        width = 1 + max_num_seqs
        content = np.frombuffer(_map_file(path, 8 * (1 + NUM_SLOTS * width)), dtype=np.int64)
        content[0] = width
        self._slots = content[1:].reshape(NUM_SLOTS, width)
        self._names = np.zeros(max_num_seqs, dtype=np.int64)  # of the request in each row

    def begin(self, step: SchedulerOutput) -> None:
        """Note who is in a step. A new row that never gets to run keeps its name until the next request takes it."""
        for new in step.new_rows:
            self._names[new.row] = name_of(new.request_id)
        slot = self._slots[step.step_id % NUM_SLOTS]
        slot[1 : 1 + len(step.rows)] = self._names[step.rows]
        slot[0] = len(step.rows)

    def end(self, step: SchedulerOutput) -> None:
        """Cross a step out."""
        self._slots[step.step_id % NUM_SLOTS, 0] = 0


def _map_file(path: Path, size: int) -> mmap.mmap:
    """A file of zeros in memory. Without room for it on the disk, memory that nobody else will see."""
    try:
        with open(path, "w+b") as file:
            # Written rather than left a hole: filling a hole once the disk is full would kill the process.
            file.write(bytes(size))
            file.flush()
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        path.unlink(missing_ok=True)
        logger.warning("steps are not recorded, so a request that kills the engine core is found late: %s", error)
        return mmap.mmap(-1, size)


def read_in_flight(path: Path, request_ids: Iterable[str]) -> set[str]:
    """Those of `request_ids` that the record's last owner was computing; none when it never began."""
    try:
        content = np.fromfile(path, dtype=np.int64)
    except FileNotFoundError:
        return set()
    if not len(content):
        return set()
    names = {name for count, *slot in content[1:].reshape(NUM_SLOTS, -1).tolist() for name in slot[:count]}
    return {request_id for request_id in request_ids if name_of(request_id) in names}


def name_of(request_id: str) -> int:
    """A request's name of fixed size."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "little", signed=True)
