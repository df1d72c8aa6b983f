"""Answers to a batch of prompts and to a conversation, without a server.

python examples/offline.py [MODEL]
"""

import sys

from octavo import LLM, SamplingParams


def main(model: str = "smollm2") -> None:
    with LLM(model) as llm:
        prompts = ["The capital of France is", "One, two, three,", "Water boils at"]
        for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12)):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")

        messages = [{"role": "user", "content": "Name two rivers of Europe."}]
        [answer] = llm.chat(messages, SamplingParams(temperature=0.7, seed=1, max_tokens=32, n=2))
        for choice in answer.outputs:
            print(f"answer {choice.index} ({choice.finish_reason}): {choice.text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
