"""The same answers from one process in lock step and from two with overlap, with a real (random) model."""

import asyncio

from octavo.config.args import EngineArgs
from octavo.engine.async_llm import AsyncLLM
from octavo.llm import LLM
from octavo.types.sampling_params import RequestOutputKind, SamplingParams

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1.0, seed=7, max_tokens=24, n=2),
    SamplingParams(temperature=0.8, seed=8, top_p=0.9, repetition_penalty=1.2, max_tokens=24, ignore_eos=True),
]
PROMPTS = ["The capital of France is", [5, 6, 7, 8] * 10, "x"]


def engine_args(path, **options) -> EngineArgs:
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 100} | options
    return EngineArgs(model=str(path), dtype="float32", **options)


def answers(output):
    """What must not depend on how the engine runs. Log probabilities to what float32 sums of any order agree on."""
    scores = [] if output.prompt_logprobs is None else output.prompt_logprobs[1:]
    return [
        [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in output.outputs],
        [[(token_id, round(entry.logprob, 3)) for token_id, entry in position.items()] for position in scores],
    ]


def test_process_split_and_overlap_change_no_answer(tiny_llama_dir):
    async def in_two_processes():
        llm = AsyncLLM.from_engine_args(engine_args(tiny_llama_dir, async_scheduling=True))
        try:

            async def last(prompt, params, request_id):
                params = params.clone()
                params.output_kind = RequestOutputKind.FINAL_ONLY
                return [o async for o in llm.generate(prompt, params, request_id)][-1]

            pairs = enumerate(zip(PROMPTS, PARAMS, strict=True))
            outputs = await asyncio.gather(*(last(prompt, params, str(i)) for i, (prompt, params) in pairs))
            assert llm.report.num_blocks == 100 and "KV cache" in llm.report.memory_plan
            return outputs
        finally:
            llm.shutdown()

    with LLM.from_engine_args(engine_args(tiny_llama_dir, async_scheduling=False)) as llm:
        alone = [llm.generate(p, q, use_tqdm=False)[0] for p, q in zip(PROMPTS, PARAMS, strict=True)]
        together = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    split = asyncio.run(in_two_processes())
    assert [answers(o) for o in together] == [answers(o) for o in alone]
    assert [answers(o) for o in split] == [answers(o) for o in alone]


def test_a_chain_model_says_its_alphabet(chain_llama_dir):
    with LLM.from_engine_args(engine_args(chain_llama_dir)) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=100)
        [output] = llm.generate("A", params, use_tqdm=False)
        assert output.outputs[0].text == "BCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
        assert output.outputs[0].finish_reason == "stop"
        [stopped] = llm.generate("A", SamplingParams(temperature=0.0, max_tokens=100, stop=["GHI"]), use_tqdm=False)
        assert (stopped.outputs[0].text, stopped.outputs[0].stop_reason) == ("BCDEF", "GHI")
        [chat] = llm.chat([{"role": "user", "content": "hi"}], params, use_tqdm=False)
        assert chat.outputs[0].text.startswith("ABC")
