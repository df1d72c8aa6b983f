"""`ServeBenchArgs`: the options of `octavo bench serve`, with vLLM's names."""

import math
from dataclasses import dataclass
from typing import Any

from octavo.bench.backends import BACKENDS
from octavo.bench.datasets import DatasetArgs
from octavo.bench.report import parse_pairs, parse_percentiles
from octavo.bench.serving_metrics import METRICS, parse_goodput
from octavo.config.options import option
from octavo.errors import ConfigError

_TARGET, _LOAD, _REQUEST, _REPORT = "Target", "Load", "Request", "Report"


@dataclass(kw_only=True)
class ServeBenchArgs(DatasetArgs):
    """Wrong values raise `ConfigError` or another `ClientError` naming the option."""

    backend: str = option(
        "openai", "API to speak: completions (openai, vllm, octavo) or chat.", group=_TARGET, choices=tuple(BACKENDS)
    )
    base_url: str | None = option(None, "The server's address; replaces host and port.", group=_TARGET)
    host: str = option("127.0.0.1", "The server's host.", group=_TARGET)
    port: int = option(8000, "The server's port.", group=_TARGET, low=1, high=65535)
    endpoint: str | None = option(None, "Route to send to. Default: the backend's.", group=_TARGET)
    header: list[str] = option([], "HTTP headers to send, NAME=VALUE.", group=_TARGET)
    api_key: str | None = option(None, "Key to send. Default: OCTAVO_API_KEY.", group=_TARGET)
    insecure: bool = option(False, "Accept any certificate.", group=_TARGET)
    model: str | None = option(None, "Model, for its tokenizer. Default: the first one served.", group=_TARGET)
    served_model_name: str | None = option(None, "Model's name in requests. Default: model.", group=_TARGET)
    tokenizer: str | None = option(
        None, "Hub id, folder, GGUF file or alias of the tokenizer. Default: the model's.", group=_TARGET
    )
    tokenizer_mode: str = option(
        "auto", "Kind of tokenizer; auto and hf are one.", group=_TARGET, choices=("auto", "hf")
    )
    trust_remote_code: bool = option(False, "Run Python code that comes with the tokenizer.", group=_TARGET)
    ready_check_timeout_sec: int = option(
        0, "Seconds to wait until a first request succeeds; 0: send none.", group=_TARGET, low=0
    )

    seed: int = option(0, "Seed of data and arrivals.", group=_LOAD, low=0)
    request_rate: str = option("inf", "Requests a second; inf: all at once.", group=_LOAD, metavar="X")
    burstiness: float = option(
        1.0, "Shape of the gaps: 1 a Poisson process, below 1 burstier, above 1 more even.", group=_LOAD, above=0
    )
    max_concurrency: int | None = option(None, "Most requests open at a time.", group=_LOAD, low=1)
    ramp_up_strategy: str | None = option(
        None,
        "How the rate goes from start to end; replaces request_rate.",
        group=_LOAD,
        choices=("linear", "exponential"),
    )
    ramp_up_start_rps: int | None = option(None, "Requests a second at the start.", group=_LOAD, low=1)
    ramp_up_end_rps: int | None = option(None, "Requests a second at the end.", group=_LOAD, low=1)
    num_warmups: int = option(0, "Requests before the measurement.", group=_LOAD, low=0)

    no_stream: bool = option(False, "Ask for whole answers; then TTFT, TPOT and ITL are not known.", group=_REQUEST)
    ignore_eos: bool = option(False, "Have answers go on to their full length.", group=_REQUEST)
    temperature: float | None = option(None, "Default: the server's.", group=_REQUEST, low=0)
    top_p: float | None = option(None, "Default: the server's.", group=_REQUEST, above=0, high=1)
    top_k: int | None = option(None, "Default: the server's.", group=_REQUEST, low=-1)
    min_p: float | None = option(None, "Default: the server's.", group=_REQUEST, low=0, high=1)
    frequency_penalty: float | None = option(None, "Default: the server's.", group=_REQUEST, low=-2, high=2)
    presence_penalty: float | None = option(None, "Default: the server's.", group=_REQUEST, low=-2, high=2)
    repetition_penalty: float | None = option(None, "Default: the server's.", group=_REQUEST, above=0)
    logprobs: int | None = option(None, "Log probabilities to ask for with each token.", group=_REQUEST, low=0)
    extra_body: dict[str, Any] = option({}, "More fields of the request's JSON.", group=_REQUEST)
    chat_template_kwargs: dict[str, Any] = option({}, "Variables for the chat template.", group=_REQUEST)
    lora_modules: list[str] = option([], "Adapters to spread the requests over, by name.", group=_REQUEST)
    lora_assignment: str = option("random", "How.", group=_REQUEST, choices=("random", "round-robin"))
    request_id_prefix: str = option("bench-", "Beginning of the X-Request-Id of each request.", group=_REQUEST)

    percentile_metrics: str = option("ttft,tpot,itl", "Metrics to print, of ttft, tpot, itl, e2el.", group=_REPORT)
    metric_percentiles: str = option("99", "Percentiles, with commas between.", group=_REPORT)
    goodput: list[str] = option(
        [], "Limits in milliseconds that a good request keeps: ttft:200 tpot:50 e2el:5000.", group=_REPORT
    )
    save_result: bool = option(False, "Write the numbers to a JSON file.", group=_REPORT)
    save_detailed: bool = option(False, "With each request's lengths, times and text.", group=_REPORT)
    append_result: bool = option(False, "Add to the file as one more line.", group=_REPORT)
    result_dir: str | None = option(None, "Folder of the file. Default: here.", group=_REPORT)
    result_filename: str | None = option(
        None, "Name of the file. Default: by label, rate, model and time.", group=_REPORT
    )
    metadata: list[str] = option([], "More keys of the file, NAME=VALUE.", group=_REPORT)
    label: str | None = option(None, "What the run is called in the file. Default: the backend.", group=_REPORT)
    plot: bool = option(False, "Draw latencies and timeline next to the file, as PNG.", group=_REPORT)
    plot_timeline: bool = option(False, "Draw the timeline.", group=_REPORT)
    timeline_itl_thresholds: str = option(
        "25,50", "Milliseconds above which the timeline shows a gap as slow and very slow.", group=_REPORT
    )
    plot_dataset_stats: bool = option(False, "Draw the lengths of prompts and answers.", group=_REPORT)
    disable_tqdm: bool = option(False, "No progress bar.", group=_REPORT)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rate()
        self.itl_thresholds()
        parse_goodput(self.goodput)
        parse_pairs(self.header, "header")
        parse_pairs(self.metadata, "metadata")
        parse_percentiles(self.metric_percentiles)
        unknown = set(self.printed_metrics()) - set(METRICS)
        if unknown:
            raise ConfigError(
                f"percentile_metrics names {', '.join(sorted(unknown))}; there are {', '.join(METRICS)}.",
                param="percentile_metrics",
            )
        self._check_ramp()
        if self.logprobs is not None and BACKENDS[self.backend].is_chat and self.logprobs == 0:
            raise ConfigError("logprobs=0 asks a chat server for nothing; give 1 or more.", param="logprobs")

    def _check_ramp(self) -> None:
        ends = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if self.ramp_up_strategy is None:
            if ends != (None, None):
                raise ConfigError("ramp_up_start_rps and ramp_up_end_rps need ramp_up_strategy.")
            return
        if None in ends:
            raise ConfigError(f"ramp_up_strategy={self.ramp_up_strategy} needs ramp_up_start_rps and ramp_up_end_rps.")
        if not math.isinf(self.rate()):
            raise ConfigError("ramp_up_strategy replaces request_rate; give one of them.", param="ramp_up_strategy")

    def rate(self) -> float:
        """Requests a second; infinity for all at once."""
        try:
            rate = float(self.request_rate)
        except ValueError:
            rate = 0.0
        if not rate > 0:
            raise ConfigError(
                f"request_rate={self.request_rate!r} is not allowed; it must be a number above 0, or inf.",
                param="request_rate",
            )
        return rate

    def itl_thresholds(self) -> tuple[float, float]:
        """Milliseconds of a slow and a very slow gap."""
        try:
            slow, very_slow = (float(part) for part in self.timeline_itl_thresholds.split(","))
        except ValueError:
            slow, very_slow = 0.0, 0.0
        if not 0 < slow < very_slow:
            raise ConfigError(
                f"timeline_itl_thresholds={self.timeline_itl_thresholds!r} is not allowed; write two numbers, rising.",
                param="timeline_itl_thresholds",
            )
        return slow, very_slow

    def printed_metrics(self) -> list[str]:
        """Names of the latency metrics to print."""
        return [name.strip() for name in self.percentile_metrics.split(",") if name.strip()]

    def wants_plots(self) -> bool:
        return self.plot or self.plot_timeline or self.plot_dataset_stats

    def url(self) -> str:
        """The server's address without a route."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (self.base_url or f"http://{host}:{self.port}").rstrip("/")

    def request_options(self) -> dict[str, Any]:
        """Fields of each request's JSON besides model, prompt and length: those that were given."""
        names = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
        )
        options = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.ignore_eos:
            options["ignore_eos"] = True
        if self.logprobs is not None and BACKENDS[self.backend].is_chat:
            options |= {"logprobs": True, "top_logprobs": self.logprobs}
        elif self.logprobs is not None:
            options["logprobs"] = self.logprobs
        if self.chat_template_kwargs:
            options["chat_template_kwargs"] = self.chat_template_kwargs
        return options | self.extra_body
