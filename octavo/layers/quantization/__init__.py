"""Weight formats. One method a file; `choose_method` is the only place that knows them all."""

from collections.abc import Mapping
from types import MappingProxyType

from octavo.config.engine import LoadConfig
from octavo.config.fp8 import ONLINE, read_fp8_scheme
from octavo.layers.linear import LinearMethod, UnquantizedMethod
from octavo.layers.quantization.fp8 import Fp8Method
from octavo.layers.quantization.gguf import GGUFMethod
from octavo.layers.quantization.online_int import OnlineIntMethod
from octavo.logger import get_logger

logger = get_logger(__name__)

NO_PACKING: Mapping[str, tuple[str, ...]] = MappingProxyType({})


def choose_method(load: LoadConfig, packing: Mapping[str, tuple[str, ...]] = NO_PACKING) -> LinearMethod:
    """The method of a model's linears and embeddings; ask its `for_layer` about each.

    `packing` maps the model's packed modules to the names of their shards, as checkpoints know them.
    """
    if load.quantization == "fp8":
        scheme = read_fp8_scheme(load.quantization_config) if load.quantization_config else ONLINE
        return Fp8Method(scheme, packing)
    if load.quantization in ("int8", "int4"):
        return OnlineIntMethod(int(load.quantization[-1]))
    if load.quantization == "gguf":
        if GGUFMethod.is_supported():
            return GGUFMethod()
        logger.warning("quantised weights are decoded on load: there are no kernels for them here")
    return UnquantizedMethod()
