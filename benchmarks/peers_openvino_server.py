"""A small server around OpenVINO GenAI's continuous batching, so that peers_cpu.py can measure it like the others.

    python peers_openvino_server.py MODEL.gguf PORT

Runs in OpenVINO's own environment with nothing else installed. It takes completions of token-id prompts, greedy, streamed,
and no more of the protocol than that.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from queue import SimpleQueue

import numpy as np
import openvino
import openvino_genai

CACHE_GIB = 2


class Engine:
    """The pipeline, stepped by one thread while there is work."""

    def __init__(self, model: str):
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.enable_prefix_caching = True
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU")
        self.numbers = count()
        self.arrivals: SimpleQueue = SimpleQueue()
        threading.Thread(target=self.loop, daemon=True).start()

    def submit(self, prompt: list, max_tokens: int) -> SimpleQueue:
        """A queue that gets the number of new tokens of each step, and None at the end."""
        tokens: SimpleQueue = SimpleQueue()
        self.arrivals.put((prompt, max_tokens, tokens))
        return tokens

    def loop(self) -> None:
        running = []
        while True:
            while not running or not self.arrivals.empty():
                running.append(self.add(*self.arrivals.get()))
            self.pipeline.step()
            for item in list(running):
                handle, tokens = item
                new = 0
                while handle.can_read():
                    new += sum(len(output.generated_ids) for output in handle.read().values())
                if new:
                    tokens.put(new)
                if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                    tokens.put(None)
                    running.remove(item)

    def add(self, prompt: list, max_tokens: int, tokens: SimpleQueue) -> tuple:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        return self.pipeline.add_request(next(self.numbers), ids, config), tokens


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = self.server.engine.submit(body["prompt"], body["max_tokens"])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        total = 0
        while (new := tokens.get()) is not None:
            total += new
            self.event(json.dumps({"choices": [{"index": 0, "text": "x" * new}]}))
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": total}
        self.event(json.dumps({"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": usage}))
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, data: str) -> None:
        text = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(text), text))
        self.wfile.flush()

    def log_message(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler)
    server.engine = Engine(sys.argv[1])
    server.serve_forever()
