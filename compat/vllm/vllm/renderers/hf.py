"""Chat templates."""

from typing import Any


def resolve_chat_template(
    tokenizer: Any, chat_template: str | None = None, tools: list[dict[str, Any]] | None = None, **kwargs: Any
) -> str | None:
    """The template that holds: the one given, else the tokenizer's; None when there is none."""
    if chat_template is not None:
        return chat_template
    try:
        template: str = tokenizer.get_chat_template(chat_template, tools=tools)
    except ValueError:  # the tokenizer has none
        return None
    return template
