"""Step inputs gathered from rows: the reference against a plain loop, and the Triton kernels against the reference."""

import pytest
import torch

from octavo.ops.inputs import prepare_inputs, store_sampled

MAX_ROWS, MAX_LEN, SIZES = 6, 64, (4, 8)


def _state(seed: int = 0):
    rng = torch.Generator().manual_seed(seed)
    return {
        "num_computed": torch.tensor([5, 0, 17, 3, 9, 0, 0], dtype=torch.int32),
        "token_ids": torch.randint(0, 500, (MAX_ROWS + 1, MAX_LEN), generator=rng, dtype=torch.int32),
        "block_tables": [
            torch.randint(1, 99, (MAX_ROWS + 1, MAX_LEN // size + 1), generator=rng, dtype=torch.int32)
            for size in SIZES
        ],
    }


def _run(op, rows: list[int], query_lens: list[int]):
    state = _state()
    num, total = len(rows), sum(query_lens)
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    request = torch.repeat_interleave(torch.arange(num, dtype=torch.int32), torch.tensor(query_lens))
    out = {
        "input_ids": torch.full((total,), -7),
        "positions": torch.full((total,), -7),
        "seq_lens": torch.full((num,), -7, dtype=torch.int32),
        "slots": [torch.full((total,), -7) for _ in SIZES],
        "tables": [torch.zeros(num, t.shape[1], dtype=torch.int32) for t in state["block_tables"]],
    }
    op(
        torch.tensor(rows, dtype=torch.int32),
        request,
        starts,
        state["num_computed"],
        state["token_ids"],
        state["block_tables"],
        list(SIZES),
        out["input_ids"],
        out["positions"],
        out["seq_lens"],
        out["slots"],
        out["tables"],
    )
    return state, out


CASES = [([2, 0], [1, 1]), ([4, 1, 3], [1, 30, 4]), ([0, MAX_ROWS, MAX_ROWS], [1, 1, 1])]


@pytest.mark.parametrize(("rows", "query_lens"), CASES)
def test_reference_matches_a_loop(rows, query_lens):
    before, (state, out) = _state(), _run(prepare_inputs.reference, rows, query_lens)
    at = 0
    for r, (row, count) in enumerate(zip(rows, query_lens, strict=True)):
        computed = int(before["num_computed"][row])
        if row == MAX_ROWS:
            assert int(out["seq_lens"][r]) == 0
            assert [int(s[at]) for s in out["slots"]] == [-1, -1]
            at += count
            continue
        assert int(out["seq_lens"][r]) == computed + count == int(state["num_computed"][row])
        for i in range(count):
            position = computed + i
            assert int(out["positions"][at]) == position
            assert int(out["input_ids"][at]) == int(before["token_ids"][row, position])
            for size, table, slots in zip(SIZES, before["block_tables"], out["slots"], strict=True):
                assert int(slots[at]) == int(table[row, position // size]) * size + position % size
            at += 1
        for table, step_table in zip(before["block_tables"], out["tables"], strict=True):
            assert torch.equal(table[row], step_table[r])
    assert int(state["num_computed"][MAX_ROWS]) == 0


def test_store_sampled_appends_and_keeps_inside_the_row():
    token_ids = torch.zeros(MAX_ROWS + 1, MAX_LEN, dtype=torch.int32)
    rows = torch.tensor([3, 1, MAX_ROWS], dtype=torch.int32)
    store_sampled(torch.tensor([7, 8, 9]), rows, torch.tensor([5, MAX_LEN, 0], dtype=torch.int32), token_ids)
    assert int(token_ids[3, 5]) == 7
    assert int(token_ids[:MAX_ROWS].sum()) == 7


@pytest.mark.parametrize(("rows", "query_lens"), CASES)
@pytest.mark.skipif(
    not any(p.name == "triton" for p in prepare_inputs.providers), reason="needs a GPU or Triton's interpreter"
)
def test_triton_matches_the_reference(rows, query_lens):
    provider = next(p for p in prepare_inputs.providers if p.name == "triton")
    want_state, want = _run(prepare_inputs.reference, rows, query_lens)
    state, got = _run(provider.fn, rows, query_lens)
    assert torch.equal(state["num_computed"], want_state["num_computed"])
    live = [r for r, row in enumerate(rows) if row != MAX_ROWS]
    assert torch.equal(got["seq_lens"], want["seq_lens"])
    for key in ("input_ids", "positions"):
        assert torch.equal(got[key], want[key])
    for a, b in zip(got["slots"], want["slots"], strict=True):
        assert torch.equal(a, b)
    for size, a, b in zip(SIZES, got["tables"], want["tables"], strict=True):
        for r in live:
            used = -(-int(want["seq_lens"][r]) // size)
            assert torch.equal(a[r, :used], b[r, :used])
