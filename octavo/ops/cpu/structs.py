"""The kernels' argument structures, field for field those of csrc/cpu."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

STEP_BYTES = 16  # pool.h: Step
BEST_BYTES = 64  # step.cpp: Best
MAX_SHARDS = 4
MAX_GROUPS = 8
Count = c_void_p  # pool.h: the address of an int64
ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}


class PackedWeight(ctypes.Structure):
    """packed.h: PackedWeight"""

    _fields_ = [
        ("data", c_void_p),
        ("rows", c_int64),
        ("cols", c_int64),
        ("kind", c_int32),
        ("group", c_int32),
        ("zero", c_int32),
        ("has_min", c_int32),
        ("gain", c_float),
        ("reserved", c_int32),
    ]


class LinearArgs(ctypes.Structure):
    """linear.cpp: LinearArgs"""

    _fields_ = [
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("tokens", Count),
        ("cols", c_int64),
        ("shards", PackedWeight * MAX_SHARDS),
        ("num_shards", c_int32),
        ("activation", c_int32),
        ("terms", c_int32),
        ("reserved", c_int32),
        ("bias", c_void_p),
        ("norm_weight", c_void_p),
        ("eps", c_float),
        ("scale", c_float),
        ("residual", c_void_p),
        ("residual_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("workspace", c_void_p),
    ]


class EmbeddingArgs(ctypes.Structure):
    """linear.cpp: EmbeddingArgs"""

    _fields_ = [
        ("ids", c_void_p),
        ("tokens", Count),
        ("table", PackedWeight),
        ("scale", c_float),
        ("out", c_void_p),
    ]


class Cache(ctypes.Structure):
    """attention.cpp: Cache"""

    _fields_ = [
        ("data", c_void_p),
        ("block_stride", c_int64),
        ("kind", c_int32),
        ("block_size", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
    ]


class RopeArgs(ctypes.Structure):
    """attention.cpp: RopeArgs"""

    _fields_ = [
        ("qkv", c_void_p),
        ("qkv_stride", c_int64),
        ("tokens", Count),
        ("positions", c_void_p),
        ("cos_sin", c_void_p),
        ("rotary_dim", c_int64),
        ("cache", Cache),
        ("slots", c_void_p),
        ("num_heads", c_int32),
        ("interleaved", c_int32),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("eps", c_float),
        ("reserved", c_int32),
        ("q", c_void_p),
    ]


class AttentionArgs(ctypes.Structure):
    """attention.cpp: AttentionArgs"""

    _fields_ = [
        ("q", c_void_p),
        ("cache", Cache),
        ("block_table", c_void_p),
        ("table_stride", c_int64),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("requests", Count),
        ("num_heads", c_int32),
        ("scale", c_float),
        ("window", c_int32),
        ("softcap", c_float),
        ("sinks", c_void_p),
        ("bias", c_void_p),
        ("num_distances", c_int32),
        ("out", c_void_p),
        ("workspace", c_void_p),
    ]


class NormArgs(ctypes.Structure):
    """norm.cpp: NormArgs"""

    _fields_ = [
        ("x", c_void_p),
        ("rows", Count),
        ("width", c_int64),
        ("weight", c_void_p),
        ("residual", c_void_p),
        ("out", c_void_p),
        ("eps", c_float),
        ("reserved", c_int32),
    ]


class GatherGroup(ctypes.Structure):
    """step.cpp: GatherArgs.groups"""

    _fields_ = [
        ("block_table", c_void_p),
        ("width", c_int64),
        ("block_size", c_int64),
        ("slots", c_void_p),
        ("step_table", c_void_p),
    ]


class GatherArgs(ctypes.Structure):
    """step.cpp: GatherArgs"""

    _fields_ = [
        ("rows", c_void_p),
        ("requests", Count),
        ("num_computed", c_void_p),
        ("scratch_row", c_int64),
        ("token_ids", c_void_p),
        ("token_stride", c_int64),
        ("input_ids", c_void_p),
        ("positions", c_void_p),
        ("seq_lens", c_void_p),
        ("num_groups", c_int32),
        ("reserved", c_int32),
        ("groups", GatherGroup * MAX_GROUPS),
    ]


class ArgmaxArgs(ctypes.Structure):
    """step.cpp: ArgmaxArgs"""

    _fields_ = [
        ("logits", c_void_p),
        ("stride", c_int64),
        ("rows", Count),
        ("vocab", c_int64),
        ("token_ids", c_void_p),
        ("is_bad", c_void_p),
        ("workspace", c_void_p),
    ]


class SampleArgs(ctypes.Structure):
    """sample.cpp: SampleArgs"""

    _fields_ = [
        ("logits", c_void_p),
        ("stride", c_int64),
        ("rows", Count),
        ("vocab", c_int64),
        ("row_ids", c_void_p),
        ("positions", c_void_p),
        ("temperature", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("top_k", c_void_p),
        ("seeds", c_void_p),
        ("token_ids", c_void_p),
        ("is_bad", c_void_p),
        ("workspace", c_void_p),
    ]


class StoreArgs(ctypes.Structure):
    """step.cpp: StoreArgs"""

    _fields_ = [
        ("sampled", c_void_p),
        ("rows", c_void_p),
        ("seq_lens", c_void_p),
        ("count", Count),
        ("token_ids", c_void_p),
        ("max_len", c_int64),
        ("scratch_row", c_int64),
    ]
