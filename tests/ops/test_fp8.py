"""FP8 linears: what the reference means, and every provider against it.

Triton's kernels run on a GPU where there is one, else in a child process in Triton's interpreter, which must be chosen
before Triton is imported.
"""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from octavo import ops
from octavo.ops.linear import linear
from octavo.ops.linear.fp8 import BLOCK, FP8, FP8_MAX, dequantize_weight, linear_fp8, quantize_fp8
from octavo.ops.registry import Op
from octavo.ops.triton_support import is_interpreting

ops.load_providers()

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
interpreted = pytest.mark.skipif(not is_interpreting(), reason="runs in the child process with Triton's interpreter")


def provider(op: Op, name: str):
    """A provider's function and its condition."""
    found = next((p for p in op.providers if p.name == name and p.is_available()), None)
    if found is None:
        pytest.skip(f"provider {name} of {op.name} is not supported on this machine")
    return found


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error in the Frobenius norm."""
    return float((got.float() - want.float()).norm() / want.float().norm())


def weight_by_row(rng: torch.Generator, out: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    quants, scale = quantize_fp8.reference(torch.randn(out, width, generator=rng) / width**0.5)
    return quants.to(DEVICE), scale[:, 0].to(DEVICE)


def weight_by_block(rng: torch.Generator, out: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales differ from block to block by up to four, so that a wrong block shows."""
    weight = torch.randn(out, width, generator=rng) / width**0.5
    scale = 4 ** torch.rand(out // BLOCK, width // BLOCK, generator=rng) * 4 / FP8_MAX / width**0.5
    return (weight / scale.mean()).to(FP8).to(DEVICE), scale.to(DEVICE)


def test_quantize_scales_the_largest_to_448():
    x = torch.tensor([[1.0, -2.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]])
    quants, scale = quantize_fp8.reference(x)
    assert quants.dtype == FP8 and scale.shape == (2, 1)
    assert quants[0].float().tolist() == [224.0, -448.0, 112.0, 0.0]
    torch.testing.assert_close(quants.float() * scale, x)


def test_quantize_by_group_and_with_a_given_scale():
    x = torch.tensor([[1.0, 2.0, 30.0, 40.0]])
    quants, scale = quantize_fp8.reference(x, group=2)
    torch.testing.assert_close(scale, torch.tensor([[2.0, 40.0]]) / FP8_MAX)
    assert quants.float().tolist() == [[224.0, 448.0, 320.0, 448.0]]  # 336 lies between 320 and 352: to even
    quants, scale = quantize_fp8.reference(x, given_scale=torch.tensor(0.05))
    assert quants.float().tolist() == [[20.0, 40.0, 448.0, 448.0]]  # 600 and 800 saturate
    torch.testing.assert_close(scale, torch.tensor([[0.05]]))


def test_quantize_after_norm_and_activation():
    rng = torch.Generator().manual_seed(0)
    x, gamma = torch.randn(3, 64, generator=rng), torch.randn(64, generator=rng)
    quants, scale = quantize_fp8.reference(x, gamma, 1e-5)
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * gamma
    torch.testing.assert_close(quants.float() * scale, normed, rtol=0.07, atol=0.01)
    quants, scale = quantize_fp8.reference(x, activation="silu")
    gated = torch.nn.functional.silu(x[:, :32]) * x[:, 32:]
    torch.testing.assert_close(quants.float() * scale, gated, rtol=0.07, atol=0.01)


@pytest.mark.parametrize("scales", ["tensor", "row", "block"])
def test_reference_is_a_linear_on_rounded_numbers(scales):
    rng = torch.Generator().manual_seed(1)
    weight = (torch.randn(200, 256, generator=rng) * 100).to(FP8)
    scale = {"tensor": torch.tensor(0.01), "row": torch.rand(200, generator=rng), "block": torch.rand(2, 2)}[scales]
    wide = dequantize_weight(weight, scale)
    if scales == "block":
        assert wide[130, 200] == weight[130, 200].float() * scale[1, 1]
        assert wide[130, 100] == weight[130, 100].float() * scale[1, 0]
    x, bias, residual = (torch.randn(n, generator=rng) for n in ((3, 256), (200,), (3, 200)))
    quants, x_scale = quantize_fp8.reference(x, group=BLOCK if scales == "block" else None)
    rounded = (quants.float().view(3, x_scale.shape[1], -1) * x_scale[..., None]).view(3, 256)
    want = linear.reference(rounded, wide, bias, None, 0.0, None, residual, 0.5)
    got = linear_fp8.reference(x, weight, scale, bias, None, 0.0, None, residual, 0.5)
    torch.testing.assert_close(got, want)
    assert 0.001 < error(linear_fp8.reference(x, weight, scale), linear.reference(x, wide)) < 0.05


@pytest.mark.parametrize("variant", ["plain", "gated", "residual", "static"])
def test_scaled_mm_on_a_cpu(variant):
    """The provider is for GPUs; newer versions of torch can compute the same call here."""
    rng = torch.Generator().manual_seed(6)
    weight, weight_scale = weight_by_row(rng, 96, 64)
    weight, weight_scale = weight.cpu(), weight_scale.cpu()
    x, gamma, bias = (torch.randn(s, generator=rng).bfloat16() for s in ((5, 64), (64,), (96,)))
    residual = torch.randn(5, 96, generator=rng).bfloat16()
    rest = {
        "plain": (),
        "gated": (bias, gamma, 1e-5, "silu"),
        "residual": (None, None, 0.0, None, residual, 0.5),
        "static": (None, None, 0.0, None, None, 1.0, torch.tensor(0.01)),
    }[variant]
    run = next(p.fn for p in linear_fp8.providers if p.name == "scaled_mm")
    try:
        got = run(x, weight, weight_scale, *rest)
    except RuntimeError as failure:
        pytest.skip(f"this torch has no row-wise scaled_mm for CPUs: {failure}")
    wide = [t.float() if isinstance(t, torch.Tensor) else t for t in rest]
    assert error(got, linear_fp8.reference(x.float(), weight, weight_scale, *wide)) < 1e-2


@interpreted
@pytest.mark.parametrize("case", range(5))
def test_triton_quantize_in_the_interpreter(case):
    rng = torch.Generator().manual_seed(case)
    x = torch.randn(3, 384, generator=rng)
    arguments = (
        (x,),
        (x, 1 + 0.1 * torch.randn(384, generator=rng), 1e-5),
        (x, None, 0.0, None, None, torch.tensor(0.005)),
        (x, None, 0.0, "silu"),
        (x, None, 0.0, None, BLOCK),
    )[case]
    found = provider(quantize_fp8, "triton")
    assert found.accepts(*arguments)
    quants, scale = found.fn(*arguments)
    want, want_scale = quantize_fp8.reference(*arguments)
    torch.testing.assert_close(scale, want_scale)
    # The interpreter loses the carry of a mantissa that rounds up to the next power of two, so those are left out.
    regular = torch.frexp(want.float())[0].abs() != 0.5
    torch.testing.assert_close(quants.float()[regular], want.float()[regular], rtol=0.13, atol=0.01)
    assert (quants.float() == want.float())[regular].float().mean() > 0.99


@interpreted
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("by_block", [False, True])
def test_triton_gemv_in_the_interpreter(by_block, gated):
    from octavo.ops.linear.triton_fp8_gemv import fp8_gemv
    from octavo.ops.linear.triton_gemv import GemvConfig

    rng = torch.Generator().manual_seed(2)
    n, k = (128, 384) if by_block else (100, 320)  # 320: the last chunk is not full; 100: nor is the last program
    make = weight_by_block if by_block else weight_by_row
    weight, weight_scale = make(rng, 2 * n if gated else n, k)
    x, gamma, bias, residual = (torch.randn(s, generator=rng) for s in ((1, k), (k,), (weight.shape[0],), (1, n)))
    rest = (bias, gamma, 1e-5, "silu" if gated else None, residual, 0.5)
    got = fp8_gemv(x, weight, weight_scale, GemvConfig(8, 256, 4), *rest)
    want = linear.reference(x, dequantize_weight(weight, weight_scale), *rest)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@interpreted
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("by_block", "rows"), [(False, 5), (True, 5), (False, 40)])
def test_triton_dot_in_the_interpreter(by_block, rows, gated):
    from octavo.ops.linear.triton_fp8_dot import Fp8DotConfig, fp8_dot

    rng = torch.Generator().manual_seed(3)
    n, k = (128, 256) if by_block else (100, 256)
    make = weight_by_block if by_block else weight_by_row
    weight, weight_scale = make(rng, 2 * n if gated else n, k)
    x, bias, residual = (torch.randn(s, generator=rng) for s in ((rows, k), (weight.shape[0],), (rows, n)))
    quants, x_scale = quantize_fp8.reference(x, group=BLOCK if by_block else None)
    activation = "silu" if gated else None
    config = Fp8DotConfig(16, 64, 128, 2, 3)
    got = fp8_dot(quants, x_scale, weight, weight_scale, x.dtype, config, bias, activation, residual, 0.5)
    want = linear_fp8.reference(x, weight, weight_scale, bias, None, 0.0, activation, residual, 0.5)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@interpreted
