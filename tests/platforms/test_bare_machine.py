"""FC-179: a machine with the bare dependencies, no compiler, no GPU package and no network computes the same."""

import os
import subprocess
import sys

# Packages that an installation without extras may lack.
OPTIONAL = (
    "triton",
    "matplotlib",
    "sentencepiece",
    "accelerate",
    "openai",
    "uvloop",
    "httptools",
    "flash_attn",
    "vllm",
)

CODE = """
import json, socket, sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in OPTIONAL else PathFinder.find_spec(name, path, target)

def no_network(*args):
    raise AssertionError("the network was asked")

if sys.argv[2] == "bare":
    sys.meta_path[sys.meta_path.index(PathFinder)] = Without
    socket.getaddrinfo = no_network
from octavo import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32")
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
print(json.dumps([o.outputs[0].token_ids for o in llm.generate(["Hello", "One, two"], params, use_tqdm=False)]))
"""


def answers(model, how: str, environment: dict[str, str]) -> str:
    code = CODE.replace("OPTIONAL", repr(OPTIONAL))
    words = [sys.executable, "-c", code, str(model), how]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_same_tokens_without_what_may_be_missing(tiny_llama_dir, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    bare = {
        **environment,
        "PATH": str(tmp_path),  # no compiler
        "CXX": "",
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path),  # and nothing that one built before
    }
    assert answers(tiny_llama_dir, "bare", bare) == answers(tiny_llama_dir, "full", environment)
