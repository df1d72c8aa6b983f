"""What vLLM's documentation and examples do, run by test_vllm.py in a process of its own: argv[1] is a model folder.

Each function is one example; the names imported in it are the ones people import.
"""

import asyncio
import importlib
import sys
import warnings

MODEL = sys.argv[1]
SMALL = {"max_model_len": 128, "max_num_seqs": 4, "dtype": "float32"}


def offline_inference() -> None:
    from vllm import LLM, SamplingParams

    prompts = ["Hello, my name is", "The president of the United States is"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4)
    llm = LLM(model=MODEL, **SMALL)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        assert (output.prompt, len(output.outputs[0].token_ids)) == (prompts[outputs.index(output)], 4)
        assert isinstance(output.outputs[0].text, str)
    conversation = [{"role": "user", "content": "Hello"}]
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    chat = llm.chat(conversation, SamplingParams(max_tokens=2, temperature=0))
    assert chat[0].prompt == text
    assert chat[0].prompt_token_ids == tokenizer(text)["input_ids"]
    assert llm.get_default_sampling_params().max_tokens


def what_lm_eval_does() -> None:
    """The calls of lm-eval's vllm backend, with its arguments."""
    from importlib.metadata import version

    from packaging.version import parse
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest  # noqa: F401
    from vllm.renderers.hf import resolve_chat_template
    from vllm.tokenizers import get_tokenizer

    assert parse(version("vllm")) >= parse("0.9.0")
    llm = LLM(
        model=MODEL, revision=None, dtype="float32", tokenizer=None, tokenizer_mode="auto", tokenizer_revision=None,
        trust_remote_code=False, tensor_parallel_size=1, max_model_len=None, max_num_seqs=None, quantization=None,
        seed=1234, enable_lora=False, max_lora_rank=16,
    )  # fmt: skip
    tokenizer = get_tokenizer(MODEL, tokenizer_mode="auto", trust_remote_code=False, revision=None)
    template = resolve_chat_template(
        tokenizer=tokenizer, chat_template=None, tools=None, model_config=llm.llm_engine.model_config
    )
    assert "{%" in template
    assert llm.llm_engine.model_config.max_model_len == 256
    requests = [tokenizer(text).input_ids for text in ("one two", "three")]
    params = SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=1, detokenize=False)
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=request) for request in requests],
        sampling_params=[params] * 2,
        use_tqdm=True,
        lora_request=None,
    )
    for request, output in zip(requests, outputs, strict=True):
        first, *others = output.prompt_logprobs
        assert first is None and len(others) == len(request) - 1
        assert all(position[token].logprob <= 0 for token, position in zip(request[1:], others, strict=True))
    until = SamplingParams(
        max_tokens=5, stop=["\n", "<|im_end|>"], temperature=0.0, skip_special_tokens=False,
        spaces_between_special_tokens=False,
    )  # fmt: skip
    assert llm.generate([TokensPrompt(prompt_token_ids=requests[0])], [until])[0].outputs[0].finish_reason


def engines() -> None:
    from vllm import AsyncEngineArgs, AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams
    from vllm.engine.arg_utils import EngineArgs as SameArgs
    from vllm.utils import FlexibleArgumentParser, random_uuid

    assert EngineArgs is SameArgs
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", MODEL, "--max_num_seqs", "4", "--max-model-len=128"])
    engine_args = EngineArgs.from_cli_args(args)
    assert (engine_args.model, engine_args.max_num_seqs) == (MODEL, 4)
    engine = LLMEngine.from_engine_args(engine_args)
    engine.add_request("0", "What is this?", SamplingParams(temperature=0.0, max_tokens=3))
    finished = []
    while engine.has_unfinished_requests():
        finished += [output for output in engine.step() if output.finished]
    assert [output.request_id for output in finished] == ["0"]

    async def stream() -> list[int]:
        engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=MODEL, **SMALL, disable_log_requests=True))
        try:
            request_id, lengths = random_uuid(), []
            async for output in engine.generate("Hi", SamplingParams(max_tokens=4, temperature=0), request_id):
                assert output.request_id == request_id
                lengths.append(len(output.outputs[0].token_ids))
            assert (await engine.get_tokenizer()).encode("Hi")
            return lengths
        finally:
            engine.shutdown()

    assert asyncio.run(stream())[-1] == 4


