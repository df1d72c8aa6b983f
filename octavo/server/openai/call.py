"""What every chunk of one API call repeats, decided once."""

import time
from dataclasses import dataclass

from octavo.config.engine import ModelConfig
from octavo.config.server_args import ServerArgs
from octavo.errors import ModelNotFoundError
from octavo.server.openai.protocol import GenerationRequest


@dataclass(frozen=True, slots=True)
class Call:
    """Identity of the answer, and how it is written."""

    response_id: str
    created: int  # seconds since the epoch
    model: str  # the name the client used
    include_usage: bool  # end a stream with a chunk of usage
    continuous_usage: bool  # running usage on every chunk
    usage_details: bool  # say how much of the prompt came from the cache
    tokens_as_ids: bool  # show tokens as token_id:123

    @classmethod
    def of(cls, prefix: str, request: GenerationRequest, http_id: str, model: ModelConfig, args: ServerArgs) -> "Call":
        options = request.stream_options
        include_usage = bool(options and options.include_usage) or args.enable_force_include_usage
        return cls(
            response_id=f"{prefix}-{request.request_id or http_id}",
            created=int(time.time()),
            model=served_name(request.model, model),
            include_usage=include_usage,
            continuous_usage=include_usage and bool(options and options.continuous_usage_stats),
            usage_details=args.enable_prompt_tokens_details,
            tokens_as_ids=bool(request.return_tokens_as_token_ids) or args.return_tokens_as_token_ids,
        )


def served_name(asked: str | None, model: ModelConfig) -> str:
    """The name to answer under: the one asked for, or the first when none is. Unknown ones are a 404."""
    names = model.served_model_names
    if not asked:
        return names[0]
    if asked not in names:
        listed = ", ".join(f"`{name}`" for name in names)
        raise ModelNotFoundError(f"The model `{asked}` does not exist. This server has: {listed}.", param="model")
    return asked
