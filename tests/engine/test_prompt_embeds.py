"""Prompts as embeddings: those of the model's own table give exactly what the ids give, whatever happens on the way."""

import asyncio
import base64
import io
import os
import pickle
import signal
import zipfile

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.config.args import EngineArgs
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.prompt_embeds import load_embeds, read_embeds
from octavo.errors import ClientError, ContextLengthError
from octavo.types.sampling_params import BeamSearchParams, RequestOutputKind
from tests.models.harness import random_checkpoint
from tests.models.table import ROWS

IDS = [(7 * i) % 500 for i in range(50)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=9, presence_penalty=1.0, frequency_penalty=0.5, max_tokens=20),
]


def args(path, **options) -> EngineArgs:
    options = {"max_num_seqs": 4, "num_gpu_blocks_override": 100, "block_size": 16} | options
    return EngineArgs(model=str(path), dtype="float32", enable_prompt_embeds=True, **options)


def said(output):
    return [(c.token_ids, c.finish_reason) for c in output.outputs]


def assert_same(got, wanted):
    """Equal answers, and log probabilities to what float32 sums of any order agree on."""
    assert said(got) == said(wanted)
    scores = [[e.logprob for c in o.outputs for p in c.logprobs or () for e in p.values()] for o in (got, wanted)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def table_of(llm: LLM) -> torch.Tensor:
    [table] = llm.apply_model(lambda model: model.embed(torch.arange(512, device=next(model.parameters()).device)))
    return table.to("cpu", copy=True)


@pytest.fixture(scope="module")
def table(tiny_llama_dir) -> torch.Tensor:
    with LLM.from_engine_args(args(tiny_llama_dir)) as llm:
        return table_of(llm)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 17, "max_num_seqs": 3},  # chunks that end anywhere, the last of one token among them
        {"async_scheduling": True, "enable_prefix_caching": False},
        {"num_gpu_blocks_override": 11, "max_num_batched_tokens": 24, "max_model_len": 80},  # they preempt each other
        {"enforce_eager": True},
    ],
    ids=["whole", "chunks", "overlap", "preemption", "eager"],
)
def test_the_tables_own_embeddings_are_the_ids(tiny_llama_dir, table, options):
    prompts = [IDS[:n] for n in (1, 16, 17, 34, 50)]
    with LLM.from_engine_args(args(tiny_llama_dir, disable_log_stats=False, **options)) as llm:
        for params in PARAMS:
            mixed = [*prompts, *({"prompt_embeds": table[ids]} for ids in prompts)]
            outputs = llm.generate(mixed, params, use_tqdm=False)
            for wanted, got in zip(outputs[:5], outputs[5:], strict=True):
                assert_same(got, wanted)
                assert got.prompt is None and got.prompt_token_ids == [0] * len(wanted.prompt_token_ids)
        if "num_gpu_blocks_override" in options:
            assert next(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions") > 0


def test_equal_embeddings_share_blocks_and_different_ones_never_do(tiny_llama_dir, table):
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    other = table[IDS].clone()
    other[20, 3] += 1e-3
    with LLM.from_engine_args(args(tiny_llama_dir)) as llm:

        def ask(prompt):
            [output] = llm.generate(prompt, greedy, use_tqdm=False)
            return output.num_cached_tokens, said(output)

        cold = ask({"prompt_embeds": table[IDS]})
        assert cold[0] == 0
        assert ask({"prompt_embeds": table[IDS]}) == (48, cold[1])
        assert ask({"prompt_embeds": table[IDS].half()})[0] in (0, 48)  # equal once it is float32, or not at all
        assert ask({"prompt_embeds": other})[0] == 16  # the block before the difference
        assert ask({"prompt_embeds": table[IDS], "cache_salt": "a"})[0] == 0
        # Ids and embeddings do not know of each other, nor do the zeros that stand for embeddings.
        assert ask(IDS)[0] == 0
        assert ask([0] * 50)[0] == 0


@pytest.mark.parametrize("name", ["Gemma2", "Granite", "GPT2LMHead", "OlmoHybrid"])
def test_embeddings_mean_what_transformers_takes_them_for(name, tmp_path):
    row = ROWS[name.replace("LMHead", "LMHeadModel") if "LMHead" in name else f"{name}ForCausalLM"]
    oracle = random_checkpoint(row.model_type, row.changes, tmp_path)
    ids = [
        int(i) for i in torch.randint(1, oracle.config.vocab_size, (21,), generator=torch.Generator().manual_seed(1))
    ]
    with torch.no_grad():
        embeds = oracle.get_input_embeddings()(torch.tensor(ids))
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2, detokenize=False)
    engine_args = args(tmp_path, skip_tokenizer_init=True, max_num_batched_tokens=8, max_model_len=64)
    with LLM.from_engine_args(engine_args) as llm:
        wanted, got = llm.generate([ids, {"prompt_embeds": embeds}], params, use_tqdm=False)
    assert_same(got, wanted)


