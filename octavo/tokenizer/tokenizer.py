"""`Tokenizer`: text to ids and back, special tokens and chat templates, safe under concurrent use.

A thin layer over the Rust library. It never changes the Rust object after it is built, so threads share it freely.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from octavo.errors import ClientError
from octavo.tokenizer.backends import Backend, RustBackend
from octavo.tokenizer.chat_template import ContentFormat, render_chat
from octavo.tokenizer.control_tokens import MARK, ControlTokens
from octavo.tokenizer.token_bytes import TokenBytes, make_token_bytes


@dataclass(frozen=True)
class TokenizerInfo:
    """What a tokenizer's files say besides the vocabulary."""

    special_tokens: dict[str, str] = field(default_factory=dict)  # "bos_token" -> "<s>"
    extra_special_tokens: list[str] = field(default_factory=list)
    chat_templates: dict[str, str] = field(default_factory=dict)  # "default", "tool_use", …
    end_token_ids: list[int] = field(default_factory=list)  # ids that end an answer, as far as the tokenizer knows
    source: str = "the tokenizer"  # folder or file, for messages
    load_hf: Callable[[], Any] | None = None  # makes the transformers tokenizer of the same files


class ChatPrompt(NamedTuple):
    """A rendered conversation."""

    text: str
    token_ids: list[int]


