"""Kill the engine core again and again under open streams, and compare every stream with an undisturbed run.

    python benchmarks/kill_core.py --model smollm2 --kills 10
    python benchmarks/kill_core.py --poison          # besides, a request whose logits processor crashes the core

The streams mix greedy and seeded sampling, n = 2, log probabilities of prompt and answer, stop strings and a minimum
length. Tokens, text, finish reasons and the number of scores must be equal; log probabilities may differ by what float32
sums in another order differ. Exits with 1 when a stream differs, or when anybody but the poison fails.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from octavo.config.args import EngineArgs
from octavo.engine.async_llm import AsyncLLM
from octavo.errors import RequestFailedError
from octavo.types.outputs import PositionLogprobs, RequestOutput
from octavo.types.sampling_params import RequestOutputKind, SamplingParams
from octavo.worker.custom_logits import AdapterLogitsProcessor

LOGPROB_TOLERANCE = 1e-3
POISON_AFTER = 5  # tokens of the poison's answer


class CrashOnRequest(AdapterLogitsProcessor):
    """`extra_args={"crash_after": n}`: the process dies, without a word, once n tokens are out."""

    def is_argmax_invariant(self):
        return True

    def new_req_logits_processor(self, params):
        after = (params.extra_args or {}).get("crash_after")
        if after is None:
            return None

        def crash(output_ids, logits):
            if len(output_ids) >= after:
                os.kill(os.getpid(), signal.SIGSEGV)
            return logits

        return crash


@dataclass
class Answer:
    """One choice, put together from its stream."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    cumulative_logprob: float | None = None
    end: tuple[str | None, int | str | None] = (None, None)


@dataclass
class Stream:
    """Everything one client gets."""

    answers: dict[int, Answer] = field(default_factory=dict)
    prompt_logprobs: list[list[PositionLogprobs | None]] = field(default_factory=list)
    num_prompt_tokens: int = 0


class Progress:
    """Tokens that all clients have, and a way to wait for more."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._changed = asyncio.Event()

    def add(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self._changed.set()

    async def reach(self, num_tokens: int) -> None:
        while self.num_tokens < num_tokens:
            self._changed.clear()
            await self._changed.wait()


class Restarts:
    """A stat logger that counts them."""

    count = 0

    def record(self, scheduler_stats, iteration_stats) -> None:
        self.count += iteration_stats.num_engine_restarts if iteration_stats is not None else 0

    def log(self) -> None:
        pass


def parameters(num_streams: int, max_tokens: int) -> list[SamplingParams]:
    """A mix of everything that must survive."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.8, "top_p": 0.9, "seed": 2, "n": 2, "logprobs": 2},
        {"temperature": 0.0, "logprobs": 1, "prompt_logprobs": 1},
        {"temperature": 0.7, "top_k": 20, "seed": 3, "stop": ["zzzzz"], "repetition_penalty": 1.1},
        {"temperature": 0.0, "min_tokens": max_tokens // 2, "frequency_penalty": 0.2},
        {"temperature": 1.0, "min_p": 0.05, "seed": 4, "n": 2},
        {"temperature": 0.0, "output_kind": RequestOutputKind.FINAL_ONLY},
    ]
    common = {"max_tokens": max_tokens, "ignore_eos": True, "output_kind": RequestOutputKind.DELTA}
    return [SamplingParams(**(common | kinds[i % len(kinds)])) for i in range(num_streams)]


def prompt_ids(index: int, vocab_size: int) -> list[int]:
    """Ids of various lengths, a third of them behind a common beginning."""
    beginning = [(11 * i + 3) % (vocab_size - 10) + 3 for i in range(32)] if index % 3 == 0 else []
    return beginning + [(7 * i * (index + 1) + index) % (vocab_size - 10) + 3 for i in range(8 + 3 * index)]


async def read(outputs: AsyncIterator[RequestOutput], progress: Progress) -> Stream:
    """Read a stream to its end."""
    stream = Stream()
    async for output in outputs:
        stream.num_prompt_tokens = len(output.prompt_token_ids)
        if output.prompt_logprobs is not None:
            stream.prompt_logprobs.append(output.prompt_logprobs)
        for piece in output.outputs:
            answer = stream.answers.setdefault(piece.index, Answer())
            answer.text += piece.text
            answer.token_ids += piece.token_ids
            answer.logprobs += piece.logprobs or []
            answer.cumulative_logprob = piece.cumulative_logprob
            answer.end = (piece.finish_reason, piece.stop_reason)
            progress.add(len(piece.token_ids))
    return stream


async def run(llm: AsyncLLM, mix: list[SamplingParams], progress: Progress) -> list[Stream]:
    """All streams at once."""
    vocab_size = llm.model_config.vocab_size
    return await asyncio.gather(
        *(
            read(llm.generate({"prompt_token_ids": prompt_ids(i, vocab_size)}, params.clone(), str(i)), progress)
            for i, params in enumerate(mix)
        )
    )


