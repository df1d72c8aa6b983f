"""Whether a model makes vectors, classes or scores instead of text, and how: `runner`, `convert` and `pooler_config` end here.

By the name of its architecture, a model is

    …ForSequenceClassification      a classifier of texts; with one label a cross-encoder or a reward model
    …ForTokenClassification         a classifier of tokens
    …ForRewardModel                 a score a token; …ForProcessRewardModel: at the ends of steps
    …Model, …ForMaskedLM            a maker of embeddings
    …ForCausalLM                    a maker of text, unless files of sentence-transformers lie beside it, or `runner` or
                                    `convert` says otherwise

A decoder is run by its native file with other heads, in chunks and with cached prefixes; everything else needs whole prompts.
"""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.config.args import EngineArgs
from octavo.config.engine import PoolingConfig
from octavo.config.hf import HFConfig
from octavo.config.sentence_transformers import SentenceTransformers
from octavo.errors import ConfigError

EMBED, TOKEN_EMBED = ["embed", "token_embed"], ["token_embed"]
CLASSIFY, TOKEN_CLASSIFY = ["classify", "token_classify"], ["token_classify"]

# What an architecture's name ends in -> the tasks, and how a text becomes one row in a decoder.
SUFFIXES: dict[str, list[str]] = {
    "ForSequenceClassification": CLASSIFY,
    "ForTokenClassification": TOKEN_CLASSIFY,
    "ForProcessRewardModel": TOKEN_CLASSIFY,
    "ForRewardModel": TOKEN_CLASSIFY,
    "EmbeddingModel": EMBED,
    "TextModel": EMBED,
    "ForMaskedLM": EMBED,
    "Model": EMBED,
    "HF_ColBERT": TOKEN_EMBED,
}
GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
SEQUENCE_POOLING = ("last", "cls", "mean")
CONVERSIONS = {"embed": EMBED, "classify": CLASSIFY, "reward": TOKEN_CLASSIFY}
POOLER_KEYS = (
    "task",
    "pooling_type",
    "seq_pooling_type",
    "tok_pooling_type",
    "use_activation",
    "normalize",
    "softmax",
    "activation",
    "dimensions",
    "step_tag_id",
    "returned_token_ids",
    "logit_mean",
    "logit_sigma",
)

_NUMBER = (int, float)
_KINDS: dict[str, Any] = {
    "step_tag_id": int,
    "returned_token_ids": list,
    "logit_mean": _NUMBER,
    "logit_sigma": _NUMBER,
}

# Decoders trained to look both ways and for embeddings of several sizes, whose configurations do not say the sizes.
MATRYOSHKA = {"gemma3_text": [128, 256, 512, 768]}  # EmbeddingGemma

# Learned positions that count from pad_token_id + 1 leave fewer than max_position_embeddings.
POSITIONS_AFTER_PADDING = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer", "ibert")


@dataclass(frozen=True)
class PoolingModel:
    """A model that pools: what to look up for it, who runs it, and how."""

    architecture: str
    model_impl: str
    config: PoolingConfig


def resolve_pooling(
    args: EngineArgs,
    hf: HFConfig,
    files: SentenceTransformers | None,
    *,
    decoders: Collection[str],
    encoders: Collection[str],
    label_token_ids: Collection[int] = (),
    notes: list[str],
) -> PoolingModel | None:
    """None for a model that makes text. `label_token_ids` are those of `classifier_from_token`."""
    tasks = _tasks(args, hf, files, notes)
    if tasks is None:
        _refuse_options(args)
        return None
    architecture, impl = _who_runs(args, hf, decoders, encoders)
    if impl == "transformers" and "classify" in tasks:
        tasks = ["classify"]  # its module classifies whole texts
    is_bidirectional = bool(hf.get("use_bidirectional_attention")) or hf.get("is_causal") is False
    is_encoder = impl == "transformers" or architecture in encoders or is_bidirectional
    is_classifier = tasks[0].endswith("classify")
    sizes = hf.get("matryoshka_dimensions") or []
    if not sizes and is_bidirectional and hf.get("is_matryoshka") is None:
        sizes = MATRYOSHKA.get(hf.model_type, [])
    labels = _labels(hf) if is_classifier else []
    if label_token_ids and "classify" in tasks:
        labels = labels[:1] if len(label_token_ids) <= 2 else [str(i) for i in range(len(label_token_ids))]
    config = PoolingConfig(
        tasks=tasks,
        is_encoder=is_encoder,
        is_bidirectional=is_bidirectional,
        pooling=_default_pooling(hf, tasks, files, architecture in encoders),
        token_pooling="step" if hf.architecture.endswith("ForProcessRewardModel") else "all",
        activation=_activation(hf, tasks, labels, files),
        width=_width(hf, files),
        labels=labels,
        dense=[] if files is None or is_classifier else files.dense,
        label_token_ids=list(label_token_ids),
        is_matryoshka=bool(hf.get("is_matryoshka") or sizes),
        matryoshka_dimensions=sizes,
        prompts={} if files is None else files.prompts,
        default_prompt=None if files is None else files.default_prompt,
    )
    config = _override(args, config)
    notes.append(
        f"runner=pooling: {hf.architecture} serves {', '.join(config.tasks)}; {config.pooling} pooling, "
        f"{config.activation}, {'whole prompts' if is_encoder else 'prompts in chunks'}"
    )
    return PoolingModel(architecture, impl, config)


