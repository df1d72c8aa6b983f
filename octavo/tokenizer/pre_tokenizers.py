r"""How byte-level BPE vocabularies cut text into words before merging: the meaning of GGUF's `tokenizer.ggml.pre`.

A GGUF names its pre-tokenizer instead of describing it. One row here is one name: regular expressions applied one after
the other (each cuts what the previous ones left, matches stand alone), then every byte becomes one character. The
expressions are those of the models' own `tokenizer.json`.
"""

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from octavo.errors import LoadError
from octavo.logger import get_logger

logger = get_logger(__name__)

_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_THREE_DIGITS = r"[0-9][0-9][0-9]"
_PUNCTUATION = r"[\p{P}$+<=>^~|`]+"


def _tiktoken(numbers: str) -> str:
    """The pattern of cl100k and its children, which differ in how many digits make a word."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased(numbers: str, suffix: str) -> str:
    """The pattern of o200k and Tekken: words break where lower case turns into upper case."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}"
    return rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


@dataclass(frozen=True)
class PreTokenizer:
    """One way of cutting text. `ignore_merges`: a word that is in the vocabulary as a whole is taken as it is."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False  # used where the file has no add_bos_token flag
    nfc: bool = False  # text is composed to Unicode NFC first, as the models' own tokenizers do

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The Rust object: the cuts, then bytes as characters."""
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> normalizers.Normalizer | None:
        """What happens to the text before it is cut."""
        return normalizers.NFC() if self.nfc else None


_DEEPSEEK_V3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
        + _SPACES,
    )
)
_DEEPSEEK_LLM = PreTokenizer(
    (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        r"[一-龥ࠀ-一가-퟿]+",
        r"\p{N}+",
    )
)
_GPT2_WORDS = PreTokenizer((_GPT2,))
_GPT_NEOX = PreTokenizer((_GPT2,), nfc=True)
_GPT2_SINGLE_DIGITS = PreTokenizer((_DIGIT, _GPT2))
_CL100K = PreTokenizer((_tiktoken(r"\p{N}{1,3}"),))
_LLAMA3 = PreTokenizer((_tiktoken(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_GLM4 = PreTokenizer((_tiktoken(r"\p{N}{1,3}"),), ignore_merges=True)
_QWEN2 = PreTokenizer((_tiktoken(_DIGIT),), nfc=True)
_CL100K_SINGLE_DIGITS = PreTokenizer((_tiktoken(_DIGIT),))
_QWEN35 = PreTokenizer(
    (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
        rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ),
    nfc=True,
)
_SEED_CODER = PreTokenizer(
    (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
)
_BLOOM_WORD = r" ?[^(\s|.,!?…。，、।۔،)]+"
_BLOOM = PreTokenizer((_BLOOM_WORD,))
_O200K = PreTokenizer((_cased(r"\p{N}{1,3}", rf"{_CONTRACTIONS}?"),))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", _THREE_DIGITS)),
    "gpt-2": _GPT2_WORDS,
    "phi-2": _GPT2_WORDS,
    "mpt": _GPT_NEOX,
    "olmo": _GPT_NEOX,
    "jais": _GPT2_WORDS,
    "trillion": _GPT2_WORDS,
    "granite-docling": _GPT2_WORDS,
    "exaone4": _GPT2_WORDS,
    "gigachat": _GPT2_WORDS,
    "a.x-4.0": _GPT2_WORDS,
    "mellum": _GPT2_WORDS,
    "smollm": _GPT2_SINGLE_DIGITS,
    "starcoder": _GPT2_SINGLE_DIGITS,
    "refact": _GPT2_SINGLE_DIGITS,
    "codeshell": _GPT2_SINGLE_DIGITS,
    "exaone": _GPT2_SINGLE_DIGITS,
    "minerva-7b": _GPT2_SINGLE_DIGITS,
    "command-r": PreTokenizer((_DIGIT, _GPT2), nfc=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "chatglm-bpe": _CL100K,
    "glm4": _GLM4,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "qwen35": _QWEN35,
    "stablelm2": _CL100K_SINGLE_DIGITS,
    "hunyuan": _CL100K_SINGLE_DIGITS,
    "grok-2": _CL100K_SINGLE_DIGITS,
    "seed-coder": _SEED_CODER,
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", _DIGIT)),
    "deepseek-v3": _DEEPSEEK_V3,
    "hunyuan-dense": _DEEPSEEK_V3,
    "falcon": PreTokenizer((_PUNCTUATION, _GPT2, _THREE_DIGITS)),
    "tekken": PreTokenizer((_cased(_DIGIT, ""),), ignore_merges=True, add_bos=True),
    "gpt-4o": _O200K,
    "llama4": _O200K,
    "kanana2": _O200K,
    "minimax-m2": _O200K,
    "bloom": _BLOOM,
    "poro-chat": _BLOOM,
    "gpt3-finnish": _BLOOM,
    "viking": PreTokenizer((_BLOOM_WORD, _DIGIT)),
}


def find_pre_tokenizer(name: str | None) -> PreTokenizer:
    """The row of a GGUF's `tokenizer.ggml.pre`.

    A file without the key is read as "default" with a warning; a name that is not in the table raises LoadError, since
    a wrong guess would give wrong ids without a sign.
    """
    if name is None:
        logger.warning(
            "the GGUF names no pre-tokenizer (tokenizer.ggml.pre); using 'default', ids may differ slightly."
        )
        name = "default"
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise LoadError(
            f"tokenizer.ggml.pre={name!r} is not supported; known are {', '.join(sorted(PRE_TOKENIZERS))}. "
            "Give the original model's tokenizer with --tokenizer instead."
        ) from None
