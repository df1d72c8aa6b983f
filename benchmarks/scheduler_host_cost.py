"""Microseconds the scheduler takes for a step of pure decoding, without worker, sockets and text.

    python benchmarks/scheduler_host_cost.py [--batch 1 32 256] [--steps 2000] [--async-scheduling] [--profile]

The worker is faked: every row samples the same token. Lengths are staggered as they are in service, so that in each step
a sixteenth of the requests crosses the border of a block, gets a new one and has the full one named. Times are those of the
thread, so that other work on the machine does not count.
"""

import argparse
import cProfile
import gc
import pstats
import statistics
import time
from collections import deque

from octavo.config.engine import CacheConfig, SchedulerConfig
from octavo.scheduler.scheduler import Scheduler
from octavo.types.kv_spec import FullAttentionSpec, KVCacheConfig, KVGroup, KVSpec, SlidingWindowSpec
from octavo.types.request import EngineRequest
from octavo.types.sampling_params import SamplingParams
from octavo.types.step import ModelRunnerOutput, SchedulerOutput

BLOCK_SIZE = 16


def make_scheduler(batch: int, num_tokens: int, specs: list[KVSpec]) -> Scheduler:
    """A scheduler with room for `batch` requests of `num_tokens` tokens."""
    config = SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=8192, max_model_len=num_tokens)
    num_blocks = (num_tokens // BLOCK_SIZE + 2) * batch * len(specs) * 2
    groups = [KVGroup([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
    return Scheduler(config, CacheConfig(BLOCK_SIZE, "bfloat16", 0.9), KVCacheConfig(num_blocks, groups))


def fake_result(step: SchedulerOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput(step.step_id, [[7] if samples else [] for samples in step.samples])


def measure(
    batch: int, num_steps: int, depth: int, specs: list[KVSpec], profile: cProfile.Profile | None
) -> list[float]:
    """Seconds of schedule + update for each of `num_steps` decode steps."""
    num_tokens = num_steps + 4 * BLOCK_SIZE + 64
    scheduler = make_scheduler(batch, num_tokens, specs)
    params = SamplingParams(max_tokens=None, temperature=0.0)
    for i in range(batch):
        prompt = [(i * 31 + j) % 32000 + 10 for j in range(BLOCK_SIZE + i % BLOCK_SIZE)]
        scheduler.add_request(EngineRequest(f"request-{i}", prompt, params, eos_token_ids=[2]))
    in_flight: deque[SchedulerOutput] = deque()
    seconds = []
    for i in range(num_steps + 16):
        is_warm = i >= 16  # prefill and the first outputs are over
        if is_warm and profile is not None:
            profile.enable()
        start = time.thread_time()
        while len(in_flight) < depth and (step := scheduler.schedule()) is not None:
            in_flight.append(step)
        scheduling = time.thread_time() - start
        if profile is not None:
            profile.disable()
        oldest = in_flight.popleft()
        result = fake_result(oldest)
        if is_warm and profile is not None:
            profile.enable()
        start = time.thread_time()
        scheduler.update(oldest, result)
        scheduler.stats()
        updating = time.thread_time() - start
        if profile is not None:
            profile.disable()
        if is_warm:
            assert len(oldest.rows) == batch
            seconds.append(scheduling + updating)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--async-scheduling", action="store_true", help="two steps in flight")
    parser.add_argument("--sliding-window", type=int, default=0, help="add a group with this window")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    specs: list[KVSpec] = [FullAttentionSpec(8, 128, "bfloat16", BLOCK_SIZE)]
    if args.sliding_window:
        specs.append(SlidingWindowSpec(8, 128, "bfloat16", BLOCK_SIZE, args.sliding_window))
    gc.collect()
    gc.freeze()
    for batch in args.batch:
        profile = cProfile.Profile() if args.profile else None
        seconds = measure(batch, args.steps, 2 if args.async_scheduling else 1, specs, profile)
        deciles = statistics.quantiles(seconds, n=10)
        print(
            f"batch {batch:4}: mean {statistics.fmean(seconds) * 1e6:6.1f} us, tenth percentile {deciles[0] * 1e6:6.1f} us, "
            f"median {deciles[4] * 1e6:6.1f} us, ninetieth {deciles[8] * 1e6:6.1f} us"
        )
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(12)


if __name__ == "__main__":
    main()
