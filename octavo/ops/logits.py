"""What is done to logits before sampling, and log probabilities. Nothing here waits for the device.

Operators that change logits do so in place and return them; they take float32.
"""

import numpy as np
import torch

from octavo.ops.registry import op
from octavo.ops.triton_support import has_triton, runs_on_triton


@op
def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    num_prompt: torch.Tensor,
    num_tokens: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Make tokens that were there less likely, in place; for each row of logits [num, vocab], with c = times generated:

        seen in prompt or output:  logit = logit / repetition if logit > 0 else logit * repetition
        then:                      logit -= frequency * c + presence * (c > 0)

    rows [num] int32 is the permanent row of each logits row, num_tokens [num] int32 how many of its tokens exist. By
    permanent row: token_ids [max_rows, max_len] int32, num_prompt int32, the penalties float32 (1, 0 and 0: none).
    """
    row = rows.long()
    place = torch.arange(token_ids.shape[1], device=logits.device)
    is_known = place < num_tokens[:, None]
    is_generated = is_known & (place >= num_prompt[row][:, None])
    known_ids = token_ids[row].long().masked_fill_(~is_known, 0)
    is_seen = torch.zeros_like(logits).scatter_add_(1, known_ids, is_known.float()) > 0
    count = torch.zeros_like(logits).scatter_add_(1, known_ids, is_generated.float())
    factor = repetition[row][:, None]
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits.copy_(torch.where(is_seen, repeated, logits))
    return logits.sub_(frequency[row][:, None] * count + presence[row][:, None] * (count > 0))


@apply_penalties.register("cpu", accepts=lambda logits, *args: logits.device.type == "cpu")
def _apply_penalties_cpu(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    num_prompt: torch.Tensor,
    num_tokens: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Touches the tokens that were there only. An id that comes twice gets the same value written twice."""
    for i, (row, length) in enumerate(zip(rows.tolist(), num_tokens.tolist(), strict=True)):
        factor, present, frequent = repetition[row].item(), presence[row], frequency[row]
        if factor == 1.0 and present == 0 and frequent == 0:
            continue
        known = token_ids[row, :length].long()
        generated = known[int(num_prompt[row]) :]
        if factor != 1.0:
            values = logits[i, known]
            logits[i, known] = torch.where(values > 0, values / factor, values * factor)
        if generated.shape[0]:
            count = torch.bincount(generated, minlength=logits.shape[1])[generated]
            logits[i, generated] = logits[i, generated] - (frequent * count + present)
    return logits