async def kill_repeatedly(llm: AsyncLLM, kills: int, num_tokens: int, progress: Progress) -> int:
    """SIGKILL, evenly spread over the streams' tokens; how often it was done."""
    for number in range(kills):
        await progress.reach((number + 1) * num_tokens // (kills + 1))
        pid = llm.core_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while llm.core_pid == pid:
            await asyncio.sleep(0.01)
    return kills


def differences(want: Stream, got: Stream) -> list[str]:
    """What is not as it would have been."""
    found = []
    if want.answers.keys() != got.answers.keys():
        return ["choices are missing"]
    for index, answer in want.answers.items():
        other = got.answers[index]
        for name in ("token_ids", "text", "end"):
            if getattr(answer, name) != getattr(other, name):
                found.append(f"{name} of choice {index}")
        found += [f"{word} of choice {index}" for word in compare(answer.logprobs, other.logprobs)]
        if answer.cumulative_logprob is not None:
            assert other.cumulative_logprob is not None
            if abs(answer.cumulative_logprob - other.cumulative_logprob) > LOGPROB_TOLERANCE * len(answer.token_ids):
                found.append(f"cumulative_logprob of choice {index}")
    if len(want.prompt_logprobs) != len(got.prompt_logprobs):
        found.append(f"prompt_logprobs came {len(got.prompt_logprobs)} times")
    for scores, others in zip(want.prompt_logprobs, got.prompt_logprobs, strict=False):
        found += compare(scores[1:], others[1:])
    return found


def compare(want, got) -> list[str]:
    """Log probabilities, position by position; the likeliest tokens may swap places when they are as good as equal."""
    if len(want) != len(got):
        return [f"{len(got)} logprobs instead of {len(want)}"]
    for scores, others in zip(want, got, strict=True):
        chosen = next(iter(scores))
        if next(iter(others)) != chosen or abs(scores[chosen].logprob - others[chosen].logprob) > LOGPROB_TOLERANCE:
            return ["logprobs"]
    return []


async def poison(llm: AsyncLLM, progress: Progress) -> str:
    """Send the request that crashes the core; what became of it."""
    params = SamplingParams(temperature=0.0, max_tokens=50, extra_args={"crash_after": POISON_AFTER}, ignore_eos=True)
    try:
        await read(llm.generate({"prompt_token_ids": [5, 6, 7]}, params, "poison"), progress)
    except RequestFailedError as error:
        return str(error)
    return ""


async def measure(args: argparse.Namespace, llm: AsyncLLM, restarts: Restarts) -> int:
    mix = parameters(args.streams, args.max_tokens)
    undisturbed = Progress()
    started = time.monotonic()
    want = await run(llm, mix, undisturbed)
    calm_seconds = time.monotonic() - started
    num_tokens = undisturbed.num_tokens
    print(f"undisturbed: {args.streams} streams, {num_tokens} tokens in {calm_seconds:.1f} s")

    progress = Progress()
    started = time.monotonic()
    got, kills = await asyncio.gather(run(llm, mix, progress), kill_repeatedly(llm, args.kills, num_tokens, progress))
    seconds = time.monotonic() - started
    num_bad = report(want, got)
    pause = (seconds - calm_seconds) / max(kills, 1)
    print(
        f"killed {kills} times, restarted {restarts.count} times: {len(want) - num_bad} of {len(want)} streams equal, "
        f"{seconds:.1f} s, {pause:.2f} s a kill"
    )
    if args.poison:
        fate, got = await asyncio.gather(poison(llm, Progress()), run(llm, mix, Progress()))
        num_bad += report(want, got)
        num_bad += not fate
        print(f"poison: {fate or 'it was answered'}; {restarts.count - kills} more restarts")
    return 1 if num_bad or llm.get_num_unfinished_requests() else 0


def report(want: list[Stream], got: list[Stream]) -> int:
    """Print what differs; the number of streams that do."""
    num_bad = 0
    for index, (one, other) in enumerate(zip(want, got, strict=True)):
        if found := differences(one, other):
            num_bad += 1
            print(f"stream {index} differs: {'; '.join(found)}")
    return num_bad


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--async-scheduling", action="store_true")
    parser.add_argument("--poison", action="store_true", help="besides, send a request that crashes the core")
    args = parser.parse_args(argv)
    engine_args = EngineArgs(
        model=args.model,
        dtype="float32",
        max_model_len=args.max_tokens + 128,
        max_num_seqs=args.max_num_seqs,
        async_scheduling=args.async_scheduling,
        # By name: the core imports it from this file's folder, whatever this module is called here.
        logits_processors=["kill_core:CrashOnRequest"] if args.poison else [],
    )
    restarts = Restarts()
    llm = AsyncLLM.from_engine_args(engine_args, stat_loggers=[restarts])
    try:
        return asyncio.run(measure(args, llm, restarts))
    finally:
        llm.shutdown()


if __name__ == "__main__":
    sys.exit(main())
