"""Perplexity of a model on a text, as it is served and as floating point: what a format or a kernel costs in quality.

    python benchmarks/perplexity.py --model smollm2 --text README.md docs/*.md

The text is cut into windows of `--window` tokens, and every token of a window but its first is predicted from those before
it. Without `--against none`, the same windows go through the model with dtype=float32, which decodes quantised weights.
"""

import argparse
import math
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams


def perplexity(model: str, text: str, window: int, **options: Any) -> tuple[float, int]:
    """(perplexity, number of tokens predicted)."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    total, count = 0.0, 0
    with LLM(model, max_model_len=window + 1, enable_prefix_caching=False, **options) as llm:
        ids = llm.get_tokenizer().encode(text)
        windows = [{"prompt_token_ids": ids[start : start + window]} for start in range(0, len(ids), window)]
        for output in llm.generate([w for w in windows if len(w["prompt_token_ids"]) > 1], params, use_tqdm=False):
            pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
            scores = [entries[token].logprob for token, entries in pairs]
            total, count = total + sum(scores), count + len(scores)
    return math.exp(-total / count), count


def main() -> None:
    """Parse the command line and print one line a configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", nargs="+", type=Path, required=True)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--quantization", choices=("int8", "int4", "fp8"))
    parser.add_argument("--max-tokens", type=int, default=8192, help="of the text; about four characters each are read")
    parser.add_argument("--against", choices=("float32", "none"), default="float32")
    args = parser.parse_args()
    text = "\n".join(path.read_text() for path in args.text)[: 4 * args.max_tokens]
    own, count = perplexity(args.model, text, args.window, quantization=args.quantization)
    print(f"{args.model} {args.quantization or ''}: perplexity {own:.4f} on {count:,} tokens")
    if args.against == "float32":
        exact, _ = perplexity(args.model, text, args.window, dtype="float32")
        print(f"dtype=float32: perplexity {exact:.4f}, a difference of {own / exact - 1:+.3%}")


if __name__ == "__main__":
    main()