def pooling_length(args: EngineArgs, hf: HFConfig, files: SentenceTransformers | None) -> int | str | None:
    """`max_model_len` where such a model has limits that others have not; else what was asked for."""
    asked, stated = args.max_model_len, hf.max_position_embeddings
    possible = int(stated) if stated is not None else None
    if possible is not None and hf.model_type in POSITIONS_AFTER_PADDING:
        possible -= int(hf.get("pad_token_id", 1)) + 1
        if isinstance(asked, int) and asked > possible:
            raise ConfigError(
                f"max_model_len={asked} is more than the {possible} tokens {hf.architecture} has positions for; lower it.",
                param="max_model_len",
            )
    if asked not in (None, "auto", -1):
        return asked
    if files is not None and files.max_seq_length:
        return min(int(files.max_seq_length), possible or int(files.max_seq_length))
    return possible if hf.model_type in POSITIONS_AFTER_PADDING else asked


def _tasks(args: EngineArgs, hf: HFConfig, files: SentenceTransformers | None, notes: list[str]) -> list[str] | None:
    name = hf.architecture
    found = next((tasks for suffix, tasks in SUFFIXES.items() if name.endswith(suffix)), None)
    makes_text = name.endswith(GENERATES) or found is None
    if args.convert in CONVERSIONS:
        if args.runner == "generate":
            raise ConfigError(
                f"convert={args.convert} makes a model of vectors or classes, but runner=generate; leave one out.",
                param="convert",
            )
        return CONVERSIONS[args.convert]
    if args.runner == "generate":
        if not makes_text:
            raise ConfigError(f"{name} generates no text; leave runner out.", param="runner")
        return None
    if files is not None and (makes_text or found is EMBED):
        return EMBED if files.pooling is not None else TOKEN_EMBED
    if makes_text:
        return EMBED if args.runner == "pooling" else None
    return found


def _refuse_options(args: EngineArgs) -> None:
    for name in ("pooler_config", "override_pooler_config"):
        if getattr(args, name):
            raise ConfigError(
                f"{name} is for models that make vectors or classes, and this one generates text; set runner=pooling or "
                "leave it out.",
                param=name,
            )


def _who_runs(args: EngineArgs, hf: HFConfig, decoders: Collection[str], encoders: Collection[str]) -> tuple[str, str]:
    """(the name to look up, whose code runs it)"""
    name = hf.architecture
    candidates = [name]
    for suffix in SUFFIXES:
        if name.endswith(suffix):
            candidates.append(name.removesuffix(suffix).removesuffix("Text") + "ForCausalLM")
    found = next((c for c in candidates if c in encoders or c in decoders), None)
    if args.model_impl == "transformers" or (found is None and args.model_impl == "auto"):
        return name, "transformers"
    if found is None:
        raise ConfigError(
            f"model_impl={args.model_impl}, but Octavo has no model file for {name}; use model_impl=transformers.",
            param="model_impl",
        )
    return found, "octavo"


