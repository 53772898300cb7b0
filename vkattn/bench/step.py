"""``vkattn bench --graph``: what one decode step costs, as the device and the host time it.

The graph appends new rows to a KV cache and attends over what is live then, layer after layer, each layer's output the
next one's queries. It is compared with the oracle before anything is printed; the numbers are medians after a warm-up.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from .. import oracle
from ..cache.kv_cache import KVCache
from ..dtypes import ITEM_BYTES, numpy_dtype
from ..errors import CapacityError, DeviceError, OptionError
from ..ops.builder import GraphBuilder
from ..ops.graph import Graph
from ..ops.timings import Timings
from ..runtime.device import Device
from .clock import warm_up, warm_up_seconds
from .roofline import raise_clock


@dataclass(frozen=True)
class Settings:
    """One decode step: ``q_len`` new tokens, with which ``length`` of the cache's ``capacity`` tokens are live."""

    num_heads: int = 24
    num_kv_heads: int = 8
    head_dim: int = 128
    capacity: int = 4096
    length: int = 250
    q_len: int = 1
    num_layers: int = 1
    dtype: str = "float16"
    repeat: int = 50

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise OptionError(f"--heads {self.num_heads}/{self.num_kv_heads}: the query heads must be a multiple of "
                              "the KV heads.")
        if not self.q_len <= self.length <= self.capacity:
            raise CapacityError(f"--q-len {self.q_len} --length {self.length} --capacity {self.capacity}: the new "
                                "tokens are part of the length, and the length must fit the capacity.")

    @property
    def position(self) -> int:
        """Where the new tokens go."""
        return self.length - self.q_len

    @property
    def bytes_read(self) -> int:
        """Bytes that any kernel must read: every live row of keys and values once, in every layer."""
        return self.num_layers * self.num_kv_heads * self.length * 2 * self.head_dim * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Result:
    """What was measured. ``worst_share`` is the largest error as a share of its bound; ``host_ns`` is of one call."""

    settings: Settings
    device: str
    driver: str
    report: dict[str, int]
    worst_share: float
    timings: Timings
    host_ns: float

    @property
    def gigabytes_per_second(self) -> float:
        """``bytes_read`` over the device's time for all dispatches."""
        return self.settings.bytes_read / self.timings.total_ns

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        return {
            "device": self.device, "driver": self.driver, "settings": asdict(self.settings), "graph": self.report,
            "worst_share": self.worst_share, "device_ns": self.timings.total_ns, "host_ns": self.host_ns,
            "bytes_read": self.settings.bytes_read, "gigabytes_per_second": self.gigabytes_per_second,
            "timings": self.timings.as_dict(),
        }  # fmt: skip

    def __str__(self) -> str:
        given = self.settings
        plural = "" if given.num_layers == 1 else "s"
        return "\n".join([
            f'"{self.device}" ({self.driver})',
            f"decode step of {given.num_layers} layer{plural}: {given.num_heads} query heads on {given.num_kv_heads} "
            f"KV heads, head_dim {given.head_dim}, {given.dtype}, q_len {given.q_len}, length {given.length} of "
            f"{given.capacity}",
            f"right: the worst error is {self.worst_share:.2g} of its bound",
            "",
            str(self.timings),
            "",
            f"device   {self.timings.total_ns / 1e3:.1f} microseconds, each dispatch's median of {given.repeat} runs",
            f"host     {self.host_ns / 1e3:.1f} microseconds for the whole call, median of {given.repeat}",
            f"keys and values  {given.bytes_read} bytes, read at {self.gigabytes_per_second:.3g} GB/s",
        ])  # fmt: skip


