"""Choosing tokens: temperature, min-p, top-k, top-p, and Gumbel-max with counter-based noise.

Noise is a pure function of (seed, position, token id): Philox4x32-10 with key = the 64-bit seed and counter
(token_id // 4, position, 0, 0), lane token_id % 4. Neither batch nor preemption nor kernel changes a sample.

Which tokens survive, on x = logits / temperature (by value, so that equal logits are kept or dropped together):
  min_p   x >= max(x) + log(min_p)
  top_k   fewer than k tokens are more likely
  top_p   among the survivors of both, the tokens more likely than this one hold less than top_p of the mass
"""

from typing import TypeVar

import numpy as np
import torch

from octavo.ops.registry import op
from octavo.ops.triton_support import has_triton, runs_on_triton

_PHILOX_M0, _PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
_PHILOX_W0, _PHILOX_W1 = 0x9E3779B9, 0xBB67AE85
_LOW32 = 0xFFFFFFFF

Words = TypeVar("Words", torch.Tensor, np.ndarray)


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Philox4x32-10 (Salmon et al. 2011): four words of 32 random bits for each counter, as int64 in [0, 2^32).

    All words are int64 tensors or arrays and broadcast against one another: words that a row shares cost nothing.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # Only the low 64 bits of a product matter and int64 wraps to just them. Words are masked where they are
        # multiplied; until then their upper halves hold rubbish, as the keys' do.
        product0 = (c0 & _LOW32) * _PHILOX_M0
        product1 = (c2 & _LOW32) * _PHILOX_M1
        c0 = (product1 >> 32) ^ (c1 ^ k0)
        c2 = (product0 >> 32) ^ (c3 ^ k1)
        c1, c3 = product1, product0
        k0 = k0 + _PHILOX_W0
        k1 = k1 + _PHILOX_W1
    return c0 & _LOW32, c1 & _LOW32, c2 & _LOW32, c3 & _LOW32


