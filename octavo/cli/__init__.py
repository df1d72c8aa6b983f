"""The command `octavo`. A subcommand's module is imported when it is called, so that `octavo chat` starts at once."""

import sys
from collections.abc import Sequence
from importlib import import_module

from octavo import __version__
from octavo.errors import OctavoError

# Subcommand -> (module with run(arguments) -> exit code, one sentence).
COMMANDS = {
    "serve": ("octavo.cli.serve", "Serve a model over HTTP."),
    "chat": ("octavo.cli.chat", "Chat with a running server."),
    "complete": ("octavo.cli.complete", "Let a running server complete texts."),
    "bench": ("octavo.cli.bench", "Measure latency, throughput, serving, start and kernels."),
    "run-batch": ("octavo.cli.run_batch", "Answer a file of requests."),
    "collect-env": ("octavo.cli.collect_env", "Describe this machine and installation, for bug reports."),
}
_UNSUPPORTED = {"launch", "download-kernels", "preload", "snapshot"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; 0 on success, 1 when Octavo refuses or fails, 2 for a wrong command line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = words[0] if words else "--help"
    if command in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if command in ("-v", "-V", "--version"):
        print(__version__)
        return 0
    if command not in COMMANDS:
        reason = "is not supported yet" if command in _UNSUPPORTED else "is not a command"
        print(f"octavo: {command} {reason}; there are {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    try:
        return int(import_module(COMMANDS[command][0]).run(words[1:]))
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _usage() -> str:
    lines = [f"  {name:14}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        ["usage: octavo COMMAND [options]", "", *lines, "", "octavo COMMAND --help tells a command's options."]
    )