def test_answers_go_on_when_the_core_is_killed(tiny_llama_dir, table):
    async def last(llm, prompt, params, name, kill_after=None):
        params = params.clone()
        params.output_kind = RequestOutputKind.CUMULATIVE
        output = None
        async for output in llm.generate(prompt, params, name):
            if kill_after is not None and len(output.outputs[0].token_ids) >= kill_after:
                os.kill(llm.core_pid, signal.SIGKILL)
                kill_after = None
        return output

    async def run():
        llm = AsyncLLM.from_engine_args(args(tiny_llama_dir))
        try:
            for index, params in enumerate(PARAMS):
                wanted = await last(llm, IDS, params, f"ids-{index}")
                got, beside = await asyncio.gather(
                    last(llm, {"prompt_embeds": table[IDS]}, params, f"embeds-{index}", kill_after=3),
                    last(llm, {"prompt_embeds": table[IDS]}, params, f"beside-{index}"),
                )
                assert_same(got, wanted)
                assert_same(beside, wanted)
        finally:
            llm.shutdown()

    asyncio.run(run())


def test_off_by_default(tiny_llama_dir, table):
    off = LLM(str(tiny_llama_dir), dtype="float32", num_gpu_blocks_override=100)
    with off as llm, pytest.raises(ClientError, match="--enable-prompt-embeds"):
        llm.generate({"prompt_embeds": table[:3]}, use_tqdm=False)


