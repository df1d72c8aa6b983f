"""`octavo bench kernels`: estimates, rates, providers chosen and refused."""

import json
from pathlib import Path

import pytest
import torch

from octavo import cli
from octavo.cli.bench_kernels import rates
from octavo.ops.attention import paged_attention
from octavo.ops.linear import linear
from octavo.ops.measure import Ceilings, Measurement, estimate, load_operators, measure_op
from octavo.ops.registry import Op


def test_estimates():
    load_operators()
    doubled = Op(lambda x: x * 2)
    x = torch.ones(10, 4)
    assert estimate(doubled, (x, 3, [x[:5]]), x) == (160 + 80 + 160, 0)
    weight = torch.ones(6, 4)
    assert estimate(linear, (x, weight), None) == (160 + 96 + 10 * 6 * 4, 2 * 10 * 6 * 4)
    assert estimate(linear, (x, weight, None, None, 0.0, "silu"), None)[0] == 160 + 96 + 10 * 3 * 4


def test_attention_counts_what_each_query_sees():
    q, kv_cache = torch.zeros(4, 2, 8), torch.zeros(9, 2, 16, 1, 8)
    starts, lens = torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([5, 20], dtype=torch.int32)
    num_bytes, flops = paged_attention.bytes_and_flops(q, kv_cache, None, starts, lens, 3, 20, 1.0)
    assert num_bytes == 2 * 4 * 2 * 8 * 4 + 2 * (5 + 20) * 8 * 4  # the cache's other blocks do not count
    assert flops == 4 * (3 + 4 + 5 + 20) * 2 * 8


def test_every_operator_can_be_measured():
    operators = load_operators()
    assert not [op.name for op in operators.values() if op.inputs is None and op.bench_inputs is None]


def test_decoding_counts_the_cache_and_the_projections():
    num, width = 2, 6 * 128  # 4 query heads and one of keys and of values
    cache, lens = torch.zeros(9, 2, 64, 8, 128), torch.tensor([100, 7], dtype=torch.int32)
    num_bytes, flops = load_operators()["decode_attention"].bytes_and_flops(
        torch.zeros(num, width), None, None, cache, None, None, lens, 100, 4, 8, 1.0
    )
    assert num_bytes == 4 * (num * width + num * 4 * 128 + 2 * 107 * 8 * 128)
    assert flops == 4 * 107 * 4 * 128


def test_rates_are_shares_of_the_ceilings():
    row = rates(Measurement("op", "torch", "", 0.5, 10**9, 4 * 10**11), Ceilings(4e9, 1.6e12))
    assert (row["gb_per_s"], row["bandwidth_share"]) == (2.0, 0.5)
    assert (row["tflop_per_s"], row["compute_share"]) == (0.8, 0.5)


def test_every_accepting_provider_is_measured():
    scaled = Op(lambda x: x * 2)
    scaled.register("wide", accepts=lambda x: x.shape[0] > 1)(lambda x: x + x)
    scaled.register("elsewhere", supported=lambda: False)(lambda x: x)
    scaled.inputs = lambda rng, dtype, device: [(torch.ones(n, dtype=dtype, device=device),) for n in (1, 2)]
    found = [(m.provider, m.num_bytes) for m in measure_op(scaled, torch.float32, "cpu", 1e-4)]
    assert found == [("torch", 8), ("wide", 16), ("torch", 16)]
    found = [m.provider for m in measure_op(scaled, torch.float32, "cpu", 1e-4, only=["wide"])]
    assert found == ["wide"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    from octavo.ops import measure

    monkeypatch.setitem(measure._COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(measure._MATMUL_SIZE, "cpu", 128)
    path = tmp_path / "kernels.json"
    words = ["--ops", "gated_activation", "--device", "cpu", "--seconds", "0.001", "--output-json", str(path)]
    assert cli.main(["bench", "kernels", *words]) == 0
    result = json.loads(path.read_text())
    assert result["device"] == "cpu" and result["copy_bytes_per_second"] > 0
    assert {row["op"] for row in result["results"]} == {"gated_activation"}
    assert all(row["seconds"] > 0 and row["gb_per_s"] > 0 for row in result["results"])
    assert "gated_activation    torch" in capsys.readouterr().out
    assert cli.main(["bench", "kernels", "--ops", "nothing"]) == 1
    assert "there is no operator nothing" in capsys.readouterr().err
