"""The choice of sparse latent attention against a plain loop, and attention to it against attention to all."""

import pytest
import torch

from octavo.ops.attention import sparse
from octavo.ops.attention.mla import latent_attention
from octavo.ops.attention.sparse import index_topk, sparse_latent_attention

CALLS = list(index_topk.inputs(torch.Generator().manual_seed(0), torch.float32, "cpu"))


@pytest.mark.parametrize("room", [1, 2**25])  # one query at a time, or all at once
@pytest.mark.parametrize("call", CALLS)
def test_the_best_are_chosen(call, room, monkeypatch):
    monkeypatch.setattr(sparse, "_ROOM", room)
    q, weights, cache, table, seq_lens, _, topk, *starts = call
    slots, counts = index_topk.reference(*call)
    query_lens = starts[0].diff().tolist() if starts else [1] * len(seq_lens)
    t = 0
    for r, seq_len in enumerate(seq_lens.tolist()):
        positions = torch.arange(seq_len)
        seen = table[r].long()[positions // cache.shape[1]] * cache.shape[1] + positions % cache.shape[1]
        for visible in range(seq_len - query_lens[r] + 1, seq_len + 1):
            keys = cache.flatten(0, 1)[seen[:visible]]
            scores = (weights[t, :, None] * (q[t] @ keys.T).relu()).sum(0)
            want = seen[scores.sort(descending=True).indices[:topk]]
            assert slots[t, : counts[t]].tolist() == want.tolist()
            t += 1


@pytest.mark.parametrize("room", [1, 2**25])
def test_attention_to_all_is_latent_attention(room, monkeypatch):
    monkeypatch.setattr(sparse, "_ROOM", room)
    for *args, starts, lens, _, longest, scale, starts_cpu, lens_cpu in latent_attention.inputs(
        torch.Generator().manual_seed(0), torch.float32, "cpu"
    ):
        q_nope, q_rope, up, cache, table = args
        q, weights = torch.randn(len(q_nope), 4, 8), torch.randn(len(q_nope), 4)
        chosen = index_topk(q, weights, cache[..., :8], table, lens, longest, 1000, starts, starts_cpu, lens_cpu)
        want = latent_attention.reference(*args, starts, lens, 1, longest, scale, starts_cpu, lens_cpu)
        torch.testing.assert_close(sparse_latent_attention(q_nope, q_rope, up, cache, *chosen, scale), want)


def test_a_decode_step_reads_nothing_from_the_device():
    """A graph can capture it: tensors without numbers will do. Its padding sees one token, so that all is finite."""
    q, weights, cache, table, seq_lens, *rest = CALLS[0]
    seq_lens = seq_lens * torch.tensor([1, 0, 1], dtype=torch.int32)
    up, q_nope, q_rope = torch.randn(5, 7, 24), torch.randn(3, 5, 3), torch.randn(3, 5, 16)
    for device in ("cpu", "meta"):
        index = [tensor.to(device) for tensor in (q, weights, cache, table, seq_lens)]
        chosen = index_topk(*index, *rest)
        heads = [tensor.to(device) for tensor in (q_nope, q_rope, up)]
        out = sparse_latent_attention(*heads, torch.randn(9, 16, 40, device=device), *chosen, 0.1)
        assert out.shape == (3, 5, 4)
        assert device == "meta" or out.isfinite().all()
