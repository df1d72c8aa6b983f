"""A logits processor that makes a model say what a request wants it to: `extra_args={"force": [token ids]}`."""

import torch

from octavo import AdapterLogitsProcessor, SamplingParams
from octavo.worker.custom_logits import RequestLogitsProcessor


class ForcedTokens(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        wanted = (params.extra_args or {}).get("force")
        if wanted is None:
            return None

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output_ids) >= len(wanted):
                return logits
            forced = torch.full_like(logits, -float("inf"))
            forced[wanted[len(output_ids)]] = 0.0
            return forced

        return force
