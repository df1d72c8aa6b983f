"""Prompts to measure with: `load_samples` makes them from one of five kinds of data, the same for the same seed.

random: random words of exact token lengths, optionally behind a common prefix. prefix_repetition: few long prefixes,
each under many suffixes. sonnet: verse made by rule, a common beginning and different lines. sharegpt: first questions of
recorded conversations, as long an answer as was given. custom: a JSON Lines file of one's own.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from octavo.bench.verse import lines_of_verse
from octavo.config.options import check_options, option
from octavo.errors import ClientError, ConfigError
from octavo.logger import get_logger
from octavo.tokenizer.tokenizer import Tokenizer

logger = get_logger(__name__)

T = TypeVar("T")

DATASETS = ("random", "sharegpt", "prefix_repetition", "sonnet", "custom")
_GROUP = "Data"
_READ_CHARACTERS = 1 << 20
_MIN_TOKENS = 4  # of a question or an answer in sharegpt that is worth measuring
_MAX_PROMPT_TOKENS, _MAX_TOTAL_TOKENS = 1024, 2048
_MIN_WORDS = 64  # fewer whole-word tokens than this would make prompts of one word
_MAX_TRIES = 10


@dataclass(kw_only=True)
class DatasetArgs:
    """Options of the data, shared by `serve` and `throughput`."""

    dataset_name: str = option("random", "Kind of data.", group=_GROUP, choices=DATASETS)
    dataset_path: str | None = option(
        None, "File of sharegpt (JSON), custom (JSON Lines) or, if given, sonnet (text).", group=_GROUP
    )
    num_prompts: int = option(1000, "Number of requests.", group=_GROUP, low=1)
    input_len: int | None = option(None, "Prompt tokens, whatever the kind of data made by rule.", group=_GROUP, low=1)
    output_len: int | None = option(None, "Answer tokens, whatever the kind of data.", group=_GROUP, low=1)
    no_oversample: bool = option(False, "Send fewer requests rather than a prompt twice.", group=_GROUP)
    disable_shuffle: bool = option(False, "Take the prompts of a file in their order.", group=_GROUP)
    skip_chat_template: bool = option(
        False, "Send custom prompts as they are, without the model's chat template.", group=_GROUP
    )
    random_input_len: int = option(1024, "Prompt tokens of random.", group=_GROUP, low=1)
    random_output_len: int = option(128, "Answer tokens of random.", group=_GROUP, low=1)
    random_range_ratio: str = option(
        "0.0",
        'Lengths of random spread by this share to both sides, from 0 to below 1; or JSON {"input": X, "output": X}.',
        group=_GROUP,
    )
    random_prefix_len: int = option(0, "Tokens of a prefix common to all prompts of random.", group=_GROUP, low=0)
    prefix_repetition_prefix_len: int = option(256, "Tokens of a prefix.", group=_GROUP, low=1)
    prefix_repetition_suffix_len: int = option(256, "Tokens of a suffix.", group=_GROUP, low=1)
    prefix_repetition_num_prefixes: int = option(10, "Number of prefixes.", group=_GROUP, low=1)
    prefix_repetition_output_len: int = option(128, "Answer tokens.", group=_GROUP, low=1)
    sonnet_input_len: int = option(550, "Prompt tokens of sonnet, about.", group=_GROUP, low=1)
    sonnet_output_len: int = option(150, "Answer tokens of sonnet.", group=_GROUP, low=1)
    sonnet_prefix_len: int = option(200, "Tokens of sonnet's common beginning, about.", group=_GROUP, low=0)
    sharegpt_output_len: int | None = option(
        None, "Answer tokens of sharegpt. Default: as many as the recorded answer has.", group=_GROUP, low=1
    )
    custom_output_len: int = option(
        256, "Answer tokens of custom; -1: each line's output_tokens.", group=_GROUP, low=-1
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.custom_output_len == 0:
            raise ConfigError("custom_output_len=0 asks for nothing; give a length, or -1.", param="custom_output_len")
        self.range_ratios()

    def range_ratios(self) -> tuple[float, float]:
        """How far input and output lengths of random spread."""
        try:
            given = json.loads(self.random_range_ratio)
            pair = (given["input"], given["output"]) if isinstance(given, dict) else (given, given)
            ratios = (float(pair[0]), float(pair[1]))
        except (ValueError, TypeError, KeyError):
            ratios = (-1.0, -1.0)
        if not all(0 <= ratio < 1 for ratio in ratios):
            raise ConfigError(
                f"random_range_ratio={self.random_range_ratio!r} is not allowed; it must be a number from 0 to below 1, "
                'or {"input": X, "output": X}.',
                param="random_range_ratio",
            )
        return ratios


@dataclass(frozen=True, slots=True)
class Sample:
    """One request's prompt and the number of tokens its answer should have."""

    prompt: str
    prompt_len: int
    output_len: int
    token_ids: list[int] | None = (
        None  # the prompt as ids, where they were drawn; `prompt` is empty without a tokenizer
    )


