"""Attention for the decoder of smollm2_model.py: on Vulkan, by the oracle, and one checked by the other.

All are called as `Attend` says, for every layer of every step, and keep the keys and values that they were given: the
device in a `vkattn.KVCache`, which never comes back to the host, the oracle in NumPy arrays rounded as that cache is.
"""

from __future__ import annotations

import time

import numpy as np
from smollm2_file import import_package
from smollm2_model import Attend, Config

import vkattn

QUANTISED = ("int8", "q8_0", "q4_0")
CACHE_DTYPES = ("float32", "float16", "bfloat16", *QUANTISED)


class GraphAttention:
    """Attention on the device: one cache for all layers, and two graphs that share it.

    Each graph is recorded once, here: one for the steps of several tokens (the prompt), one for those of a single
    token. A call replays one of them for one layer: the layer, the position and the lengths are words that the
    recorded kernels read, so a call writes the new rows and a few words, submits, and reads the output.

    Parameters
    ----------
    capacity : the most tokens that the cache can hold.
    max_step : the most tokens of one step.
    dtype : what the cache stores, one of ``CACHE_DTYPES``; queries and outputs are float32.
    """

    def __init__(self, config: Config, capacity: int, max_step: int, dtype: str, device: vkattn.Device) -> None:
        self.config = config
        self.cache = vkattn.KVCache(
            batch=1, num_kv_heads=config.num_kv_heads, capacity=capacity, head_dim=config.head_dim,
            num_layers=config.num_layers, dtype=dtype, device=device,
        )  # fmt: skip
        self.prefill = self._build(vkattn.Dim("q_len", max=max_step))
        self.decode = self._build(1)
        self.latest = self.prefill

    def _build(self, q_len: int | vkattn.Dim) -> vkattn.Graph:
        """Declare and record one layer's attention for ``q_len`` new tokens."""
        config = self.config
        builder = vkattn.GraphBuilder(self.cache.device)
        query = builder.input("query", (1, config.num_heads, q_len, config.head_dim), "float32")
        key = builder.input("key", (1, config.num_kv_heads, q_len, config.head_dim), "float32")
        value = builder.input("value", (1, config.num_kv_heads, q_len, config.head_dim), "float32")
        cache = builder.kv_cache("cache", cache=self.cache)
        position, layer = builder.position("position"), builder.position("layer")
        out = builder.sdpa_with_kv_cache(query, key, value, cache, position, layer=layer, layout="bhsd", name="attend")
        builder.output("out", out)
        return builder.build()

    def __call__(self, layer: int, query: np.ndarray, key: np.ndarray, value: np.ndarray, position: int) -> np.ndarray:
        """Append and attend on the device."""
        self.latest = self.decode if query.shape[2] == 1 else self.prefill
        inputs = {"query": query, "key": key, "value": value}
        return self.latest.run(inputs, position=position, layer=layer)["out"]

    def close(self) -> None:
        """Free the graphs and the cache."""
        self.prefill.close()
        self.decode.close()
        self.cache.close()


class OracleAttention:
    """Attention by the float64 oracle, on what a cache of this dtype holds; the output is rounded to float32.

    Of a quantised cache it keeps, in float64, what the oracle's quantiser makes of the rows.
    """

    def __init__(self, config: Config, capacity: int, dtype: str = "float32") -> None:
        shape = (config.num_layers, 1, config.num_kv_heads, capacity, config.head_dim)
        stored = import_package("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype
        self.dtype = dtype
        if dtype in QUANTISED:
            stored = "float64"
        self.keys = np.zeros(shape, stored)
        self.values = np.zeros(shape, stored)

    def append(
        self, layer: int, key: np.ndarray, value: np.ndarray, position: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Keep new rows; return all that the layer holds then, ``[1, num_kv_heads, tokens, head_dim]``."""
        end = position + key.shape[2]
        for kept, rows in ((self.keys, key), (self.values, value)):
            if self.dtype in QUANTISED:
                rows = vkattn.oracle.dequantize(*vkattn.oracle.quantize(rows, self.dtype))
            kept[layer, :, :, position:end] = rows
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def __call__(self, layer: int, query: np.ndarray, key: np.ndarray, value: np.ndarray, position: int) -> np.ndarray:
        """Append and attend."""
        keys, values = self.append(layer, key, value, position)
        return np.asarray(vkattn.oracle.attention(query, keys, values, causal="bottom_right"), dtype=np.float32)


class CheckedAttention:
    """An `Attend` around another: timed, and with ``held`` each answer compared with the oracle's.

    The oracle is given the same queries, and the keys and values as ``held`` rounds and keeps them. All lists hold one
    entry per call; `Decoder` calls once per layer, so they reshape to [steps, num_layers]. ``errors`` is the largest
    relative L2 error of a query row, ``error_shares`` the largest share of its tolerance (`vkattn.oracle.worst_share`).
    """

    def __init__(self, attend: Attend, held: OracleAttention | None = None) -> None:
        self.attend = attend
        self.held = held
        self.seconds: list[float] = []
        self.check_seconds: list[float] = []
        self.errors: list[float] = []
        self.error_shares: list[float] = []

    def __call__(self, layer: int, query: np.ndarray, key: np.ndarray, value: np.ndarray, position: int) -> np.ndarray:
        """Append and attend as the other does."""
        start = time.perf_counter()
        out = self.attend(layer, query, key, value, position)
        end = time.perf_counter()
        self.seconds.append(end - start)
        if self.held is not None:
            keys, values = self.held.append(layer, key, value, position)
            expected = vkattn.oracle.attention(query, keys, values, causal="bottom_right")
            error = np.linalg.norm(out - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
            share = vkattn.oracle.worst_share(out, query, keys, values, causal="bottom_right")
            self.errors.append(float(np.max(error)))
            self.error_shares.append(share)
        self.check_seconds.append(time.perf_counter() - end)
        return out


def cache_differences(cache: vkattn.KVCache, held: OracleAttention, length: int) -> list[int]:
    """Return the layers of ``cache`` that do not hold ``length`` tokens, each element bit for bit as ``held``.

    A quantised cache is read as float32. A GPU whose division is not exact may choose a neighbouring code, and such a
    layer is named here.
    """
    different = []
    for layer in range(cache.num_layers):
        expected = [kept[layer, :, :, :length].swapaxes(1, 2) for kept in (held.keys, held.values)]
        got = cache.read(layer)  # [1, tokens, num_kv_heads, head_dim]
        if held.dtype in QUANTISED:
            expected = [rows.astype(np.float32) for rows in expected]
        if any(a.shape != b.shape or a.tobytes() != b.tobytes() for a, b in zip(got, expected, strict=True)):
            different.append(layer)
    return different
