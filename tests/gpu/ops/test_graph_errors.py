"""What nodes of a graph refuse when they are declared: with the node's name, and nothing of them is left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vkattn import Dim, GraphBuilder, KVCache
from vkattn.errors import CapacityError, DTypeError, OptionError, PlanError, ShapeError
from vkattn.runtime.device import Device

N = Dim("n", max=6)
SPIRV = b"\x03\x02\x23\x07"


class Declared:
    """A builder with everything that a wrong declaration can be made of."""

    def __init__(self, device: Device, cache: KVCache) -> None:
        self.builder = GraphBuilder(device)
        self.q = self.builder.input("q", (1, N, 4, 8), "float32")
        self.k = self.builder.input("k", (1, N, 2, 8), "float32")
        self.half = self.builder.input("half", (1, N, 2, 8), "float16")
        self.other = self.builder.input("other", (1, Dim("m", max=9), 2, 8), "float32")
        self.fixed = self.builder.input("fixed", (2, 3, 2, 8), "float32")
        self.flat = self.builder.input("flat", (N, 8), "float32")
        self.mask = self.builder.input("mask", (N, 7), "float16")
        self.cache = self.builder.kv_cache("cache", cache=cache)
        self.at, self.later = self.builder.position("at"), self.builder.position("later")
        self.stranger = GraphBuilder(device).input("stranger", (1, N, 4, 8), "float32")
        self.view = self.builder.kv_append(self.cache, self.k, self.k, self.at)
        self.scores = self.builder.attn_weights(self.q, self.view, layout="bshd", name="scores")
        self.builder.output("scores", self.scores)


@pytest.fixture(scope="module")
def cache(device: Device) -> KVCache:
    return KVCache(1, 2, 8, 8, num_layers=3, dtype="float32", device=device)


@pytest.fixture(scope="module")
def declared(device: Device, cache: KVCache) -> Declared:
    """One builder for all wrong declarations: none of them leaves anything behind."""
    return Declared(device, cache)


Case = tuple[Callable[[Declared], Any], type[Exception], str]
NODE: dict[str, Case] = {
    "query rank": (lambda d: d.builder.attention(d.flat, d.k, d.k, name="my_node"), ShapeError,
                   r"^my_node: `query` is input|^my_node: `query` is flat \(n, 8\) float32; it must have 4 dimensions"),
    "key rank": (lambda d: d.builder.attention(d.q, d.flat, d.k, layout="bshd", name="my_node"), ShapeError,
                 "^my_node: `key` is flat"),
    "value tokens": (lambda d: d.builder.attention(d.q, d.k, d.other, layout="bshd", name="my_node"), ShapeError,
                     r"^my_node: `value` is other \(1, m, 2, 8\) float32; it must have batch 1, 2 heads, n"),
    "batch": (lambda d: d.builder.attention(d.q, d.fixed, d.fixed, layout="bshd", name="my_node"), ShapeError,
              "^my_node: `key` is fixed .* batch and head_dim must be equal"),
    "heads": (lambda d: d.builder.attention(d.k, d.q, d.q, layout="bshd", name="my_node"), ShapeError,
              "^my_node: `query` has 2 heads; they must be a multiple of the 4 KV heads"),
    "heads are a Dim": (lambda d: d.builder.attention(d.q, d.k, d.k, layout="bhsd", name="my_node"), ShapeError,
                        "^my_node: `query` is q .*; only its tokens may be a Dim"),
    "key dtype": (lambda d: d.builder.attention(d.half, d.k, d.k, layout="bshd", name="my_node"), DTypeError,
                  "^my_node: `query` is float16 but `key` is float32"),
    "value dtype": (lambda d: d.builder.attention(d.q, d.k, d.half, layout="bshd", name="my_node"), DTypeError,
                    "^my_node: `value` is float16 but the keys are float32"),
    "layout": (lambda d: d.builder.attention(d.q, d.k, d.k, layout="hbsd", name="my_node"), OptionError,
               "^my_node: `layout` is 'hbsd'; supported"),
    "causal": (lambda d: d.builder.attention(d.q, d.k, d.k, layout="bshd", causal=True, name="my_node"), OptionError,
               "^my_node: `causal` is True; allowed"),
    "scale": (lambda d: d.builder.attention(d.q, d.k, d.k, layout="bshd", scale="big", name="my_node"), OptionError,
              "^my_node: `scale` is 'big'"),
    "softcap": (lambda d: d.builder.attention(d.q, d.k, d.k, layout="bshd", softcap=-1, name="my_node"), OptionError,
                "^my_node: `softcap` is -1; it must be positive"),
    "sinks": (lambda d: d.builder.attention(d.q, d.k, d.k, layout="bshd", sinks=[1.0], name="my_node"), ShapeError,
              r"^my_node: `sinks` has shape \(1,\)"),
    "window needs q_offset": (lambda d: d.builder.attention(d.q, d.other, d.other, layout="bshd", window=(1, 1),
                                                            name="my_node"), OptionError,
                              "^my_node: `q_offset` is needed"),
    "q_offset": (lambda d: d.builder.attention(d.q, d.k, d.k, layout="bshd", q_offset=1.5, name="my_node"), OptionError,
                 "^my_node: `q_offset` is 1.5; it must be a position"),
    "kv_len": (lambda d: d.builder.attention(d.q, d.k, d.k, layout="bshd", kv_len=2**30, name="my_node"), OptionError,
               "^my_node: `kv_len` is 1073741824"),
    "kv_len with a cache": (lambda d: d.builder.attention(d.q, d.view, d.view, layout="bshd", kv_len=d.at,
                                                          name="my_node"), OptionError,
                            "^my_node: `kv_len` is given, but the live length of a cache"),
    "mask dtype": (lambda d: d.builder.attention(d.q, d.k, d.k, layout="bshd", mask=d.mask, name="my_node"), DTypeError,
                   "^my_node: `mask` is float16; supported in a graph: bool, float32"),
    "mask shape": (lambda d: d.builder.attention(d.q, d.k, d.k, layout="bshd", mask=d.flat, name="my_node"), ShapeError,
                   "^my_node: `mask` is flat .*; it must broadcast to"),
    "array": (lambda d: d.builder.attention(np.ones(3), d.k, d.k, name="my_node"), PlanError,
              r"^my_node: `query` is array\(.*; it must be a tensor of this GraphBuilder"),
    "other builder": (lambda d: d.builder.attention(d.stranger, d.k, d.k, name="my_node"), PlanError,
                      "^my_node: `query` is Value.*'stranger'.*; it must be a tensor of this GraphBuilder"),
    "position for a tensor": (lambda d: d.builder.attention(d.at, d.k, d.k, name="my_node"), PlanError,
                              "^my_node: `query` is Position.*; it must be a tensor"),
    "cache for a query": (lambda d: d.builder.attention(d.view, d.k, d.k, name="my_node"), PlanError,
                          "^my_node: `query` is CacheValue.*; it must be a tensor"),
    "tensor for a position": (lambda d: d.builder.kv_append(d.cache, d.k, d.k, d.q, layer=1, name="my_node"), PlanError,
                              "^my_node: `position` is Value.*; it must be a position"),
    "number for a position": (lambda d: d.builder.kv_append(d.cache, d.k, d.k, 3, layer=1, name="my_node"), PlanError,
                              "^my_node: `position` is 3; it must be a position"),
    "tensor for a cache": (lambda d: d.builder.kv_append(d.k, d.k, d.k, d.at, name="my_node"), PlanError,
                           "^my_node: `cache` is Value.*; it must be a KV cache"),
    "half keys": (lambda d: d.builder.attention(d.q, d.view, d.k, layout="bshd", name="my_node"), PlanError,
                  "^my_node: `key` is a cache, so `value` must be the same one"),
    "keys and a cache": (lambda d: d.builder.attention(d.q, d.k, d.view, layout="bshd", name="my_node"), PlanError,
                         "^my_node: `value` is CacheValue.*; it must be a tensor"),
    "cache without rows": (lambda d: d.builder.attention(d.q, d.cache, d.cache, layout="bshd", name="my_node"),
                           PlanError, "^my_node: cache 'cache' has to be appended to first. Hint"),
    "top_left with a cache": (lambda d: d.builder.attention(d.q, d.view, d.view, layout="bshd", causal="top_left",
                                                            name="my_node"), OptionError,
                              "^my_node: `causal` is 'top_left'; with a cache"),
    "append rank": (lambda d: d.builder.kv_append(d.cache, d.flat, d.flat, d.at, layer=1, name="my_node"), ShapeError,
                    "^my_node: `key` is flat .*; it must have 4 dimensions"),
    "append heads": (lambda d: d.builder.kv_append(d.cache, d.q, d.q, d.at, layer=1, name="my_node"), ShapeError,
                     r"^my_node: `key` has shape \(1, 6, 4, 8\); this cache takes .*num_kv_heads 2"),
    "append dtype": (lambda d: d.builder.kv_append(d.cache, d.half, d.half, d.at, layer=1, name="my_node"), DTypeError,
                     "^my_node: `key` is float16; this float32 cache takes float32 rows"),
    "append tokens": (lambda d: d.builder.kv_append(d.cache, d.k, d.other, d.at, layer=1, name="my_node"), ShapeError,
                      "^my_node: `key` has 6 tokens but `value` has 9"),
    "append beyond capacity": (lambda d: d.builder.kv_append(d.cache, d.other, d.other, d.at, layer=1, name="my_node"),
                               CapacityError, "^my_node: `key` has up to 9 tokens; the cache holds 8"),
    "append layer": (lambda d: d.builder.kv_append(d.cache, d.k, d.k, d.at, layer=3, name="my_node"), OptionError,
                     "^my_node: `layer` is 3; this cache has layers 0 .. 2"),
    "append layout": (lambda d: d.builder.kv_append(d.cache, d.k, d.k, d.at, layer=1, layout="b", name="my_node"),
                      OptionError, "^my_node: `layout` is 'b'"),
    "two writers": (lambda d: d.builder.kv_append(d.cache, d.k, d.k, d.at, name="my_node"), PlanError,
                    "^my_node: layer 0 of cache 'cache' is already appended to by kv_append_0 at the same position"),
    "a writer of any layer": (lambda d: d.builder.kv_append(d.cache, d.k, d.k, d.later, layer=d.at, name="my_node"),
                              PlanError, "^my_node: layer 'at' of cache 'cache' is already appended to by kv_append_0"),
    "more queries than rows": (lambda d: d.builder.sdpa_with_kv_cache(d.q, d.other, d.other, d.cache, d.at, layer=1,
                                                                      name="my_node"), CapacityError, "^my_node: "),
    "unknown option": (lambda d: d.builder.sdpa_with_kv_cache(d.q, d.k, d.k, d.cache, d.at, layer=1, dropout=0.1,
                                                              name="my_node"), OptionError,
                       r"^my_node: unknown options dropout; there are: scale, softcap"),
    "half query": (lambda d: d.builder.sdpa_with_kv_cache(d.half, d.k, d.k, d.cache, d.at, layer=1, name="my_node"),
                   DTypeError, "^my_node: `query` is float16 but `key` is float32"),
    "softmax of a tensor": (lambda d: d.builder.softmax(d.q, name="my_node"), PlanError,
                            "^my_node: `scores` is q .*; it must come from attn_weights"),
    "output of scores": (lambda d: d.builder.attn_output(d.scores, d.view, name="my_node"), PlanError,
                         "^my_node: `probs` is scores .*; it must come from softmax"),
    "attention over scores": (lambda d: d.builder.attention(d.scores, d.k, d.k, name="my_node"), PlanError,
                              "^my_node: `query` is scores .*, a score matrix, which only the passes after it read"),
    "no spir-v": (lambda d: d.builder.kernel("my_node", b"not spir-v..", [d.q], {}), PlanError,
                  r"^my_node: `spirv` is not a SPIR-V module \(its size is 12 bytes\)"),
    "kernel push": (lambda d: d.builder.kernel("my_node", SPIRV, [d.q], {}, push={"base_1": 1}),
                    PlanError, r"^my_node: `push` holds \['base_1'\]"),
    "kernel push of a float": (lambda d: d.builder.kernel("my_node", SPIRV, [d.q], {}, push={"bias": 0.5}), PlanError,
                               r"^my_node: `push` gives 'bias' as 0\.5; a word is an .* Hint: int\(np\.float32"),
    "kernel push of a negative": (lambda d: d.builder.kernel("my_node", SPIRV, [d.q], {}, push={"bias": -1}), PlanError,
                                  "^my_node: `push` gives 'bias' as -1"),
    "kernel groups": (lambda d: d.builder.kernel("my_node", SPIRV, [d.q], {}, groups=0), PlanError,
                      "^my_node: `groups` is 0; it must be an integer of at least 1"),
    "kernel file": (lambda d: d.builder.kernel("my_node", "no such file.spv", [d.q], {}), PlanError,
                    "^my_node: `spirv` cannot be read: .*no such file.spv"),
    "kernel shape of one size": (lambda d: d.builder.kernel("my_node", SPIRV, [d.q], {"out": (3, "float32")}),
                                 ShapeError, "^my_node: `shape` is 3; it must be a sequence of sizes"),
    "kernel dims of one size": (lambda d: d.builder.kernel("my_node", SPIRV, [d.q], {}, dims=N), ShapeError,
                                "^my_node: `dims` is Dim.*; it must be a sequence of sizes"),
    "kernel dims": (lambda d: d.builder.kernel("my_node", SPIRV, [d.q], {}, dims=(Dim("n", max=5),)),
                    PlanError, "^my_node: there are two Dims called 'n', with max 6 and 5"),
    "kernel size": (lambda d: d.builder.kernel("my_node", SPIRV, [d.q], {}, dims=("n",)), ShapeError,
                    "^my_node: 'n' is not a size"),
    "kernel shape": (lambda d: d.builder.kernel("my_node", SPIRV, [d.q], {"out": ((0, 3), "float32")}),
                     ShapeError, r"^my_node has shape \(0, 3\)"),
    "kernel dtype": (lambda d: d.builder.kernel("my_node", SPIRV, [d.q], {"out": ((3,), "int8")}),
                     DTypeError, "^my_node is 'int8'; supported: float32, float16, bfloat16, bool"),
    "node name taken": (lambda d: d.builder.attention(d.q, d.k, d.k, name="scores"), PlanError,
                        "a node is called 'scores', and so is something else in this graph"),
    "node name": (lambda d: d.builder.attention(d.q, d.k, d.k, name="my node"), PlanError,
                  "a node is called 'my node'; its name must be a Python identifier"),
    "scores after their softmax": (lambda d: [d.builder.softmax(d.scores, name="my_softmax"),
                                              d.builder.softmax(d.scores, name="my_node")], PlanError,
                                   "^my_node: scores .* was already replaced by its softmax in my_softmax"),
}


@pytest.mark.parametrize(("declare", "kind", "message"), NODE.values(), ids=NODE.keys())
def test_a_wrong_node_is_refused_and_leaves_nothing_behind(declared: Declared, declare: Callable[[Declared], Any],
                                                           kind: type[Exception], message: str) -> None:
    plan = declared.builder._plan
    before = len(plan.steps), dict(plan.appends), dict(plan.dims)
    with pytest.raises(kind, match=message):
        declare(declared)
    if "my_softmax" not in message:
        assert (len(plan.steps), plan.appends, plan.dims) == before
    assert "my_node" not in declared.builder._names


def test_a_name_that_failed_can_be_used_again(device: Device, cache: KVCache) -> None:
    fresh = Declared(device, cache)
    for _ in range(2):
        with pytest.raises(ShapeError):
            fresh.builder.attention(fresh.flat, fresh.k, fresh.k, name="again")
        with pytest.raises(ShapeError):
            fresh.builder.attention(fresh.flat, fresh.k, fresh.k)
    fresh.builder.attention(fresh.q, fresh.k, fresh.k, layout="bshd", name="again")
    fresh.builder.attention(fresh.q, fresh.k, fresh.k, layout="bshd")
