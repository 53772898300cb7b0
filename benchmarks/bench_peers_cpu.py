"""vkattn on lavapipe beside torch on the CPU, and beside the PyPI packages computeml and aule-attention on lavapipe.

Each library computes in a process of its own, and they take turns: medians of the rounds after a warm-up. What comes
out of the warm-up is compared with the oracle. A library that is not installed, or fails, is left out and said so.
Inputs of vkattn's prefill are NumPy arrays, copied in and out in every call; its decode appends to a cache and attends
over it. Tensors of torch and computeml are where they compute, before the clock starts. CPU time tells more than the
clock where the machine has other work too.

    pip install --group bench
    VK_ICD_FILENAMES=/usr/share/vulkan/icd.d/lvp_icd.x86_64.json python benchmarks/bench_peers_cpu.py [rounds]
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from common import Step, decode_step, describe, in_turn

import vkattn
from vkattn import oracle

Run = Callable[[], np.ndarray]


@dataclass(frozen=True)
class Case:
    """Sizes of a float32 problem without masks, and how vkattn's time is to compare with that of each peer."""

    label: str
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    bounds: dict[str, float]  # vkattn's time as a multiple of the peer's, at most
    cache: str = "float32"  # dtype of vkattn's cache, if it decodes

    def arrays(self) -> list[np.ndarray]:
        """Return query, key and value, bhsd."""
        rng = np.random.default_rng(1)
        shapes = [(1, heads, tokens, self.head_dim) for heads, tokens in
                  ((self.heads, self.q_len), (self.kv_heads, self.kv_len), (self.kv_heads, self.kv_len))]
        return [rng.standard_normal(shape, np.float32) for shape in shapes]


CASES = (
    Case("prefill, 8 heads, head_dim 64, 512 x 512", 8, 8, 512, 512, 64,
         {"torch": 30, "computeml": 1 / 15, "aule": 1 / 100}),
    Case("decode, 24/8 heads, head_dim 128, 1024 keys", 24, 8, 1, 1024, 128, {"torch": 12}),
    Case("decode, 8 heads, head_dim 64, 4096 keys", 8, 8, 1, 4096, 64,
         {"torch": np.inf, "computeml": 1 / 3, "aule": 1 / 50}),
    Case("decode, 8 heads, head_dim 64, 4096 keys, vkattn's cache in float16", 8, 8, 1, 4096, 64,
         {"torch": np.inf, "computeml": 1 / 3, "aule": 1 / 50}, "float16"),
)
#: Relative errors above this are reported as wrong: float32, and float16 caches.
MOST_ERROR = {"float32": 1e-5, "float16": 2e-3}


def run_vkattn(case: Case, arrays: list[np.ndarray]) -> Run:
    """Return a decode step with a cache, or a call of `vkattn.attention` for several query rows."""
    device = vkattn.Device()
    if case.q_len > 1:
        return lambda: vkattn.attention(*arrays, device=device)
    step: Step = decode_step(device, heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim,
                             capacity=case.kv_len, length=case.kv_len, dtype=case.cache, query_dtype="float32",
                             arrays=arrays)
    return lambda: step.graph.run(step.inputs, input_pos=step.position)["out"].transpose(0, 2, 1, 3)


def run_torch(case: Case, arrays: list[np.ndarray]) -> Run:
    """Return torch's function on CPU tensors, with as many threads as it takes by itself."""
    import torch

    tensors = [torch.from_numpy(array) for array in arrays]
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(*tensors, enable_gqa=case.heads != case.kv_heads).numpy()


def run_computeml(case: Case, arrays: list[np.ndarray]) -> Run:
    """Return computeml's attention on (tokens, heads x head_dim); reading the result waits for it."""
    import computeml

    context = computeml.Context()
    tensors = [context.from_numpy(np.ascontiguousarray(array[0].swapaxes(0, 1)).reshape(array.shape[2], -1))
               for array in arrays]
    shape = (case.q_len, case.heads, case.head_dim)
    return lambda: computeml.ops.attention(*tensors, num_heads=case.heads).numpy().reshape(shape).swapaxes(0, 1)[None]


