"""Encoder-decoder models against transformers in float32: alone, batched, in chunks, preempted, and what callers may ask."""

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.errors import ClientError, ConfigError
from octavo.models.registry import ENCODER_DECODERS
from tests.models.harness import LOGPROB_TOLERANCE, random_checkpoint
from tests.models.table import ENCODER_DECODER_ROWS
from tests.models.tiny import VOCAB

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own, about configurations as small as these

GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=0, detokenize=False)
# Room for the longest encoder input beside four requests.
SETTINGS = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 100, "block_size": 16}
SETTINGS |= {"dtype": "float32", "skip_tokenizer_init": True, "long_prefill_token_threshold": 7}


def checkpoint(architecture: str, folder: Path, **changes: Any) -> torch.nn.Module:
    row = ENCODER_DECODER_ROWS[architecture]
    oracle = random_checkpoint(row.model_type, row.changes | changes, folder, with_encoder=True)
    assert type(oracle).__name__ == architecture
    return oracle


def prompts() -> list[dict[str, Any]]:
    """Encoder inputs of several lengths; some answers begin with a prompt of their own, longer than a chunk."""
    rng = torch.Generator().manual_seed(3)

    def ids(length: int) -> list[int]:
        return torch.randint(3, VOCAB, (length,), generator=rng).tolist()

    explicit = [(33, 40), (20, 3), (1, 12)]
    return [{"prompt_token_ids": ids(50)}, {"encoder_prompt": ids(9)}] + [
        {"encoder_prompt": {"prompt_token_ids": ids(n)}, "decoder_prompt": ids(m)} for n, m in explicit
    ]


@torch.inference_mode()
def check_answer(oracle: torch.nn.Module, output: Any) -> None:
    """Every token is the oracle's choice after ours up to it, so by induction the whole answer is the oracle's."""
    begin, ids = output.prompt_token_ids, list(output.outputs[0].token_ids)
    read, decoded = torch.tensor([output.encoder_prompt_token_ids]), torch.tensor([begin + ids])
    scores = oracle(input_ids=read, decoder_input_ids=decoded).logits[0, len(begin) - 1 : -1].log_softmax(-1)
    assert len(ids) == 32 and scores.argmax(-1).tolist() == ids
    got = torch.tensor([entries[i].logprob for entries, i in zip(output.outputs[0].logprobs, ids, strict=True)])
    torch.testing.assert_close(got, scores.gather(1, torch.tensor(ids)[:, None])[:, 0], rtol=0, atol=LOGPROB_TOLERANCE)


def metric(llm: LLM, name: str) -> float:
    return sum(m.value for m in llm.get_metrics() if m.name == name)


@pytest.mark.parametrize("architecture", ENCODER_DECODER_ROWS)
def test_equals_transformers(architecture: str, tmp_path: Path):
    oracle = checkpoint(architecture, tmp_path)
    is_forced = architecture == "MBartForConditionalGeneration"  # into a language
    overrides = {"forced_bos_token_id": 7} if is_forced else {}
    with LLM(str(tmp_path), kv_cache_memory_bytes=2**22, hf_overrides=overrides, **SETTINGS) as llm:
        together = llm.generate(prompts(), GREEDY, use_tqdm=False)
        alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts()]
    assert together[0].prompt_token_ids == ([2, 7] if is_forced else [2])
    assert together[2].prompt_token_ids[0] == 2 and len(together[2].prompt_token_ids) == 41
    for output in together + alone:
        check_answer(oracle, output)
    assert [output.num_cached_tokens for output in alone] == [
        0,
        0,
        32,
        0,
        0,
    ]  # the decoder's, after an equal encoder input
    answers = {tuple(output.outputs[0].token_ids) for output in together}
    assert len(answers) == len(together)  # they depend on what was read


def test_every_architecture_has_a_row():
    assert set(ENCODER_DECODERS) == set(ENCODER_DECODER_ROWS)


@pytest.mark.parametrize("shares", [True, False])
def test_preempted_requests_are_encoded_again(shares: bool, tmp_path: Path):
    """Two requests fit, the others take their blocks."""
    oracle = checkpoint("T5ForConditionalGeneration", tmp_path)
    options = {"num_gpu_blocks_override": 14, "enable_prefix_caching": shares, "disable_log_stats": False}
    with LLM(str(tmp_path), **SETTINGS, **options) as llm:
        for output in llm.generate(prompts(), GREEDY, use_tqdm=False):
            check_answer(oracle, output)
        assert metric(llm, "vllm:num_preemptions") > 0


