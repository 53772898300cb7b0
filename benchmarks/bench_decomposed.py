"""All layers of a model's decode step, attention only, in one recording: general operators, three passes, one kernel.

Each layer has keys and values of its own, and its queries are the output of the layer before. Every layer is compared
with the oracle before anything is timed. Written beside the table: the device's time of all dispatches, and of the
whole recording with what lies between them, both from timestamps; and the host's time of the whole call.

    python benchmarks/bench_decomposed.py [--layers 28] [--lengths 250 2048] [--heads 24/8] [--head-dim 128]
                                          [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from decomposed.baseline import decomposed_attention

import vkattn
from vkattn import oracle
from vkattn.bench.clock import Spread, host_times, warm_up, warm_up_seconds
from vkattn.bench.inputs import Pool
from vkattn.bench.roofline import raise_clock
from vkattn.kernels.grid import num_groups
from vkattn.ops.graph import Graph

WAYS = ("decomposed", "three_pass", "split")


@dataclass(frozen=True)
class Model:
    """The sizes of the step: one token, all layers."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    capacity: int

    def arrays(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Return keys and values of a layer, float16 ``[1, capacity, num_kv_heads, head_dim]``."""
        shape = (1, self.capacity, self.num_kv_heads, self.head_dim)
        return POOL.array(shape, "float16", 2 * layer), POOL.array(shape, "float16", 2 * layer + 1)

    @property
    def query(self) -> np.ndarray:
        """The first layer's queries."""
        return 2 * POOL.array((1, 1, self.num_heads, self.head_dim), "float16", 1000)


POOL = Pool(2026)


def build(device: vkattn.Device, model: Model, way: str, every_layer: bool = False) -> Graph:
    """Return the graph of all layers, with the last layer's output, or every layer's."""
    builder = vkattn.GraphBuilder(device)
    tokens = vkattn.Dim("tokens", max=model.capacity)
    kv_len = None if way == "decomposed" else builder.position("kv_len")
    out = builder.input("query", model.query.shape, "float16")
    for layer in range(model.num_layers):
        key, value = (builder.constant(f"{name}_{layer}", array)
                      for name, array in zip(("key", "value"), model.arrays(layer), strict=True))
        if way == "decomposed":
            out = decomposed_attention(builder, out, key, value, tokens, name=f"layer_{layer}",
                                       groups=num_groups(device.info))
        else:
            out = builder.attention(out, key, value, layout="bshd", kv_len=kv_len, algorithm=way, name=f"layer_{layer}")
        if every_layer or layer == model.num_layers - 1:
            builder.output(f"out_{layer}", out)
    return builder.build()


def run(graph: Graph, model: Model, way: str, length: int) -> dict[str, np.ndarray]:
    """Run the step with ``length`` live tokens."""
    lengths = {"tokens": length} if way == "decomposed" else {"kv_len": length}
    return graph.run({"query": model.query}, **lengths)


def worst_share(device: vkattn.Device, model: Model, way: str, length: int) -> float:
    """Compare every layer with the oracle: the largest error of a row as a share of its bound."""
    graph = build(device, model, way, every_layer=True)
    outputs = run(graph, model, way, length)
    graph.close()
    query, shares = model.query, []
    for layer in range(model.num_layers):
        key, value = (array[:, :length] for array in model.arrays(layer))
        shares.append(oracle.worst_share(outputs[f"out_{layer}"], query, key, value, layout="bshd"))
        query = outputs[f"out_{layer}"]
    return max(shares)


def measure(device: vkattn.Device, model: Model, way: str, length: int, repeat: int = 15) -> dict[str, Any]:
    """Check, warm up and time one way at one length."""
    share = worst_share(device, model, way, length)
    if not share <= 1:
        raise SystemExit(f"{way} at {length} tokens is wrong: {share:.3g} times its bound. Nothing was timed.")
    graph = build(device, model, way)
    recording = graph.recording
    run(graph, model, way, length)
    raise_clock(device)
    warm_up(recording.run, warm_up_seconds(device.info))
    runs = [graph.timings() for _ in range(repeat)]
    elapsed = Spread.of(recording.elapsed_ns() for _ in range(repeat))
    host = host_times(lambda: run(graph, model, way, length), 0.3)
    result = {
        "problem": {"num_layers": model.num_layers, "num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads,
                    "head_dim": model.head_dim, "length": length, "dtype": "float16"},
        "way": way, "worst_share": share, "dispatches": len(runs[0]),
        "device_ns": Spread.of(run.total_ns for run in runs).as_dict(), "recording_ns": elapsed.as_dict(),
        "call_ns": host.as_dict(), "by_variant_ns": runs[-1].by_variant(),
        "scratch_bytes": graph.report().scratch_bytes,
    }
    graph.close()
    return result


def table(results: list[dict[str, Any]]) -> str:
    """Return the figures as lines of text."""
    lines = [f"{'length':>7}  {'way':<11} {'dispatches':>10} {'dispatch us':>12} {'recording us':>13} {'call us':>10} "
             f"{'times split':>11}"]
    for found in results:
        fastest = next(other for other in results if other["way"] == "split" and other["problem"] == found["problem"])
        lines.append(f"{found['problem']['length']:>7}  {found['way']:<11} {found['dispatches']:>10} "
                     f"{found['device_ns']['median'] / 1e3:>12.1f} {found['recording_ns']['median'] / 1e3:>13.1f} "
                     f"{found['call_ns']['median'] / 1e3:>10.1f} "
                     f"{found['device_ns']['median'] / fastest['device_ns']['median']:>11.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode of all layers: general operators, three passes, one kernel.")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--lengths", type=int, nargs="+", default=[250, 2048])
    parser.add_argument("--heads", default="24/8")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    num_heads, num_kv_heads = (int(count) for count in args.heads.split("/"))
    model = Model(args.layers, num_heads, num_kv_heads, args.head_dim, max(args.lengths))
    with vkattn.Device(args.device) as device:
        info = device.info
        results = [measure(device, model, way, length) for length in args.lengths for way in WAYS]
        print(f"{info.name} ({info.driver_name} {info.driver_info}): attention of {args.layers} layers, "
              f"{args.heads} heads, head_dim {args.head_dim}, float16, one token")
        print(table(results))
    if args.json:
        document = {"format": 1, "device": info.name, "driver": f"{info.driver_name} {info.driver_info}".strip(),
                    "decomposed": results}
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
