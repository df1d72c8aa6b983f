"""What sleep gives back and what waking costs: device memory, seconds, and whether the answers stay the same.

python benchmarks/sleep.py --model benchmarks/configs/llama-3.1-8b --load-format dummy
"""

import argparse
import json
import time
from collections.abc import Callable

import torch

from octavo import LLM, SamplingParams

GIB = 1 << 30
PROMPTS = [{"prompt_token_ids": [7 + i, *range(100, 100 + 5 * i)]} for i in range(8)]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)


def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def used() -> int:
    """Bytes of the device that are taken, by whomever."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--engine", default="{}", help="more engine arguments, JSON")
    args = parser.parse_args()
    torch.cuda.init()
    nothing = used()
    llm = LLM(
        args.model,
        load_format=args.load_format,
        skip_tokenizer_init=True,
        enable_sleep_mode=True,
        **json.loads(args.engine),
    )
    expected = answers(llm)
    awake = used() - nothing
    print(f"awake: {awake / GIB:.1f} GiB")
    for level in (1, 2):
        for _ in range(args.repeats):
            falling = seconds(lambda level=level: llm.sleep(level))
            freed = awake - (used() - nothing)
            waking = seconds(llm.wake_up)
            print(
                f"level {level}: asleep after {falling:.2f} s, {freed / GIB:.1f} GiB freed ({freed / awake:.1%}), "
                f"awake after {waking:.2f} s, same answers: {answers(llm) == expected}",
                flush=True,
            )
    llm.sleep(level=2)
    parts = {tag: seconds(lambda tag=tag: llm.wake_up(tags=[tag])) for tag in ("weights", "kv_cache")}
    print(
        ", ".join(f"{tag} {spent:.2f} s" for tag, spent in parts.items()), f"same answers: {answers(llm) == expected}"
    )


if __name__ == "__main__":
    main()
