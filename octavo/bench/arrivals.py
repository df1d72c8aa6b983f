"""When each request of a load is sent."""

import math

import numpy as np

from octavo.errors import ClientError


def arrival_times(num_requests: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Seconds from the start at which each of `num_requests` is sent, for a mean `rate` a second.

    Gaps follow a gamma distribution of shape `burstiness` (1: a Poisson process; below 1 burstier, above 1 more even).
    They are then scaled so that the last request goes out at exactly num_requests / rate: the load of a short run does
    not depend on luck. An infinite rate sends everything at once.
    """
    if math.isinf(rate):
        return [0.0] * num_requests
    times = np.cumsum(rng.gamma(burstiness, 1 / (rate * burstiness), num_requests))
    return (times * (num_requests / rate / times[-1])).tolist()


def ramp_times(
    num_requests: int, start: float, end: float, strategy: str, burstiness: float, rng: np.random.Generator
) -> list[float]:
    """Like `arrival_times` while the rate goes from `start` to `end`, evenly over the requests.

    "linear" adds the same to the rate with each request, "exponential" multiplies it. Nothing is scaled.
    """
    if start <= 0 or end <= 0:
        raise ClientError(f"a ramp-up from {start:g} to {end:g} requests/s is not possible; both must be above 0.")
    progress = np.arange(num_requests) / num_requests
    rates = start + (end - start) * progress if strategy == "linear" else start * (end / start) ** progress
    return np.cumsum(rng.gamma(burstiness, 1 / (rates * burstiness))).tolist()
