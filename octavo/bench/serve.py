"""`octavo bench serve`: load on any OpenAI-compatible server, and how long its answers take."""

import asyncio
import math
import random
import re
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from tqdm import tqdm

from octavo import envs
from octavo.bench import plots
from octavo.bench.arrivals import arrival_times, ramp_times
from octavo.bench.backends import BACKENDS, RequestResult, send_request
from octavo.bench.datasets import Sample, load_samples
from octavo.bench.http_client import HttpClient, HttpError
from octavo.bench.load import run_load
from octavo.bench.report import parse_pairs, parse_percentiles, row, title, write_json
from octavo.bench.serve_args import ServeBenchArgs
from octavo.bench.serving_metrics import METRICS, parse_goodput, summarize
from octavo.config.args import EngineArgs
from octavo.config.engine import TokenizerConfig
from octavo.engine.find_model import find_tokenizer
from octavo.errors import ClientError, OctavoError
from octavo.logger import get_logger
from octavo.tokenizer import get_tokenizer
from octavo.tokenizer.tokenizer import Tokenizer

logger = get_logger(__name__)

READY_CHECK_SECONDS = 1.0  # between two tries
MAX_ERRORS_SHOWN = 5
T = TypeVar("T")

_ROW_LABELS = (
    ("Successful requests:", "completed"),
    ("Failed requests:", "failed"),
    ("Maximum request concurrency:", "max_concurrency"),
    ("Request rate configured (RPS):", "request_rate"),
    ("Benchmark duration (s):", "duration"),
    ("Total input tokens:", "total_input_tokens"),
    ("Total generated tokens:", "total_output_tokens"),
    ("Request throughput (req/s):", "request_throughput"),
    ("Request goodput (req/s):", "request_goodput"),
    ("Output token throughput (tok/s):", "output_throughput"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
    ("Peak concurrent requests:", "max_concurrent_requests"),
    ("Total token throughput (tok/s):", "total_token_throughput"),
)
_OPTIONAL_ROWS = ("max_concurrency", "request_goodput")  # shown when they were asked for


class ServerUnreachableError(OctavoError):
    """The server to measure does not answer as it should."""


@dataclass(frozen=True)
class ServedModel:
    """What requests call the model, what it is, and where its tokenizer comes from."""

    name: str
    model_id: str
    tokenizer_id: str


class ServeBench:
    """One run against one server."""

    def __init__(self, args: ServeBenchArgs):
        self.args = args
        self.backend = BACKENDS[args.backend]
        self.path = "/" + (args.endpoint or self.backend.endpoint).lstrip("/")
        headers = parse_pairs(args.header, "header")
        key = args.api_key or envs.OCTAVO_API_KEY
        if key:
            headers = {"Authorization": f"Bearer {key}"} | headers
        self.client = HttpClient(args.url(), headers, verify=not args.insecure)

    async def run(self) -> dict[str, Any]:
        """Measure; the result as it is written. Raises ClientError and ServerUnreachableError before the load begins."""
        try:
            model = await self._model()
            samples = load_samples(self.args, self.args.seed, _load_tokenizer(self.args, model.tokenizer_id))
            await self._wait_until_ready(samples[0], model)
            await self._warm_up(samples[0], model)
            return await self._measure(samples, model)
        finally:
            await self.client.close()

    async def _measure(self, samples: Sequence[Sample], model: ServedModel) -> dict[str, Any]:
        args = self.args
        names = self._model_names(len(samples), model.name)
        drafts_before = await self._draft_counts()
        started_at = datetime.now()
        with tqdm(total=len(samples), disable=args.disable_tqdm, desc="Requests") as bar:
            results, duration = await run_load(
                lambda i: self._send(samples[i], names[i], str(i)),
                self._arrivals(len(samples)),
                args.max_concurrency,
                lambda result: bar.update(),
            )
        summary = summarize(results, duration, parse_percentiles(args.metric_percentiles), parse_goodput(args.goodput))
        rate = args.rate()
        content: dict[str, Any] = {
            "date": started_at.strftime("%Y%m%d-%H%M%S"),
            "backend": args.backend,
            "label": args.label,
            "model_id": model.model_id,
            "tokenizer_id": model.tokenizer_id,
            "num_prompts": len(samples),
            **parse_pairs(args.metadata, "metadata"),
            "request_rate": "inf" if math.isinf(rate) else rate,
            "burstiness": args.burstiness,
            "max_concurrency": args.max_concurrency,
            **summary,
            **_draft_summary(drafts_before, await self._draft_counts()),
            **_details(results),
        }
        if args.ramp_up_strategy is not None:
            content |= {
                "ramp_up_strategy": args.ramp_up_strategy,
                "ramp_up_start_rps": args.ramp_up_start_rps,
                "ramp_up_end_rps": args.ramp_up_end_rps,
            }
        self._plot(results, _result_path(args, content))
        return content

    def _arrivals(self, num: int) -> list[float]:
        args, rng = self.args, np.random.default_rng([self.args.seed, 1])  # a stream apart from that of the data
        if args.ramp_up_strategy is None:
            return arrival_times(num, args.rate(), args.burstiness, rng)
        assert args.ramp_up_start_rps is not None and args.ramp_up_end_rps is not None
        return ramp_times(
            num, args.ramp_up_start_rps, args.ramp_up_end_rps, args.ramp_up_strategy, args.burstiness, rng
        )

    def _model_names(self, num: int, name: str) -> list[str]:
        """The model of each request: the one, or adapters in turn or at random."""
        adapters = self.args.lora_modules
        if not adapters:
            return [name] * num
        if self.args.lora_assignment == "round-robin":
            return [adapters[i % len(adapters)] for i in range(num)]
        return random.Random(self.args.seed).choices(adapters, k=num)

    async def _send(self, sample: Sample, model: str, request_id: str) -> RequestResult:
        body = self.backend.body(sample, model, not self.args.no_stream, self.args.request_options())
        headers = {"X-Request-Id": self.args.request_id_prefix + request_id}
        return await send_request(self.client, self.path, body, sample.prompt_len, headers)

    # Before the load

    async def _model(self) -> ServedModel:
        args, root = self.args, None
        model_id = args.model or args.served_model_name
        if model_id is None:
            card = await self._first_model()
            model_id, root = card["id"], card.get("root")
        return ServedModel(
            args.served_model_name or model_id, model_id, args.tokenizer or args.model or root or model_id
        )

    async def _first_model(self) -> dict[str, Any]:
        try:
            async with self.client.request("GET", "/v1/models") as response:
                data = await response.read()
            models = msgspec.json.decode(data)["data"] if response.status == 200 else None
        except (HttpError, OSError) as error:
            raise ServerUnreachableError(f"no server answers at {self.client.base_url}: {error}") from None
        except (msgspec.DecodeError, KeyError, TypeError):
            models = None
        if not models:
            raise ServerUnreachableError(
                f"{self.client.base_url}/v1/models answers {response.status} and names no model; give --model."
            )
        card: dict[str, Any] = models[0]
        return card

    async def _wait_until_ready(self, sample: Sample, model: ServedModel) -> None:
        """Try one request until it succeeds."""
        seconds = self.args.ready_check_timeout_sec
        if not seconds:
            return
        deadline = time.monotonic() + seconds
        while not (result := await self._send(sample, model.name, "ready")).success:
            if time.monotonic() + READY_CHECK_SECONDS > deadline:
                raise ServerUnreachableError(
                    f"{self.client.base_url} was not ready within {seconds} s; the last answer was: {result.error}"
                )
            await asyncio.sleep(READY_CHECK_SECONDS)

    async def _warm_up(self, sample: Sample, model: ServedModel) -> None:
        results, _ = await run_load(
            lambda i: self._send(sample, model.name, f"warmup-{i}"),
            [0.0] * self.args.num_warmups,
            self.args.max_concurrency,
        )
        failed = [result.error for result in results if not result.success]
        if failed:
            logger.warning("%d of %d warm-up requests failed: %s", len(failed), len(results), failed[0])

    # Around it

    async def _draft_counts(self) -> dict[str, float]:
        """The server's counters of speculative decoding; empty when it has none, or no metrics."""
        try:
            async with self.client.request("GET", "/metrics") as response:
                text = (await response.read()).decode(errors="replace")
        except (HttpError, OSError):
            return {}
        return read_draft_counts(text) if response.status == 200 else {}

    def _plot(self, results: Sequence[RequestResult], path: Path) -> None:
        args = self.args
        if not args.wants_plots():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if args.plot:
            plots.plot_latencies(results, path.with_suffix(".latencies.png"))
        if args.plot or args.plot_timeline:
            plots.plot_timeline(results, path.with_suffix(".timeline.png"), args.itl_thresholds())
        if args.plot_dataset_stats:
            plots.plot_lengths(results, path.with_suffix(".lengths.png"))


def run_serve(args: ServeBenchArgs) -> int:
    """Run, print, write. 1 when no request succeeded."""
    if args.wants_plots():
        plots.check_plotting()
    content = _run(ServeBench(args).run())
    print(render(content, args.printed_metrics()))
    errors = [error for error in content["errors"] if error]
    for error in list(dict.fromkeys(errors))[:MAX_ERRORS_SHOWN]:
        logger.warning("%d x %s", errors.count(error), error)
    if args.save_result or args.save_detailed or args.append_result:
        path = _result_path(args, content)
        kept = content if args.save_detailed else {k: v for k, v in content.items() if k not in DETAIL_KEYS}
        write_json(path, kept, append=args.append_result)
        print(f"Result in {path}")
    return 0 if content["completed"] else 1


def _run(main: Coroutine[Any, Any, T]) -> T:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def _load_tokenizer(args: ServeBenchArgs, tokenizer_id: str) -> Tokenizer:
    try:
        path = find_tokenizer(EngineArgs(tokenizer=tokenizer_id, trust_remote_code=args.trust_remote_code), Path())
        return get_tokenizer(TokenizerConfig(str(path), args.tokenizer_mode, trust_remote_code=args.trust_remote_code))
    except OctavoError as error:
        raise ClientError(
            f"no tokenizer for {tokenizer_id}, which is needed to make and count prompts; give --tokenizer. ({error})",
            param="tokenizer",
        ) from error


def _details(results: Sequence[RequestResult]) -> dict[str, list[Any]]:
    """One entry a request, in order, in each list. Times in seconds; start times count from the first request."""
    first = min((r.start for r in results), default=0.0)
    return {
        "input_lens": [r.prompt_len for r in results],
        "output_lens": [r.output_len for r in results],
        "start_times": [r.start - first for r in results],
        "ttfts": [r.ttft for r in results],
        "itls": [r.itls for r in results],
        "latencies": [r.latency for r in results],
        "generated_texts": [r.text for r in results],
        "errors": [r.error for r in results],
    }


DETAIL_KEYS = frozenset(_details([]))


def _result_path(args: ServeBenchArgs, content: dict[str, Any]) -> Path:
    if args.result_filename is not None:
        name = args.result_filename
    else:
        concurrency = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
        model = str(content["model_id"]).rstrip("/").rsplit("/", 1)[-1]
        rate = content["request_rate"] if args.ramp_up_strategy is None else "ramp-up-" + args.ramp_up_strategy
        name = f"{args.label or args.backend}-{rate}qps{concurrency}-{model}-{content['date']}.json"
    return Path(args.result_dir or ".") / name


_DRAFT_COUNTERS = {
    "drafts": "num_drafts",
    "draft_tokens": "num_draft_tokens",
    "accepted_tokens": "num_accepted_tokens",
}


def read_draft_counts(text: str) -> dict[str, float]:
    """Sums over engines of the counters of speculative decoding in a Prometheus page."""
    counts = {}
    for key, name in _DRAFT_COUNTERS.items():
        values = re.findall(rf"^vllm:spec_decode_{name}(?:_total)?(?:\{{[^}}]*\}})? (\S+)", text, re.MULTILINE)
        if values:
            counts[key] = sum(map(float, values))
    return counts


def _draft_summary(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """How well the server's draft did during the run; nothing when it drafted nothing."""
    made = {key: after[key] - before.get(key, 0.0) for key in after}
    if not made.get("drafts") or not made.get("draft_tokens"):
        return {}
    accepted = made.get("accepted_tokens", 0.0)
    return {
        "spec_decode_acceptance_rate": accepted / made["draft_tokens"] * 100,
        "spec_decode_acceptance_length": 1 + accepted / made["drafts"],
        "spec_decode_num_drafts": made["drafts"],
        "spec_decode_draft_tokens": made["draft_tokens"],
        "spec_decode_accepted_tokens": accepted,
    }


def render(content: dict[str, Any], metrics: Sequence[str]) -> str:
    """The result as a table."""
    lines = [title("Serving Benchmark Result")]
    for label, key in _ROW_LABELS:
        if content[key] is not None or key not in _OPTIONAL_ROWS:
            lines.append(row(label, content[key]))
    for name in metrics:
        lines.append(title(METRICS[name], "-"))
        for key, value in content.items():
            if key.endswith(f"_{name}_ms"):
                kind = key.removesuffix(f"_{name}_ms")
                kind = kind.upper() if kind.startswith("p") else kind.capitalize()
                lines.append(row(f"{kind} {name.upper()} (ms):", value))
    if "spec_decode_acceptance_rate" in content:
        lines.append(title("Speculative Decoding", "-"))
        lines.append(row("Acceptance rate (%):", content["spec_decode_acceptance_rate"]))
        lines.append(row("Acceptance length:", content["spec_decode_acceptance_length"]))
    lines.append(title(""))
    return "\n".join(lines)
