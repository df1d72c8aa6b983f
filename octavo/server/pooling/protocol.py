"""Bodies and answers of the routes that make vectors, classes and scores.

A field this server knows but cannot honour stands in `NOT_YET`: any value but a neutral one is refused.
"""

from typing import Any, Generic, TypeVar

import msgspec

from octavo.errors import ClientError
from octavo.server.openai.protocol import REQUEST_ID
from octavo.types.pooling_params import PoolingParams

T = TypeVar("T")

MAX_INPUTS = 2048
ENCODINGS = ("float", "base64")
COHERE_TYPES = ("float", "base64", "binary", "ubinary")
# Cohere's words -> names that models give to such prompts, in order of preference.
INPUT_TYPES = {
    "search_query": ("search_query", "query", "retrieval.query"),
    "search_document": ("search_document", "document", "passage", "retrieval.passage"),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering"),
}

NOT_YET: dict[str, tuple[Any, ...]] = {
    "truncation_side": ("right",),
    "padding": (False,),
    "mm_processor_kwargs": ({},),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "images": ([],),
    "inputs": ([],),
    "data": (),
}


class PoolingBody(msgspec.Struct, kw_only=True):
    """What all of these have in common. null means "not sent"."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    use_activation: bool | None = None
    priority: int | None = None
    request_id: str | None = None
    user: str | None = None

    def __post_init__(self) -> None:
        if self.request_id is not None and not REQUEST_ID.fullmatch(self.request_id):
            raise ClientError("request_id must have 1 to 128 letters, digits or any of _.:@/+=-.", param="request_id")

    def params(self, task: str | None, **more: Any) -> PoolingParams:
        """What the body asks of the engine."""
        return PoolingParams(
            task=task,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            use_activation=self.use_activation,
            **more,
        )


class InputBody(PoolingBody, kw_only=True):
    """Texts, token ids, or a conversation."""

    input: Any = None
    messages: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def check(self) -> None:
        """Raise where fields contradict each other."""
        if (self.input is None) == (self.messages is None):
            raise ClientError("send either input or messages.", param="input")


class EmbeddingRequest(InputBody, kw_only=True):
    """POST /v1/embeddings"""

    encoding_format: str | None = None
    dimensions: int | None = None
    prompt_name: str | None = None

    def check(self) -> None:
        super().check()
        check_encoding(self.encoding_format)


class PoolingRequest(InputBody, kw_only=True):
    """POST /pooling"""

    task: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    prompt_name: str | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None

    def check(self) -> None:
        super().check()
        check_encoding(self.encoding_format)


class ClassifyRequest(InputBody, kw_only=True):
    """POST /classify"""


class ScoreRequest(PoolingBody, kw_only=True):
    """POST /score; the two sides have several names."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def sides(self) -> tuple[list[str], list[str]]:
        """The texts on either side."""
        first = _only_one(text_1=self.text_1, data_1=self.data_1, queries=self.queries)
        second = _only_one(text_2=self.text_2, data_2=self.data_2, documents=self.documents, items=self.items)
        return first, second


class RerankDocument(msgspec.Struct):
    text: str


class RerankRequest(PoolingBody, kw_only=True):
    """POST /rerank"""

    query: str
    documents: list[str | RerankDocument]
    top_n: int | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens_per_doc: int | None = None

    def check(self) -> None:
        """Raise where a field is out of its range."""
        if self.top_n is not None and self.top_n < 0:
            raise ClientError(f"top_n={self.top_n} must be at least 0; 0 is all.", param="top_n")
        if self.max_tokens_per_doc is not None:
            raise ClientError(
                "max_tokens_per_doc is not supported yet; use truncate_prompt_tokens for query and document together.",
                param="max_tokens_per_doc",
                code="unsupported_parameter",
            )


class CohereEmbedRequest(msgspec.Struct, kw_only=True):
    """POST /v2/embed"""

    model: str | None = None
    texts: list[str]
    input_type: str | None = None
    output_dimension: int | None = None
    embedding_types: list[str] | None = None
    truncate: str | None = None
    max_tokens: int | None = None
    priority: int | None = None

    def check(self) -> None:
        """Raise where a field holds what is not known."""
        for name, values, known in (
            ("input_type", [self.input_type], INPUT_TYPES),
            ("truncate", [self.truncate], ("NONE", "END")),
            ("embedding_types", self.embedding_types or [], COHERE_TYPES),
        ):
            for value in values:
                if value is not None and value not in known:
                    raise ClientError(f"{name} has {value!r}; supported are {', '.join(known)}.", param=name)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ClientError(f"max_tokens={self.max_tokens} must be at least 1.", param="max_tokens")


def check_encoding(encoding_format: str | None) -> None:
    if encoding_format is not None and encoding_format not in ENCODINGS:
        raise ClientError(
            f"encoding_format={encoding_format!r} is not supported; use {' or '.join(ENCODINGS)}.",
            param="encoding_format",
        )


def _only_one(**sides: str | list[str] | None) -> list[str]:
    given = {name: value for name, value in sides.items() if value is not None}
    if len(given) != 1:
        raise ClientError(f"send one of {', '.join(sides)}.", param=next(iter(sides)))
    ((name, value),) = given.items()
    texts = [value] if isinstance(value, str) else value
    if not 1 <= len(texts) <= MAX_INPUTS:
        raise ClientError(f"{name} holds {len(texts)} texts; 1 to {MAX_INPUTS} are possible.", param=name)
    return texts


# --- answers ---


class PoolingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class Embedding(msgspec.Struct, kw_only=True):
    index: int
    object: str = "embedding"
    embedding: list[float] | str


class PoolingItem(msgspec.Struct, kw_only=True):
    index: int
    object: str = "pooling"
    data: Any


class Classification(msgspec.Struct, kw_only=True):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Score(msgspec.Struct, kw_only=True):
    index: int
    object: str = "score"
    score: float


class PoolingList(msgspec.Struct, Generic[T], kw_only=True):
    """The answer of all these routes but two."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[T]
    usage: PoolingUsage


class RerankResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    document: RerankDocument | None = None
    relevance_score: float


class RerankResponse(msgspec.Struct, kw_only=True):
    id: str
    model: str
    results: list[RerankResult]
    usage: PoolingUsage


class CohereEmbedResponse(msgspec.Struct, kw_only=True):
    id: str
    embeddings: dict[str, list[Any]]
    texts: list[str]
    meta: dict[str, Any]