def _random_words(seeds: Words, positions: Words, blocks: Words) -> tuple[Words, ...]:
    """The four words of tokens 4 * block … 4 * block + 3; all int64."""
    zero = seeds & 0
    return philox4x32((blocks, positions & _LOW32, zero, zero), (seeds & _LOW32, (seeds >> 32) & _LOW32))


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32, from words of 32 random bits: -log(-log(1 - u)) with u = (bits + ½) / 2^32.

    Large noise, which decides the winner, comes from small u, where float32 is finest. u < 1 keeps the noise finite.
    """
    u = bits.float().add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Noise of every token, float32 [num, vocab_size], for seeds [num] int64 and positions [num]."""
    blocks = torch.arange((vocab_size + 3) // 4, device=seeds.device)
    words = _random_words(seeds[:, None], positions.long()[:, None], blocks)
    return _gumbel(torch.stack(words, dim=-1)).flatten(1)[:, :vocab_size]


def _gumbel_noise_numpy(
    seed: np.ndarray, position: np.ndarray, vocab_size: int, token_ids: np.ndarray | None = None
) -> torch.Tensor:
    """Noise of one row, of the tokens token_ids [n] int64 or of all; seed [1] and position [1] int64.

    In NumPy, whose small integer operations take a third of the time of torch's.
    """
    # Four words come at a time: for a quarter of the tokens the whole row costs no more.
    if token_ids is None or 4 * len(token_ids) >= vocab_size:
        words = _random_words(seed, position, np.arange((vocab_size + 3) // 4))
        noise = _gumbel(torch.from_numpy(np.stack(words, axis=-1))).flatten()[:vocab_size]
        return noise if token_ids is None else noise[torch.from_numpy(token_ids)]
    words = _random_words(seed, position, token_ids // 4)
    return _gumbel(torch.from_numpy(np.choose(token_ids % 4, words)))


def survivor_threshold(x: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """The smallest value that survives min_p, top_k (0: off) and top_p in each row of x; [num, vocab] -> [num, 1]."""
    values = x.sort(dim=-1, descending=True).values
    largest = values[:, :1]
    last = torch.where(top_k > 0, top_k, x.shape[-1]).clamp(max=x.shape[-1]).long() - 1
    floor = torch.maximum(values.gather(1, last[:, None]), largest + min_p.log()[:, None])
    mass = torch.where(values >= floor, (values - largest).exp().double(), 0.0)
    mass_ahead = mass.cumsum(-1) - mass
    inside = mass_ahead < top_p[:, None].double() * mass.sum(-1, keepdim=True)
    nucleus = values.masked_fill(~inside, float("inf")).amin(-1, keepdim=True)
    return torch.where(top_p[:, None] < 1.0, torch.maximum(floor, nucleus), floor)


def filter_logits(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Logits [num, vocab] over temperature (0: as they are), in float32, tokens that do not survive at -inf.

    The parameters are [num], one for each row of logits. Greedy rows have no filter.
    """
    is_random = temperature > 0
    x = logits.float() * (1.0 / torch.where(is_random, temperature, 1.0))[:, None]
    threshold = survivor_threshold(x, top_k, top_p, min_p)
    return x.masked_fill(is_random[:, None] & (x < threshold), -float("inf"))


@op
def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    all_greedy: bool = False,
    any_filter: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose one token for each row of logits [num, vocab]; returns (token_ids [num] int32, is_bad [num] bool).

    rows [num] int32 is the permanent row of each logits row (-1: padding, result meaningless), positions [num] int32
    the index of the token being generated. The parameters are indexed by permanent row: temperature, top_p, min_p
    float32, top_k int32, seeds int64. Temperature 0 takes the most likely token, the lowest id among equals.
    A row without a finite maximum (NaN, +inf, or everything masked) is bad: it gets token 0, its neighbours what they
    would have got alone. The host may promise that every row is greedy, or that none has a filter.
    """
    largest, token_ids = logits.max(dim=-1)
    is_bad = ~largest.isfinite()
    if not all_greedy:
        index = rows.clamp(min=0).long()
        temp = temperature[index].masked_fill(rows < 0, 0.0)
        if any_filter:
            x = filter_logits(logits, temp, top_k[index], top_p[index], min_p[index])
        else:
            x = logits.float() * (1.0 / torch.where(temp > 0, temp, 1.0))[:, None]
        noisy = x + gumbel_noise(seeds[index], positions, logits.shape[-1])
        token_ids = torch.where(temp > 0, noisy.argmax(dim=-1), token_ids)
    return token_ids.masked_fill(is_bad, 0).int(), is_bad


@sample.register("numpy", accepts=lambda logits, *args, **kwargs: logits.device.type == "cpu")
def _sample_numpy(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    all_greedy: bool = False,
    any_filter: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row, so that a row's floats cannot depend on its neighbours; noise only for tokens that survive."""
    largest, token_ids = logits.max(dim=-1)
    is_bad = ~largest.isfinite()
    token_ids.masked_fill_(is_bad, 0)
    if all_greedy:
        return token_ids.int(), is_bad
    index = rows.clamp(min=0).long()
    temp = temperature[index].masked_fill_((rows < 0) | is_bad, 0.0)
    inverse_temp = (1.0 / temp).tolist()
    seed, position = seeds[index].numpy(), positions.long().numpy()
    k, p, m = top_k[index].tolist(), top_p[index].tolist(), min_p[index].tolist()
    for i in temp.nonzero().flatten().tolist():
        x = logits[i].float() * inverse_temp[i]
        if any_filter and (k[i] > 0 or p[i] < 1.0 or m[i] > 0.0):
            x_np = x.numpy()
            kept = np.flatnonzero(x_np >= _survivor_threshold_numpy(x_np, k[i], p[i], m[i]))
            noise = _gumbel_noise_numpy(seed[i : i + 1], position[i : i + 1], len(x_np), kept)
            token_ids[i] = int(kept[(torch.from_numpy(x_np[kept]) + noise).argmax()])
        else:
            noise = _gumbel_noise_numpy(seed[i : i + 1], position[i : i + 1], x.shape[0])
            token_ids[i] = (x + noise).argmax()
    return token_ids.int(), is_bad


def _survivor_threshold_numpy(x: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.float32:
    """`survivor_threshold` of one row x [vocab]; in NumPy, whose sort and partition are ten times torch's."""
    largest = x.max()
    floor = largest + np.log(np.float32(min_p)) if min_p > 0 else np.float32(-np.inf)
    if 0 < top_k < x.shape[0]:
        kth = x.shape[0] - top_k
        floor = max(floor, np.partition(x, kth)[kth])
    if top_p >= 1.0:
        return floor
    survivors = np.sort(x[x >= floor])[::-1]
    mass = np.exp(survivors - largest).astype(np.float64)
    mass_so_far = mass.cumsum()
    return survivors[mass_so_far - mass < top_p * mass_so_far[-1]][-1]


@sample.register("triton", supported=has_triton, accepts=lambda logits, *args, **kwargs: runs_on_triton(logits))
def _sample_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    all_greedy: bool = False,
    any_filter: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    from octavo.ops import sampling_triton

    return sampling_triton.sample(
        logits, rows, positions, temperature, top_k, top_p, min_p, seeds, all_greedy, any_filter
    )


def _inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    """Greedy, plain and filtered rows side by side; flat and peaked logits, sizes that end inside a block."""
    # One row each: plain, k, p, k and p, min_p, k larger than the kernels' candidate lists, all three, greedy.
    temperature = torch.tensor([1.0, 0.7, 1.5, 1.0, 1.0, 2.0, 0.9, 0.0])
    top_k = torch.tensor([0, 5, 0, 40, 0, 2100, 50, 7], dtype=torch.int32)
    top_p = torch.tensor([1.0, 1.0, 0.9, 0.5, 1.0, 0.8, 0.95, 0.1])
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.02, 0.0])
    max_rows = len(top_k)
    seeds = torch.randint(-(2**63), 2**63 - 1, (max_rows,), generator=rng)
    parameters = tuple(t.to(device) for t in (temperature, top_k, top_p, min_p, seeds))
    rows = torch.cat((torch.randperm(max_rows, generator=rng), torch.tensor([-1]))).to(device, torch.int32)
    positions = torch.randint(0, 2**17, (max_rows + 1,), generator=rng).to(device, torch.int32)
    logits = (torch.randn(max_rows + 1, 2999, generator=rng) * 3).to(device, dtype)
    yield (logits, rows, positions, *parameters)
    logits = logits[:, 1000:1037]  # also rows that do not lie close together
    yield (logits[:4], rows[:4], positions[:4], *parameters)
    yield (logits, rows, positions, *parameters, True, False)
    unfiltered = (torch.zeros_like(parameters[1]), torch.ones_like(parameters[2]), torch.zeros_like(parameters[3]))
    yield (logits, rows, positions, parameters[0], *unfiltered, parameters[4], False, False)


sample.inputs = _inputs
