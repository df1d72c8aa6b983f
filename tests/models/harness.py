"""Runs a model the way the worker does — paged cache, ragged batches — and compares it with transformers in float32."""

from pathlib import Path
from typing import Any

import torch
import transformers

from octavo import LLM, SamplingParams
from octavo.config.engine import LoadConfig
from octavo.config.hf import HFConfig
from octavo.context import GroupMetadata, StepContext, set_step_context
from octavo.layers.build import attention_layers, materialise
from octavo.layers.causal_lm import CausalLM
from octavo.layers.linear import UnquantizedMethod
from octavo.layers.ssm.state import row_states
from octavo.loader import load_model
from octavo.models.registry import NATIVE, model_class
from tests.models.tiny import VOCAB, tiny_config

BLOCK_SIZE = 16
LOGPROB_TOLERANCE = 1e-3


def random_checkpoint(
    model_type: str, changes: dict[str, Any], folder: Path, with_encoder: bool = False
) -> torch.nn.Module:
    """A tiny checkpoint of an architecture, saved to `folder`; returns transformers' model, the oracle.

    Weights are drawn wide and norms away from one, so that a wrong scale, bias or order shows in the logits.
    """
    config = tiny_config(model_type, changes, with_encoder)
    torch.manual_seed(0)
    make = transformers.AutoModelForSeq2SeqLM if with_encoder else transformers.AutoModelForCausalLM
    model = make.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # tables of sines
            continue
        noise = torch.randn_like(parameter)
        if parameter.dim() == 1 or "norm" in name or "bias" in name:
            parameter.data += 0.1 * noise
        else:
            parameter.data *= 3
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "final_logits_bias", "layer_scalar")):
            buffer += 0.1 * torch.randn_like(buffer)
    model.save_pretrained(folder)
    return model


def load_octavo(folder: Path, model_impl: str | None = None) -> CausalLM:
    """Our model of the checkpoint in `folder`, with its weights."""
    config = HFConfig.from_file(folder)
    impl = model_impl or ("octavo" if config.architecture in NATIVE else "transformers")
    make = model_class(config.architecture, impl)
    device = torch.device("cpu")

    def method_for(path, layer):
        return UnquantizedMethod()

    model = materialise(lambda: make(config), method_for, torch.float32, device)
    if impl == "transformers":
        model.load_checkpoint(str(folder), "safetensors", method_for, torch.float32, device)
    else:
        load_model(model, LoadConfig("safetensors", use_tqdm=False), str(folder), dtype=torch.float32, device=device)
    return model


class PagedRun:
    """A few sequences over one paged cache, each with its own shuffled blocks."""

    def __init__(self, model: CausalLM, num_sequences: int, max_len: int):
        self.model = model
        width = -(-max_len // BLOCK_SIZE)
        order = torch.randperm(num_sequences * width, generator=torch.Generator().manual_seed(1)) + 1
        self.table = order.view(num_sequences, width).to(torch.int32)
        for layer in attention_layers(model).values():
            layer.kv_cache = torch.zeros(num_sequences * width + 1, *layer.kv_spec(BLOCK_SIZE, "float32").page_shape)
        self.lens = [0] * num_sequences
        for state in row_states(model):
            state.allocate(num_sequences, torch.device("cpu"))

    @torch.inference_mode()
    def step(self, chunks: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Run new tokens of some sequences in one batch; returns the logits of each new token."""
        sequences = list(chunks)
        counts = [len(chunks[s]) for s in sequences]
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        table = self.table[sequences]
        positions = torch.cat(
            [torch.arange(self.lens[s], self.lens[s] + n) for s, n in zip(sequences, counts, strict=True)]
        )
        request = torch.repeat_interleave(torch.arange(len(sequences)), torch.tensor(counts))
        slots = table[request, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        for s, n in zip(sequences, counts, strict=True):
            self.lens[s] += n
        seq_lens = [self.lens[s] for s in sequences]
        context = StepContext(
            len(sequences),
            starts[-1],
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(seq_lens, dtype=torch.int32),
            max(counts),
            max(seq_lens),
            [GroupMetadata(table, slots, BLOCK_SIZE)],
            starts,
            seq_lens,
            rows=torch.tensor(sequences, dtype=torch.int32),
        )
        with set_step_context(context):
            hidden_states = self.model(torch.cat([chunks[s] for s in sequences]), positions)
            logits = self.model.logits(hidden_states)
        return {s: logits[starts[i] : starts[i + 1]] for i, s in enumerate(sequences)}


@torch.inference_mode()
def check_against_transformers(folder: Path, oracle: torch.nn.Module, model_impl: str | None = None) -> None:
    """Whole prefill, chunks, and step by step beside a neighbour must give the oracle's log probabilities."""
    model = load_octavo(folder, model_impl)
    rng = torch.Generator().manual_seed(2)
    ids, other = (torch.randint(3, VOCAB, (60,), generator=rng) for _ in range(2))
    want, want_other = (oracle(x[None]).logits[0].log_softmax(-1) for x in (ids, other))

    def close(got: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(got.log_softmax(-1), expected, rtol=0, atol=LOGPROB_TOLERANCE)

    close(PagedRun(model, 1, 60).step({0: ids})[0], want)

    run = PagedRun(model, 2, 60)
    got, got_other = [], []
    steps = [(0, 23, 0, 0), (23, 37, 0, 11), (37, 38, 11, 12), (38, 39, 12, 50)]
    steps += [(i, i + 1, i + 11, min(i + 12, 60)) for i in range(39, 60)]
    for first, last, other_first, other_last in steps:
        chunks = {0: ids[first:last]}
        if other_last > other_first:
            chunks[1] = other[other_first:other_last]
        out = run.step(chunks)
        got.append(out[0])
        got_other += [out[1]] if 1 in out else []
    close(torch.cat(got), want)
    close(torch.cat(got_other), want_other)


def check_engine(folder: Path, oracle: torch.nn.Module, **options: Any) -> list[int]:
    """Greedy answers of 32 tokens to five prompts, cut into chunks and batched, must be the oracle's, and so must the answers
    to the same prompts again; returns how many tokens of each prompt came from the prefix cache then."""
    rng = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCAB, (n,), generator=rng).tolist() for n in (50, 9, 33, 20, 1)]
    greedy = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=0, detokenize=False)
    settings: dict[str, Any] = {
        "max_model_len": 96,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
        "dtype": "float32",
    }
    settings["block_size"] = BLOCK_SIZE
    if "num_gpu_blocks_override" not in options:
        settings["kv_cache_memory_bytes"] = 2**22
    with LLM(str(folder), skip_tokenizer_init=True, **(settings | options)) as llm:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        for _ in range(2):
            outputs = llm.generate(inputs, greedy, use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                _check_answer(oracle, prompt, output.outputs[0])
    return [output.num_cached_tokens for output in outputs]


@torch.inference_mode()
def _check_answer(oracle: torch.nn.Module, prompt: list[int], answer: Any) -> None:
    """Every token is the oracle's choice after ours up to it, so by induction the whole answer is the oracle's."""
    ids = list(answer.token_ids)
    scores = oracle(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert scores.argmax(-1).tolist() == ids
    got = torch.tensor([entries[i].logprob for entries, i in zip(answer.logprobs, ids, strict=True)])
    want = scores.gather(1, torch.tensor(ids)[:, None])[:, 0]
    torch.testing.assert_close(got, want, rtol=0, atol=LOGPROB_TOLERANCE)
