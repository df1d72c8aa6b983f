"""What the core gives its grammars: the vocabulary of the model's tokenizer, read when the first request asks for it."""

from importlib.util import find_spec

from octavo.config.engine import EngineConfig
from octavo.errors import ClientError, ConfigError
from octavo.structured_output.manager import GrammarManager
from octavo.structured_output.vocabulary import Vocabulary


def make_grammar_manager(config: EngineConfig) -> GrammarManager:
    """The manager of a core; it costs nothing until a request follows a grammar."""
    if config.structured_outputs.backend == "xgrammar" and find_spec("xgrammar") is None:
        raise ConfigError("the grammar backend xgrammar is not installed: pip install 'octavo[xgrammar]'.")
    return GrammarManager(config.structured_outputs, lambda: _read_vocabulary(config), config.scheduler.max_num_seqs)


def _read_vocabulary(config: EngineConfig) -> Vocabulary:
    if config.tokenizer.path is None:
        raise ClientError("structured_outputs: this engine runs without a tokenizer.", param="structured_outputs")
    from octavo.tokenizer import get_tokenizer  # with jinja and more: not part of a start

    tokenizer = get_tokenizer(config.tokenizer)
    if not config.model.eos_token_ids:
        raise ClientError(
            "structured_outputs: this model has no token that ends an answer.", param="structured_outputs"
        )
    if tokenizer.token_bytes is None:
        raise ClientError(
            "structured_outputs: the tokens of this model's vocabulary are more than bytes, so no grammar can follow them.",
            param="structured_outputs",
        )
    return Vocabulary(
        [tokenizer.token_bytes[token_id] for token_id in range(len(tokenizer))],
        {text: token_id for token_id in tokenizer.special_ids if (text := tokenizer.id_to_token(token_id))},
        config.model.eos_token_ids,
        config.model.vocab_size,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