def run_aule(case: Case, arrays: list[np.ndarray]) -> Run:
    """Return aule-attention's function by its Vulkan path."""
    from aule.vulkan import attention

    return lambda: attention(*arrays, causal=False)


LIBRARIES = {"vkattn": run_vkattn, "torch": run_torch, "computeml": run_computeml, "aule": run_aule}


def work(name: str, case: Case, pipe: Any) -> None:
    """Be the process of one library: send the first result, then (seconds, CPU seconds) of a call for each message."""
    silent = os.open(os.devnull, os.O_WRONLY)  # aule writes thousands of lines
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    try:
        run = LIBRARIES[name](case, case.arrays())
        pipe.send(np.array(run()))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    while pipe.recv():
        start, cpu = time.perf_counter(), time.process_time()
        run()
        pipe.send((time.perf_counter() - start, time.process_time() - cpu))


def compare(case: Case, rounds: int) -> None:
    """Print the medians of one case and how they compare."""
    print(f"\n{case.label}; float32; medians of {rounds}")
    arrays = case.arrays()
    expected = oracle.attention(*arrays)
    spawn, pipes = multiprocessing.get_context("spawn"), {}
    for name in ("vkattn", *case.bounds):
        pipe, other = spawn.Pipe()
        spawn.Process(target=work, args=(name, case, other), daemon=True).start()
        other.close()
        try:
            first = pipe.recv()
        except EOFError:
            first = "its process ended"
        if isinstance(first, str):
            print(f"{name:12} left out: {first}")
            continue
        error = np.linalg.norm(first - expected) / np.linalg.norm(expected)
        print(f"{name:12} relative error {error:.1e}" + ("" if error < MOST_ERROR[case.cache] else "  WRONG"))
        pipes[name] = pipe
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in pipes}
    for _ in range(rounds):
        for name, pipe in pipes.items():
            pipe.send(True)
            seconds[name].append(pipe.recv())
    for pipe in pipes.values():
        pipe.send(False)
    medians = {name: np.median(values, axis=0) for name, values in seconds.items()}
    for name, median in medians.items():
        line = f"{name:12} {1e3 * median[0]:10.3f} ms {1e3 * median[1]:10.3f} CPU ms"
        if name != "vkattn" and "vkattn" in medians:
            share, cpu_share = medians["vkattn"] / median
            bound = case.bounds[name]
            line += f"   vkattn takes {share:.4g} times that, {cpu_share:.4g} of CPU time"
            line += "" if bound == np.inf else f"; bound {bound:.4g}: {'met' if share <= bound else 'NOT MET'}"
        print(line, flush=True)


def compare_algorithms(rounds: int) -> None:
    """Print `fused` against `three_pass`, and causal against not."""
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal((1, heads, 1024, 128), np.float32) for heads in (24, 8, 8)]
    with vkattn.Device() as device:
        print(f"\nprefill, 24/8 heads, head_dim 128, 1024 x 1024, float32; medians of {rounds}; {describe(device)}")
        runs = [lambda algorithm=algorithm, causal=causal: vkattn.attention(
            *arrays, algorithm=algorithm, causal=causal, device=device)
            for algorithm, causal in (("three_pass", "top_left"), ("fused", "top_left"), ("fused", None))]
        three_pass, causal, full = np.median(in_turn(runs, rounds, warm_up=1), axis=0)
    for label, median in (("three_pass, causal", three_pass), ("fused, causal", causal), ("fused, not causal", full)):
        print(f"{label:18} {median:8.3f} s")
    for label, share, bound in (("fused / three_pass", causal / three_pass, 1.0), ("causal / not", causal / full, 0.6)):
        print(f"{label:18} {share:8.3f}, bound {bound}: {'met' if share <= bound else 'NOT MET'}")


def main(rounds: int) -> None:
    for case in CASES:
        compare(case, rounds)
    compare_algorithms(rounds)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