def load_samples(
    args: DatasetArgs, seed: int, tokenizer: Tokenizer | None, *, vocab_size: int | None = None
) -> list[Sample]:
    """`args.num_prompts` samples, or fewer with `no_oversample`.

    Without a tokenizer only `random` works, and needs `vocab_size`: its prompts are token ids.
    """
    rng = np.random.default_rng(seed)
    if args.dataset_name == "random":
        return _random(args, rng, _Words(rng, tokenizer, vocab_size))
    if tokenizer is None:
        raise ClientError(
            f"dataset_name={args.dataset_name} needs a tokenizer to count tokens; give --tokenizer.", param="tokenizer"
        )
    if args.dataset_name == "prefix_repetition":
        return _prefix_repetition(args, rng, _Words(rng, tokenizer, None))
    if args.dataset_name == "sonnet":
        return _sonnet(args, rng, tokenizer)
    samples = _sharegpt(args, rng, tokenizer) if args.dataset_name == "sharegpt" else _custom(args, rng, tokenizer)
    if not samples:
        raise ClientError(f"{args.dataset_path} holds no usable prompt.", param="dataset_path")
    if args.no_oversample or len(samples) >= args.num_prompts:
        return samples
    logger.info("%s has %d usable prompts; they are repeated.", args.dataset_path, len(samples))
    return [samples[i % len(samples)] for i in range(args.num_prompts)]


# Made by rule


class _Words:
    """Draws random texts of a given number of tokens."""

    def __init__(self, rng: np.random.Generator, tokenizer: Tokenizer | None, vocab_size: int | None):
        self._rng = rng
        self._tokenizer = tokenizer
        self.makes_text = tokenizer is not None
        if tokenizer is None:
            if not vocab_size:
                raise ClientError("random prompts need a tokenizer; give --tokenizer.", param="tokenizer")
            self._ids = np.arange(vocab_size)
            return
        # Whole words with their space in front survive decoding and encoding, so that lengths come out as asked. Small
        # vocabularies have too few of them; then plain characters, then anything.
        texts = {i: tokenizer.token_text(i) for i in range(len(tokenizer)) if i not in tokenizer.special_ids}
        for pattern in (r" [A-Za-z]+", r"[ -~]+", r"(?s:.*)"):
            ids = [i for i, text in texts.items() if re.fullmatch(pattern, text)]
            if len(ids) >= _MIN_WORDS:
                break
        self._ids = np.array(ids)

    def draw_ids(self, length: int) -> list[int]:
        """Random token ids."""
        drawn: list[int] = self._rng.choice(self._ids, length).tolist()
        return drawn

    def draw_text(self, length: int) -> str:
        """Random text that encodes to `length` tokens; as near as it gets for vocabularies without whole words."""
        assert self._tokenizer is not None
        ids = self.draw_ids(length)
        for _ in range(_MAX_TRIES):
            text = self._tokenizer.decode(ids)
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            if len(ids) == length:
                return text
            ids = ids[:length] + self.draw_ids(max(length - len(ids), 0))
        return self._tokenizer.decode(ids)

    def sample(self, prefix: str, length: int, output_len: int) -> Sample:
        """A text of `prefix` and `length` random tokens."""
        assert self._tokenizer is not None
        text = prefix + self.draw_text(length)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return Sample(text, len(ids), output_len, ids)