def test_triton_serves_what_it_says():
    rng = torch.Generator().manual_seed(4)
    found = provider(linear_fp8, "triton")
    weight, weight_scale = weight_by_row(rng, 96, 192)
    for rows in (1, 3):
        x = torch.randn(rows, 192, generator=rng)
        assert found.accepts(x, weight, weight_scale)
        assert error(found.fn(x, weight, weight_scale), linear_fp8.reference(x, weight, weight_scale)) < 0.1
    assert not found.accepts(x, weight, weight_scale[0])  # one scale for all: methods spread it over the rows
    assert not found.accepts(x, weight, torch.ones(1, 2))  # 192 columns are one and a half blocks


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU")
@pytest.mark.skipif(is_interpreting(), reason="this is the child process")
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton: pip install octavo[triton]")
def test_kernels_in_the_interpreter():
    child = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "triton"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert "16 passed" in child.stdout, child.stdout


GPU_ROWS = (1, 2, 8, 32, 64, 256)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", GPU_ROWS)
@pytest.mark.parametrize("variant", ["plain", "norm", "gated", "residual", "bias", "static"])
@pytest.mark.parametrize("name", ["triton", "scaled_mm"])
def test_providers_on_the_gpu(name, variant, rows):
    rng = torch.Generator().manual_seed(rows)
    n, k = 1536, 2048

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(DEVICE, torch.bfloat16)

    weight, weight_scale = weight_by_row(rng, 2 * n if variant == "gated" else n, k)
    x, gamma, residual, bias = normal(rows, k), 1 + 0.1 * normal(k), normal(rows, n), normal(n)
    rest = {
        "plain": (),
        "norm": (None, gamma, 1e-5),
        "gated": (None, gamma, 1e-5, "silu"),
        "residual": (None, None, 0.0, None, residual, 0.5),
        "bias": (bias,),
        "static": (None, None, 0.0, None, None, 1.0, torch.tensor(0.01, device=DEVICE)),
    }[variant]
    found = provider(linear_fp8, name)
    if not found.accepts(x, weight, weight_scale, *rest):
        assert name == "triton" and rows > 64, "only many tokens may be left to the vendor"
        return
    wide = [t.float() if isinstance(t, torch.Tensor) else t for t in rest]
    if name == "triton" and rows == 1:  # one token is not rounded
        want = linear.reference(x.float(), dequantize_weight(weight, weight_scale), *wide[:6])
    else:
        want = linear_fp8.reference(x.float(), weight, weight_scale, *wide)
    first = found.fn(x, weight, weight_scale, *rest)
    assert error(first, want) < 1e-2
    assert torch.equal(first, found.fn(x, weight, weight_scale, *rest)), "the same call gives the same bits"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", GPU_ROWS)
