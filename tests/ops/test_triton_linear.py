"""The Triton kernels of `linear`: every part of the operator, shapes that divide nothing, and which kernel serves what."""
# The kernels can only be imported where they can run.
# ruff: noqa: E402

import pytest
import torch

from octavo.ops.linear import linear
from octavo.ops.triton_support import has_triton, is_interpreting
from octavo.ops.triton_utils import forget_choices, override_device_name, table_name

if not has_triton():
    pytest.skip("needs a GPU, or the child process of test_triton_interpreter.py", allow_module_level=True)

from octavo import ops

ops.load_providers()

from octavo.ops.linear.triton_dot import DotConfig, default_dot_config, dot
from octavo.ops.linear.triton_gemv import GemvConfig, default_gemv_config, gemv
from octavo.ops.linear.triton_linear import Choice, choice_from_entry, choose, run_choice

# The interpreter computes with NumPy, which warns where a GPU saturates.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cpu" if is_interpreting() else "cuda"
# (n, k): whole tiles; no multiple of any tile in either direction; k shorter than a tile.
SHAPES = [(32, 512), (19, 576), (10, 96)]
WHOLE = {"bias": True, "norm": True, "activation": None, "residual": True, "scale": 0.22}
PARTS = [
    {},
    {"bias": True, "norm": True},
    {"norm": True, "activation": "silu"},
    {"bias": True, "activation": "gelu", "residual": True, "scale": 0.5},
    {"norm": True, "activation": "gelu_tanh"},
    {"residual": True, "scale": 0.22},
    WHOLE,
]


def arguments(
    tokens: int, n: int, k: int, *, bias=False, norm=False, activation=None, residual=False, scale=1.0, seed=0
):
    """Arguments of `linear` in float16 (the interpreter multiplies the raw bits of bfloat16)."""
    rng = torch.Generator().manual_seed(seed)
    rows = n * (2 if activation else 1)

    def make(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (std * torch.randn(*shape, generator=rng)).to(DEVICE, torch.float16)

    return (
        make(tokens, k),
        make(rows, k, std=k**-0.5),
        make(rows) if bias else None,
        make(k, std=0.1) + 1 if norm else None,
        1e-5,
        activation,
        make(tokens, n) if residual else None,
        scale,
    )


def reference(args: tuple) -> torch.Tensor:
    return linear.reference(*[a.float() if isinstance(a, torch.Tensor) else a for a in args])


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected, rtol=3e-3, atol=4e-3)


@pytest.mark.parametrize("parts", PARTS, ids=lambda p: "+".join(p) or "plain")
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_gemv(n, k, parts):
    args = arguments(1, n, k, **parts)
    for config in (default_gemv_config(n, k, bool(parts.get("activation"))), GemvConfig(4, 256, 4)):
        assert_close(gemv(args[0], args[1], config, *args[2:]), reference(args))


@pytest.mark.parametrize("parts", PARTS, ids=lambda p: "+".join(p) or "plain")
@pytest.mark.parametrize(("n", "k"), [(64, 256), (75, 160)])
def test_dot(n, k, parts):
    args = arguments(5, n, k, **parts)
    for config in (
        default_dot_config(n, k, 5, bool(parts.get("activation"))),
        DotConfig(64, 64, 3, 3, swap=True),
        DotConfig(32, 32, 1, 3),
    ):
        assert_close(dot(args[0], args[1], config, *args[2:]), reference(args))


@pytest.mark.parametrize("tokens", [2, 16, 17, 33, 64])
def test_dot_pads_tokens(tokens):
    args = arguments(tokens, 75, 160, **WHOLE)
    assert_close(dot(args[0], args[1], DotConfig(32, 32, 2, 3), *args[2:]), reference(args))


def test_split_sums_do_not_depend_on_the_call():
    """The arrival counters are back at zero after a call, and the partial sums are added in one order."""
    args = arguments(3, 75, 576, norm=True)
    first = dot(args[0], args[1], DotConfig(32, 32, 4, 3), *args[2:])
    assert all(torch.equal(first, dot(args[0], args[1], DotConfig(32, 32, 4, 3), *args[2:])) for _ in range(2))


def test_norm_of_large_float16_values_does_not_overflow():
    """gamma * x passes 65504 before it is divided by the rms."""
    x, weight, _, gamma, *rest = arguments(2, 64, 128, norm=True)
    args = (x * 2000, weight, None, gamma * 20, *rest)
    actual = dot(args[0], args[1], DotConfig(32, 32, 2, 3), *args[2:])
    torch.testing.assert_close(actual.float(), reference(args), rtol=5e-3, atol=5e-2)


def test_separate_norm_gives_the_same():
    args = arguments(4, 75, 160, norm=True, activation="silu")
    for separate in (False, True):
        assert_close(run_choice(Choice(DotConfig(32, 32, 1, 3), separate), *args), reference(args))


def test_the_provider_refuses_what_its_kernels_cannot_do():
    (provider,) = (p for p in linear.providers if p.name == "triton")
    x, weight, *rest = arguments(3, 64, 128)
    assert provider.accepts(x, weight, *rest)
    assert not provider.accepts(x.float(), weight.float(), *rest)  # float32 is the vendor library's
    assert not provider.accepts(x, weight[:, ::2], *rest)  # strided weights
    assert not provider.accepts(x[:, ::2], weight[:, :64].contiguous(), *rest)  # strided activations
    assert not provider.accepts(x[:0], weight, *rest)
    assert not provider.accepts(x.repeat(30, 1), weight, *rest)  # more rows than the kernel pads to


def test_choices_come_from_the_table_or_by_rule():
    with override_device_name("a device nobody has measured"):
        assert isinstance(choose(4096, 4096, 1, False).config, GemvConfig)
        assert isinstance(choose(4096, 4096, 16, False).config, DotConfig)
        assert choose(4096, 4096, 64, False).config is None  # the vendor library's
        assert isinstance(choose(128256, 4096, 64, False).config, DotConfig)
        assert choose(64, 1 << 17, 1, False).config is None  # a row that no program's registers hold
    with override_device_name("NVIDIA H200"):
        assert isinstance(choose(6144, 4096, 1, False).config, GemvConfig)
        # Rows between two limits belong to the greater one.
        assert choose(6144, 4096, 2, False) == choose(6144, 4096, 16, False)
    forget_choices()
    assert choice_from_entry({"kernel": "composed", "us": 1.0}) == Choice(None)
    assert table_name("NVIDIA H200") == "nvidia_h200"
