"""torch.compile, on request: each block of a model becomes kernels that Inductor fuses.

Blocks are compiled one by one, and blocks that are alike share what was compiled: seconds whatever the depth. Numbers of
tokens stay symbols. What the compiler sees of operators is their reference, which it fuses with its surroundings; an
operator that only makes sense as a whole stays a call between two graphs, and so do attention and recurrent layers of our
own models. Models run by transformers call attention as one operator inside the graph (`models/transformers_backend.py`).
"""

import os
from pathlib import Path

import torch
from torch import nn

from octavo import envs
from octavo.layers.attention.layer import PagedAttention
from octavo.layers.attention.mla import LatentAttention
from octavo.layers.build import attention_layers
from octavo.layers.ssm.state import RowState
from octavo.logger import get_logger
from octavo.ops.registry import REGISTRY

logger = get_logger(__name__)

# Operators whose reference is plain arithmetic, written without a look at a number.
TRACED = frozenset({"linear", "rms_norm", "gated_activation"})
# Kinds of blocks, times one token or many, times whatever else a model's code tells apart.
MAX_VARIANTS = 64
_ATTENTION = (PagedAttention, LatentAttention)


def compile_blocks(model: nn.Module) -> None:
    """Have the blocks compiled when they first run; results are kept on disk for the next start."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(envs.OCTAVO_CACHE_DIR).expanduser() / "inductor"))
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    inductor.compile_threads = 1  # a few kernels: not worth a pool of processes that stays
    dynamo.recompile_limit = MAX_VARIANTS
    for name, op in REGISTRY.items():
        if name not in TRACED:
            op.traced = torch.compiler.disable(op.__call__)
    for module in model.modules():
        if isinstance(module, _ATTENTION) or any(isinstance(part, RowState) for part in module.children()):
            module.forward = torch.compiler.disable(module.forward)
    blocks = _blocks(model)
    for block in blocks:
        block.compile(dynamic=True)
    logger.info("%d blocks of %s are compiled as they first run", len(blocks), type(blocks[0]).__name__)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The stack of blocks: the outermost list that has one for each attention layer at least; hybrid models have more."""
    num_attention = len(attention_layers(model))
    for module in model.modules():
        is_long = isinstance(module, nn.ModuleList) and len(module) >= num_attention
        if is_long and not any(isinstance(part, (*_ATTENTION, RowState)) for part in module.children()):
            return list(module.children())
    raise AssertionError(f"{type(model).__name__} has no list of {num_attention} blocks")
