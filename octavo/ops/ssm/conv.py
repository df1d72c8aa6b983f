"""The short convolution in front of recurrent layers."""

import torch

from octavo.ops.activation import GATES
from octavo.ops.registry import op
from octavo.ops.ssm.requests import Requests, make_requests, scan_chunks

_CHUNK = 256


@op
def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    requests: Requests,
    activation: str | None = None,
) -> torch.Tensor:
    """y_t = activation(bias + sum over i of weight[:, i] * x_(t - width + 1 + i)), each channel by itself.

    x [tokens, channels], weight [channels, width], bias [channels]; states [rows, width - 1, channels] keep a request's last
    inputs; `activation` names a gate of `ops.activation`. Returns [tokens, channels] in x's dtype.
    """
    width = weight.shape[1]

    def step(state, inside, x):
        padded = torch.cat((state.to(x.dtype), x), 1)
        num = x.shape[1]
        y = padded[:, :num] * weight[:, 0] if bias is None else torch.addcmul(bias, padded[:, :num], weight[:, 0])
        for i in range(1, width):
            y = torch.addcmul(y, padded[:, i : i + num], weight[:, i])
        if inside is None:
            return y, padded[:, 1:].float()
        last = inside.sum(1, keepdim=True) + torch.arange(width - 1, device=x.device)
        return y, padded.gather(1, last[..., None].expand(-1, -1, x.shape[-1])).float()

    y = scan_chunks(requests, states, (x,), _CHUNK, step, torch.empty_like(x, memory_format=torch.contiguous_format))
    return y if activation is None else GATES[activation](y)


def _inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(device, dtype)

    for lens, channels, width, activation in (
        (((9, 1), (0, 1), (3, 1)), 80, 4, "silu"),
        (((0, 9), (7, 2), (5, 1), (0, 1), (2, 20)), 48, 4, "silu"),
        (((3, 5), (0, 1)), 96, 3, None),
    ):
        requests = make_requests(device, *lens)
        # Channels of a wider projection.
        x = make(int(requests.query_start_loc[-1]), channels + 16)[:, 8:-8]
        bias = make(channels) if activation else None
        yield x, make(channels, width), bias, make(len(lens), width - 1, channels), requests, activation


short_conv.inputs = _inputs
