"""`octavo bench kernels`: a table of operators, providers, times and rates.

It stands here and not in `bench/`, which reaches the engine from above: operators are measured below the engine.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from octavo.bench.report import write_json
from octavo.config.options import check_options, option
from octavo.errors import ClientError
from octavo.ops.measure import Ceilings, Measurement, load_operators, measure_ceilings, measure_op

_GROUP = "Benchmark"
MAX_CALL_CHARACTERS = 60


@dataclass(kw_only=True)
class KernelBenchArgs:
    """Options of `octavo bench kernels`."""

    ops: list[str] = option([], "Operators to measure. Default: all that have inputs.", group=_GROUP)
    providers: list[str] = option([], "Providers to measure. Default: all that run here.", group=_GROUP)
    dtype: str | None = option(
        None, "Data type. Default: bfloat16 on a GPU.", group=_GROUP, choices=("float32", "float16", "bfloat16")
    )
    device: str | None = option(None, "cpu or cuda. Default: cuda where there is one.", group=_GROUP)
    seconds: float = option(0.1, "Measured time of each line, about.", group=_GROUP, above=0)
    output_json: str | None = option(None, "File to write the result to.", group=_GROUP)

    def __post_init__(self) -> None:
        check_options(self)


def run_kernels(args: KernelBenchArgs) -> int:
    """Measure, print line by line, write."""
    operators = load_operators()
    unknown = set(args.ops) - set(operators)
    if unknown:
        raise ClientError(
            f"there is no operator {', '.join(sorted(unknown))}; there are {', '.join(sorted(operators))}."
        )
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, args.dtype or ("bfloat16" if device == "cuda" else "float32"))
    chosen = [operators[name] for name in args.ops or sorted(operators)]
    without = [op.name for op in chosen if op.inputs is None and op.bench_inputs is None]
    if without and args.ops:
        raise ClientError(f"{', '.join(without)} brings no inputs to be measured with.", param="ops")
    with torch.inference_mode():
        ceilings = measure_ceilings(dtype, device, args.seconds)
        print(
            f"{device}, {str(dtype).removeprefix('torch.')}: copies {ceilings.copy_bytes_per_second / 1e9:.1f} GB/s, "
            f"multiplies matrices at {ceilings.matmul_flops_per_second / 1e12:.3f} TFLOP/s"
        )
        print(f"{'operator':<20}{'provider':<12}{'µs':>10}{'GB/s':>9}{'%':>6}{'TFLOP/s':>9}{'%':>6}  call")
        rows = []
        for op in chosen:
            for measured in measure_op(op, dtype, device, args.seconds, args.providers):
                rows.append(rates(measured, ceilings))
                print(_line(rows[-1]), flush=True)
    if without:
        print(f"Not measured, without inputs: {', '.join(without)}")
    if args.output_json is not None:
        write_json(args.output_json, {"device": device, "dtype": str(dtype), **asdict(ceilings), "results": rows})
    return 0


def rates(measured: Measurement, ceilings: Ceilings) -> dict[str, Any]:
    """A measurement with its rates and their shares of the ceilings."""
    bytes_per_second = measured.num_bytes / measured.seconds
    flops_per_second = measured.flops / measured.seconds
    return {
        **asdict(measured),
        "gb_per_s": bytes_per_second / 1e9,
        "bandwidth_share": bytes_per_second / ceilings.copy_bytes_per_second,
        "tflop_per_s": flops_per_second / 1e12,
        "compute_share": flops_per_second / ceilings.matmul_flops_per_second,
    }


def _line(row: dict[str, Any]) -> str:
    has_flops = row["flops"] > 0
    tflops = f"{row['tflop_per_s']:9.3f}{row['compute_share']:6.0%}" if has_flops else f"{'-':>9}{'-':>6}"
    return (
        f"{row['op']:<20}{row['provider']:<12}{row['seconds'] * 1e6:10.1f}{row['gb_per_s']:9.1f}"
        f"{row['bandwidth_share']:6.0%}{tflops}  {_short(row['call'])}"
    )


def _short(call: str) -> str:
    """The shapes of a call."""
    text = " ".join(_shapes(call))
    return text if len(text) <= MAX_CALL_CHARACTERS else text[: MAX_CALL_CHARACTERS - 1] + "…"


def _shapes(call: str) -> Sequence[str]:
    return [shape.replace(", ", "x") for shape in re.findall(r"torch\.\w+\[([\d, ]*)\]", call)]
