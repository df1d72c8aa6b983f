"""Rendering a template that a client sent: in a process of its own, so that limits hold whatever it does.

The sandbox keeps a template from reaching Python, but not from running for hours or filling the memory, and a thread
cannot be stopped. Such templates are refused unless an operator allows them, so a process for each is affordable.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from octavo.errors import ClientError
from octavo.tokenizer.jinja_environment import TemplateRefusal

MAX_SOURCE_CHARS = 256 * 1024
MAX_OUTPUT_CHARS = 16 * 1024 * 1024
MEMORY_BYTES = 512 * 1024 * 1024
CPU_SECONDS = 0.5
_WALL_SECONDS = 30.0  # for a machine too busy to give the process its CPU time

_SCRIPT = Path(__file__).with_name("jinja_environment.py")


def render_isolated(source: str, variables: dict[str, Any]) -> str:
    """Render within the limits; TemplateRefusal with the template's own words, ClientError for everything else."""
    if len(source) > MAX_SOURCE_CHARS:
        raise ClientError(
            f"the chat template has {len(source)} characters; at most {MAX_SOURCE_CHARS} are allowed.",
            param="chat_template",
        )
    job = {
        "source": source,
        "variables": variables,
        "cpu_seconds": CPU_SECONDS,
        "memory_bytes": MEMORY_BYTES,
        "max_chars": MAX_OUTPUT_CHARS,
    }
    try:
        # -I: neither environment variables nor the working directory choose what the process imports.
        done = subprocess.run(
            [sys.executable, "-I", str(_SCRIPT)],
            input=json.dumps(job).encode(),
            capture_output=True,
            env={},
            timeout=_WALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _failed(f"it took more than {_WALL_SECONDS:g} seconds") from None
    if done.returncode == -signal.SIGPROF:
        raise _failed(f"it took more than {CPU_SECONDS:g} seconds of CPU time")
    if done.returncode != 0:
        raise _failed(f"its process ended with status {done.returncode}")
    answer = json.loads(done.stdout)
    if "refusal" in answer:
        raise TemplateRefusal(answer["refusal"])
    if "error" in answer:
        raise _failed(answer["error"])
    return answer["text"]


def _failed(why: str) -> ClientError:
    return ClientError(f"the request's chat template could not be rendered: {why}.", param="chat_template")
