"""Device functions that several Triton kernels use."""

import triton
import triton.language as tl

from octavo.ops.triton_support import is_interpreting

_INTERPRETING = tl.constexpr(is_interpreting())


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
    elif ACTIVATION == "relu2":
        return tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    else:
        tl.static_assert(ACTIVATION == "relu", "unknown activation")
        return tl.maximum(x, 0.0)


@triton.jit
def softplus(x):
    """log(1 + exp(x)) of float32 values. Where 1 + exp(x) is rounded, the logarithm is corrected for it (Kahan)."""
    u = tl.exp(tl.minimum(x, 20.0))
    w = 1.0 + u
    return tl.where(x > 20.0, x, tl.where(w == 1.0, u, tl.log(w) * (u / (w - 1.0))))


@triton.jit
def tanh(x):
    """Hyperbolic tangent of float32 values; exp saturates to 0 or inf at both ends, which gives -1 and 1."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def unpack_e4m3_pairs(pairs):
    """The E4M3 numbers in the lower and in the upper bytes of int16 values, as float16."""
    if _INTERPRETING:
        lower = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        upper = ((pairs >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        return lower, upper
    else:
        # Two values at a time: their lower bytes side by side, then their upper bytes, and each two converted at once.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 lower, upper;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {lower, upper}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, lower;
            cvt.rn.f16x2.e4m3x2 $1, upper;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
