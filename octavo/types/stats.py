"""Counters that travel from the core to whoever shows them."""

import msgspec


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """State of the scheduler after one step; counters are totals of this step, not of the life."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # 0…1
    prefix_cache_queries: int = 0  # tokens looked up in this step
    prefix_cache_hits: int = 0  # tokens found
    num_preemptions: int = 0
    num_prompt_tokens: int = 0  # prompt tokens computed in this step
    num_generation_tokens: int = 0
    sleep_level: int | None = None  # None: awake; said by the front, since a sleeping core has no steps
