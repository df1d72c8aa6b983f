"""`octavo complete`: a running server completes what is typed."""

from collections.abc import Sequence

from octavo.cli.client import Client, ClientArgs, read_lines
from octavo.config.parser import OptionParser


def run(arguments: Sequence[str]) -> int:
    """Complete each line until end of file (Ctrl-D), or one text."""
    parser = OptionParser("octavo complete", "Complete texts with a running server; Ctrl-D ends.", (ClientArgs,))
    args = ClientArgs(**parser.parse_options(arguments))
    client = Client(args)
    for text in [args.quick] if args.quick is not None else read_lines("> "):
        body = {"prompt": text, **args.sampling()}
        answer = client.print_stream("/completions", body, lambda choice: choice.get("text"))
        if args.stats:
            print(answer.summary())
    return 0