@pytest.fixture(scope="module")
def bart(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bart")
    oracle = checkpoint("BartForConditionalGeneration", folder)
    with LLM(str(folder), kv_cache_memory_bytes=2**22, disable_log_stats=False, **SETTINGS) as llm:
        yield llm, oracle


def test_equal_encoder_inputs_are_encoded_once(bart, monkeypatch):
    llm, _ = bart
    model = llm.apply_model(lambda model: model)[0]
    num_encoded, encode = [], model.encode
    monkeypatch.setattr(model, "encode", lambda ids, positions: num_encoded.append(len(ids)) or encode(ids, positions))
    prompt = {"prompt_token_ids": list(range(100, 148))}
    sampled = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=8, detokenize=False)
    first, second = (llm.generate(prompt, sampled, use_tqdm=False)[0] for _ in range(2))
    assert [choice.token_ids for choice in first.outputs] == [choice.token_ids for choice in second.outputs]
    assert len({tuple(choice.token_ids) for choice in first.outputs}) == 4
    assert num_encoded == [48] and first.num_prompt_tokens == 49


def test_salts_keep_encoder_outputs_apart(bart):
    llm, oracle = bart
    ids = list(range(200, 230))
    one, two = (
        llm.generate({"prompt_token_ids": ids, "cache_salt": salt}, GREEDY, use_tqdm=False)[0] for salt in ("a", "b")
    )
    assert one.outputs[0].token_ids == two.outputs[0].token_ids
    check_answer(oracle, two)


def test_beam_search_equals_transformers(bart):
    llm, oracle = bart
    ids = list(range(300, 320))
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    (found,) = llm.beam_search([{"prompt_token_ids": ids}], params)
    want = oracle.generate(
        torch.tensor([ids]),
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=8,
        min_new_tokens=8,
        do_sample=False,
        forced_eos_token_id=None,
        eos_token_id=None,
    )
    assert [sequence.tokens for sequence in found.sequences] == want.tolist()


def test_an_aborted_request_frees_its_blocks(bart):
    llm, _ = bart
    llm.llm_engine.add_request("gone", {"encoder_prompt": [5, 6, 7]}, GREEDY)
    llm.llm_engine.step()
    llm.llm_engine.abort_request(["gone"])
    while llm.llm_engine._client.has_work:  # the core checks its accounts when it comes to rest
        llm.llm_engine.step()


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ({"decoder_prompt": [5]}, "no encoder_prompt"),
        ({"encoder_prompt": [5], "cache_salt": "x"}, "put them inside"),
        ({"prompt_token_ids": list(range(3, 100))}, "encoder reads at most 96 tokens"),
        ({"encoder_prompt": [5], "decoder_prompt": list(range(3, 99))}, "maximum context length is 96"),
        ({"encoder_prompt": [VOCAB]}, "not allowed"),
        ({"prompt_token_ids": []}, "empty"),
    ],
)
def test_wrong_prompts_are_refused(bart, prompt, why):
    with pytest.raises(ClientError, match=why):
        bart[0].generate(prompt, GREEDY, use_tqdm=False)


def test_the_encoder_input_is_truncated_when_asked(bart):
    params = SamplingParams(temperature=0.0, max_tokens=2, truncate_prompt_tokens=-1, detokenize=False)
    output = bart[0].generate({"prompt_token_ids": list(range(3, 150))}, params, use_tqdm=False)[0]
    assert output.encoder_prompt_token_ids == list(range(54, 150))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"max_num_batched_tokens": 99}, "encoder may read"),
        ({"model_impl": "transformers"}, "own model file"),
        ({"runner": "pooling"}, "makes text"),
        ({"batch_invariant": True}, "batch-invariant"),
        ({"enable_chunked_prefill": False}, "beside the encoder"),
        ({"compile": True}, "compile is not supported"),
        ({"kv_cache_dtype": "fp8"}, "data type"),
        ({"dtype": "float16", "hf_overrides": {"model_type": "t5"}}, "overflow"),
        ({"hf_overrides": {"architectures": ["LEDForConditionalGeneration"]}}, "no model file"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(options, why, tmp_path: Path):
    checkpoint("BartForConditionalGeneration", tmp_path)
    with pytest.raises(ConfigError, match=why):
        LLM(str(tmp_path), **(SETTINGS | {"long_prefill_token_threshold": 0} | options))


def test_words_that_a_generation_config_forbids_do_not_come(tmp_path: Path):
    oracle = checkpoint("MarianMTModel", tmp_path)
    oracle.generation_config.bad_words_ids = [[i] for i in range(3, 400)]
    oracle.generation_config.save_pretrained(tmp_path)
    with LLM(str(tmp_path), kv_cache_memory_bytes=2**22, **SETTINGS) as llm:
        output = llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY, use_tqdm=False)[0]
    assert not set(range(3, 400)) & set(output.outputs[0].token_ids)
