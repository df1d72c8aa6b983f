"""What a pooling request may ask of the model, and how its text becomes tokens. Wrong ones end here, with a `ClientError`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec

from octavo.config.engine import ModelConfig, PoolingConfig
from octavo.errors import ClientError, ContextLengthError
from octavo.types.pooling_params import PoolingParams
from octavo.types.prompts import PairPrompt, PromptEmbeds, PromptType
from octavo.types.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from octavo.engine.input_processor import InputProcessor

# What such a request says to the parts of the engine that think in tokens to come.
NOTHING_TO_SAMPLE = SamplingParams(max_tokens=0, detokenize=False, seed=0, output_kind=RequestOutputKind.FINAL_ONLY)


@dataclass(frozen=True)
class Prompt:
    """A prompt, read: its tokens, the text behind them where there is one."""

    text: str | None
    token_ids: list[int]  # zeros where embeddings are the prompt
    cache_salt: str | None = None
    embeds: PromptEmbeds | None = None
    encoder: "Prompt | None" = None  # what goes to the encoder of a model that has one; the rest is the decoder's

    @property
    def encoder_text(self) -> str | None:
        return None if self.encoder is None else self.encoder.text


class PoolingInputs:
    """Reads pooling requests for one model; `config` None: the model generates text."""

    def __init__(self, config: PoolingConfig | None, model: ModelConfig, inputs: "InputProcessor"):
        self._config = config
        self._model = model
        self._inputs = inputs

    def check_generates(self) -> None:
        """Refuse what asks a pooling model for text."""
        if self._config is not None:
            raise ClientError(
                f"the model {self._model.served_model_names[0]} generates no text; its tasks are "
                f"{', '.join(self._config.tasks)}.",
                param="model",
            )

    def read(
        self, prompt: PromptType | PairPrompt, params: PoolingParams, options: Mapping[str, Any]
    ) -> tuple[Prompt, PoolingParams]:
        """The prompt's tokens, and the parameters with nothing left to decide."""
        config = self._checked_config()
        task = self._check(params, config)
        truncate = options.get("truncate_prompt_tokens", params.truncate_prompt_tokens)
        add_special_tokens = options.get("add_special_tokens", True)
        limit = self._limit(truncate)
        segment_start = params.segment_start
        if isinstance(prompt, Mapping) and "second" in prompt:
            pair = cast(PairPrompt, prompt)
            first, second = pair["first"], pair["second"]
            token_ids, segment_start = self._inputs.tokenizer.encode_fitting(first, second, add_special_tokens, limit)
            read = Prompt(first, token_ids)
        else:
            read = self._read_one(prompt, task, params, add_special_tokens, limit)
        self._check_length(read, limit)
        whole = config.reads_whole_prompts or task.startswith("token") or bool(params.skip_reading_prefix_cache)
        made = msgspec.structs.replace(
            params, task=task, segment_start=segment_start, skip_reading_prefix_cache=whole or None
        )
        return read, made

    def _read_one(
        self, prompt: PromptType, task: str, params: PoolingParams, add_special_tokens: bool, limit: int | None
    ) -> Prompt:
        if isinstance(prompt, Mapping) and "prompt_embeds" in prompt:
            raise ClientError("prompt_embeds is for models that generate text.", param="prompt_embeds")
        if isinstance(prompt, Mapping) and "prompt_token_ids" not in prompt:
            prompt = cast(PromptType, {**prompt, "prompt": self._with_prompt(prompt.get("prompt"), task, params)})
        elif isinstance(prompt, str):
            prompt = self._with_prompt(prompt, task, params)
        if isinstance(prompt, str) and limit is not None:
            token_ids, _ = self._inputs.tokenizer.encode_fitting(prompt, None, add_special_tokens, limit)
            return Prompt(prompt, token_ids)
        read = self._inputs.read_prompt(prompt, add_special_tokens=add_special_tokens)
        return read if limit is None else Prompt(read.text, read.token_ids[:limit], read.cache_salt)

    def _checked_config(self) -> PoolingConfig:
        if self._config is None:
            raise ClientError(
                f"the model {self._model.served_model_names[0]} generates text and makes no vectors or classes; start it "
                "with runner=pooling for that.",
                param="model",
            )
        return self._config

    def _check(self, params: PoolingParams, config: PoolingConfig) -> str:
        """The request's task, once the model can do what it asks."""
        task = params.task or config.tasks[0]
        if task not in config.tasks:
            raise ClientError(f"task={task!r} is not one of this model's: {', '.join(config.tasks)}.", param="task")
        if params.dimensions is not None:
            _check_dimensions(params.dimensions, task, config)
        for name, ids, size in (
            ("returned_token_ids", params.returned_token_ids or [], len(config.labels)),
            ("step_tag_id", [] if params.step_tag_id is None else [params.step_tag_id], self._model.vocab_size),
        ):
            if ids and not task.endswith("token_classify"):
                raise ClientError(f"{name} is for the task token_classify, not for {task}.", param=name)
            if any(i >= size for i in ids):
                raise ClientError(f"{name}={ids} goes beyond the last id, {size - 1}.", param=name)
        return task

    def _with_prompt(self, text: Any, task: str, params: PoolingParams) -> Any:
        """The text behind one of the prompts that the model was trained with."""
        config = self._checked_config()
        name = params.prompt_name if params.prompt_name is not None else config.default_prompt
        if name is None or not isinstance(text, str) or not task.endswith("embed"):
            return text
        if name not in config.prompts:
            known = ", ".join(sorted(config.prompts)) or "none"
            raise ClientError(f"prompt_name={name!r} is not known; the model has {known}.", param="prompt_name")
        return config.prompts[name] + text

    def _limit(self, truncate: int | None) -> int | None:
        longest = self._model.max_model_len
        if truncate is None:
            return None
        if type(truncate) is not int or not (truncate == -1 or 1 <= truncate <= longest):
            raise ClientError(
                f"truncate_prompt_tokens={truncate!r} is not allowed; use -1, or 1 to the {longest} tokens the model takes.",
                param="truncate_prompt_tokens",
            )
        return longest if truncate == -1 else truncate

    def _check_length(self, prompt: Prompt, limit: int | None) -> None:
        num_tokens, longest = len(prompt.token_ids), self._model.max_model_len
        if not num_tokens:
            raise ClientError("the input is empty; it must have at least one token.", param="input")
        if limit is not None and num_tokens > limit:
            raise ClientError(
                f"truncate_prompt_tokens={limit} leaves no room for the special tokens.", param="truncate_prompt_tokens"
            )
        if num_tokens > longest:
            raise ContextLengthError(
                f"This model takes {longest} tokens, but the input has {num_tokens}. Shorten it, or set "
                "truncate_prompt_tokens=-1.",
                param="input",
            )


def _check_dimensions(dimensions: int, task: str, config: PoolingConfig) -> None:
    if not task.endswith("embed"):
        raise ClientError(f"dimensions is for embeddings, not for the task {task}.", param="dimensions")
    if not config.is_matryoshka:
        raise ClientError(
            f"dimensions={dimensions}: this model was not trained for embeddings of several sizes (matryoshka), and a cut "
            "vector would be worth little; leave dimensions out.",
            param="dimensions",
        )
    if config.matryoshka_dimensions and dimensions not in config.matryoshka_dimensions:
        raise ClientError(
            f"dimensions={dimensions} is not one of the model's: {', '.join(map(str, config.matryoshka_dimensions))}.",
            param="dimensions",
        )
    if dimensions > config.width:
        raise ClientError(
            f"dimensions={dimensions} is more than the {config.width} of this model's embeddings.", param="dimensions"
        )
