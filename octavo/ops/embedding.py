"""Token embedding."""

import torch
import torch.nn.functional as F

from octavo.ops.registry import op


@op
def embedding(input_ids: torch.Tensor, weight: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Rows of weight [vocab, hidden] for input_ids [tokens] (int32 or int64), times scale."""
    y = F.embedding(input_ids, weight)
    return y if scale == 1.0 else y * scale