class DecodeStep:
    """A decode-step graph with a filled cache and inputs to run it with."""

    def __init__(self, device: Device, settings: Settings) -> None:
        self.settings = settings
        self.device = device
        rng = np.random.default_rng(2026)
        given = settings

        def rows(heads: int, tokens: int) -> np.ndarray:
            return rng.standard_normal((1, tokens, heads, given.head_dim), np.float32).astype(numpy_dtype(given.dtype))

        self.cache = KVCache(1, given.num_kv_heads, given.capacity, given.head_dim, num_layers=given.num_layers,
                             dtype=given.dtype, device=device)
        self.inputs = {"query": rows(given.num_heads, given.q_len), "key": rows(given.num_kv_heads, given.q_len),
                       "value": rows(given.num_kv_heads, given.q_len)}
        for layer in range(given.num_layers if given.position else 0):
            key, value = rows(given.num_kv_heads, given.position), rows(given.num_kv_heads, given.position)
            self.cache.update(key, value, 0, layer)
        self.graph = self._build(every_layer=False)

    def _build(self, every_layer: bool) -> Graph:
        """Return a graph whose output is that of the last layer, or that has an output for each layer."""
        given = self.settings
        builder = GraphBuilder(self.device)
        heads = {"query": given.num_heads, "key": given.num_kv_heads, "value": given.num_kv_heads}
        query, key, value = (builder.input(name, (1, given.q_len, count, given.head_dim), given.dtype)
                             for name, count in heads.items())
        cache, position = builder.kv_cache("cache", cache=self.cache), builder.position("position")
        for layer in range(given.num_layers):
            query = builder.sdpa_with_kv_cache(query, key, value, cache, position, layer=layer, name=f"layer_{layer}")
            if every_layer or layer == given.num_layers - 1:
                builder.output(f"out_{layer}", query)
        return builder.build()

    def run(self) -> np.ndarray:
        """Run one step, at the same place each time; return the last layer's output."""
        return self.graph.run(self.inputs, position=self.settings.position)[f"out_{self.settings.num_layers - 1}"]

    def worst_share(self) -> float:
        """Compare every layer with the oracle: the largest error of a row as a share of its bound.

        The outputs of inner layers come from a second graph, which must give the last one with the same bits.
        """
        last, outputs = self.run(), {}
        if self.settings.num_layers > 1:
            with_every_layer = self._build(every_layer=True)
            outputs = with_every_layer.run(self.inputs, position=self.settings.position)
            with_every_layer.close()
        else:
            outputs["out_0"] = last
        if outputs[f"out_{self.settings.num_layers - 1}"].tobytes() != last.tobytes():
            return float("inf")
        shares, query = [], self.inputs["query"]
        for layer in range(self.settings.num_layers):
            key, value = self.cache.read(layer)
            key[:, self.settings.position :] = self.inputs["key"]  # what was read may not excuse a wrong append
            value[:, self.settings.position :] = self.inputs["value"]
            shares.append(oracle.worst_share(outputs[f"out_{layer}"], query, key, value, causal="bottom_right",
                                             layout="bshd"))
            query = outputs[f"out_{layer}"]
        return max(shares)

    def close(self) -> None:
        """Free the graph and the cache."""
        self.graph.close()
        self.cache.close()


def measure(device: Device, settings: Settings) -> Result:
    """Build the graph, compare it with the oracle, warm up, and time it.

    Raises
    ------
    DeviceError : it is wrong; nothing was measured.
    """
    step = DecodeStep(device, settings)
    try:
        share = step.worst_share()
        if not share <= 1:
            raise DeviceError(f'"{device.info.name}" computes this step wrongly: the worst error is {share:.3g} times '
                              "its bound, so nothing was measured. Hint: vkattn check tells which kernel it is.")
        raise_clock(device)
        warm_up(step.run, warm_up_seconds(device.info))
        host = []
        for _ in range(settings.repeat):
            start = time.perf_counter_ns()
            step.run()
            host.append(time.perf_counter_ns() - start)
        step.graph.timings()  # makes the recording with timestamps
        timings = Timings.median_of([step.graph.timings() for _ in range(settings.repeat)])
        report = step.graph.report()
    finally:
        step.close()
    counts = {"dispatches": report.num_dispatches, "segments": report.num_segments,
              "submissions": report.num_submissions, "pipelines": report.num_pipelines}
    driver = f"{device.info.driver_name} {device.info.driver_info}".strip() or "driver unknown"
    return Result(settings, device.info.name, driver, counts, share, timings, float(median(host)))


def main(args: argparse.Namespace) -> int:
    """Measure and print; return 1 if the device computes wrongly, 2 for wrong usage or no device."""
    try:
        settings = Settings(
            num_heads=args.heads[0], num_kv_heads=args.heads[1], head_dim=args.head_dim, capacity=args.capacity,
            length=args.length, q_len=args.q_len, num_layers=args.layers, dtype=args.dtype, repeat=args.repeat,
        )  # fmt: skip
        device = Device(args.device)
    except (OptionError, CapacityError, DeviceError) as error:
        print(f"vkattn bench: {error}", file=sys.stderr)
        return 2
    with device:
        result = measure(device, settings)
    print(json.dumps(result.as_dict(), indent=1) if args.json else result)
    return 0
