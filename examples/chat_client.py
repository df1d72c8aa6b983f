"""A conversation with a running server through OpenAI's client, streamed.

octavo serve smollm2
python examples/chat_client.py [URL] [KEY]
"""

import sys

from openai import OpenAI


def main(url: str = "http://localhost:8000/v1", key: str = "none") -> None:
    with OpenAI(base_url=url, api_key=key) as client:
        model = client.models.list().data[0].id
        messages = [{"role": "system", "content": "You answer in one sentence."}]
        for question in ("What is the capital of France?", "And of Italy?"):
            messages.append({"role": "user", "content": question})
            print(f"> {question}")
            answer = ""
            stream = client.chat.completions.create(model=model, messages=messages, max_tokens=32, stream=True)
            for chunk in stream:
                piece = chunk.choices[0].delta.content or ""
                answer += piece
                print(piece, end="", flush=True)
            print()
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main(*sys.argv[1:])
