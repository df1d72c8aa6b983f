"""Many streams at once from one engine, with asyncio; one of them is given up half-way.

python examples/streaming.py [MODEL]
"""

import asyncio
import sys

from octavo import AsyncLLM, EngineArgs, SamplingParams
from octavo.types.sampling_params import RequestOutputKind


async def tell(engine: AsyncLLM, name: str, prompt: str, stop_after: int | None = None) -> None:
    """Print a stream's pieces. Leaving the loop early aborts the request in the engine."""
    params = SamplingParams(temperature=0, max_tokens=24, output_kind=RequestOutputKind.DELTA)
    num_pieces = 0
    async for output in engine.generate(prompt, params, request_id=name):
        print(f"{name}: {output.outputs[0].text!r}")
        num_pieces += 1
        if num_pieces == stop_after:
            print(f"{name}: enough")
            break


async def main(model: str = "smollm2") -> None:
    engine = AsyncLLM.from_engine_args(EngineArgs(model=model))
    try:
        await asyncio.gather(
            tell(engine, "first", "Once upon a time"),
            tell(engine, "second", "The three laws of robotics are", stop_after=5),
        )
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