def test_what_needs_the_tokens_of_the_prompt_is_refused_by_name(tiny_llama_dir, table):
    with LLM.from_engine_args(args(tiny_llama_dir)) as llm:
        prompt = {"prompt_embeds": table[:3]}
        for field in ({"prompt_logprobs": 1}, {"repetition_penalty": 1.1}, {"truncate_prompt_tokens": 2}):
            with pytest.raises(ClientError, match=next(iter(field))):
                llm.generate(prompt, SamplingParams(max_tokens=2, **field), use_tqdm=False)
        with pytest.raises(ClientError, match="beam_search"):
            llm.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=2))
        with pytest.raises(ClientError, match="leave out"):
            llm.generate({"prompt": "a", **prompt}, use_tqdm=False)
        with pytest.raises(ContextLengthError):
            llm.generate({"prompt_embeds": torch.zeros(256, 64)}, SamplingParams(max_tokens=1), use_tqdm=False)
        assert (
            llm.generate(prompt, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids
        )


# Files of torch.save, and others (FC-169).


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/octavo-was-here",)


def saved(value) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def repacked(file: bytes, compression: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    """The archive with some of its members replaced (`pkl`, `numbers`) and others added."""
    names = {"pkl": "archive/data.pkl", "numbers": "archive/data/0"}
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(file)) as old, zipfile.ZipFile(made, "w", compression) as new:
        content = {name: old.read(name) for name in old.namelist()}
        for name, data in (content | {names.get(k, f"archive/{k}"): v for k, v in members.items()}).items():
            new.writestr(name, data)
    return made.getvalue()


GOOD = saved(torch.zeros(3, 64))
PICKLE = zipfile.ZipFile(io.BytesIO(GOOD)).read("archive/data.pkl")
WRONG = {
    "empty": b"",
    "text": b"hello",
    "pickle": pickle.dumps(Evil()),
    "old format": pickle.dumps(torch.zeros(3, 64).numpy()),
    "cut": GOOD[:-30],
    "a directory beyond the end": GOOD[:-43] + b"\xff" + GOOD[-42:],
    "without numbers": repacked(GOOD, numbers=b""),
    "fewer numbers than claimed": repacked(GOOD, numbers=b"\0" * 40),
    "2 GB claimed": repacked(GOOD, pkl=PICKLE.replace(b"K\x03K@\x86", b"J\x00\x00\x80\x00K@\x86")),
    "a compressed 64 MB of zeros": repacked(GOOD, zipfile.ZIP_DEFLATED, numbers=b"\0" * (64 << 20)),
    "code": repacked(GOOD, pkl=pickle.dumps(Evil(), protocol=2)),
    "a call of an allowed type": repacked(GOOD, pkl=b"\x80\x02cbuiltins\nbytearray\nJ\x00\x00\x00\x7f\x85R."),
    "a long pickle": repacked(GOOD, pkl=PICKLE[:-1] + b"0" * 5000 + b"."),
    "a cut pickle": repacked(GOOD, pkl=PICKLE[:50]),
    "many members": repacked(GOOD, **{f"data/{i}": b"" for i in range(20)}),
    "a list": saved([torch.zeros(3, 64)]),
    "integers": saved(torch.zeros(3, 64, dtype=torch.int64)),
    "complex": saved(torch.zeros(3, 64, dtype=torch.complex64)),
    "float8": saved(torch.zeros(3, 64).to(torch.float8_e4m3fn)),
    "sparse with bad indices": saved(
        torch.sparse_coo_tensor(torch.tensor([[0, 10**9], [0, 1]]), torch.ones(2), (3, 64), check_invariants=False)
    ),
    "meta": saved(torch.zeros(3, 64, device="meta")),
    "too narrow": saved(torch.zeros(3, 63)),
    "one row": saved(torch.zeros(64)),
    "a batch": saved(torch.zeros(2, 3, 64)),
    "no token": saved(torch.zeros(0, 64)),
    "longer than the context": saved(torch.zeros(1, 64).expand(10**9, 64)),
    "not a number": saved(torch.full((3, 64), float("nan"))),
    "infinite in float32": saved(torch.full((3, 64), 1e300, dtype=torch.float64)),
}


@pytest.fixture(scope="module")
def model_config(tiny_llama_dir):
    from octavo.engine.configure import create_engine_config

    return create_engine_config(args(tiny_llama_dir)).model


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files_are_refused(name, model_config):
    text = base64.b64encode(WRONG[name]).decode()
    with pytest.raises(ClientError, match="prompt_embeds") as raised:
        load_embeds(text, model_config)
    assert raised.value.param == "prompt_embeds" and len(str(raised.value)) < 300
    assert not os.path.exists("/tmp/octavo-was-here")


@pytest.mark.parametrize("text", ["@@@", "QUJD=", "ünï", "A" * 5])
def test_what_is_not_base64_is_refused(text, model_config):
    with pytest.raises(ClientError, match="base64"):
        load_embeds(text, model_config)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(192.0).view(3, 64),
        torch.arange(192.0).view(1, 3, 64),
        torch.arange(192.0).view(64, 3).t(),
        torch.arange(768.0).view(6, 128)[::2, ::2],
        torch.nn.Parameter(torch.arange(192.0).view(3, 64)),
        torch.arange(192.0).view(3, 64).bfloat16(),
        torch.arange(192.0).view(3, 64).double(),
        torch._neg_view(-torch.arange(192.0).view(3, 64)),
    ],
    ids=["plain", "batch of one", "transposed", "strided", "parameter", "bfloat16", "float64", "lazily negated"],
)
def test_right_tensors_arrive_as_they_are(tensor, model_config):
    wanted = read_embeds(tensor, model_config)
    assert wanted.data == tensor.detach().resolve_neg().float().reshape(3, 64).numpy().tobytes()
    assert load_embeds(base64.b64encode(saved(tensor)).decode(), model_config) == wanted