def _random(args: DatasetArgs, rng: np.random.Generator, words: _Words) -> list[Sample]:
    input_ratio, output_ratio = args.range_ratios()
    inputs = _spread(rng, args.input_len or args.random_input_len, input_ratio, args.num_prompts)
    outputs = _spread(rng, args.output_len or args.random_output_len, output_ratio, args.num_prompts)
    if not words.makes_text:
        prefix_ids = words.draw_ids(args.random_prefix_len)
        drawn = [prefix_ids + words.draw_ids(length) for length in inputs]
        return [Sample("", len(ids), output, ids) for ids, output in zip(drawn, outputs, strict=True)]
    prefix = words.draw_text(args.random_prefix_len) if args.random_prefix_len else ""
    return [words.sample(prefix, length, output) for length, output in zip(inputs, outputs, strict=True)]


def _spread(rng: np.random.Generator, length: int, ratio: float, num: int) -> list[int]:
    """Lengths drawn evenly from length * (1 - ratio) … length * (1 + ratio), at least 1."""
    low, high = max(1, int(length * (1 - ratio))), int(np.ceil(length * (1 + ratio)))
    drawn: list[int] = rng.integers(low, high, num, endpoint=True).tolist()
    return drawn


def _prefix_repetition(args: DatasetArgs, rng: np.random.Generator, words: _Words) -> list[Sample]:
    num_prefixes = min(args.prefix_repetition_num_prefixes, args.num_prompts)
    prefixes = [words.draw_text(args.prefix_repetition_prefix_len) for _ in range(num_prefixes)]
    suffix_len = args.input_len or args.prefix_repetition_suffix_len
    output_len = args.output_len or args.prefix_repetition_output_len
    samples = [words.sample(prefixes[i % num_prefixes], suffix_len, output_len) for i in range(args.num_prompts)]
    return samples if args.disable_shuffle else _shuffled(samples, rng)


def _sonnet(args: DatasetArgs, rng: np.random.Generator, tokenizer: Tokenizer) -> list[Sample]:
    """A task, a common run of lines, then lines drawn for each prompt until the length is reached."""
    if args.dataset_path is None:
        lines = lines_of_verse(512, rng)
    else:
        lines = [line for line in _read_text(args.dataset_path).splitlines() if line.strip()]
        if not lines:
            raise ClientError(f"{args.dataset_path} holds no line of text.", param="dataset_path")
    sizes = [len(tokenizer.encode(line + "\n", add_special_tokens=False)) for line in lines]
    task = "Go on with this poem, as long as you can:\n\n"
    budget = (args.input_len or args.sonnet_input_len) - len(tokenizer.encode(task, add_special_tokens=False))
    if budget < max(sizes):
        raise ClientError(f"sonnet prompts cannot be that short; ask for {budget + max(sizes)} tokens or more.")
    common, used = 0, 0
    while common < len(lines) - 1 and used + sizes[common] <= min(args.sonnet_prefix_len, budget):
        used += sizes[common]
        common += 1
    samples = []
    for _ in range(args.num_prompts):
        chosen, size = list(range(common)), used
        while size + sizes[line := int(rng.integers(common, len(lines)))] <= budget:
            chosen.append(line)
            size += sizes[line]
        text = task + "\n".join(lines[i] for i in chosen)
        ids = tokenizer.encode(text, add_special_tokens=False)
        samples.append(Sample(text, len(ids), args.output_len or args.sonnet_output_len, ids))
    return samples


# From files