def beam_search_and_processors() -> None:
    import torch
    from vllm import LLM, SamplingParams
    from vllm.config import VllmConfig
    from vllm.sampling_params import BeamSearchParams
    from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

    class DummyLogitsProcessor(LogitsProcessor):
        """The one of vLLM's documentation."""

        @classmethod
        def validate_params(cls, params: SamplingParams):
            target_token = params.extra_args and params.extra_args.get("target_token")
            if target_token is not None and not isinstance(target_token, int):
                raise ValueError(f"target_token value {target_token} is not int")

        def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
            assert vllm_config.model_config.get_vocab_size() and vllm_config.scheduler_config.max_num_seqs
            self.req_info: dict[int, int] = {}

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: BatchUpdate | None):
            if not batch_update:
                return
            for index, params, _, _ in batch_update.added:
                if params.extra_args and (target := params.extra_args.get("target_token")) is not None:
                    self.req_info[index] = target
                else:
                    self.req_info.pop(index, None)
            for index in batch_update.removed:
                self.req_info.pop(index, None)

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            for index, target in self.req_info.items():
                kept = logits[index, target].clone()
                logits[index] = float("-inf")
                logits[index, target] = kept
            return logits

    llm = LLM(model=MODEL, logits_processors=[DummyLogitsProcessor], disable_custom_all_reduce=True, **SMALL)
    params = [SamplingParams(max_tokens=3, extra_args={"target_token": 67}), SamplingParams(max_tokens=3, seed=1)]
    forced, free = llm.generate(["a", "b"], params)
    assert forced.outputs[0].token_ids == [67] * 3 != free.outputs[0].token_ids
    [beams] = llm.beam_search([{"prompt": "a"}], BeamSearchParams(beam_width=2, max_tokens=3))
    assert len(beams.sequences) == 2 and beams.sequences[0].cum_logprob >= beams.sequences[1].cum_logprob


def what_is_not_there() -> None:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    def refusal(action) -> str:
        try:
            action()
        except (ImportError, NotImplementedError, ValueError) as error:
            return str(error)
        raise AssertionError("not refused")

    def names(module, *wanted):
        for name in wanted:
            getattr(importlib.import_module(module), name)

    names("vllm", "PoolingParams", "EmbeddingRequestOutput")
    assert "as a plain value" in refusal(lambda: names("vllm.config", "CompilationConfig"))
    assert "one device" in refusal(lambda: importlib.import_module("vllm.distributed.parallel_state"))
    assert "written for octavo.layers" in refusal(lambda: importlib.import_module("vllm.model_executor.layers.linear"))
    assert "merge the adapter" in refusal(lambda: LoRARequest("x", 1, "/x"))
    assert "enable_lora is not supported yet" in refusal(lambda: LLM(MODEL, enable_lora=True, max_lora_rank=16))
    assert "tensor_parallel_size=2" in refusal(lambda: LLM(MODEL, tensor_parallel_size=2))
    assert "did you mean" in refusal(lambda: LLM(MODEL, max_model_length=16))
    assert not hasattr(importlib.import_module("vllm"), "__nothing__")


def environment() -> None:
    from vllm import _environment

    values = {
        "VLLM_API_KEY": "k", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_USE_V1": "1", "VLLM_HOST": "::",
        "VLLM_API_KEX": "k", "VLLM_USE_V1_": "0",
    }  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _environment.apply(values)
    assert (values["OCTAVO_API_KEY"], values["OCTAVO_LOG_LEVEL"]) == ("k", "ERROR")
    said = [str(warning.message) for warning in caught]
    assert ["use --host" in text for text in said] == [True, False, False]
    assert "did you mean VLLM_API_KEY" in said[1]


if __name__ == "__main__":
    for example in sys.argv[2:]:
        globals()[example]()
        print("done:", example)
