"""The selective scan of Mamba and its dual form of Mamba 2."""

import torch
import torch.nn.functional as F

from octavo.ops.registry import op
from octavo.ops.ssm.requests import LENS, Requests, make_requests, scan_chunks

_SCAN_CHUNK = 8  # each doubling passes over the states of all its tokens: more would leave the cache
_DUAL_CHUNK = 64


@op
def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    requests: Requests,
) -> torch.Tensor:
    """Mamba (Gu and Dao 2023): h_t = exp(dt_t A) h_(t-1) + dt_t b_t x_t; y_t = (c_t h_t + d x_t) silu(gate_t).

    x, dt, gate [tokens, channels], b, c [tokens, state]; a_log [channels, state] float32, A = -exp(a_log); d, dt_bias
    [channels] float32, dt becomes softplus(dt + dt_bias); states [rows, channels, state] float32. Returns x's shape and dtype.
    """
    a = -a_log.float().exp()

    def step(state, inside, x, dt, b, c):
        x, c = x.float(), c.float()
        dt = F.softplus(dt.float() + dt_bias.float())
        dt = dt if inside is None else dt.masked_fill(~inside[..., None], 0.0)
        decay = torch.exp(dt[..., None] * a)
        h = (dt * x)[..., None] * b.float()[:, :, None]
        h[:, 0] += decay[:, 0] * state
        reach = 1  # by doubling (Hillis and Steele 1986)
        while reach < h.shape[1]:
            h[:, reach:] = h[:, reach:] + decay[:, reach:] * h[:, :-reach]
            decay[:, reach:] = decay[:, reach:] * decay[:, :-reach]
            reach *= 2
        return (h @ c[..., None])[..., 0] + d.float() * x, h[:, -1]

    y = scan_chunks(requests, states, (x, dt, b, c), _SCAN_CHUNK, step, torch.empty(x.shape, device=x.device))
    return (y * F.silu(gate.float())).to(x.dtype)


@op
def state_space_dual(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    requests: Requests,
    dt_limit: tuple[float, float],
) -> torch.Tensor:
    """Mamba 2 (Dao and Gu 2024), heads by themselves: H_t = exp(dt_t A) H_(t-1) + dt_t x_t b_t'; y_t = H_t c_t + d x_t.

    xbc [tokens, heads * head_dim + 2 * groups * state]: x, b and c, which groups of heads share; dt [tokens, heads] becomes
    softplus(dt + dt_bias) within `dt_limit`; a_log, d, dt_bias [heads] float32, A = -exp(a_log); states [rows, heads,
    head_dim, state] float32. Returns [tokens, heads * head_dim] in xbc's dtype.
    """
    _, heads, head_dim, size = states.shape
    inner = heads * head_dim
    groups = (xbc.shape[1] - inner) // (2 * size)
    a = -a_log.float().exp()
    x, b, c = xbc.split((inner, groups * size, groups * size), 1)
    x, b, c = x.unflatten(1, (heads, head_dim)), b.unflatten(1, (groups, size)), c.unflatten(1, (groups, size))

    def step(state, inside, x, b, c, dt):
        # b and c [n, groups, tokens, state]; x and dt [n, heads, tokens, …], the heads of a group side by side
        x, b, c, dt = (each.float().transpose(1, 2) for each in (x, b, c, dt))
        dt = F.softplus(dt + dt_bias.float()[:, None]).clamp(*dt_limit)
        dt = dt if inside is None else dt.masked_fill(~inside[:, None], 0.0)
        log_decay = (dt * a[:, None]).cumsum(-1)
        scores = (c @ b.transpose(2, 3)).repeat_interleave(heads // groups, 1)
        y = (scores * decay_between(log_decay) * dt[:, :, None]) @ x
        # What the state gives, and what it gets: one product for all heads of a group.
        read = c @ state.view(len(x), groups, -1, size).transpose(2, 3)
        read = read.unflatten(3, (-1, head_dim)).transpose(2, 3).flatten(1, 2)
        y = y + log_decay.exp()[..., None] * read + d.float()[:, None, None] * x
        left = x * (dt * (log_decay[..., -1:] - log_decay).exp())[..., None]
        left = left.unflatten(1, (groups, -1)).transpose(3, 4).flatten(2, 3)
        new = state * log_decay[..., -1:, None].exp() + (left @ b).view_as(state)
        return y.transpose(1, 2), new

    out = torch.empty(xbc.shape[0], heads, head_dim, dtype=xbc.dtype, device=xbc.device)
    return scan_chunks(requests, states, (x, b, c, dt), _DUAL_CHUNK, step, out).flatten(1)


def decay_between(log_decay: torch.Tensor) -> torch.Tensor:
    """Sums of logarithms up to each token [..., tokens] → [..., tokens, tokens]: what is left of token s at t >= s, else 0."""
    return (log_decay[..., :, None] - log_decay[..., None, :]).exp().tril()


def _scan_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for lens, channels, size in zip(LENS, (40, 6), (16, 4), strict=True):
        requests = make_requests(device, *lens)
        tokens = int(requests.query_start_loc[-1])

        def make(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(*shape, generator=rng).to(device, dtype)

        xz, bc = make(tokens, 2 * channels), make(tokens, 2 * size)
        x, gate = xz.chunk(2, 1)
        d, dt_bias = make(2, channels, dtype=torch.float32)
        yield (
            x.contiguous(), make(tokens, channels), *bc.chunk(2, 1), gate, make(channels, size, dtype=torch.float32), d,
            dt_bias, make(len(lens), channels, size, dtype=torch.float32), requests,
        )  # fmt: skip


def _dual_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for lens, heads, head_dim, groups, size in zip(LENS, (6, 2), (16, 24), (3, 1), (16, 32), strict=True):
        requests = make_requests(device, *lens)
        tokens = int(requests.query_start_loc[-1])

        def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(*shape, generator=rng).to(device, dtype)

        xbc = 0.5 * make(tokens, heads * head_dim + 2 * groups * size, dtype=dtype)
        dt = make(tokens, 2 * heads, dtype=dtype)[:, heads:]
        yield xbc, dt, *make(3, heads), make(len(lens), heads, head_dim, size), requests, (0.1, 2.0)


selective_scan.inputs, state_space_dual.inputs = _scan_inputs, _dual_inputs
for each in (selective_scan, state_space_dual):
    # Sums of dozens of products in another order.
    each.tolerance[torch.float32] = (1e-4, 1e-4)
