"""The recurrence of RWKV-4: weighted means of values, whose weights fade with distance."""

import torch
import torch.nn.functional as F

from octavo.ops.registry import op
from octavo.ops.ssm.requests import LENS, Requests, make_requests, scan_chunks

_CHUNK = 31  # a power of two with the state in front
_NOTHING = -1e38  # the maximum of no tokens


@op
def wkv(
    key: torch.Tensor,
    value: torch.Tensor,
    time_decay: torch.Tensor,
    time_first: torch.Tensor,
    states: torch.Tensor,
    requests: Requests,
) -> torch.Tensor:
    """RWKV-4 (Peng et al. 2023): y_t = (a_(t-1) + e^(time_first + k_t) v_t) / (b_(t-1) + e^(time_first + k_t)) with sums
    a_t = d a_(t-1) + e^(k_t) v_t and b_t = d b_(t-1) + e^(k_t), that fade by d = exp(-exp(time_decay)); channels by themselves.

    key, value [tokens, channels]; time_decay, time_first [channels] float32; states [rows, 3, channels] float32: a and b over
    e^m, and m, the largest exponent in them. Returns key's shape and dtype.
    """
    # On a and b over e^m, and m: both change the exponents alone.
    fade, first = (F.pad(x.float()[None], (0, 0, 2, 0)) for x in (-time_decay.float().exp(), time_first))

    def step(state, inside, key, value):
        key, value = key.float(), value.float()
        # One term of b is e^m itself, so that nothing but a fresh state has b = 0.
        maximum = state[:, 2].masked_fill(state[:, 1] == 0, _NOTHING)
        state = torch.stack((state[:, 0], state[:, 1], maximum), 1)
        each = torch.stack((value, torch.ones_like(value), key), 2)
        sums = torch.cat((state[:, None], each), 1)
        reach = 1  # by doubling (Hillis and Steele 1986)
        while reach < sums.shape[1]:
            sums[:, reach:] = _add(sums[:, :-reach] + reach * fade, sums[:, reach:])
            reach *= 2
        a, b, _ = _add(sums[:, :-1], each + first).unbind(2)
        if inside is None:
            return a / b, sums[:, -1]
        return a / b, sums[torch.arange(len(sums), device=sums.device), inside.sum(1)]

    return scan_chunks(requests, states, (key, value), _CHUNK, step, torch.empty_like(key))


def _add(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Sums over e^m, and m [..., 3, channels], added under the greater m."""
    (a, m), (b, n) = (each.split((2, 1), -2) for each in (one, other))
    top = torch.maximum(m, n)
    return torch.cat((a * (m - top).exp() + b * (n - top).exp(), top), -2)


def _inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for lens, channels in zip(LENS, (40, 6), strict=True):
        requests = make_requests(device, *lens)

        def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(*shape, generator=rng).to(device, dtype)

        key, value = make(2, int(requests.query_start_loc[-1]), channels, dtype=dtype)
        states = make(len(lens), 3, channels)
        states[:, 1] = states[:, 1].abs() + 1
        # Keys whose exponentials float32 cannot hold.
        yield 50 * key, value, *make(2, channels), states, requests


wkv.inputs = _inputs
