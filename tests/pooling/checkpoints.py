"""Tiny random models that make vectors, classes and scores, with transformers' own as the oracle."""

import json
from pathlib import Path

import tokenizers
import torch
import transformers

TEXTS = ["how do I reset my password", "bake the cake for half an hour", "a", "login login login"]

SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "pad_token_id": 1,
}
CHANGES = {
    "roberta": {"type_vocab_size": 1},
    "xlm-roberta": {"type_vocab_size": 1},
    "camembert": {"type_vocab_size": 1},
    "electra": {"embedding_size": 16},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4},
    # A window that most of a prompt lies outside of.
    "modernbert": {"local_attention": 8, "cls_token_id": 0, "sep_token_id": 2, "bos_token_id": 0, "eos_token_id": 2},
}


def write_encoder(model_type: str, folder: Path, auto_class: str, **changes):
    """A random checkpoint in `folder`; returns transformers' model."""
    config = transformers.CONFIG_MAPPING[model_type](**{**SIZES, **CHANGES.get(model_type, {}), **changes})
    return write(config, folder, auto_class)


def write(config, folder: Path, auto_class: str):
    """The same for a whole configuration. Weights are wide and norms away from one: a wrong scale or order shows."""
    torch.manual_seed(0)
    model = getattr(transformers, auto_class).from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
        else:
            parameter.data *= 3
    model.save_pretrained(folder)
    return model


def write_tokenizer(folder: Path, pair_types: bool = True) -> None:
    """A WordPiece-like tokenizer of whole words, which marks the two texts of a pair as BERT's does."""
    words = sorted({word for text in TEXTS for word in text.split()})
    vocab = {token: i for i, token in enumerate(["[CLS]", "[PAD]", "[SEP]", "[UNK]", *words])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    second = 1 if pair_types else 0
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A [SEP] $B:{second} [SEP]:{second}",
        special_tokens=[("[CLS]", 0), ("[SEP]", 2)],
    )
    made.save(str(folder / "tokenizer.json"))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "tokenizer_class": "PreTrainedTokenizerFast"}))
