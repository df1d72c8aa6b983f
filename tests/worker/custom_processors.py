"""Logits processors as users write them, importable by a core in another process."""

import torch

from octavo.worker.custom_logits import AdapterLogitsProcessor, LogitsProcessor


class ForceToken(AdapterLogitsProcessor):
    """`extra_args={"force": id}`: only this token; {"boom": n}: raise once n tokens are out."""

    @classmethod
    def validate_params(cls, sampling_params):
        force = (sampling_params.extra_args or {}).get("force", 0)
        if not isinstance(force, int):
            raise ValueError(f"force={force!r} must be a token id")

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        args = params.extra_args or {}
        if args.get("refuse"):
            raise RuntimeError("cannot take this one")
        if "boom" in args:
            return lambda output_ids, logits: _boom(args["boom"], output_ids, logits)
        if "force" in args:
            return lambda output_ids, logits: _only(args["force"], logits)
        if "count_up" in args:
            return lambda prompt_ids, output_ids, logits: _only(len(prompt_ids) + sum(output_ids), logits)
        return None


class ForceText(AdapterLogitsProcessor):
    """`extra_args={"say": ids}`: these tokens, then the last of them for ever."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        ids = (params.extra_args or {}).get("say")
        if not ids:
            return None
        return lambda output_ids, logits: _only(ids[min(len(output_ids), len(ids) - 1)], logits)


class BatchBias(LogitsProcessor):
    """Batch-level: adds to each request's `extra_args["favourite"]`; checks that it is told the truth."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self.device = device
        self.batch: dict[int, tuple[int, list[int], list[int]]] = {}
        self.size = 0

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        if batch_update is None:
            return
        for index in batch_update.removed:
            del self.batch[index]
        for index, params, prompt_ids, output_ids in batch_update.added:
            assert index not in self.batch, "added where somebody is"
            self.batch[index] = ((params.extra_args or {}).get("favourite", -1), prompt_ids, output_ids)
        for source, target, direction in batch_update.moved:
            moving, displaced = self.batch.pop(source), self.batch.pop(target, None)
            self.batch[target] = moving
            if direction.name == "SWAP":
                assert displaced is not None
                self.batch[source] = displaced
            else:
                assert displaced is None
        self.size = batch_update.batch_size
        assert sorted(self.batch) == list(range(self.size))

    def apply(self, logits):
        assert logits.shape[0] == self.size
        for index, (favourite, _, output_ids) in self.batch.items():
            if favourite == -2 and len(output_ids) == 2:
                raise RuntimeError("batch broken")
            if favourite >= 0:
                logits[index, favourite] += 1000.0
        return logits


class KeepTwo(LogitsProcessor):
    """Argmax invariant: all but the two likeliest are impossible."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self.seen: list[torch.Tensor] = []

    def is_argmax_invariant(self):
        return True

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        self.seen.append(logits.clone())
        second = logits.topk(2).values[:, -1:]
        return logits.masked_fill(logits < second, -torch.inf)


def _only(token_id: int, logits: torch.Tensor) -> torch.Tensor:
    masked = torch.full_like(logits, -torch.inf)
    masked[token_id] = 0.0
    return masked


def _boom(after: int, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    if len(output_ids) >= after:
        raise RuntimeError("boom")
    return logits
