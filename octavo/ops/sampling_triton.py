"""Sampling without sorting: Triton kernels behind `octavo.ops.sampling.sample`.

One step is two launches when no row has a filter, four otherwise. All rows take part in each, whatever they ask for. A
row's result depends on its own logits only, bit for bit: what is summed is summed as integers, in any order.

  _score       (chunk, row)  Gumbel-max of a chunk, or its plain maximum for greedy and filtered rows
  _histogram   (part, row)   filtered rows: how many tokens, and what mass, lie how far below the row's maximum
  _gather      (part, row)   filtered rows: copy the tokens that may survive, when they fit `CANDIDATES`
  _choose      (row)         best of the chunks; or pivot search for the threshold among the candidates (if they did not
                             fit, in the whole row), then Gumbel-max of the survivors

Nothing is read back by the host and no shape depends on data, so a launch can be captured in a graph.
"""

import torch
import triton
import triton.language as tl

from octavo.ops.triton_utils import launch

# A chunk is what one program keeps in registers: 16 floats a thread. 128k tokens are 64 chunks, half an H200's SMs:
# a single row is read at once; larger chunks would leave memory bandwidth idle at batch 1.
CHUNK = tl.constexpr(2048)
# Sets of survivors larger than this are searched in the row itself, which is slower. Real models keep tens to hundreds.
CANDIDATES = tl.constexpr(2048)
# 512 bins of 1/16 nat reach 32 nats (a factor of 1e14) below the maximum; the last takes all the rest.
NUM_BINS = tl.constexpr(512)
BINS_PER_NAT = tl.constexpr(16.0)
# Probability mass relative to the most likely token, in fixed point: 2^18 tokens of 2^40 stay far from 2^63.
MASS_ONE = tl.constexpr(1099511627776.0)
# Programs a launch should have when a row is split into parts; four for each SM of the largest GPUs.
TARGET_PROGRAMS = 528

_NO_TOKEN = tl.constexpr(2147483647)
# Products and sums are rounded apart, as in the reference: the same logits give the same sample on every device.
_EXACT = {"enable_fp_fusion": False}


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
    """See `octavo.ops.sampling.sample`."""
    num, vocab_size = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    device = logits.device
    num_chunks = triton.cdiv(vocab_size, CHUNK.value)
    any_filter = any_filter and not all_greedy
    token_ids = torch.empty(num, dtype=torch.int32, device=device)
    is_bad = torch.empty(num, dtype=torch.bool, device=device)
    if num == 0:
        return token_ids, is_bad
    best = torch.empty(num, num_chunks, dtype=torch.float32, device=device)
    best_id = torch.empty(num, num_chunks, dtype=torch.int32, device=device)
    # Without filters the rest is never touched; the kernels still take a pointer.
    histogram, mass, num_candidates, candidates, candidate_ids = (best_id,) * 5
    if any_filter:
        histogram = torch.empty(num, NUM_BINS.value, dtype=torch.int32, device=device)
        mass = torch.empty(num, dtype=torch.int64, device=device)
        num_candidates = torch.empty(num, dtype=torch.int32, device=device)
        candidates = torch.empty(num, CANDIDATES.value, dtype=torch.float32, device=device)
        candidate_ids = torch.empty(num, CANDIDATES.value, dtype=torch.int32, device=device)
    params = (rows, positions, temperature, top_k, top_p, min_p, seeds)
    shape = (vocab_size, logits.stride(0), num_chunks)
    launch(
        _score, (num_chunks, num), logits, *params, best, best_id, histogram, mass, num_candidates, *shape,
        ALL_GREEDY=all_greedy, ANY_FILTER=any_filter, num_warps=4, **_EXACT,
    )  # fmt: skip
    max_chunks = triton.next_power_of_2(num_chunks)
    if any_filter:
        parts = min(num_chunks, triton.cdiv(TARGET_PROGRAMS, num))
        grid = (parts, num)
        tail = (*shape, triton.cdiv(num_chunks, parts))
        launch(
            _histogram, grid, logits, *params, best, histogram, mass, *tail, MAX_CHUNKS=max_chunks, num_warps=4, **_EXACT
        )  # fmt: skip
        launch(
            _gather, grid, logits, *params, best, histogram, num_candidates, candidates, candidate_ids, *tail,
            MAX_CHUNKS=max_chunks, num_warps=4, **_EXACT,
        )  # fmt: skip
    launch(
        _choose, (num,), logits, *params, best, best_id, mass, num_candidates, candidates, candidate_ids, token_ids, is_bad,
        *shape, MAX_CHUNKS=max_chunks, ANY_FILTER=any_filter, num_warps=8 if any_filter else 4, **_EXACT,
    )  # fmt: skip
    return token_ids, is_bad


