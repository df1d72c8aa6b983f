"""From what clients send to token ids: texts, ids and conversations, checked before anything is queued.

Long texts are tokenized on another thread, so that one long prompt does not stall everybody's stream.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, cast

from octavo.config.server_args import ServerArgs
from octavo.engine.prompt_embeds import check_enabled, load_embeds
from octavo.errors import ClientError, ContextLengthError
from octavo.server.engine_client import EngineClient
from octavo.server.openai.protocol import MAX_PROMPTS, ChatCompletionRequest, CompletionRequest, TokenizeRequest
from octavo.server.reasoning_formats import SWITCHES
from octavo.server.tool_formats import ToolFormat
from octavo.server.tool_prompt import explain_tools
from octavo.server.tools import read_tools
from octavo.tokenizer.chat_template import ContentFormat
from octavo.tokenizer.template_traits import template_traits
from octavo.tokenizer.tokenizer import ChatPrompt
from octavo.types.prompts import EmbedsPrompt, TokensPrompt

T = TypeVar("T")

INLINE_CHARACTERS = 8192  # tokenized in about a millisecond; a thread would cost more than it saves
# No vocabulary has longer tokens than this, so a text of more than this many characters a token of context cannot fit.
MAX_TOKEN_CHARACTERS = 256
MAX_DETOKENIZED = 1 << 20  # ids in one call of /detokenize


class PromptMaker:
    """Makes prompts for one engine."""

    def __init__(self, engine: EngineClient, args: ServerArgs, tool_format: ToolFormat | None = None):
        self.model = engine.config.model
        self.tool_format = tool_format
        self.engine = engine
        self.args = args

    async def completion(self, request: CompletionRequest) -> list[TokensPrompt | EmbedsPrompt]:
        """The prompts of a completions body, in order: embeddings first, as in vLLM."""
        prompts: list[TokensPrompt | EmbedsPrompt] = []
        if request.prompt_embeds is not None:
            prompts += await self._embeds(request.prompt_embeds)
        if request.prompt or not prompts:
            prompts += await self._texts(request)
        if len(prompts) > MAX_PROMPTS:
            raise ClientError(f"prompt and prompt_embeds hold {len(prompts)} prompts; at most {MAX_PROMPTS} fit.")
        if request.cache_salt is not None:
            for prompt in prompts:
                prompt["cache_salt"] = request.cache_salt
        return prompts

    async def _embeds(self, given: str | list[str]) -> list[EmbedsPrompt]:
        """Tensors are read one at a time, on another thread."""
        check_enabled(self.model)
        texts = [given] if isinstance(given, str) else given
        if not 1 <= len(texts) <= MAX_PROMPTS:
            raise ClientError(
                f"prompt_embeds holds {len(texts)} prompts; send 1 to {MAX_PROMPTS}.", param="prompt_embeds"
            )
        return [EmbedsPrompt(prompt_embeds=await asyncio.to_thread(load_embeds, text, self.model)) for text in texts]

    async def _texts(self, request: CompletionRequest) -> list[TokensPrompt]:
        if request.echo and self.model.encoder_decoder is not None:
            raise ClientError(
                "echo=true is not supported by this model: its prompt goes to an encoder, and no answer goes on from it.",
                param="echo",
            )
        add_special_tokens = request.add_special_tokens is not False
        prompts: list[TokensPrompt] = []
        for prompt in split_prompts(request.prompt):
            if isinstance(prompt, str):
                token_ids = await self.encode(
                    prompt, add_special_tokens, cut=request.truncate_prompt_tokens is not None
                )
                made = TokensPrompt(prompt_token_ids=token_ids, prompt=prompt)
            else:
                self.check_ids(prompt, "prompt")
                made = TokensPrompt(prompt_token_ids=prompt)
            if not made["prompt_token_ids"]:
                raise ClientError("the prompt is empty; it must hold at least one token.", param="prompt")
            prompts.append(made)
        return prompts

    async def chat(
        self, request: ChatCompletionRequest | TokenizeRequest, cache_salt: str | None = None
    ) -> TokensPrompt:
        """The prompt of a conversation."""
        template = request.chat_template
        if template is not None and not self.args.trust_request_chat_template:
            raise ClientError(
                "chat_template is not taken from requests; start with --trust-request-chat-template to allow it.",
                param="chat_template",
            )
        assert request.messages is not None
        size = _count_characters([request.messages, request.documents, request.tools, request.chat_template_kwargs])
        self.check_length(size)
        tokenizer, variables = self.engine.tokenizer, self.variables(request)
        messages, tools = self._with_tools(request, template)

        def render() -> ChatPrompt:
            return tokenizer.encode_chat(
                messages,
                tools=tools,
                documents=request.documents,
                chat_template=template,
                content_format=cast(ContentFormat, self.args.chat_template_content_format),
                # A new turn and a continued one exclude each other; asking for one is saying no to the other.
                add_generation_prompt=request.add_generation_prompt is not False and not request.continue_final_message,
                continue_final_message=bool(request.continue_final_message),
                chat_template_kwargs=variables,
                add_special_tokens=bool(request.add_special_tokens),
                escape_special_tokens=self.args.escape_special_tokens,
            )

        prompt = await self._run(render, size, inline=template is None)
        made = TokensPrompt(prompt_token_ids=prompt.token_ids, prompt=prompt.text)
        if cache_salt is not None:
            made["cache_salt"] = cache_salt
        return made

    def _with_tools(
        self, request: ChatCompletionRequest | TokenizeRequest, template: str | None
    ) -> tuple[list[Any], list[Any] | None]:
        """(messages, tools) for the template: one that says nothing of tools gets them as text."""
        messages, tools = request.messages or [], request.tools
        read_tools(tools)
        is_off = getattr(request, "tool_choice", None) == "none"
        if is_off and self.args.exclude_tools_when_tool_choice_none:
            tools = None
        if not tools and not any(
            isinstance(m, dict) and ("tool_calls" in m or m.get("role") == "tool") for m in messages
        ):
            return messages, None
        source, _ = self.engine.tokenizer.choose_chat_template(template, bool(tools))
        traits = template_traits(source)
        if traits.knows_tools:
            return messages, tools
        return explain_tools(messages, None if is_off else tools, self.tool_format, traits), None

    async def encode(self, text: str, add_special_tokens: bool, cut: bool = False) -> list[int]:
        """Token ids of one text; `cut` says that the engine will shorten it, so that any length is fine."""
        if not cut:
            self.check_length(len(text))
        tokenizer = self.engine.tokenizer
        return await self._run(lambda: tokenizer.encode(text, add_special_tokens), len(text))

    async def decode(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens included."""
        tokenizer = self.engine.tokenizer
        if len(token_ids) > MAX_DETOKENIZED:
            raise ClientError(f"tokens holds {len(token_ids)} ids; at most {MAX_DETOKENIZED} fit.", param="tokens")
        self.check_ids(token_ids, "tokens")
        return await self._run(lambda: tokenizer.decode(token_ids, skip_special_tokens=False), len(token_ids))

    def check_ids(self, token_ids: list[int], param: str) -> None:
        """Refuse ids outside the vocabulary."""
        size = self.model.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < size:
                raise ClientError(
                    f"{param} has token id {token_id}, but the vocabulary holds 0 to {size - 1}.", param=param
                )

    def variables(self, request: ChatCompletionRequest | TokenizeRequest) -> dict[str, Any]:
        """What the chat template is told besides the conversation. No effort at reasoning switches thinking off."""
        effort = getattr(request, "reasoning_effort", None)
        efforts = {} if effort is None else {"reasoning_effort": effort}
        switches = dict.fromkeys(SWITCHES, False) if effort == "none" else {}
        defaults = self.args.default_chat_template_kwargs or {}
        return {**defaults, **switches, **(request.chat_template_kwargs or {}), **efforts}

    def check_length(self, num_characters: int) -> None:
        context = self.model.max_model_len
        if num_characters > context * MAX_TOKEN_CHARACTERS:
            raise ContextLengthError(
                f"the prompt has {num_characters} characters, which cannot fit the context of {context} tokens.",
                param="prompt",
            )

    async def _run(self, work: Callable[[], T], size: int, inline: bool = True) -> T:
        return work() if inline and size <= INLINE_CHARACTERS else await asyncio.to_thread(work)


def split_prompts(value: Any, name: str = "prompt", most: int = MAX_PROMPTS) -> list[str] | list[list[int]]:
    """The four shapes of `prompt` as a list of texts or a list of lists of ids; `name` is the field's."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ClientError(f"{name} must be a string, a list of strings, token ids or a list of token ids.", param=name)
    if not value:
        raise ClientError(f"{name} is an empty list.", param=name)
    if isinstance(value[0], (str, list)):
        if len(value) > most:
            raise ClientError(f"{name} holds {len(value)} prompts; at most {most} fit.", param=name)
    else:
        value = [value]
    kind = type(value[0])
    for index, item in enumerate(value):
        if type(item) is not kind:
            raise ClientError(f"{name} mixes texts and token ids; send one kind.", param=name)
        if kind is list:
            _check_integers(item, f"{name}[{index}]", name)
    return value


def _check_integers(items: list[Any], place: str, param: str) -> None:
    for item in items:
        if type(item) is not int:  # true is an int to isinstance
            raise ClientError(f"{place} holds {item!r}; token ids are integers.", param=param)


def _count_characters(value: Any) -> int:
    """Characters of all text inside a value of JSON."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_count_characters, value.values()))
    return sum(map(_count_characters, value)) if isinstance(value, list) else 0
