"""How layers share the pool, whatever the sizes of their pages."""

import itertools

import pytest

from octavo.config.hf import HFConfig
from octavo.config.model import kv_bytes
from octavo.types.kv_spec import FullAttentionSpec, KVCacheConfig, KVSpec, SlidingWindowSpec, make_kv_groups

FULL = FullAttentionSpec(2, 32, "float32", 16)


def config(specs: dict[str, KVSpec]) -> KVCacheConfig:
    return KVCacheConfig(3, make_kv_groups(specs))


@pytest.mark.parametrize(
    ("head_dim", "counts", "group_size"),
    [
        (32, [2, 2, 1, 2], 2),  # equal pages: groups of as many layers
        (16, [4, 1, 2], 2),  # two to a buffer's page
        (12, [4, 1, 2], 2),  # two, and some room is left
        (64, [1, 1, 1, 1, 1, 2], 1),  # the full layers are the small ones
    ],
)
def test_pages_of_unequal_sizes_share_a_pool(head_dim: int, counts: list[int], group_size: int):
    window = SlidingWindowSpec(2, head_dim, "float32", 16, 32)
    cache = config({f"w{i}": window for i in range(5)} | {f"f{i}": FULL for i in range(2)})
    assert [len(group.layer_names) for group in cache.groups] == counts
    assert cache.group_size == group_size
    assert cache.page_bytes == max(FULL.page_bytes, window.page_bytes)
    for group in cache.groups:
        places = [cache.place(group, i) for i in range(len(group.layer_names))]
        spans = sorted(
            (b * cache.page_bytes + at, b * cache.page_bytes + at + group.spec.page_bytes) for b, at in places
        )
        assert spans[-1][1] <= cache.block_bytes
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert all(at + group.spec.page_bytes <= cache.page_bytes for _, at in places)


def test_the_estimate_of_a_request_knows_of_unequal_heads():
    """A model like Gemma 4: full layers have wider heads, the last layers keep nothing."""
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * 3
    text = HFConfig(
        {
            "hidden_size": 2048,
            "num_hidden_layers": 15,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
        }
        | {"layer_types": kinds, "global_head_dim": 512, "num_kv_shared_layers": 5}
    )
    sliding, full = SlidingWindowSpec(1, 256, "bfloat16", 16, 512), FullAttentionSpec(1, 512, "bfloat16", 16)
    specs = {str(i): full if kind == "full_attention" else sliding for i, kind in enumerate(kinds[:10])}
    cache = config(specs)
    blocks = [8192 // 16 if group.spec == full else 512 // 16 for group in cache.groups]
    assert kv_bytes(text, "bfloat16", 8192) == sum(blocks) * cache.block_bytes
