"""How well two texts go together, by whatever the model makes.

cross-encoder       reads both together, as its tokenizer's pair or through a template; its one class is the score
bi-encoder          makes a vector of each; the score is their cosine
late interaction    makes a vector of each token; the score sums, over the first text's, the largest product with one of
                    the second's (MaxSim, Khattab and Zaharia 2020)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.config.engine import PoolingConfig
from octavo.errors import ClientError
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.types.prompts import PairPrompt, PromptType

# The question that Qwen3-Reranker was trained to answer with yes or no.
QWEN3_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {{ instruction | default('Given a web search query, retrieve relevant passages that answer the query') }}\n"
    "<Query>: {{ messages[0].content }}\n<Document>: {{ messages[1].content }}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


@dataclass(frozen=True)
class ScorePlan:
    """What to compute: a request for each prompt, all of one task; then `scores` of what came out."""

    task: str
    prompts: list[PromptType | PairPrompt]
    pairs: list[tuple[int, int]]  # for each score, the two outputs it is made of (of a cross-encoder, one twice)

    def scores(self, outputs: Sequence[np.ndarray]) -> list[float]:
        """The scores, in the order of the pairs."""
        return [self._score(outputs[first], outputs[second]) for first, second in self.pairs]

    def _score(self, first: np.ndarray, second: np.ndarray) -> float:
        if self.task == "classify":
            return float(first[0])
        if self.task == "embed":
            return float(first @ second / max(np.linalg.norm(first) * np.linalg.norm(second), np.float32(1e-12)))
        return float((first @ second.T).max(axis=1).sum())


def make_score_plan(
    config: PoolingConfig | None,
    tokenizer: Tokenizer | None,
    first: list[str],
    second: list[str],
    *,
    chat_template: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> ScorePlan:
    """Score first against second: one with each, or as many pairwise. `variables` (`instruction`) are the template's."""
    if config is None:
        raise ClientError(
            "this model generates text and gives no scores; start a model with runner=pooling.", param="model"
        )
    if not first or not second:
        raise ClientError("there is nothing to score; give at least one text on either side.", param="data_2")
    if len(first) not in (1, len(second)):
        raise ClientError(
            f"{len(first)} texts cannot be paired with {len(second)}; give one, or as many.", param="data_1"
        )
    if "classify" in config.tasks:
        if len(config.labels) != 1:
            raise ClientError(
                f"a model with {len(config.labels)} classes gives no score; use classify, or a model with one class.",
                param="model",
            )
        texts = [(first[0] if len(first) == 1 else first[i], other) for i, other in enumerate(second)]
        template = chat_template or (QWEN3_TEMPLATE if config.label_token_ids else None)
        prompts = [_pair(tokenizer, one, other, template, variables) for one, other in texts]
        return ScorePlan("classify", prompts, [(i, i) for i in range(len(prompts))])
    task = next((task for task in ("embed", "token_embed") if task in config.tasks), None)
    if task is None:
        raise ClientError(f"this model gives no scores; its tasks are {', '.join(config.tasks)}.", param="model")
    if variables:
        raise ClientError(
            f"{', '.join(sorted(variables))} is for models that read both texts through a template.",
            param="instruction",
        )
    offset = len(first)
    pairs = [(0 if offset == 1 else i, offset + i) for i in range(len(second))]
    return ScorePlan(task, [*first, *second], pairs)


def _pair(
    tokenizer: Tokenizer | None, first: str, second: str, template: str | None, variables: Mapping[str, Any] | None
) -> PromptType | PairPrompt:
    if tokenizer is None:
        raise ClientError(
            "this engine runs without a tokenizer (skip_tokenizer_init), which scores need.", param="model"
        )
    if template is None:
        if variables:
            raise ClientError(
                f"{', '.join(sorted(variables))} is for models that read both texts through a template.",
                param="instruction",
            )
        return PairPrompt(first=first, second=second)
    messages = [{"role": "query", "content": first}, {"role": "document", "content": second}]
    made = tokenizer.encode_chat(
        messages,
        chat_template=template,
        trust_chat_template=True,
        chat_template_kwargs=variables,
        content_format="string",
    )
    return {"prompt": made.text, "prompt_token_ids": made.token_ids}
