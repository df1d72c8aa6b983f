"""Where older programs look for `Logprob`."""

from octavo.types.outputs import Logprob, RequestMetrics

__all__ = ["Logprob", "RequestMetrics"]
