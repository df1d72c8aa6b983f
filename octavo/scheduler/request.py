"""`Request`: the scheduler's record of one request.

Two lengths to keep apart:

    token_ids:   p p p p p o o o         what is known: prompt, then output
    num_tokens:  p p p p p o o o ?       known tokens and the sampled ones that are still in flight (at most one a step)
    computed:    c c c c c c c c         num_computed_tokens: positions whose keys and values some issued step writes

A request has work while `num_computed_tokens < num_tokens`. There are no phases: a prompt, what is left of it, a
resumed request and a decode differ only in how far apart the two numbers are.
"""

import enum

from octavo.structured_output.request_grammar import RequestGrammar
from octavo.types.outputs import FinishReason
from octavo.types.request import EngineRequest


class RequestStatus(enum.IntEnum):
    """Where a request stands."""

    WAITING = 0  # new, or preempted: holds no row and no blocks
    RUNNING = 1
    FINISHED = 2


class Request:
    """One request. The scheduler and the KV cache manager are the only writers."""

    __slots__ = (
        "admitted_step",
        "arrival",
        "block_ids",
        "block_names",
        "cache_salt",
        "discard_through_step",
        "encoder_input",
        "encoder_names",
        "eos_token_ids",
        "final_step",
        "first_scheduled_time",
        "grammar",
        "is_protected",
        "is_steady",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prefix_tokens",
        "num_prompt_logprobs",
        "num_prompt_logprobs_sent",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_reserved_blocks",
        "num_tokens",
        "pooling_params",
        "priority",
        "prompt_embeds",
        "reads_prefix_cache",
        "request_id",
        "resumable_after_step",
        "row",
        "sampling_params",
        "status",
        "steady_until",
        "stop_token_ids",
        "token_ids",
        "was_announced",
    )

    def __init__(
        self, engine_request: EngineRequest, arrival: int, priority: float, max_model_len: int, num_groups: int
    ):
        """`arrival` numbers the requests in the order they came; `max_model_len` is the most tokens this engine can
        hold.
        """
        params = engine_request.sampling_params
        self.request_id = engine_request.request_id
        self.sampling_params = params
        self.pooling_params = engine_request.pooling_params
        self.prompt_embeds = engine_request.prompt_embeds
        self.encoder_input = engine_request.encoder_input
        self.priority = priority
        self.arrival = arrival
        self.status = RequestStatus.WAITING
        self.row = -1

        self.token_ids: list[int] = engine_request.prompt_token_ids + engine_request.output_token_ids
        self.num_prompt_tokens = len(engine_request.prompt_token_ids)
        self.num_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        # Generation ends when this many tokens are known.
        self.max_total_tokens = max_model_len
        if params.max_tokens is not None:
            self.max_total_tokens = min(max_model_len, self.num_prompt_tokens + params.max_tokens)
        self.eos_token_ids = frozenset(() if params.ignore_eos else engine_request.eos_token_ids)
        self.stop_token_ids = self.eos_token_ids.union(params.stop_token_ids or ())

        self.grammar: RequestGrammar | None = None  # which the answer follows

        # A decode needs no thought while `num_tokens <= steady_until`: it has a slot, and its limits are not reached.
        # 0 while the request has more than one token to catch up with.
        self.steady_until = 0
        # Whether `update` may treat a single sampled token as nothing but a token: the request runs, its first output
        # since it was admitted is out, and it wants no log probabilities.
        self.is_steady = False
        # Resumed and not yet past where it was preempted: not preempted again before that.
        self.is_protected = False
        self.num_preemptions = 0
        self.admitted_step = -1
        self.resumable_after_step = -1  # may be admitted once the results of this step are in
        self.discard_through_step = -1  # results of steps up to this one are void for this request
        self.final_step = -1  # the step that ends a request that samples nothing

        self.cache_salt = engine_request.cache_salt
        # Scores of every prompt position are wanted: each has to be computed.
        self.reads_prefix_cache = params.prompt_logprobs is None and not params.skip_reading_prefix_cache
        if self.pooling_params is not None and self.pooling_params.skip_reading_prefix_cache:
            self.reads_prefix_cache = False
        self.block_ids: list[list[int]] = [[] for _ in range(num_groups)]
        self.encoder_names: list[bytes] = []  # of the blocks of its encoder's output
        self.block_names: list[bytes] = []  # of the full blocks of known tokens, as far as needed so far
        self.num_published_blocks = 0  # leading blocks that were offered to the prefix cache since admission
        self.num_reserved_blocks = 0  # free blocks kept for the rest of its prefill
        self.num_prefix_tokens = 0  # found in the prefix cache at the last admission
        self.num_cached_tokens = 0  # the same at the first admission: what the client is told

        self.num_prompt_logprobs = 0  # entries the worker delivered since the last admission
        self.num_prompt_logprobs_sent = 0
        self.first_scheduled_time = 0.0
        self.was_announced = False  # whether an output has gone out

    @property
    def order(self) -> tuple[float, int]:
        """Smaller runs first: priority, then arrival. Unique."""
        return self.priority, self.arrival

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_input_tokens(self) -> int:
        """Of the client's: its prompt, and what its encoder reads."""
        return self.num_prompt_tokens + self.num_encoder_positions

    @property
    def num_encoder_positions(self) -> int:
        """Positions of its encoder's output; 0 for decoder-only models."""
        return 0 if self.encoder_input is None else self.encoder_input.num_positions

    @property
    def is_finished(self) -> bool:
        return self.status == RequestStatus.FINISHED

    def follow_grammar(self, token_ids: list[int], reason: FinishReason | None) -> tuple[int, FinishReason | None]:
        """Take sampled tokens into the grammar; `reason` is why the last of them ends the request, if it does.

        Returns how many count and the reason, which is STOP where the grammar lets nothing more follow. Raises GrammarError.
        """
        assert self.grammar is not None
        if self.grammar.is_terminated:
            return 0, FinishReason.STOP
        is_stopped = reason is FinishReason.STOP  # by a token that is no part of the text
        count = self.grammar.follow(token_ids[:-1] if is_stopped else token_ids)
        if self.grammar.is_terminated:
            return count, FinishReason.STOP
        return len(token_ids), reason

    def find_stop(self, token_ids: list[int]) -> tuple[int, FinishReason | None, int | None]:
        """Say where `token_ids`, sampled after the known tokens, end the request.

        Returns how many of them count, the reason if the last of these ends it, and the stop token id if one of the
        client's did. In order for each token: EOS, the client's stop ids, length. Below `min_tokens` only length
        counts; the sampler masks the others there.
        """
        num_known = len(self.token_ids)
        num_before_stop = self.num_prompt_tokens + self.sampling_params.min_tokens
        for count, token_id in enumerate(token_ids, 1):
            if token_id in self.stop_token_ids and num_known + count > num_before_stop:
                return count, FinishReason.STOP, None if token_id in self.eos_token_ids else token_id
            if num_known + count >= self.max_total_tokens:
                return count, FinishReason.LENGTH, None
        return len(token_ids), None, None