@apply_penalties.register("triton", supported=has_triton, accepts=lambda logits, *args: runs_on_triton(logits))
def _apply_penalties_triton(logits: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
    from octavo.ops import logits_triton

    logits_triton.apply_penalties(logits, *args)
    return logits


@op
def apply_token_bitmask(
    logits: torch.Tensor, bitmask: torch.Tensor, indices: torch.Tensor | None = None
) -> torch.Tensor:
    """Mask tokens whose bit is 0 to -inf, in place.

    bitmask [n, ceil(vocab / 32)] int32, token t in bit t % 32 of word t // 32; its row j masks row indices[j] of logits
    (row j without indices). No row is masked twice.
    """
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    is_masked = ((bitmask[:, :, None] >> bits) & 1 == 0).flatten(1)[:, : logits.shape[1]]
    if indices is None:
        return logits.masked_fill_(is_masked, -float("inf"))
    logits[indices] = logits[indices].masked_fill_(is_masked, -float("inf"))
    return logits


@apply_token_bitmask.register("numpy", accepts=lambda logits, *args: logits.device.type == "cpu")
def _apply_token_bitmask_numpy(
    logits: torch.Tensor, bitmask: torch.Tensor, indices: torch.Tensor | None = None
) -> torch.Tensor:
    """Unpack bits a byte at a time: a fifth of the time that shifting words takes."""
    is_masked = np.unpackbits(~bitmask.numpy().view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    rows = logits.numpy()
    for row, mask in zip(range(len(rows)) if indices is None else indices.tolist(), is_masked, strict=True):
        np.copyto(rows[row], -np.inf, where=mask.view(np.bool_))
    return logits


@apply_token_bitmask.register("triton", supported=has_triton, accepts=lambda logits, *args: runs_on_triton(logits))
def _apply_token_bitmask_triton(
    logits: torch.Tensor, bitmask: torch.Tensor, indices: torch.Tensor | None = None
) -> torch.Tensor:
    from octavo.ops import logits_triton

    logits_triton.apply_token_bitmask(logits, bitmask, indices)
    return logits


@op
def add_logit_bias(
    logits: torch.Tensor, indices: torch.Tensor, token_ids: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Add bias[e] to logits[indices[e], token_ids[e]] for every entry e, in place; -inf forbids the token.

    logits [num, vocab] contiguous; indices and token_ids [n] int64, bias [n] float32. An entry may come twice only if all
    of its values but one are 0 or -inf, so that the sum does not depend on their order.
    """
    logits.view(-1).scatter_add_(0, indices * logits.shape[1] + token_ids, bias)
    return logits


@op
def top_logprobs(
    logits: torch.Tensor, k: int, chosen: torch.Tensor, normalize: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log probabilities, in float32, of one chosen token and the k most likely ones at each position.

    logits [n, vocab], chosen [n] token ids; returns (chosen_logprob [n], rank [n] int32: 1 + how many are more likely,
    top_ids [n, k] int32, top [n, k] in falling order). Without `normalize` the values are the logits themselves.
    """
    logits = logits.float()
    at_chosen = logits.gather(1, chosen.long()[:, None])
    rank = 1 + (logits > at_chosen).sum(dim=-1, dtype=torch.int32)
    top, top_ids = logits.topk(k, dim=-1)
    if normalize:
        total = logits.logsumexp(dim=-1, keepdim=True)
        at_chosen, top = at_chosen - total, top - total
    return at_chosen.squeeze(1), rank, top_ids.int(), top


def _penalty_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    """Rows with each penalty alone, all of them, and none; prompts and outputs that repeat tokens; one empty row."""
    repetition = torch.tensor([1.0, 1.3, 1.0, 1.0, 0.7, 1.0])
    presence = torch.tensor([0.0, 0.0, 1.5, 0.0, -0.5, 0.0])
    frequency = torch.tensor([0.0, 0.0, 0.0, 0.7, 0.3, 0.0])
    num_prompt = torch.tensor([3, 5, 0, 200, 290, 4], dtype=torch.int32)
    vocab_size, max_len = 1501, 300
    token_ids = torch.randint(0, 40, (6, max_len), generator=rng, dtype=torch.int32) * 37
    rows = torch.tensor([4, 0, 2, 3, 1, 5], dtype=torch.int32)
    num_tokens = torch.tensor([300, 20, 33, 270, 6, 4], dtype=torch.int32)
    logits = torch.randn(6, vocab_size, generator=rng) * 3
    arguments = (logits, rows, token_ids, num_prompt, num_tokens, repetition, presence, frequency)
    yield tuple(t.to(device) for t in arguments)


def _bitmask_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for vocab_size in (1501, 64):
        words = -(-vocab_size // 32)
        bitmask = torch.randint(-(2**31), 2**31, (3, words), generator=rng).to(device, torch.int32)
        yield torch.randn(3, vocab_size, generator=rng).to(device), bitmask
        indices = torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
        yield torch.randn(5, vocab_size, generator=rng).to(device), bitmask, indices


def _bias_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    indices, token_ids = torch.tensor([0, 2, 2, 1]), torch.tensor([5, 0, 99, 7])
    bias = torch.tensor([-100.0, 3.5, -float("inf"), 100.0])
    logits = torch.randn(3, 100, generator=rng)
    yield tuple(t.to(device) for t in (logits, indices, token_ids, bias))


def _logprob_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for vocab_size, k in ((1501, 5), (40, 0), (40, 40)):
        chosen = torch.randint(0, vocab_size, (4,), generator=rng, dtype=torch.int32).to(device)
        yield (torch.randn(4, vocab_size, generator=rng) * 4).to(device, dtype), k, chosen
    yield (torch.randn(4, 40, generator=rng) * 4).to(device, dtype), 3, chosen, False


apply_penalties.inputs = _penalty_inputs
apply_token_bitmask.inputs = _bitmask_inputs
add_logit_bias.inputs = _bias_inputs
top_logprobs.inputs = _logprob_inputs