def _sharegpt(args: DatasetArgs, rng: np.random.Generator, tokenizer: Tokenizer) -> list[Sample]:
    """Question and answer that open each conversation; very short and very long ones are left out."""
    path = _required_path(args)
    pairs: list[tuple[str, str]] = []
    with open(path, encoding="utf-8") as stream:
        for conversation in objects_of_array(stream, path):
            turns = conversation.get("conversations") or conversation.get("conversation") or []
            if len(turns) >= 2:
                pairs.append((str(turns[0].get("value", "")), str(turns[1].get("value", ""))))
    if not args.disable_shuffle:
        pairs = _shuffled(pairs, rng)
    samples: list[Sample] = []
    for question, answer in pairs:
        if len(samples) == args.num_prompts:
            break
        ids = tokenizer.encode(question)
        output_len = args.output_len or args.sharegpt_output_len
        answer_len = output_len or len(tokenizer.encode(answer, add_special_tokens=False))
        is_short = len(ids) < _MIN_TOKENS or (output_len is None and answer_len < _MIN_TOKENS)
        is_long = len(ids) > _MAX_PROMPT_TOKENS or len(ids) + answer_len > _MAX_TOTAL_TOKENS
        if not is_short and not is_long:
            samples.append(Sample(question, len(ids), answer_len, ids))
    return samples


def objects_of_array(stream: Any, name: object) -> Iterator[dict[str, Any]]:
    """The objects of a JSON array in a text stream, one by one.

    A file that is cut off in the middle gives the objects before the cut, with a word in the log; known copies of the
    ShareGPT file are. ClientError when it is no array of objects.
    """
    decoder = json.JSONDecoder()
    buffer = stream.read(_READ_CHARACTERS).lstrip()
    if not buffer.startswith("["):
        raise ClientError(f"{name} is not a JSON array.", param="dataset_path")
    buffer, position, count = buffer[1:], 0, 0
    while True:
        position = _skip(buffer, position)
        if buffer[position : position + 1] == "]":
            return
        try:
            item, position = decoder.raw_decode(buffer, position)
        except ValueError:
            # Most often the object goes on in the next piece; reading as much again keeps the work linear.
            more = stream.read(max(_READ_CHARACTERS, len(buffer) - position))
            if not more:
                logger.warning("%s is cut off or damaged after %d objects; what follows is left out.", name, count)
                return
            buffer, position = buffer[position:] + more, 0
            continue
        if not isinstance(item, dict):
            raise ClientError(f"{name} holds a {type(item).__name__} where an object is needed.", param="dataset_path")
        count += 1
        yield item


_SEPARATORS = re.compile(r"[\s,]*")


def _skip(text: str, position: int) -> int:
    match = _SEPARATORS.match(text, position)
    assert match is not None  # the pattern matches the empty string
    return match.end()


def _custom(args: DatasetArgs, rng: np.random.Generator, tokenizer: Tokenizer) -> list[Sample]:
    """Lines `{"prompt": text, "output_tokens": number}`, the second with custom_output_len -1 only."""
    path = _required_path(args)
    samples = []
    lines = [(number, line) for number, line in enumerate(_read_text(path).splitlines(), 1) if line.strip()]
    if not args.disable_shuffle:
        lines = _shuffled(lines, rng)
    for number, line in lines[: args.num_prompts]:
        try:
            entry = json.loads(line)
            prompt = entry["prompt"]
            output_len = args.output_len or args.custom_output_len
            output_len = int(entry["output_tokens"]) if output_len == -1 else output_len
        except (ValueError, TypeError, KeyError) as error:
            raise ClientError(
                f'{path}, line {number} is not {{"prompt": text}} with what custom_output_len asks for: {error!r}.',
                param="dataset_path",
            ) from None
        if not isinstance(prompt, str) or not prompt or output_len < 1:
            raise ClientError(f"{path}, line {number}: prompt must be text and output_tokens above 0.")
        if not args.skip_chat_template:
            prompt = tokenizer.encode_chat([{"role": "user", "content": prompt}]).text
        ids = tokenizer.encode(prompt, add_special_tokens=args.skip_chat_template)
        samples.append(Sample(prompt, len(ids), output_len, ids))
    return samples


def _required_path(args: DatasetArgs) -> Path:
    if args.dataset_path is None:
        raise ClientError(f"dataset_name={args.dataset_name} needs --dataset-path.", param="dataset_path")
    return Path(args.dataset_path)


def _read_text(path: str | Path) -> str:
    return Path(path).read_text(encoding="utf-8")


def _shuffled(items: list[T], rng: np.random.Generator) -> list[T]:
    return [items[i] for i in rng.permutation(len(items))]
