"""The command `vllm`: Octavo's, with vLLM's spelling."""

import sys
from collections.abc import Sequence

from octavo.cli import main as octavo_main
from vllm._options import translate_words


def main(arguments: Sequence[str] | None = None) -> int:
    """`vllm serve`, `chat`, `complete`, `bench`, `collect-env`; the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["serve"]:
        words = ["serve", *translate_words(words[1:])]
    return octavo_main(words)


if __name__ == "__main__":
    sys.exit(main())
