"""Device functions that several Triton kernels use."""

import triton
import triton.language as tl


@triton.jit
def prefetch_l2(pointers):
    """Start bringing the 128-byte lines at `pointers` (a tensor of valid addresses) into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def apply_gate(x, ACTIVATION: tl.constexpr):
    """A gate of `ops.activation` on float32 values."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) is the logistic function of 2u.
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * u))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "relu", "unknown activation")
        return tl.maximum(x, 0.0)


@triton.jit
def tanh(x):
    """Hyperbolic tangent of float32 values; exp saturates to 0 or inf at both ends, which gives -1 and 1."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
