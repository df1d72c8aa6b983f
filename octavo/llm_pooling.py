"""The methods of `LLM` for models that make vectors, classes or scores."""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar

import msgspec
from tqdm import tqdm

from octavo.engine.llm_engine import LLMEngine, PreparedRequest
from octavo.engine.scoring import make_score_plan
from octavo.errors import ClientError, RequestFailedError
from octavo.types.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from octavo.types.pooling_params import PoolingParams
from octavo.types.prompts import PairPrompt, PromptType

T = TypeVar("T")
Bar = bool | Callable[..., tqdm]
Prompts = PromptType | Sequence[PromptType]


class PoolingMethods:
    """What `LLM` has beside the making of text."""

    llm_engine: LLMEngine
    serial: "count[int]"

    def run(self, requests: list[PreparedRequest], use_tqdm: Bar) -> list[Any]:
        """Answer prepared requests, in their order."""
        raise NotImplementedError

    def encode(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: Bar = True,
        lora_request: Any = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The numbers a pooling model makes of each prompt: a row, or with a token_… task a row for each token."""
        return self._pool(as_list(prompts), pooling_params, pooling_task, use_tqdm, lora_request, tokenization_kwargs)

    def embed(
        self,
        prompts: Prompts,
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: Bar = True,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt."""
        outputs = self._pool(as_list(prompts), pooling_params, "embed", use_tqdm, lora_request, tokenization_kwargs)
        return [_with(output, EmbeddingOutput(output.outputs.data.tolist())) for output in outputs]

    def classify(
        self,
        prompts: Prompts,
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: Bar = True,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Each prompt's probability for each class."""
        outputs = self._pool(as_list(prompts), pooling_params, "classify", use_tqdm, lora_request, tokenization_kwargs)
        return [_with(output, ClassificationOutput(output.outputs.data.tolist())) for output in outputs]

    def reward(
        self,
        prompts: Prompts,
        /,
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: Bar = True,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """A reward model's scores: one for each token, or for each step of a process reward model."""
        return self._pool(
            as_list(prompts), pooling_params, "token_classify", use_tqdm, lora_request, tokenization_kwargs
        )

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: Bar = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Any = None,
        chat_template: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together: one with one, one with each of many, or many pairwise. Larger is better."""
        config = self.llm_engine.config
        plan = make_score_plan(
            config.pooling,
            None if config.tokenizer.path is None else self.llm_engine.get_tokenizer(),
            [data_1] if isinstance(data_1, str) else list(data_1),
            [data_2] if isinstance(data_2, str) else list(data_2),
            chat_template=chat_template or config.tokenizer.chat_template,
        )
        outputs = self._pool(plan.prompts, pooling_params, plan.task, use_tqdm, lora_request, tokenization_kwargs)
        scores = plan.scores([output.outputs.data for output in outputs])
        return [
            _with(outputs[second], ScoringOutput(score)) for score, (_, second) in zip(scores, plan.pairs, strict=True)
        ]

    def _pool(
        self,
        prompts: Sequence[PromptType | PairPrompt],
        params: PoolingParams | Sequence[PoolingParams] | None,
        task: str | None,
        use_tqdm: Bar,
        lora_request: Any,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        if lora_request is not None:
            raise ClientError(
                f"lora_request={lora_request!r} is not supported yet; leave it out.", param="lora_request"
            )
        each = one_each("pooling_params", params or PoolingParams(), PoolingParams, len(prompts))
        requests = [
            self.llm_engine.prepare(
                str(next(self.serial)),
                prompt,
                own if task is None else msgspec.structs.replace(own, task=task),
                tokenization_kwargs=tokenization_kwargs,
            )
            for prompt, own in zip(prompts, each, strict=True)
        ]
        outputs = self.run(requests, use_tqdm)
        failed = next((output for output in outputs if output.error is not None), None)
        if failed is not None:
            raise RequestFailedError(failed.error)
        return outputs


def _with(output: PoolingRequestOutput[PoolingOutput], made: T) -> PoolingRequestOutput[T]:
    """The same answer in another kind's clothes."""
    return PoolingRequestOutput(output.request_id, made, output.prompt_token_ids, output.num_cached_tokens)


def as_list(prompts: PromptType | Sequence[PromptType]) -> Sequence[PromptType]:
    """One prompt as a list of one. A list that starts with a number is a prompt of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def one_each(name: str, given: T | Sequence[T], kind: type[T], num_prompts: int) -> Sequence[T]:
    """One value for all prompts, or as many as there are prompts."""
    if isinstance(given, kind):
        return [given] * num_prompts
    values: Sequence[T] = given  # type: ignore[assignment]
    if not isinstance(values, Sequence) or not all(isinstance(value, kind) for value in values):
        raise ClientError(f"{name} must be a {kind.__name__} or a list of them.", param=name)
    if len(values) != num_prompts:
        raise ClientError(f"{name} has {len(values)} entries for {num_prompts} prompts; give one for each.", param=name)
    return values