def _labels(hf: HFConfig) -> list[str]:
    """Names of the classes, in their order."""
    names = hf.get("id2label")
    if isinstance(names, Mapping) and names:
        by_id = {int(key): str(name) for key, name in names.items()}
        return [by_id.get(i, f"LABEL_{i}") for i in range(len(by_id))]
    count = int(hf.get("num_labels", 1 if hf.architecture.endswith("RewardModel") else 2))
    return [f"LABEL_{i}" for i in range(count)]


def _default_pooling(hf: HFConfig, tasks: list[str], files: SentenceTransformers | None, is_encoder: bool) -> str:
    if files is not None and files.pooling is not None:
        return files.pooling
    if "classify" in tasks and hf.model_type == "modernbert":
        return str(hf.choose("classifier_pooling", ["cls", "mean"], "cls"))
    return "cls" if is_encoder else "last"


def _width(hf: HFConfig, files: SentenceTransformers | None) -> int:
    if files is not None and files.dense:
        return files.dense[-1].out_features
    if hf.architecture == "HF_ColBERT":
        return int(hf.get("dim", 128))
    return int(hf.text().get("hidden_size") or hf.require("dim"))


def _activation(hf: HFConfig, tasks: list[str], labels: list[str], files: SentenceTransformers | None) -> str:
    """What turns a row of a head into what clients get, unless they say otherwise."""
    if not tasks[0].endswith("classify"):
        return "normalize" if files is None or files.normalizes or files.pooling is None else "identity"
    if hf.architecture.endswith("ForRewardModel"):
        return "identity"
    # What a cross-encoder was trained with: sentence-transformers notes it in config.json.
    told = (hf.get("sentence_transformers") or {}).get("activation_fn") or hf.get(
        "sbert_ce_default_activation_function"
    )
    if told is not None:
        kind = str(told).rpartition(".")[2].lower()
        if kind not in ("identity", "sigmoid", "softmax"):
            raise ConfigError(f"config.json has the activation {told!r}; supported are Identity, Sigmoid and Softmax.")
        return kind
    kinds = {
        "regression": "identity",
        "single_label_classification": "softmax",
        "multi_label_classification": "sigmoid",
    }
    return kinds.get(str(hf.get("problem_type")), "sigmoid" if len(labels) == 1 else "softmax")


def _override(args: EngineArgs, config: PoolingConfig) -> PoolingConfig:
    """The options laid over what the model says."""
    told: dict[str, Any] = {**args.pooler_config, **args.override_pooler_config}
    unknown = sorted(set(told) - set(POOLER_KEYS))
    if unknown:
        raise _error(f"has {', '.join(unknown)}, which is not supported; it takes {', '.join(POOLER_KEYS)}")
    changes: dict[str, Any] = {}
    task = told.get("task")
    if task is not None:
        if task not in config.tasks:
            raise _error(f"task={task!r} is not one of {', '.join(config.tasks)}")
        changes["tasks"] = [task, *(t for t in config.tasks if t != task)]
    for key in ("pooling_type", "seq_pooling_type", "tok_pooling_type"):
        word = str(told.get(key) or "").lower()
        if word in ("all", "step"):
            changes["token_pooling"] = word
        elif word in SEQUENCE_POOLING:
            changes["pooling"] = word
        elif word:
            raise _error(f"{key}={told[key]!r} is not known; use {', '.join(SEQUENCE_POOLING)}, all or step")
    for key in ("use_activation", "normalize", "softmax", "activation"):
        if told.get(key) is False:
            changes["activation"] = "identity"
        elif told.get(key) not in (None, True):
            raise _error(f"{key}={told[key]!r} must be true or false")
    for key, kinds in _KINDS.items():
        if told.get(key) is not None:
            if not isinstance(told[key], kinds) or isinstance(told[key], bool):
                raise _error(f"{key}={told[key]!r} is not of the right kind")
            changes[key] = told[key]
    if changes.get("logit_sigma") == 0:
        raise _error("logit_sigma=0 would divide by zero")
    if told.get("dimensions") is not None:
        if type(told["dimensions"]) is not int or told["dimensions"] < 1:
            raise _error(f"dimensions={told['dimensions']!r} must be an integer of at least 1")
        changes |= {"dimensions": told["dimensions"], "is_matryoshka": True}
    return dataclasses.replace(config, **changes)


def _error(problem: str) -> ConfigError:
    return ConfigError(f"pooler_config {problem}.", param="pooler_config")
