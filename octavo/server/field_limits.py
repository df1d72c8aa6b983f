"""What each field of each body may hold: the table behind docs/limits.md.

The numbers are those that the code checks by. A test walks the bodies, so that a new field cannot be left out, and sends
what lies beyond.
"""

from octavo.engine.input_processor import MAX_BAD_WORDS_TOKENS, MAX_CACHE_SALT, MAX_PRIORITY
from octavo.server.anthropic.protocol import MIN_THINKING_BUDGET, CountTokensRequest, MessagesRequest
from octavo.server.limits import MAX_EXTRA_ARGS_BYTES
from octavo.server.openai.protocol import (
    MAX_MESSAGES,
    MAX_PROMPTS,
    REASONING_EFFORTS,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from octavo.server.pooling.protocol import (
    MAX_INPUTS,
    ClassifyRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from octavo.server.prompts import MAX_DETOKENIZED, MAX_TOKEN_CHARACTERS
from octavo.server.responses.protocol import ResponsesRequest
from octavo.server.tokens.protocol import GenerateRequest
from octavo.server.tools import MAX_TOOLS
from octavo.types.pooling_params import MAX_RETURNED_LABELS
from octavo.types.sampling_params import (
    INT32_MAX,
    MAX_BAD_WORDS,
    MAX_CHARACTERS,
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from octavo.types.structured_outputs import MAX_CHOICES, MAX_CONSTRAINT_BYTES

BODIES = {
    "POST /v1/completions": CompletionRequest,
    "POST /v1/chat/completions": ChatCompletionRequest,
    "POST /tokenize": TokenizeRequest,
    "POST /detokenize": DetokenizeRequest,
    "POST /v1/responses": ResponsesRequest,
    "POST /inference/v1/generate": GenerateRequest,
    "POST /v1/messages": MessagesRequest,
    "POST /v1/messages/count_tokens": CountTokensRequest,
    "POST /v1/embeddings": EmbeddingRequest,
    "POST /v2/embed": CohereEmbedRequest,
    "POST /pooling": PoolingRequest,
    "POST /classify": ClassifyRequest,
    "POST /score": ScoreRequest,
    "POST /rerank": RerankRequest,
}

_MESSAGES, _COUNT = "POST /v1/messages", "POST /v1/messages/count_tokens"
_SWITCH = "true or false"
_TOKENS_OF_CONTEXT = f"{MAX_TOKEN_CHARACTERS} characters a token of the context, and what fits as tokens"
_IDS = "in the vocabulary"
_INPUTS = ("POST /v1/embeddings", "POST /pooling", "POST /classify")
_TEXTS = f"1 to {MAX_INPUTS} texts, each of {_TOKENS_OF_CONTEXT}"
_CONSTRAINT = f"{MAX_CONSTRAINT_BYTES} characters"

# By field; where a field means something else on one route, by (route, field).
FIELDS: dict[str | tuple[str, str], str] = {
    "model": "a served name",
    "n": f"1 to {MAX_N}",
    "temperature": "0 to 2",
    "top_p": "above 0, to 1",
    "top_k": f"-1 to {INT32_MAX}",
    "min_p": "0 to 1",
    "presence_penalty": "-2 to 2",
    "frequency_penalty": "-2 to 2",
    "repetition_penalty": "above 0, to 100",
    "seed": "64 bits, signed",
    "stop": f"{MAX_STOP_STRINGS} strings of 1 to {MAX_CHARACTERS} characters",
    "stop_token_ids": f"{MAX_STOP_TOKEN_IDS} ids, {_IDS}",
    "include_stop_str_in_output": _SWITCH,
    "ignore_eos": _SWITCH,
    "max_tokens": "the context",
    "max_completion_tokens": "the context",
    "min_tokens": "max_tokens",
    "logprobs": "`--max-logprobs`",
    ("POST /v1/chat/completions", "logprobs"): _SWITCH,
    "top_logprobs": "`--max-logprobs`",
    "prompt_logprobs": "`--max-logprobs`; not streamed",
    "skip_special_tokens": _SWITCH,
    "spaces_between_special_tokens": _SWITCH,
    "truncate_prompt_tokens": "-1 to the context",
    "stream_interval": f"1 to {INT32_MAX}",
    "allowed_token_ids": f"as many as the vocabulary has, {_IDS}",
    "bad_words": f"{MAX_BAD_WORDS} strings of 1 to {MAX_CHARACTERS} characters, {MAX_BAD_WORDS_TOKENS} tokens in all",
    "response_format": f"text, json_object, json_schema or structural_tag; {_CONSTRAINT}",
    "structured_outputs": _CONSTRAINT,
    "guided_json": _CONSTRAINT,
    "guided_regex": _CONSTRAINT,
    "guided_choice": f"{MAX_CHOICES} texts; {_CONSTRAINT}",
    "guided_grammar": _CONSTRAINT,
    "guided_whitespace_pattern": "a regular expression",
    "logit_bias": f"{MAX_LOGIT_BIAS} entries, {_IDS}, -100 to 100",
    "stream": _SWITCH,
    "stream_options": "include_usage and continuous_usage_stats, true or false",
    "echo": _SWITCH,
    "add_special_tokens": _SWITCH,
    "priority": f"-{MAX_PRIORITY} to {MAX_PRIORITY}; not 0 only with `--scheduling-policy priority`",
    "cache_salt": f"1 to {MAX_CACHE_SALT} characters",
    "request_id": "1 to 128 characters",
    "user": "ignored",
    "use_beam_search": _SWITCH,
    "length_penalty": "-100 to 100",
    "vllm_xargs": f"{MAX_EXTRA_ARGS_BYTES} bytes",
    "return_token_ids": _SWITCH,
    "return_tokens_as_token_ids": _SWITCH,
    "return_token_strs": _SWITCH,
    "prompt": f"{MAX_PROMPTS} prompts, each of {_TOKENS_OF_CONTEXT}",
    "prompt_embeds": f"{MAX_PROMPTS} tensors as base64 of torch.save, each within the context; refused unless "
    "`--enable-prompt-embeds`",
    ("POST /tokenize", "prompt"): f"one text of {MAX_TOKEN_CHARACTERS} characters a token of the context",
    "messages": f"{MAX_MESSAGES} messages; with documents and chat_template_kwargs {_TOKENS_OF_CONTEXT}",
    "documents": "counted with messages",
    "chat_template_kwargs": "counted with messages; names that steer the rendering are refused",
    "chat_template": "refused unless `--trust-request-chat-template`",
    "reasoning_effort": f"{', '.join(REASONING_EFFORTS)}; passed to the chat template",
    "add_generation_prompt": _SWITCH,
    "continue_final_message": _SWITCH,
    "parallel_tool_calls": _SWITCH,
    "include_reasoning": _SWITCH,
    "thinking_token_budget": f"-1 to {INT32_MAX}; of models whose reasoning is told apart",
    "tools": f"{MAX_TOOLS} functions, counted with messages",
    "tool_choice": "none, auto, required, one of the tools, or allowed_tools",
    "tokens": f"{MAX_DETOKENIZED} ids, {_IDS}",
    "input": f"as messages: text, or {MAX_MESSAGES} items",
    "instructions": "counted with input",
    "max_output_tokens": "the context",
    "max_tool_calls": "ignored: of tools that a server runs, and there are none",
    "text": "format: text, json_object or json_schema; verbosity: medium",
    "reasoning": "effort as reasoning_effort; summary: auto, and none is written",
    "include": "message.output_text.logprobs, reasoning.encrypted_content",
    "store": "true only with `--responses-store-bytes`",
    "background": "true only with `--responses-store-bytes`",
    "previous_response_id": "a stored response of the same key",
    "safety_identifier": "ignored",
    "prompt_cache_key": "ignored",
    ("POST /v1/responses", "metadata"): "returned as it is",
    ("POST /v1/responses", "tools"): "functions, counted with input",
    ("POST /v1/responses", "tool_choice"): "none, auto, required, or one of the tools",
    ("POST /v1/responses", "structured_outputs"): "as in a chat completion",
    "token_ids": f"the context, {_IDS}",
    "sampling_params": "the sampling fields of a completion, by the same limits",
    "output_mode": "tokens or text",
    "system": "counted with messages",
    "stop_sequences": f"{MAX_STOP_STRINGS} strings of 1 to {MAX_CHARACTERS} characters",
    "metadata": "ignored",
    "thinking": f"budget_tokens from {MIN_THINKING_BUDGET}, less than max_tokens",
    "output_config": "effort as reasoning_effort; format is a JSON schema",
    **{(route, "tools"): "counted with messages; tools with an input_schema" for route in (_MESSAGES, _COUNT)},
    **{(route, "input"): f"{MAX_INPUTS} texts or lists of ids, each of {_TOKENS_OF_CONTEXT}" for route in _INPUTS},
    **dict.fromkeys(("text_1", "text_2", "data_1", "data_2", "queries", "items", "texts"), _TEXTS),
    **{(route, "documents"): _TEXTS for route in ("POST /score", "POST /rerank")},
    "query": f"{_TOKENS_OF_CONTEXT}",
    "encoding_format": "float or base64",
    "dimensions": "of matryoshka models, to the width of their embeddings",
    "output_dimension": "as dimensions",
    "use_activation": _SWITCH,
    "prompt_name": "one of the model's",
    "task": "one of the model's",
    "step_tag_id": _IDS,
    "returned_token_ids": f"{MAX_RETURNED_LABELS} numbers of classes",
    "instruction": "of models that read both texts through a template",
    "top_n": "from 0; 0 is all",
    "return_documents": _SWITCH,
    "max_tokens_per_doc": "refused; use truncate_prompt_tokens",
    "input_type": "search_query, search_document, classification or clustering",
    "embedding_types": "float, base64, binary, ubinary",
    "truncate": "NONE or END",
    ("POST /v2/embed", "max_tokens"): "1 to the context",
    **{(route, "tool_choice"): "auto, any, none, or one of the tools" for route in (_MESSAGES, _COUNT)},
}


def limit_of(route: str, field: str) -> str:
    """What the field may hold; KeyError when nobody has said."""
    return FIELDS.get((route, field)) or FIELDS[field]
