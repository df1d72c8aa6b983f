"""Prompts as embeddings: tensors that callers pass, made sure of and turned into plain data.

Over HTTP a tensor comes as a file of `torch.save`, which is a zip archive: the numbers, and a pickle that says what they
are. A pickle names functions to call, and an archive can claim to be larger than it is, so torch gets to read nothing
but what was looked at before: stored (never compressed) members, a pickle of a few hundred bytes, and in it only the
names that a dense tensor needs.
"""

import base64
import binascii
import io
import os
import pickletools
import zipfile
from hashlib import blake2b
from typing import Any

from octavo.config.engine import ModelConfig
from octavo.errors import ClientError, ContextLengthError
from octavo.types.prompts import EMBEDS_DIGEST_BYTES, PromptEmbeds
from octavo.types.sampling_params import SamplingParams

# What the answers to one request may take in the core, which keeps one copy for each.
MAX_REQUEST_BYTES = 1 << 30
MAX_PICKLE_BYTES = 4096
MAX_MEMBERS = 16
_DTYPES = ("float32", "float64", "float16", "bfloat16")
_PICKLED_NAMES = {
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    "collections OrderedDict",
    *(f"torch {kind}Storage" for kind in ("Float", "Double", "Half", "BFloat16")),
}
_NAMING_OPCODES = {"GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"}
# Two clients with equal embeddings share cached blocks; nobody can make unequal ones look equal without the key.
_DIGEST_KEY = os.urandom(32)


def load_embeds(text: str, model: ModelConfig) -> PromptEmbeds:
    """Read the base64 of what `torch.save` wrote; ClientError for everything but a sound tensor."""
    check_enabled(model)
    try:
        file = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _wrong(f"it is not base64 ({error})") from None
    archive, size = _check_archive(file)

    import torch

    try:
        tensor = torch.load(archive, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's readers raise whatever they stumble over
        raise _wrong(f"torch cannot read it ({type(error).__name__})") from None
    if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() != size:
        raise _wrong("it claims more numbers than it holds")
    return read_embeds(tensor, model)


def read_embeds(tensor: Any, model: ModelConfig) -> PromptEmbeds:
    """A tensor [tokens, hidden_size] in the model's data type; ClientError when it is something else."""
    check_enabled(model)
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise _wrong(f"it is a {type(tensor).__name__}, not a tensor")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested or dtype not in _DTYPES:
        raise _wrong(f"it is a tensor of kind {dtype}, {tensor.layout}; a dense one of {', '.join(_DTYPES)} is needed")
    if tensor.dim() == 3 and tensor.shape[0] == 1:
        tensor = tensor[0]
    width = model.hf_config.text().hidden_size
    if tensor.dim() != 2 or tensor.shape[1] != width or not tensor.shape[0]:
        raise _wrong(f"its shape is {list(tensor.shape)}; [number of tokens, {width}] is needed")
    num_tokens = tensor.shape[0]
    if num_tokens > model.max_model_len:
        raise ContextLengthError(
            f"prompt_embeds has {num_tokens} tokens, but the model's maximum context length is {model.max_model_len}.",
            param="prompt_embeds",
        )
    rows = tensor.detach().resolve_neg().to("cpu", getattr(torch, model.dtype)).contiguous()
    if not bool(torch.isfinite(rows).all()):
        raise _wrong(f"it holds numbers that are not finite in {model.dtype}")
    data = rows.view(torch.uint8).numpy().tobytes()
    row_bytes = len(data) // num_tokens
    digests = b"".join(
        blake2b(data[at : at + row_bytes], digest_size=EMBEDS_DIGEST_BYTES, key=_DIGEST_KEY).digest()
        for at in range(0, len(data), row_bytes)
    )
    return PromptEmbeds(num_tokens, data, digests)


def check_sampling(embeds: PromptEmbeds, params: SamplingParams, truncate: int | None) -> None:
    """Refuse what reads or cuts the tokens of a prompt that has none."""
    for name, is_asked in (
        ("prompt_logprobs", params.prompt_logprobs is not None),
        ("repetition_penalty", params.repetition_penalty != 1.0),
        ("truncate_prompt_tokens", truncate is not None),
    ):
        if is_asked:
            raise ClientError(
                f"{name} looks at the tokens of the prompt, and prompt_embeds has none; leave {name} out"
                + (" or send 1." if name == "repetition_penalty" else "."),
                param=name,
            )
    if params.n * len(embeds.data) > MAX_REQUEST_BYTES:
        raise ClientError(
            f"n={params.n} answers to prompt_embeds of {len(embeds.data)} bytes need {params.n * len(embeds.data)}; at "
            f"most {MAX_REQUEST_BYTES} fit.",
            param="n",
        )


def check_enabled(model: ModelConfig) -> None:
    """Refuse embeddings where nobody has asked for them."""
    if not model.enable_prompt_embeds:
        raise ClientError(
            "prompt_embeds is not taken; start the engine with --enable-prompt-embeds to allow it.",
            param="prompt_embeds",
            code="unsupported_parameter",
        )


def _check_archive(file: bytes) -> tuple[io.BytesIO, int]:
    """The archive with nothing in it that was not looked at, and the size of its numbers."""
    try:
        with zipfile.ZipFile(io.BytesIO(file)) as given:
            members = given.infolist()
            if len(members) > MAX_MEMBERS or any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise _wrong("it is not what torch.save writes for one tensor")
            content = {member.filename.partition("/")[2]: given.read(member) for member in members}
    except ClientError:
        raise
    except Exception as error:  # OverflowError and struct.error among them
        raise _wrong(f"it is not a file of torch.save ({error})") from None
    if not {"data.pkl", "data/0"} <= content.keys():
        raise _wrong("it is not what torch.save writes for one tensor")
    _check_pickle(content["data.pkl"])
    checked = io.BytesIO()
    with zipfile.ZipFile(checked, "w", zipfile.ZIP_STORED) as archive:
        for name in ("data.pkl", "byteorder", "data/0", "version"):
            if name in content:
                archive.writestr(f"archive/{name}", content[name])
    checked.seek(0)
    return checked, len(content["data/0"])


def _check_pickle(data: bytes) -> None:
    """Refuse a pickle that names anything but the parts of a dense tensor. Nothing in it is run."""
    if len(data) > MAX_PICKLE_BYTES:
        raise _wrong(f"its description has {len(data)} bytes; a tensor's is shorter")
    try:
        names = [arg for opcode, arg, _ in pickletools.genops(data) if opcode.name in _NAMING_OPCODES]
    except Exception:
        raise _wrong("its description cannot be read") from None
    if unknown := [name for name in names if name not in _PICKLED_NAMES]:
        raise _wrong(f"it names {unknown[0]!r}, which no dense tensor of floating-point numbers needs")


def _wrong(reason: str) -> ClientError:
    return ClientError(
        f"prompt_embeds must be a dense tensor [tokens, hidden_size], sent as the base64 of torch.save: {reason}.",
        param="prompt_embeds",
    )
