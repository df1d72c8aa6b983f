"""Benchmarks as users run them: `octavo bench latency | throughput | serve | startup | sweep`.

`serve` is a client of any OpenAI-compatible server and needs no engine; `latency`, `throughput` and `startup` run one.
Arguments and result keys carry vLLM's names, so that scripts that read its results read these.
"""
