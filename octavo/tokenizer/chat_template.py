"""From a conversation to the text of a prompt, through a model's chat template."""

import secrets
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jinja2

from octavo.errors import ClientError
from octavo.tokenizer.isolated_template import render_isolated
from octavo.tokenizer.jinja_environment import TemplateRefusal, make_environment
from octavo.tokenizer.messages import ContentFormat, prepare_messages, to_plain
from octavo.tokenizer.template_traits import template_traits

# What `chat_template_kwargs` may not name: the engine sets these, or transformers gives them a meaning of its own.
RESERVED_VARIABLES = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "tokenizer",
        "tokenizer_kwargs",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "raise_exception",
        "strftime_now",
        "namespace",
        "bos_token",
        "eos_token",
        "unk_token",
        "sep_token",
        "pad_token",
        "cls_token",
        "mask_token",
    }
)
# Stands behind the last message while it is rendered, to find where the text must end. Digits survive case filters
# and JSON; a space after it shows whether the template trims.
_END = "".join(str(secrets.randbelow(10)) for _ in range(40))


def render_chat(
    source: str,
    messages: list[Any],
    *,
    tools: list[Any] | None = None,
    documents: list[Any] | None = None,
    content_format: ContentFormat = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    special_tokens: Mapping[str, str] | None = None,
    variables: Mapping[str, Any] | None = None,
    trusted: bool = True,
    escape: Callable[[Any], Any] | None = None,
) -> str:
    """Render `messages` with the template `source`.

    `variables` are extra names the template may use; `special_tokens` (bos_token, …) are always there. `trusted=False`
    renders in a limited process. `escape` is applied to all plain data that comes from the client. Whatever a template
    does with a conversation is the client's to change, so every failure is a ClientError with the template's words.
    """
    if add_generation_prompt and continue_final_message:
        raise ClientError(
            "add_generation_prompt and continue_final_message exclude each other; set one of them to false.",
            param="continue_final_message",
        )
    _check_variables(variables or {})
    traits = template_traits(source)
    client_data = {
        "messages": prepare_messages(messages, traits, content_format),
        "tools": to_plain(tools) or None,
        "documents": to_plain(documents) or None,
        **to_plain(dict(variables or {})),
    }
    if escape is not None:
        client_data = {name: escape(value) for name, value in client_data.items()}
    if continue_final_message:
        _mark_end(client_data["messages"][-1])
    everything = {**(special_tokens or {}), **client_data, "add_generation_prompt": add_generation_prompt}
    text = _render(source, everything, trusted)
    return _cut_at_end(text) if continue_final_message else text


def _check_variables(variables: Mapping[str, Any]) -> None:
    for name in variables:
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise ClientError(f"chat_template_kwargs: {name!r} is not a name.", param="chat_template_kwargs")
        if name in RESERVED_VARIABLES:
            raise ClientError(
                f"chat_template_kwargs cannot set {name!r}; use the request field of that name where there is one.",
                param="chat_template_kwargs",
            )


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    return make_environment().from_string(source)


def _render(source: str, variables: dict[str, Any], trusted: bool) -> str:
    try:
        return _compile(source).render(**variables) if trusted else render_isolated(source, variables)
    except ClientError:
        raise
    except TemplateRefusal as error:
        raise ClientError(f"the chat template refuses this conversation: {error}", param="messages") from None
    except Exception as error:
        raise ClientError(
            f"the chat template cannot render this conversation: {type(error).__name__}: {error}", param="messages"
        ) from error


def _mark_end(message: dict[str, Any]) -> None:
    """Put the end mark behind the text of the message to be continued."""
    content = message["content"]
    if isinstance(content, str) and not message.get("tool_calls"):
        message["content"] = content + _END + " "
        return
    if isinstance(content, list) and content and not message.get("tool_calls"):
        content[-1]["text"] += _END + " "
        return
    raise ClientError(
        "continue_final_message needs a last message with text content and no tool calls.", param="messages"
    )


def _cut_at_end(text: str) -> str:
    position = text.rfind(_END)
    if position < 0:
        raise ClientError(
            "continue_final_message: the chat template does not write the last message as it is, so there is nothing "
            "to continue.",
            param="continue_final_message",
        )
    kept = text[:position]
    # A template that trims messages was made for texts without trailing space.
    return kept if text.startswith(_END + " ", position) else kept.rstrip()
