"""`octavo bench throughput`: everything at once, as fast as it goes."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from octavo.bench.datasets import DatasetArgs, Sample, load_samples
from octavo.bench.report import write_json
from octavo.config.args import EngineArgs
from octavo.config.options import option
from octavo.engine.async_llm import AsyncLLM
from octavo.errors import ServerError
from octavo.llm import LLM
from octavo.types.outputs import RequestOutput
from octavo.types.prompts import PromptType
from octavo.types.sampling_params import RequestOutputKind, SamplingParams

_GROUP = "Benchmark"


@dataclass(kw_only=True)
class ThroughputArgs(DatasetArgs):
    """Options of `octavo bench throughput` besides the engine's."""

    backend: str = option(
        "octavo",
        "octavo and vllm: prompts as they are; vllm-chat: through the model's chat template.",
        group=_GROUP,
        choices=("octavo", "vllm", "vllm-chat"),
    )
    n: int = option(1, "Answers to each prompt.", group=_GROUP, low=1)
    num_warmups: int = option(0, "Requests before the measurement.", group=_GROUP, low=0)
    prefix_len: int | None = option(
        None, "Tokens of a common prefix of random prompts; same as random_prefix_len.", group=_GROUP, low=0
    )
    async_engine: bool = option(False, "Through AsyncLLM, the core in a process of its own.", group=_GROUP)
    disable_detokenize: bool = option(False, "Measure tokens only, without making text of them.", group=_GROUP)
    output_json: str | None = option(None, "File to write the result to.", group=_GROUP)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefix_len is not None:
            self.random_prefix_len = self.prefix_len


def run_throughput(engine_options: Mapping[str, Any], args: ThroughputArgs) -> int:
    """Measure, print, write."""
    engine_args = EngineArgs(**({"disable_log_stats": True} | dict(engine_options)))
    measure = _measure_async if args.async_engine else _measure
    result = summarize_throughput(*measure(engine_args, args))
    print(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, {result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {result['num_prompt_tokens']}")
    print(f"Total num output tokens:  {result['num_output_tokens']}")
    if args.output_json is not None:
        write_json(args.output_json, result)
    return 0


def summarize_throughput(outputs: Sequence[RequestOutput], elapsed: float) -> dict[str, Any]:
    """Requests and tokens of a run that took `elapsed` seconds. A request that failed ends the benchmark."""
    for output in outputs:
        if output.error is not None:
            raise ServerError(f"request {output.request_id} of the benchmark failed: {output.error}")
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    return {
        "elapsed_time": elapsed,
        "num_requests": len(outputs),
        "total_num_tokens": num_prompt + num_output,
        "requests_per_second": len(outputs) / elapsed,
        "tokens_per_second": (num_prompt + num_output) / elapsed,
        "output_tokens_per_second": num_output / elapsed,
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
    }


def _measure(engine_args: EngineArgs, args: ThroughputArgs) -> tuple[list[RequestOutput], float]:
    with LLM.from_engine_args(engine_args) as llm:
        config = llm.llm_engine.config
        tokenizer = llm.get_tokenizer() if config.tokenizer.path is not None else None
        samples = load_samples(args, config.model.seed, tokenizer, vocab_size=config.model.vocab_size)
        params = [_params(args, sample, tokenizer is not None) for sample in samples]
        prompts = [_prompt(sample) for sample in samples]
        conversations = [[{"role": "user", "content": sample.prompt}] for sample in samples]

        def answer(num: int) -> list[RequestOutput]:
            if args.backend == "vllm-chat":
                return llm.chat(conversations[:num], params[:num], use_tqdm=num > args.num_warmups)
            return llm.generate(prompts[:num], params[:num], use_tqdm=num > args.num_warmups)

        if args.num_warmups:
            answer(min(args.num_warmups, len(samples)))
            llm.reset_prefix_cache()
        started = perf_counter()
        outputs = answer(len(samples))
        return outputs, perf_counter() - started


def _measure_async(engine_args: EngineArgs, args: ThroughputArgs) -> tuple[list[RequestOutput], float]:
    return asyncio.run(_run_async(engine_args, args))


async def _run_async(engine_args: EngineArgs, args: ThroughputArgs) -> tuple[list[RequestOutput], float]:
    engine = AsyncLLM.from_engine_args(engine_args)
    try:
        config = engine.config
        tokenizer = engine.tokenizer if config.tokenizer.path is not None else None
        samples = load_samples(args, config.model.seed, tokenizer, vocab_size=config.model.vocab_size)

        async def answer(index: int, name: str) -> RequestOutput:
            sample = samples[index]
            prompt = _prompt(sample)
            if args.backend == "vllm-chat":
                chat = engine.tokenizer.encode_chat([{"role": "user", "content": sample.prompt}])
                prompt = {"prompt_token_ids": chat.token_ids, "prompt": chat.text}
            last = None
            async for output in engine.generate(
                prompt, _params(args, sample, tokenizer is not None), f"{name}-{index}"
            ):
                last = output
            assert last is not None  # a stream without output raises
            return last

        if args.num_warmups:
            await asyncio.gather(*(answer(i, "warmup") for i in range(min(args.num_warmups, len(samples)))))
            await engine.reset_prefix_cache()
        started = perf_counter()
        outputs = await asyncio.gather(*(answer(i, "request") for i in range(len(samples))))
        return list(outputs), perf_counter() - started
    finally:
        engine.shutdown()


def _params(args: ThroughputArgs, sample: Sample, makes_text: bool) -> SamplingParams:
    return SamplingParams(
        n=args.n,
        temperature=1.0,
        top_p=1.0,
        ignore_eos=True,
        max_tokens=sample.output_len,
        detokenize=makes_text and not args.disable_detokenize,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _prompt(sample: Sample) -> PromptType:
    """The text where there is one, so that tokenising is measured too."""
    if sample.prompt:
        return {"prompt": sample.prompt}
    assert sample.token_ids is not None
    return {"prompt_token_ids": sample.token_ids}
