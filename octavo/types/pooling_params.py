"""`PoolingParams`: what one request wants of a model that makes vectors, classes or scores instead of text."""

from collections.abc import Sequence

import msgspec

from octavo.errors import ClientError

# A vector a text, a vector a token, class probabilities a text, and a token.
TASKS = ("embed", "token_embed", "classify", "token_classify")

MAX_RETURNED_LABELS = 4096


class PoolingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Checked alone here; what the model can do is checked in engine/pooling_inputs.py."""

    task: str | None = None  # one of TASKS; None: the model's first
    dimensions: int | None = None  # of an embedding: its first so many numbers, normalised again (matryoshka models)
    # Whether embeddings are normalised and logits become probabilities; None: as the model says.
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None  # keep the first so many tokens; -1: as many as the model takes
    step_tag_id: int | None = None  # token_classify: only tokens with this id
    returned_token_ids: list[int] | None = None  # token_classify: only these classes
    skip_reading_prefix_cache: bool | None = None
    prompt_name: str | None = None  # of the model's prompts, the one that goes before the text
    segment_start: int | None = None  # index of the first token of a pair's second text; None: there is none

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in TASKS:
            raise ClientError(f"task={self.task!r} is not known; use one of {', '.join(TASKS)}.", param="task")
        _check_range("dimensions", self.dimensions, 1)
        _check_range("truncate_prompt_tokens", self.truncate_prompt_tokens, -1)
        if self.truncate_prompt_tokens == 0:
            raise ClientError(
                "truncate_prompt_tokens=0 leaves no token; use at least 1, or -1.", param="truncate_prompt_tokens"
            )
        _check_range("step_tag_id", self.step_tag_id, 0)
        _check_labels(self.returned_token_ids)


def _check_range(name: str, value: int | None, low: int) -> None:
    if value is None:
        return
    if type(value) is not int or not low <= value < 2**31:
        raise ClientError(f"{name}={value!r} is not allowed; it must be an integer of at least {low}.", param=name)


def _check_labels(ids: Sequence[int] | None) -> None:
    if ids is None:
        return
    if not 1 <= len(ids) <= MAX_RETURNED_LABELS or any(type(i) is not int or i < 0 for i in ids):
        raise ClientError(
            f"returned_token_ids must hold 1 to {MAX_RETURNED_LABELS} class numbers from 0.", param="returned_token_ids"
        )
