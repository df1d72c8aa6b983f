"""The gated delta rule."""

import torch
import torch.nn.functional as F

from octavo.ops.registry import op
from octavo.ops.ssm.mamba import decay_between
from octavo.ops.ssm.requests import LENS, Requests, make_requests, scan_chunks

_CHUNK = 64
NORM_EPS = 1e-6


def unit(x: torch.Tensor) -> torch.Tensor:
    """x over its length, along the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


@op
def gated_delta_rule(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    requests: Requests,
    num_key_heads: int,
) -> torch.Tensor:
    """Yang et al. 2024: S_t = g_t S_(t-1) + k_t (beta_t (v_t - g_t k_t S_(t-1)))'; y_t = q_t S_t / sqrt(key_dim).

    qkv [tokens, 2 * key_heads * key_dim + heads * value_dim]: q and k, which are divided by their length and which
    consecutive heads share, and v; b, a [tokens, heads]: beta = sigmoid(b), g = exp(-exp(a_log) softplus(a + dt_bias));
    a_log, dt_bias [heads] float32; states [rows, heads, key_dim, value_dim] float32. Returns [tokens, heads * value_dim].

    Within a chunk the corrections u_t = beta_t (v_t - …) depend on those before them by a triangular system.
    """
    _, heads, key_dim, value_dim = states.shape
    key_width = num_key_heads * key_dim
    q, k, v = qkv.split((key_width, key_width, heads * value_dim), 1)
    q, k = q.unflatten(1, (num_key_heads, key_dim)), k.unflatten(1, (num_key_heads, key_dim))

    def step(state, inside, q, k, v, b, a):
        # [n, heads, tokens, …], a key head repeated for its heads
        q, k, v, b, a = (each.float().transpose(1, 2) for each in (q, k, v, b, a))
        q, k = (unit(each).repeat_interleave(heads // num_key_heads, 1) for each in (q, k))
        q = q * key_dim**-0.5
        beta, log_g = b.sigmoid(), -a_log.float().exp()[:, None] * F.softplus(a + dt_bias.float()[:, None])
        if inside is not None:
            beta, log_g = (each.masked_fill(~inside[:, None], 0.0) for each in (beta, log_g))
        log_decay = log_g.cumsum(-1)
        decay, so_far = decay_between(log_decay), log_decay.exp()[..., None]
        u = beta[..., None] * (v - so_far * (k @ state))
        if u.shape[2] > 1:
            system = (beta[..., None] * (k @ k.transpose(2, 3)) * decay).tril(-1)
            u = torch.linalg.solve_triangular(system, u, upper=False, unitriangular=True)
        y = so_far * (q @ state) + ((q @ k.transpose(2, 3)) * decay) @ u
        left = (log_decay[..., -1:] - log_decay).exp()[..., None]
        new = state * so_far[:, :, -1:] + (k * left).transpose(2, 3) @ u
        return y.transpose(1, 2), new

    out = torch.empty(qkv.shape[0], heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    inputs = (q, k, v.unflatten(1, (heads, value_dim)), b, a)
    return scan_chunks(requests, states, inputs, _CHUNK, step, out).flatten(1)


def _inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for lens, key_heads, heads, key_dim, value_dim in zip(LENS, (2, 1), (4, 2), (16, 24), (32, 16), strict=True):
        requests = make_requests(device, *lens)
        tokens = int(requests.query_start_loc[-1])

        def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(*shape, generator=rng).to(device, dtype)

        qkv = make(tokens, 2 * key_heads * key_dim + heads * value_dim, dtype=dtype)
        # Decays between a hundredth and one, so that what is far back counts.
        a_log, dt_bias = make(2, heads)
        b, a = make(tokens, 2 * heads, dtype=dtype).chunk(2, 1)
        yield qkv, b, a, a_log - 1, dt_bias, make(len(lens), heads, key_dim, value_dim), requests, key_heads


gated_delta_rule.inputs = _inputs
gated_delta_rule.tolerance[torch.float32] = (1e-4, 1e-4)  # a triangular system solved in another order