@triton.jit
def _temperature_of(row, temperature):
    """The row's temperature; padding (-1) counts as greedy."""
    return tl.load(temperature + row, mask=row >= 0, other=0.0)


@triton.jit
def _filters_of(row, top_k, top_p, min_p, vocab_size):
    """(top_k or 0, top_p, min_p, whether any of them does anything)."""
    k = tl.load(top_k + row)
    k = tl.where(k >= vocab_size, 0, k)
    p = tl.load(top_p + row)
    m = tl.load(min_p + row)
    return k, p, m, (k > 0) | (p < 1.0) | (m > 0.0)


@triton.jit
def _load_scaled(source, offsets, size, scale):
    """Values times scale in float32, -inf beyond size; -0 becomes 0, so that equal values have equal keys."""
    x = tl.load(source + offsets, mask=offsets < size, other=float("-inf")).to(tl.float32) * scale
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def _gumbel(bits):
    """-log(-log(1 - u)), u = (bits + ½) / 2^32. The factor beside the inner logarithm undoes the rounding of 1 - u."""
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = tl.minimum(u, 0.99999994)
    rest = 1.0 - u
    exponential = tl.where(rest == 1.0, u, -tl.log(rest) * (u / tl.where(rest == 1.0, 1.0, 1.0 - rest)))
    return -tl.log(exponential)


@triton.jit
def _chunk_noise(seed, position, start, SIZE: tl.constexpr):
    """Noise of the tokens start … start + SIZE; start is a multiple of four."""
    block = start // 4 + tl.arange(0, SIZE // 4)
    zero = block * 0
    r0, r1, r2, r3 = tl.philox(seed, block, zero + position, zero, zero)
    bits = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), (SIZE,))  # lane = 2 * i + j of [block, i, j]
    return _gumbel(bits)


@triton.jit
def _noise_at(seed, position, token_ids):
    """Noise of any tokens."""
    block = token_ids // 4
    zero = block * 0
    r0, r1, r2, r3 = tl.philox(seed, block, zero + position, zero, zero)
    lane = token_ids % 4
    return _gumbel(tl.where(lane < 2, tl.where(lane == 0, r0, r1), tl.where(lane == 2, r2, r3)))


