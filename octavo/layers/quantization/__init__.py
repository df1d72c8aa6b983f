"""Weight formats. One method a file; `choose_method` is the only place that knows them all."""

from octavo.config.engine import LoadConfig
from octavo.layers.linear import LinearMethod, UnquantizedMethod
from octavo.layers.quantization.gguf import GGUFMethod
from octavo.logger import get_logger

logger = get_logger(__name__)


def choose_method(load: LoadConfig) -> LinearMethod:
    """The method of a model's linears and embeddings."""
    if load.quantization == "gguf":
        if GGUFMethod.is_supported():
            return GGUFMethod()
        logger.warning("quantised weights are decoded on load: there are no kernels for them here")
    return UnquantizedMethod()
