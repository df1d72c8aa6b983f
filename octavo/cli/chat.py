"""`octavo chat`: a conversation with a running server, in the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.cli.client import Client, ClientArgs, read_lines
from octavo.config.options import option
from octavo.config.parser import OptionParser


@dataclass(kw_only=True)
class ChatArgs(ClientArgs):
    """Options of `octavo chat`."""

    system_prompt: str | None = option(None, "System message to begin with.", group="Client")


def run(arguments: Sequence[str]) -> int:
    """Chat until end of file (Ctrl-D), or send one message."""
    parser = OptionParser("octavo chat", "Chat with a running server; Ctrl-D ends.", (ChatArgs,))
    args = ChatArgs(**parser.parse_options(arguments))
    client = Client(args)
    messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
    for text in [args.quick] if args.quick is not None else read_lines("> "):
        messages.append({"role": "user", "content": text})
        answer = client.print_stream(
            "/chat/completions",
            {"messages": messages, **args.sampling()},
            lambda choice: choice["delta"].get("content"),
        )
        messages.append({"role": "assistant", "content": answer.text})
        if args.stats:
            print(answer.summary())
    return 0
