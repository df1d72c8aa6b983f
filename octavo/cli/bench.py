"""`octavo bench BENCHMARK`: how fast it is. Each benchmark's module is imported when it is called."""

import sys
from collections.abc import Sequence

from octavo.config.options import option_fields
from octavo.config.parser import OptionParser

# Benchmark -> one sentence.
BENCHMARKS = {
    "latency": "Seconds of one batch from prompt to last token, in this process.",
    "throughput": "Requests and tokens a second when everything is given at once, in this process.",
    "serve": "Load on a running OpenAI-compatible server: TTFT, TPOT, ITL, end-to-end latency, goodput.",
    "startup": "Seconds from the start of a process to its first token, by phase, cold and warm.",
    "sweep": "A server and a benchmark over combinations of their options.",
    "kernels": "Every operator's providers on its own inputs, against what the machine can do.",
}


def run(arguments: Sequence[str]) -> int:
    """Run one benchmark; its exit code."""
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if name not in BENCHMARKS:
        print(f"octavo bench: {name} is not a benchmark; there are {', '.join(BENCHMARKS)}.", file=sys.stderr)
        return 2
    match name:
        case "serve":
            return _serve(arguments[1:])
        case "latency":
            return _latency(arguments[1:])
        case "throughput":
            return _throughput(arguments[1:])
        case "startup":
            return _startup(arguments[1:])
        case "sweep":
            return _sweep(arguments[1:])
        case _:
            return _kernels(arguments[1:])


def _usage() -> str:
    lines = [f"  {name:12}{text}" for name, text in BENCHMARKS.items()]
    return "\n".join(
        ["usage: octavo bench BENCHMARK [options]", "", *lines, "", "octavo bench BENCHMARK --help tells its options."]
    )


def _serve(arguments: Sequence[str]) -> int:
    from octavo.bench.serve import run_serve
    from octavo.bench.serve_args import ServeBenchArgs

    parser = OptionParser("octavo bench serve", BENCHMARKS["serve"], (ServeBenchArgs,))
    return run_serve(ServeBenchArgs(**parser.parse_options(arguments)))


def _latency(arguments: Sequence[str]) -> int:
    from octavo.bench.latency import LatencyArgs, run_latency

    engine, own = _with_engine("latency", arguments, LatencyArgs)
    return run_latency(engine, LatencyArgs(**own))


def _throughput(arguments: Sequence[str]) -> int:
    from octavo.bench.throughput import ThroughputArgs, run_throughput

    engine, own = _with_engine("throughput", arguments, ThroughputArgs)
    return run_throughput(engine, ThroughputArgs(**own))


def _startup(arguments: Sequence[str]) -> int:
    from octavo.bench.startup import StartupArgs, run_startup

    engine, own = _with_engine("startup", arguments, StartupArgs)
    return run_startup(engine, StartupArgs(**own))


def _sweep(arguments: Sequence[str]) -> int:
    from octavo.bench.sweep import SweepArgs, run_sweep

    # vLLM has several sweeps; `sweep serve` is the one there is, and may be named.
    words = arguments[1:] if arguments[:1] == ["serve"] else arguments
    parser = OptionParser("octavo bench sweep serve", BENCHMARKS["sweep"], (SweepArgs,))
    return run_sweep(SweepArgs(**parser.parse_options(words)))


def _kernels(arguments: Sequence[str]) -> int:
    from octavo.cli.bench_kernels import KernelBenchArgs, run_kernels

    parser = OptionParser("octavo bench kernels", BENCHMARKS["kernels"], (KernelBenchArgs,))
    return run_kernels(KernelBenchArgs(**parser.parse_options(arguments)))


def _with_engine(name: str, arguments: Sequence[str], own_class: type) -> tuple[dict, dict]:
    """What was given, split into the engine's options and the benchmark's own."""
    from octavo.config.args import EngineArgs

    parser = OptionParser(f"octavo bench {name}", BENCHMARKS[name], (own_class, EngineArgs), positional="model")
    given = parser.parse_options(arguments)
    own = {field.name for field in option_fields(own_class)}
    return (
        {key: value for key, value in given.items() if key not in own},
        {key: value for key, value in given.items() if key in own},
    )