@pytest.mark.parametrize("gated", [False, True])
def test_block_scales_on_the_gpu(gated, rows):
    rng = torch.Generator().manual_seed(rows)
    n, k = 1536, 2048
    weight, weight_scale = weight_by_block(rng, 2 * n if gated else n, k)
    x = torch.randn(rows, k, generator=rng).to(DEVICE, torch.bfloat16)
    rest = (None, None, 0.0, "silu" if gated else None)
    found = provider(linear_fp8, "triton")
    assert found.accepts(x, weight, weight_scale, *rest)
    if rows == 1:
        want = linear.reference(x.float(), dequantize_weight(weight, weight_scale), *rest)
    else:
        want = linear_fp8.reference(x.float(), weight, weight_scale, *rest)
    assert error(found.fn(x, weight, weight_scale, *rest), want) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("rows", GPU_ROWS)
@pytest.mark.parametrize("case", ["plain", "norm", "silu", "group", "given"])
def test_quantize_on_the_gpu(case, rows):
    rng = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 4096, generator=rng).to(DEVICE, torch.bfloat16)
    gamma = (1 + 0.1 * torch.randn(4096, generator=rng)).to(DEVICE, torch.bfloat16)
    arguments = {
        "plain": (x,),
        "norm": (x, gamma, 1e-5),
        "silu": (x, None, 0.0, "silu"),
        "group": (x, None, 0.0, None, BLOCK),
        "given": (x, None, 0.0, None, None, torch.tensor(0.002, device=DEVICE)),
    }[case]
    quants, scale = provider(quantize_fp8, "triton").fn(*arguments)
    want, want_scale = quantize_fp8.reference(*arguments)
    torch.testing.assert_close(scale, want_scale)
    assert (quants.float() == want.float()).float().mean() > 0.99
    torch.testing.assert_close(quants.float(), want.float(), rtol=0.13, atol=0.01)
