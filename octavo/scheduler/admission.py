"""What the scheduler refuses: options that contradict each other, and requests that could never run."""

from octavo.config.engine import SchedulerConfig
from octavo.errors import ClientError, ConfigError, ContextLengthError, QueueFullError
from octavo.types.request import EngineRequest


def check_config(config: SchedulerConfig) -> None:
    """Raise ConfigError where two options cannot both be honoured."""
    budget = config.max_num_batched_tokens
    if config.max_num_seqs > budget:
        raise ConfigError(
            f"max_num_seqs={config.max_num_seqs} is more than max_num_batched_tokens={budget}, but each running "
            "request needs a token a step; lower the one or raise the other."
        )
    if not config.enable_chunked_prefill and budget < config.max_model_len:
        raise ConfigError(
            f"without chunked prefill a prompt is computed in one step, but max_num_batched_tokens={budget} is less "
            f"than max_model_len={config.max_model_len}; raise the one, lower the other, or allow chunks."
        )

    if config.max_encoder_len + config.max_num_seqs > budget:
        raise ConfigError(
            f"max_num_batched_tokens={budget} is less than max_num_seqs={config.max_num_seqs} and the encoder's "
            f"{config.max_encoder_len} positions, which are computed in one step; raise it, or lower max_model_len."
        )


def check_request(request: EngineRequest, config: SchedulerConfig, pool_tokens: int) -> None:
    """Raise ClientError for a request that can never run; `pool_tokens`: what one request can keep in the KV cache."""
    if not request.prompt_token_ids:
        raise ClientError("the prompt holds no token; give at least one.", param="prompt")
    if request.priority != 0 and config.policy != "priority":
        raise ClientError(
            f"priority={request.priority} has no meaning under scheduling_policy={config.policy!r}; leave it out, or "
            "start the engine with --scheduling-policy priority.",
            param="priority",
        )
    num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
    num_to_sample = 0 if request.sampling_params.max_tokens == 0 else 1
    if num_tokens + num_to_sample > config.max_model_len:
        raise ContextLengthError(
            f"the request has {num_tokens} tokens and samples at least {num_to_sample}, but the context holds "
            f"{config.max_model_len}; shorten the prompt.",
            param="prompt",
        )
    if request.encoder_input is not None and not 0 < request.encoder_input.num_positions <= config.max_encoder_len:
        raise ContextLengthError(
            f"the encoder's input has {request.encoder_input.num_positions} positions; it reads 1 to "
            f"{config.max_encoder_len}.",
            param="prompt",
        )
    if num_tokens > pool_tokens:
        raise ContextLengthError(
            f"the request has {num_tokens} tokens, but the whole KV cache holds {pool_tokens}; shorten the prompt, or "
            "start the engine with more memory for the KV cache.",
            param="prompt",
        )


def check_queue(request: EngineRequest, config: SchedulerConfig, num_waiting: int, num_waiting_tokens: int) -> None:
    """Raise QueueFullError when as much waits as may. A request that goes on after a restart was let in before."""
    if request.is_admitted:
        return
    max_reqs, max_tokens = config.max_num_queued_reqs, config.max_num_queued_tokens
    if max_reqs is not None and num_waiting >= max_reqs:
        raise QueueFullError(f"{num_waiting} requests are waiting, the most allowed; try again later.")
    num_tokens = request.num_prompt_tokens
    if max_tokens is not None and num_waiting and num_waiting_tokens + num_tokens > max_tokens:
        raise QueueFullError(
            f"prompts of {num_waiting_tokens} tokens are waiting, and this one has {num_tokens}; at most "
            f"{max_tokens} may wait; try again later."
        )
