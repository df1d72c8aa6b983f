"""compat/vllm: programs written for vLLM, unchanged, in a process whose `vllm` is Octavo's."""

import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parent.parent.parent
COMPAT = ROOT / "compat" / "vllm"
PATIENCE = 120.0
EXAMPLES = [
    "offline_inference",
    "what_lm_eval_does",
    "engines",
    "beam_search_and_processors",
    "what_is_not_there",
    "environment",
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """Variables of a process that finds the stand-in, as if it were installed."""
    site = tmp_path_factory.mktemp("site")
    project = tomllib.loads((COMPAT / "pyproject.toml").read_text())["project"]
    info = site / f"vllm-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {project['version']}\n")
    path = os.pathsep.join(map(str, (COMPAT, ROOT, site)))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OCTAVO_LOG_LEVEL": "WARNING"}


def run(environment: Mapping[str, str], *words: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=dict(environment), capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_programs_for_vllm_run_unchanged(environment, tiny_llama_dir):
    """All in one process: most of the time goes into imports."""
    said = run(environment, "-W", "error", Path(__file__).parent / "quick_start.py", tiny_llama_dir, *EXAMPLES)
    assert re.findall("done: (.*)", said) == EXAMPLES


def test_the_import_is_light_and_versions_agree(environment):
    code = (
        "import sys, vllm, importlib.metadata as m; assert not {'torch', 'transformers'} & set(sys.modules); "
        "assert m.version('vllm') == vllm.__version__; print(vllm.__version__)"
    )
    assert run(environment, "-c", code).startswith("0.32.0+octavo.")


def test_flags_that_change_nothing_are_dropped(environment):
    code = (
        "from vllm._options import translate, translate_words as t; "
        "print(t('m --swap-space 4 --disable-log-requests --runner pooling --max-num-seqs 3'.split()));"
        "print(translate({'dtype': 'torch.float16', 'swap_space': 4, 'seed': None, 'max_num_seqs': None}))"
    )
    variables = {"VLLM_ATTENTION_BACKEND": "TORCH_SDPA", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_SERVER_DEV_MODE": "1"}
    variables["VLLM_BATCH_INVARIANT"] = "1"
    first, second = run({**environment, **variables}, "-c", code).splitlines()
    assert eval(first) == [
        "m", "--runner", "pooling", "--max-num-seqs", "3", "--attention-backend", "sdpa", "--batch-invariant",
        "--kv-cache-memory-bytes", str(2 << 30), "--enable-admin-routes",
    ]  # fmt: skip
    assert eval(second) == {
        "dtype": "float16", "max_num_seqs": None, "attention_backend": "sdpa", "batch_invariant": True,
        "kv_cache_memory_bytes": 2 << 30,
    }  # fmt: skip


def test_the_server(environment, tiny_llama_dir):
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model"]
    command = [sys.executable, *words, str(tiny_llama_dir), "--port", "0", "--max-num-seqs", "4", "--swap-space", "4"]
    variables = {**environment, "VLLM_API_KEY": "secret", "OCTAVO_LOG_LEVEL": "INFO"}
    with subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            lines = []
            for line in server.stderr:
                lines.append(line)
                if found := re.search(r"serving on (http://\S+)", line):
                    break
            else:
                raise AssertionError("".join(lines))
            body = {"model": str(tiny_llama_dir), "prompt": "San Francisco is a", "max_tokens": 3, "temperature": 0}
            with httpx.Client(base_url=found[1], timeout=PATIENCE) as client:
                assert client.post("/v1/completions", json=body).status_code == 401
                answer = client.post("/v1/completions", json=body, headers={"Authorization": "Bearer secret"})
            assert answer.json()["usage"]["completion_tokens"] == 3
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=PATIENCE)
            assert server.returncode == 0
        finally:
            server.kill()
