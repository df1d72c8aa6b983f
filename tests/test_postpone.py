"""What `import torch` leaves out is there again once something traces."""

import subprocess
import sys

SCRIPT = """
from octavo.utils.postpone import TRACING, _Postponed, postpone_tracing
postpone_tracing()
import importlib.util
import sys
import torch

def meta():
    return torch.empty(3, 4, device="meta").take(torch.zeros(2, dtype=torch.long, device="meta")).shape

assert all(isinstance(sys.modules[name], _Postponed) for name in TRACING)
try:
    meta()
    raise SystemExit("this operator has a version for the meta device without the postponed modules: take another")
except NotImplementedError:
    pass
importlib.util.find_spec("transformers")  # whose import is about to begin: it may build a model on the meta device
assert not any(isinstance(sys.modules[name], _Postponed) for name in TRACING)
assert meta() == (2,)
assert torch.export.Dim is not None
"""


def test_tracing_is_whole_once_it_is_wanted():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
