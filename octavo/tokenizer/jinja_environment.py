"""The Jinja sandbox that chat templates run in, as their authors know it from transformers.

Imports nothing of Octavo: run as a script, this file renders one template that a client sent, in a process of its own
whose CPU time and memory are limited (see `isolated_template`).
"""

import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class TemplateRefusal(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the model writes, for training; here it only groups."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _Namespace(Namespace):
    """Jinja's namespace, closed to names that could reach into Python objects."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that a template may store an attribute called self
        self, initial = args[0], dict(*args[1:], **kwargs)
        for name in initial:
            _check_attribute(name)
        Namespace.__init__(self, initial)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.sandbox.SecurityError(f"a namespace cannot hold {name!r}; names must not start with '_'.")


def _raise_exception(message: Any) -> None:
    raise TemplateRefusal(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML."""
    if separators is not None:
        separators = tuple(separators)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def make_environment() -> ImmutableSandboxedEnvironment:
    """A fresh environment with everything a chat template may use."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    return environment


def _render_one() -> dict[str, Any]:
    """Render the template on standard input within the limits stated there."""
    job = json.loads(sys.stdin.buffer.read())
    environment = make_environment()
    resource.setrlimit(resource.RLIMIT_AS, (job["memory_bytes"],) * 2)
    signal.setitimer(signal.ITIMER_PROF, job["cpu_seconds"])  # its signal ends the process, in C code too
    try:
        text = environment.from_string(job["source"]).render(**job["variables"])
    except TemplateRefusal as error:
        return {"refusal": str(error)}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:1000]}
    if len(text) > job["max_chars"]:
        return {"error": f"it writes more than {job['max_chars']} characters"}
    return {"text": text}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_render_one()))
