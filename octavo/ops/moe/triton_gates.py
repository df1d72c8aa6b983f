"""The gates of experts on the device, see `ops.moe.gate_and_up`."""

import triton
import triton.language as tl

from octavo.ops.triton_device import apply_gate


@triton.jit
def gate_and_up(gate, up, ACTIVATION: tl.constexpr):
    """act(gate) * up of float32 values."""
    if ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    else:
        return apply_gate(gate, ACTIVATION) * up
