"""The KV cache of a CPU takes memory when it is used, not when the engine starts."""

import psutil
import torch

from octavo.worker.memory import zero_bytes


def test_pages_are_taken_when_they_are_touched():
    process = psutil.Process()
    before = process.memory_info().rss
    buffer = zero_bytes(1 << 30, torch.device("cpu"))
    assert process.memory_info().rss - before < 64 << 20
    assert buffer.dtype == torch.uint8
    assert buffer.shape == (1 << 30,)
    assert not buffer[:: 1 << 24].any()
    buffer[5] = 7  # writable, as the cache is
    assert int(buffer[:10].sum()) == 7