class Tokenizer:
    """Text to token ids and back.

    `decode` and the incremental detokenizer follow one rule: special tokens go or stay as asked, everything else is the
    exact text of its bytes (no clean-up of spaces), and bytes that are no UTF-8 become U+FFFD.
    """

    def __init__(self, backend: Backend, info: TokenizerInfo):
        self.backend = backend
        self.info = info
        self.is_fast = backend.is_fast
        self.special_ids: frozenset[int] = frozenset(i for i, t in backend.added_tokens.items() if t.special)
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.pad_token_id = self._named_id("pad_token")
        self.unk_token_id = self._named_id("unk_token")

    def _named_id(self, name: str) -> int | None:
        token = self.info.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    # Text to ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. A text that starts with the BOS mark itself does not get a second one."""
        return self._one_bos(self.backend.encode(text, add_special_tokens), text, add_special_tokens)

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of several texts."""
        batch = self.backend.encode_batch(texts, add_special_tokens)
        return [self._one_bos(ids, text, add_special_tokens) for ids, text in zip(batch, texts, strict=True)]

    def encode_fitting(
        self, text: str, second: str | None = None, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> tuple[list[int], int | None]:
        """Token ids of a text or a pair, cut to `max_tokens` with the special tokens kept, and where the vocabulary's
        own rules say that the second text's tokens begin.
        """
        texts = [text] if second is None else [text, second]
        ids, types = self.backend.encode_fitting(texts, add_special_tokens, max_tokens)
        return self._one_bos(ids, text, add_special_tokens), types.index(1) if 1 in types else None

    def _one_bos(self, ids: list[int], text: str, add_special_tokens: bool) -> list[int]:
        bos = self.bos_token_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos] and text.startswith(self.bos_token or "\0"):
            return ids[1:]
        return ids

    # Ids to text

    def decode(
        self,
        token_ids: int | Iterable[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of token ids.

        `spaces_between_special_tokens` matters for vocabularies whose decoder puts spaces between tokens (WordPiece):
        when off, neighbouring special tokens stand without. Ids outside the vocabulary have no text.
        """
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if self.token_bytes is None:
            return self._decode_by_library(ids, skip_special_tokens, spaces_between_special_tokens)
        if skip_special_tokens and self.special_ids:
            ids = [token_id for token_id in ids if token_id not in self.special_ids]
        return self.token_bytes.decode(ids)

    def _decode_by_library(self, ids: list[int], skip_special_tokens: bool, spaces_between: bool) -> str:
        if skip_special_tokens or spaces_between:
            return self.backend.decode(ids, skip_special_tokens)
        # Neighbouring special tokens stand in different runs, so nothing is put between them.
        runs: list[list[int]] = [[]]
        after_added = False
        for token_id in ids:
            is_added = token_id in self.backend.added_tokens
            if is_added and after_added:
                runs.append([])
            runs[-1].append(token_id)
            after_added = is_added
        return "".join(self.backend.decode(run, False) for run in runs)

    @cached_property
    def token_bytes(self) -> TokenBytes | None:
        """The bytes of each token, or None for vocabularies that are more than that."""
        return make_token_bytes(self.backend.decoder_state, self.id_to_token)

    def token_text(self, token_id: int) -> str:
        """One token as it reads inside a text (special tokens too); U+FFFD for parts of characters."""
        if self.token_bytes is not None:
            return self.token_bytes[token_id].decode("utf-8", "replace")
        return self.backend.decode([token_id], False)

    def token_to_bytes(self, token_id: int) -> bytes:
        """The bytes of one token inside a text, parts of characters as they are."""
        if self.token_bytes is not None:
            return self.token_bytes[token_id]
        return self.backend.decode([token_id], False).encode("utf-8", "replace")

    # The vocabulary

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, or None."""
        return self.backend.id_to_token(token_id) if token_id >= 0 else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, or None."""
        return self.backend.token_to_id(token)

    def convert_ids_to_tokens(self, token_ids: Iterable[int]) -> list[str | None]:
        """`id_to_token` of each."""
        return [self.id_to_token(token_id) for token_id in token_ids]

    def convert_tokens_to_ids(self, tokens: Iterable[str]) -> list[int | None]:
        """`token_to_id` of each."""
        return [self.backend.token_to_id(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, added tokens included; a fresh dictionary."""
        return self.backend.vocab()

    @cached_property
    def max_token_id(self) -> int:
        """The highest id; ids need not be without gaps."""
        return max(self.backend.vocab().values(), default=-1)

    def __len__(self) -> int:
        """Number of ids from 0 to the highest, added tokens included."""
        return self.max_token_id + 1

    @property
    def vocab_size(self) -> int:
        """`len(self)`."""
        return len(self)

    @property
    def bos_token(self) -> str | None:
        return self.info.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.info.special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self.info.special_tokens.get("pad_token")

    @property
    def unk_token(self) -> str | None:
        return self.info.special_tokens.get("unk_token")

    @cached_property
    def all_special_tokens(self) -> list[str]:
        """Named special tokens and every added token marked special."""
        marked = [token.content for token in self.backend.added_tokens.values() if token.special]
        return list(dict.fromkeys([*self.info.special_tokens.values(), *self.info.extra_special_tokens, *marked]))

    @cached_property
    def all_special_ids(self) -> list[int]:
        """The ids of `all_special_tokens`, in rising order."""
        ids = (self.backend.token_to_id(token) for token in self.all_special_tokens)
        return sorted({token_id for token_id in ids if token_id is not None})

    # Chat

    @property
    def chat_template(self) -> str | None:
        """The default chat template, if there is one."""
        return self.info.chat_templates.get("default")

    def choose_chat_template(self, name_or_text: str | None, has_tools: bool) -> tuple[str, bool]:
        """The template to use and whether it is the tokenizer's own.

        A request may name one of the tokenizer's templates or bring text; without either, `tool_use` is taken when
        there are tools, else `default`. ClientError when there is none.
        """
        templates = self.info.chat_templates
        if name_or_text is not None:
            own = templates.get(name_or_text)
            return (own, True) if own is not None else (name_or_text, name_or_text in templates.values())
        if has_tools and "tool_use" in templates:
            return templates["tool_use"], True
        if "default" in templates:
            return templates["default"], True
        named = f" It has templates named {', '.join(sorted(templates))}; name one." if templates else ""
        raise ClientError(
            f"{self.info.source} has no default chat template, so messages cannot become a prompt.{named} Start with "
            "--chat-template FILE, or use completions with a prompt you format yourself.",
            param="messages",
        )

    def encode_chat(
        self,
        messages: list[Any],
        *,
        tools: list[Any] | None = None,
        documents: list[Any] | None = None,
        chat_template: str | None = None,
        trust_chat_template: bool = False,
        content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
        escape_special_tokens: bool = False,
    ) -> ChatPrompt:
        """Render a conversation and encode it.

        The template writes BOS and turn marks itself, so the tokenizer adds none unless `add_special_tokens`. A
        `chat_template` that is not the tokenizer's own is rendered in a process of its own with limits on time, memory
        and size, unless `trust_chat_template`. With `escape_special_tokens`, nothing that a client wrote (messages,
        tools, documents, template variables) can become a special token: marks typed there are encoded as text.
        """
        template, is_own = self.choose_chat_template(chat_template, bool(tools))
        escape = self.control_tokens.escape if escape_special_tokens else None
        rendered = render_chat(
            template,
            messages,
            tools=tools,
            documents=documents,
            content_format=content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            special_tokens=self.info.special_tokens,
            variables=chat_template_kwargs or {},
            trusted=is_own or trust_chat_template,
            escape=escape,
        )
        if escape is None or MARK not in rendered:
            return ChatPrompt(rendered, self.encode(rendered, add_special_tokens))
        pieces = [piece for piece in rendered.split(MARK) if piece]
        text = "".join(pieces)
        ids = self.backend.encode_pieces(pieces, add_special_tokens)
        return ChatPrompt(text, self._one_bos(ids, text, add_special_tokens))

    def apply_chat_template(
        self, messages: list[Any], *, tokenize: bool = True, add_generation_prompt: bool = False, **options: Any
    ) -> str | list[int]:
        """transformers' spelling of `encode_chat`: the ids, or the text when `tokenize` is off."""
        prompt = self.encode_chat(messages, add_generation_prompt=add_generation_prompt, **options)
        return prompt.token_ids if tokenize else prompt.text

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """The special tokens, as marks to look for in what clients write."""
        return ControlTokens(self.all_special_tokens)

    # transformers

    @cached_property
    def hf(self) -> Any:
        """The transformers tokenizer of the same files, made on first use. Changing it does not change this one."""
        if self.info.load_hf is not None:
            return self.info.load_hf()
        import transformers

        assert isinstance(self.backend, RustBackend)
        extra = [token for token in self.all_special_tokens if token not in self.info.special_tokens.values()]
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=self.backend.rust,
            additional_special_tokens=extra,
            chat_template=self.chat_template,
            clean_up_tokenization_spaces=False,
            **self.info.special_tokens,
        )
