"""`python -m vllm.entrypoints.openai.api_server --model MODEL`: the server, in vLLM's older spelling."""

import sys

from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
