"""`EngineRequest`: what the front process hands to the engine core, plain data."""

import msgspec

from octavo.types.pooling_params import PoolingParams
from octavo.types.prompts import PromptEmbeds
from octavo.types.sampling_params import SamplingParams


class EncoderInput(msgspec.Struct, array_like=True, frozen=True):
    """What the encoder of an encoder-decoder model reads before a request's first token is computed."""

    token_ids: list[int]

    @property
    def num_positions(self) -> int:
        """Positions of the encoder's output, whose keys and values the decoder reads."""
        return len(self.token_ids)


class EngineRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """One sequence to generate. A user's request with n > 1 becomes n of these.

    `output_token_ids` is empty for a new request; a request resubmitted after the core was lost carries what its client
    already has, and goes on from there.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: list[int] = []  # every id that ends an answer, from the model's own configuration
    arrival_time: float = 0.0
    priority: int = 0  # lower runs first (scheduling_policy="priority")
    cache_salt: str | None = None
    output_token_ids: list[int] = []
    index: int = 0  # of the n answers
    # Was let in before the core was lost: the limits of the queue do not concern it again.
    is_admitted: bool = False
    pooling_params: PoolingParams | None = (
        None  # of a request that is computed for its hidden states: it samples nothing
    )
    prompt_embeds: PromptEmbeds | None = None  # what the prompt is; its `prompt_token_ids` are zeros then
    encoder_input: EncoderInput | None = None  # of encoder-decoder models, whose prompt is what the decoder begins with

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens the model reads before it writes."""
        return len(self.prompt_token_ids) + (0 if self.encoder_input is None else self.encoder_input.num_positions)