@triton.jit
def _score(
    logits,  # [num, vocab_size]
    rows,  # [num]
    positions,  # [num]
    temperature, top_k, top_p, min_p, seeds,  # [max_rows]
    best,  # out [num, num_chunks]: the largest score of the chunk, NaN if the chunk holds one
    best_id,  # out [num, num_chunks]: its token, the lowest among equals
    histogram, mass, num_candidates,  # out: zeroed for the next launches
    vocab_size, stride, num_chunks,
    ALL_GREEDY: tl.constexpr, ANY_FILTER: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one row, scored in a single pass."""
    chunk = tl.program_id(0)
    i = tl.program_id(1)
    offsets = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + i.to(tl.int64) * stride + offsets, mask=offsets < vocab_size, other=float("-inf"))
    x = x.to(tl.float32)
    has_nan = tl.max((x != x).to(tl.int32), axis=0)
    if not ALL_GREEDY:
        row = tl.load(rows + i)
        temp = _temperature_of(row, temperature)
        if temp > 0.0:
            x = x * tl.div_rn(1.0, temp)
            is_filtered = False
            if ANY_FILTER:
                _, _, _, is_filtered = _filters_of(row, top_k, top_p, min_p, vocab_size)
                if chunk == 0:
                    tl.store(histogram + i * NUM_BINS + tl.arange(0, NUM_BINS), tl.zeros((NUM_BINS,), tl.int32))
                    tl.store(mass + i, tl.zeros((), tl.int64))
                    tl.store(num_candidates + i, 0)
            if not is_filtered:
                x += _chunk_noise(tl.load(seeds + row), tl.load(positions + i), chunk * CHUNK, CHUNK)
    top = tl.max(x, axis=0)
    tl.store(best_id + i * num_chunks + chunk, tl.min(tl.where(x == top, offsets, _NO_TOKEN), axis=0))
    tl.store(best + i * num_chunks + chunk, tl.where(has_nan > 0, float("nan"), top))


@triton.jit
def _log_min_p(m):
    return tl.where(m > 0.0, tl.log(tl.maximum(m, 1e-30)), float("-inf"))


@triton.jit
def _row_maximum(best, i, num_chunks, MAX_CHUNKS: tl.constexpr):
    """(largest value of the row, whether it is finite and the row free of NaN)."""
    chunks = tl.arange(0, MAX_CHUNKS)
    values = tl.load(best + i * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf"))
    has_nan = tl.max((values != values).to(tl.int32), axis=0) > 0
    largest = tl.max(tl.where(values != values, float("-inf"), values), axis=0)
    return largest, (largest > float("-inf")) & (largest < float("inf")) & (not has_nan)


@triton.jit
def _bin_of(x, largest):
    """How far below the row's maximum, 0 … NUM_BINS - 1; never decreasing as x falls."""
    return tl.minimum((largest - x) * BINS_PER_NAT, NUM_BINS - 1.0).to(tl.int32)


@triton.jit
def _mass_of(x, largest):
    """exp(x - largest) in fixed point, int64."""
    return (tl.exp(x - largest) * MASS_ONE).to(tl.int64)


@triton.jit
def _histogram(
    logits, rows, positions, temperature, top_k, top_p, min_p, seeds,
    best,  # [num, num_chunks]
    histogram,  # out [num, NUM_BINS], zeroed: tokens in each bin
    mass,  # out [num], zeroed: mass of the tokens that min_p leaves
    vocab_size, stride, num_chunks, chunks_per_part,
    MAX_CHUNKS: tl.constexpr,
):  # fmt: skip
    """One program: some chunks of one filtered row."""
    part = tl.program_id(0)
    i = tl.program_id(1)
    row = tl.load(rows + i)
    temp = _temperature_of(row, temperature)
    if temp <= 0.0:
        return
    _, _, m, is_filtered = _filters_of(row, top_k, top_p, min_p, vocab_size)
    largest, is_finite = _row_maximum(best, i, num_chunks, MAX_CHUNKS)
    if not (is_filtered & is_finite):
        return
    scale = tl.div_rn(1.0, temp)
    floor = largest + _log_min_p(m)
    counts = tl.zeros((NUM_BINS,), tl.int32)
    masses = tl.zeros((CHUNK,), tl.int64)
    source = logits + i.to(tl.int64) * stride
    first = part * chunks_per_part
    for chunk in range(first, tl.minimum(first + chunks_per_part, num_chunks)):
        x = _load_scaled(source, chunk * CHUNK + tl.arange(0, CHUNK), vocab_size, scale)
        counts += tl.histogram(_bin_of(x, largest), NUM_BINS)
        masses += tl.where(x >= floor, _mass_of(x, largest), 0)
    bins = tl.arange(0, NUM_BINS)
    tl.atomic_add(histogram + i * NUM_BINS + bins, counts, mask=counts > 0, sem="relaxed")
    tl.atomic_add(mass + i, tl.sum(masses, axis=0), sem="relaxed")


@triton.jit
def _last_bin(histogram, i, k, p, m):
    """(the last bin whose tokens may survive, the number of tokens up to it); bin -1 where no bin is of use."""
    bins = tl.arange(0, NUM_BINS)
    count = tl.cumsum(tl.load(histogram + i * NUM_BINS + bins), axis=0)
    last = NUM_BINS - 1
    if k > 0:
        last = tl.sum((count < k).to(tl.int32), axis=0)
    elif p < 1.0:
        last = tl.sum((count <= CANDIDATES).to(tl.int32), axis=0) - 1
    if m > 0.0:
        # One bin more than the threshold's own, for the rounding of the logarithm.
        last = tl.minimum(last, tl.minimum(-_log_min_p(m) * BINS_PER_NAT, NUM_BINS - 2.0).to(tl.int32) + 1)
    return last, tl.sum(tl.where(bins == last, count, 0), axis=0)


@triton.jit
def _gather(
    logits, rows, positions, temperature, top_k, top_p, min_p, seeds,
    best,  # [num, num_chunks]
    histogram,  # [num, NUM_BINS]
    num_candidates,  # out [num], zeroed; -1 when they do not fit
    candidates, candidate_ids,  # out [num, CANDIDATES]: scaled values and token ids, in no order
    vocab_size, stride, num_chunks, chunks_per_part,
    MAX_CHUNKS: tl.constexpr,
):  # fmt: skip
    """One program: some chunks of one filtered row; copies the tokens in the bins that may hold survivors."""
    part = tl.program_id(0)
    i = tl.program_id(1)
    row = tl.load(rows + i)
    temp = _temperature_of(row, temperature)
    if temp <= 0.0:
        return
    k, p, m, is_filtered = _filters_of(row, top_k, top_p, min_p, vocab_size)
    largest, is_finite = _row_maximum(best, i, num_chunks, MAX_CHUNKS)
    if not (is_filtered & is_finite):
        return
    last, count = _last_bin(histogram, i, k, p, m)
    if (last < 0) | (count > CANDIDATES):
        tl.store(num_candidates + i, -1)
        return
    scale = tl.div_rn(1.0, temp)
    source = logits + i.to(tl.int64) * stride
    first = part * chunks_per_part
    for chunk in range(first, tl.minimum(first + chunks_per_part, num_chunks)):
        offsets = chunk * CHUNK + tl.arange(0, CHUNK)
        x = _load_scaled(source, offsets, vocab_size, scale)
        is_candidate = (_bin_of(x, largest) <= last) & (offsets < vocab_size)
        num_here = tl.sum(is_candidate.to(tl.int32), axis=0)
        if num_here > 0:
            base = tl.atomic_add(num_candidates + i, num_here, sem="relaxed")
            slots = i * CANDIDATES + base + tl.cumsum(is_candidate.to(tl.int32), axis=0) - 1
            tl.store(candidates + slots, x, mask=is_candidate)
            tl.store(candidate_ids + slots, offsets, mask=is_candidate)


@triton.jit
def _key_of(x):
    """An integer with the order of the float, as int64 so that differences do not overflow."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _amounts_above(source, size, scale, largest, floor, a, b, c, BY_MASS: tl.constexpr):
    """How many tokens of at least key `floor` (BY_MASS: what mass) lie above each of the keys a, b, c."""
    above_a = tl.zeros((CHUNK,), tl.int64)
    above_b = tl.zeros((CHUNK,), tl.int64)
    above_c = tl.zeros((CHUNK,), tl.int64)
    for start in range(0, size, CHUNK):
        offsets = start + tl.arange(0, CHUNK)
        x = _load_scaled(source, offsets, size, scale)
        key = _key_of(x)
        weight = ((key >= floor) & (offsets < size)).to(tl.int64)
        if BY_MASS:
            weight = weight * _mass_of(x, largest)
        above_a += tl.where(key > a, weight, 0)
        above_b += tl.where(key > b, weight, 0)
        above_c += tl.where(key > c, weight, 0)
    return tl.sum(above_a, axis=0), tl.sum(above_b, axis=0), tl.sum(above_c, axis=0)


@triton.jit
def _smallest_key(source, size, scale):
    """Where a search may begin: one pass that saves several, since a row's floats share most of their upper bits."""
    smallest = tl.full((CHUNK,), 2147483647, tl.int64)
    for start in range(0, size, CHUNK):
        offsets = start + tl.arange(0, CHUNK)
        key = _key_of(_load_scaled(source, offsets, size, scale))
        smallest = tl.where(offsets < size, tl.minimum(smallest, key), smallest)
    return tl.min(smallest, axis=0)


@triton.jit
def _search(source, size, scale, largest, floor, wanted, BY_MASS: tl.constexpr):
    """The smallest key of at least `floor` with less than `wanted` above it; three pivots settle two bits a pass."""
    low = floor
    high = _key_of(largest)
    while low < high:
        span = high - low
        a = low + span // 4
        b = low + span // 2
        c = high - 1 - span // 4
        c = tl.maximum(b, c)
        above_a, above_b, above_c = _amounts_above(source, size, scale, largest, floor, a, b, c, BY_MASS)
        if above_a < wanted:
            high = a
        elif above_b < wanted:
            low = a + 1
            high = b
        elif above_c < wanted:
            low = b + 1
            high = c
        else:
            low = c + 1
    return low


@triton.jit
def _threshold_key(source, size, scale, largest, row_mass, k, p, m):
    """(key of the smallest survivor, whether `source` holds enough of the row to tell).

    row_mass is the mass of all tokens that min_p leaves, of use when top_k is off; negative: sum it over `source`.
    """
    floor = tl.maximum(_key_of(largest + _log_min_p(m)), _smallest_key(source, size, scale))
    is_enough = size > 0
    if is_enough & (k > 0):
        floor = _search(source, size, scale, largest, floor, k.to(tl.int64), False)
    if is_enough & (p < 1.0):
        inside, _, _ = _amounts_above(source, size, scale, largest, floor, floor - 1, floor - 1, floor - 1, True)
        total = tl.where((k <= 0) & (row_mass >= 0), row_mass, inside)
        wanted = tl.maximum((total.to(tl.float64) * p.to(tl.float64)).to(tl.int64), 1)
        is_enough = inside >= wanted
        if is_enough:
            floor = _search(source, size, scale, largest, floor, wanted, True)
    return floor, is_enough


@triton.jit
def _choose_candidate(x, candidate_ids, size, threshold, seed, position):
    """Gumbel-max over the candidates x [CANDIDATES], of which the first `size` count."""
    slots = tl.arange(0, CANDIDATES)
    ids = tl.load(candidate_ids + slots, mask=slots < size, other=0)
    is_survivor = (_key_of(x) >= threshold) & (slots < size)
    noisy = tl.where(is_survivor, x + _noise_at(seed, position, ids), float("-inf"))
    return tl.min(tl.where(noisy == tl.max(noisy, axis=0), ids, _NO_TOKEN), axis=0)


@triton.jit
def _choose_in_row(source, vocab_size, scale, threshold, seed, position):
    """Gumbel-max over a whole row."""
    best = tl.full((), float("-inf"), tl.float32)
    token_id = tl.full((), 0, tl.int32)
    for start in range(0, vocab_size, CHUNK):
        offsets = start + tl.arange(0, CHUNK)
        x = _load_scaled(source, offsets, vocab_size, scale)
        is_survivor = (_key_of(x) >= threshold) & (offsets < vocab_size)
        noisy = tl.where(is_survivor, x + _chunk_noise(seed, position, start, CHUNK), float("-inf"))
        best_here = tl.max(noisy, axis=0)
        token_id_here = tl.min(tl.where(noisy == best_here, offsets, _NO_TOKEN), axis=0)
        token_id = tl.where(best_here > best, token_id_here, token_id)
        best = tl.maximum(best, best_here)
    return token_id


@triton.jit
def _choose(
    logits, rows, positions, temperature, top_k, top_p, min_p, seeds,
    best, best_id,  # [num, num_chunks]
    mass, num_candidates,  # [num]
    candidates, candidate_ids,  # [num, CANDIDATES]
    token_ids,  # out [num]
    is_bad,  # out [num]
    vocab_size, stride, num_chunks,
    MAX_CHUNKS: tl.constexpr, ANY_FILTER: tl.constexpr,
):  # fmt: skip
    """One program: the token of one row."""
    i = tl.program_id(0)
    largest, is_finite = _row_maximum(best, i, num_chunks, MAX_CHUNKS)
    chunks = tl.arange(0, MAX_CHUNKS)
    values = tl.load(best + i * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf"))
    ids = tl.load(best_id + i * num_chunks + chunks, mask=chunks < num_chunks, other=_NO_TOKEN)
    token_id = tl.min(tl.where(values == largest, ids, _NO_TOKEN), axis=0)
    if ANY_FILTER:
        row = tl.load(rows + i)
        temp = _temperature_of(row, temperature)
        if (temp > 0.0) & is_finite:
            k, p, m, is_filtered = _filters_of(row, top_k, top_p, min_p, vocab_size)
            if is_filtered:
                seed = tl.load(seeds + row)
                position = tl.load(positions + i)
                size = tl.load(num_candidates + i)
                # A list of size -1 reads as empty, which never holds enough.
                mine = candidates + i * CANDIDATES
                threshold, is_enough = _threshold_key(mine, size, 1.0, largest, tl.load(mass + i), k, p, m)
                if is_enough:
                    x = _load_scaled(mine, tl.arange(0, CANDIDATES), size, 1.0)
                    token_id = _choose_candidate(x, candidate_ids + i * CANDIDATES, size, threshold, seed, position)
                else:
                    scale = tl.div_rn(1.0, temp)
                    source = logits + i.to(tl.int64) * stride
                    no_mass = tl.full((), -1, tl.int64)
                    threshold, _ = _threshold_key(source, vocab_size, scale, largest, no_mass, k, p, m)
                    token_id = _choose_in_row(source, vocab_size, scale, threshold, seed, position)
    tl.store(token_ids + i, tl.where(is_finite, token_id, 0))
    tl.store(is_bad + i, not is_finite)
