"""`GraphBuilder`: declares nodes on symbolic values and checks them at once; `build` makes a `Graph` of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..cache.kv_cache import KVCache
from ..dtypes import FLOAT_DTYPES, dtype_name
from ..errors import CapacityError, DTypeError, OptionError, PlanError, ShapeError
from ..graph.steps import Base, Resource, Step
from ..graph.values import CacheValue, Dim, Position, Shape, Size, Value, capacities, capacity, words_of
from ..kernels.manifest import Binding, Variant
from ..layout import QUAD_WORDS, join_shape, split_shape
from ..mask import resolve_causal, resolve_window
from ..runtime.device import Device, default_device
from ..validate import causal_window, check_mixture, finite_option, per_head_option
from .graph import Graph, Plan
from .lower import Tensors, append_step, output_step, softmax_step, three_passes, weights_step, with_scores
from .spec import AttentionSpec, DimsBlock, check_value

GRAPH_DTYPES = (*FLOAT_DTYPES, "bool")


class GraphBuilder:
    """Declares a graph: inputs, caches, nodes, outputs. Nothing touches the device until `build`.

    Nodes run in the order in which they are declared. Sizes may hold a `Dim`, whose value every run chooses up to its
    max. Every mistake is an error at the declaration, with the node's name.

    Parameters
    ----------
    device : vkattn.Device or None
        None is `vkattn.default_device`.

    Example
    -------
    >>> builder = GraphBuilder()
    >>> length = Dim("q_len", max=16)
    >>> q, k, v = (builder.input(name, (1, length, heads, 64), "float16") for name, heads in
    ...            (("q", 9), ("k", 3), ("v", 3)))
    >>> cache = builder.kv_cache("cache", batch=1, num_kv_heads=3, capacity=128, head_dim=64)
    >>> builder.output("out", builder.sdpa_with_kv_cache(q, k, v, cache, builder.position("input_pos")))
    >>> graph = builder.build()
    >>> x = np.ones((1, 2, 9, 64), np.float16)
    >>> graph.run({"q": x, "k": x[:, :, :3], "v": x[:, :, :3]}, input_pos=0)["out"].shape
    (1, 2, 9, 64)
    """

    def __init__(self, device: Device | None = None) -> None:
        self.device = default_device() if device is None else device
        self.device.check()
        self._plan = Plan()
        self._params = Resource("params", 0, "params")
        self._nothing = Resource("nothing", QUAD_WORDS, "nothing")
        self._resources: dict[Value, Resource] = {}
        self._used: set[Value] = set()
        self._softmaxed: dict[Value, str] = {}
        self._names: set[str] = set()
        self._versions: dict[tuple[int, Any], tuple[int, str]] = {}
        self._is_built = False

    # --- what comes from the host -----------------------------------------------------------------------------------

    def input(self, name: str, shape: Sequence[Size], dtype: str) -> Value:
        """Declare an array that every run is given.

        Parameters
        ----------
        name : str
            The key in the run's ``inputs``.
        shape : sequence of int and Dim
            At least one dimension.
        dtype : "float32", "float16", "bfloat16", or "bool" (a mask)
        """
        self._take_name(name, "an input")
        value = self._value(name, tuple(shape), dtype, f"input {name!r}")
        self._resources[value] = Resource(value, words_of(capacities(value.shape), dtype), "input")
        self._plan.inputs[name] = value
        return value

    def constant(self, name: str, array: Any) -> Value:
        """Declare an array that is uploaded once, when the graph is built."""
        self._take_name(name, "a constant")
        given = np.array(array)
        value = self._value(name, given.shape, dtype_name(given, name, GRAPH_DTYPES), f"constant {name!r}")
        self._resources[value] = Resource(value, words_of(given.shape, value.dtype), "constant")
        self._plan.constants[value] = given
        return value

    def kv_cache(self, name: str, *, cache: KVCache | None = None, **sizes: Any) -> CacheValue:
        """Declare a KV cache: an existing one (``cache=``), or a new one of the graph's own (the sizes of `KVCache`)."""
        self._take_name(name, "a cache")
        if (cache is None) == (not sizes):
            raise PlanError(f"cache {name!r}: give either `cache` or the sizes of a new one.")
        if cache is None:
            cache = KVCache(**sizes, device=self.device)
            self._plan.own_caches.append(cache)
        cache.check()
        if cache.device is not self.device:
            raise PlanError(f"cache {name!r} lies on {cache.device!r} but the graph is for {self.device!r}.")
        if any(known is cache for known in self._plan.caches.values()):
            raise PlanError(f"cache {name!r} is the same KVCache as another of this graph. Hint: use the first name.")
        self._plan.caches[name] = cache
        return CacheValue(self, name, cache)

    def position(self, name: str) -> Position:
        """Declare a whole number, or one for each batch entry, that every run is given by this name."""
        self._take_name(name, "a position")
        self._plan.positions.append(name)
        return Position(self, name)

    # --- nodes ------------------------------------------------------------------------------------------------------

    def kv_append(self, cache: CacheValue, key: Value, value: Value, position: Position, *, layer: int | Position = 0,
                  layout: str = "bshd", name: str | None = None) -> CacheValue:
        """Append new rows to a layer of a cache; return the cache as it is then, for attention to read.

        Parameters
        ----------
        key, value : Value, shape ``[batch, tokens, num_kv_heads, dim]`` (bshd), float32 or the cache's dtype
        position : Position
            Where row 0 goes: at most the live length. The live length becomes ``position + tokens``.
        layer : int or Position
            A Position lets every run choose; the cache must then lie in one pair of buffers.
        """
        node = self._node(name, "kv_append")
        spec, view = self._append_spec(node, cache, key, value, position, layer, layout)
        self._append(node, spec, view, key, value)
        return view

    def attn_weights(self, query: Value, key: Value | CacheValue, *, mask: Value | None = None,
                     causal: str | None = None, scale: float | None = None, softcap: float | None = None,
                     window: Any = (None, None), alibi_slopes: Any = None, q_offset: int | Position | None = None,
                     kv_len: int | Position | None = None, layout: str = "bhsd", name: str | None = None) -> Value:
        """Declare pass 1: scaled, masked scores ``[batch, num_heads, q_len, kv_len]``, for `softmax`."""
        node = self._node(name, "attn_weights")
        spec = self._spec(node, query, key, None, mask, causal, scale, softcap, window, None, alibi_slopes, q_offset,
                          kv_len, layout, False)
        spec = with_scores(spec, self.device.info, 0, whole=True)
        scores = Value(self, node, (spec.batch_size, spec.num_heads, spec.q_len, spec.kv_len), "float32", "scores",
                       spec)
        self._resources[scores] = Resource(scores, spec.score_words, "arena")
        tensors = self._tensors(query, key, None, mask, scores=self._resources[scores])
        self._plan.steps.append(weights_step(node, spec, tensors, self.device.info))
        return scores

    def softmax(self, scores: Value, *, sinks: Any = None, return_lse: bool = False, name: str | None = None) -> Any:
        """Declare pass 2: the weights of ``scores``, which they replace; and the lse ``[batch, num_heads, q_len]``."""
        node = self._node(name, "softmax")
        check_value(scores, self, "scores", node)
        if scores.kind != "scores":
            raise PlanError(f"{node}: `scores` is {scores}; it must come from attn_weights.")
        if scores in self._softmaxed:
            raise PlanError(f"{node}: {scores} was already replaced by its softmax in {self._softmaxed[scores]}.")
        self._softmaxed[scores] = node
        self._used.add(scores)
        spec = replace(scores.about, sinks=self._per_head(sinks, "sinks", scores.about.num_heads),
                       return_lse=return_lse)
        probs = Value(self, node, scores.shape, "float32", "probs", spec)
        self._resources[probs] = self._resources[scores]
        lse = Value(self, f"{node} lse", scores.shape[:3], "float32")
        tensors = self._tensors(None, None, None, None, scores=self._resources[scores])
        if return_lse:
            tensors = replace(tensors, lse=self._new(lse))
        self._plan.steps.append(softmax_step(node, spec, tensors, self.device.info))
        return (probs, lse) if return_lse else probs

    def attn_output(self, probs: Value, value: Value | CacheValue, *, name: str | None = None) -> Value:
        """Declare pass 3: weights times values, in the query's dtype and layout."""
        node = self._node(name, "attn_output")
        check_value(probs, self, "probs", node)
        if probs.kind != "probs":
            raise PlanError(f"{node}: `probs` is {probs}; it must come from softmax.")
        self._used.add(probs)
        spec: AttentionSpec = probs.about
        if spec.cache is not None or isinstance(value, CacheValue):
            if not isinstance(value, CacheValue) or value.cache is not spec.cache:
                raise PlanError(f"{node}: the scores and `value` must read the same cache.")
            self._check_view(node, value)
            spec = replace(spec, value_dim=value.cache.value_dim)
        else:
            spec = replace(spec, value_dim=self._check_keys(node, "value", value, spec))
        out = Value(self, node, join_shape(spec.batch_size, spec.num_heads, spec.q_len, spec.value_dim, spec.layout),
                    spec.query_dtype)
        tensors = self._tensors(None, None, value, None, scores=self._resources[probs], out=self._new(out))
        self._plan.steps.append(output_step(node, spec, tensors, self.device.info))
        return out

    def attention(self, query: Value, key: Value | CacheValue, value: Value | CacheValue, *, mask: Value | None = None,
                  causal: str | None = None, scale: float | None = None, softcap: float | None = None,
                  window: Any = (None, None), sinks: Any = None, alibi_slopes: Any = None,
                  q_offset: int | Position | None = None, kv_len: int | Position | None = None, layout: str = "bhsd",
                  return_lse: bool = False, name: str | None = None) -> Any:
        """Declare attention as one node; the options are those of `vkattn.attention`.

        Returns
        -------
        out : Value, the query's shape with value_dim last; with ``return_lse`` also the lse
        """
        node = self._node(name, "attention")
        spec = self._spec(node, query, key, value, mask, causal, scale, softcap, window, sinks, alibi_slopes, q_offset,
                          kv_len, layout, return_lse)
        return self._attend(node, spec, query, key, value, mask)

    def sdpa_with_kv_cache(self, query: Value, key: Value, value: Value, cache: CacheValue, position: Position, *,
                           layer: int | Position = 0, mask: Value | None = None, causal: str | None = "bottom_right",
                           layout: str = "bshd", name: str | None = None, **options: Any) -> Any:
        """Declare an append to a cache and attention over what is live then; see `vkattn.sdpa_with_kv_cache`."""
        node = self._node(name, "sdpa_with_kv_cache")
        append, view = self._append_spec(node, cache, key, value, position, layer, layout)
        unknown = set(options) - {"scale", "softcap", "window", "sinks", "alibi_slopes", "return_lse"}
        if unknown:
            raise OptionError(f"{node}: unknown options {sorted(unknown)}.")
        scale, softcap, window, sinks, slopes, return_lse = (
            options.get(name, default) for name, default in (
                ("scale", None), ("softcap", None), ("window", (None, None)), ("sinks", None), ("alibi_slopes", None),
                ("return_lse", False)))
        spec = self._spec(node, query, view, view, mask, causal, scale, softcap, window, sinks, slopes, None, None,
                          layout, return_lse, append)
        self._append(node, spec, view, key, value)
        return self._attend(node, spec, query, view, view, mask)

    def kernel(self, name: str, spirv: bytes | str | Path, reads: Sequence[Value],
               writes: Mapping[str, tuple[Sequence[Size], str]], *, push: Mapping[str, int] | None = None,
               dims: Sequence[Size] = (), groups: int = 64) -> tuple[Value, ...]:
        """Declare a node of your own.

        Parameters
        ----------
        spirv : bytes, or the path of a file
            A compute shader for Vulkan 1.1 with an entry point ``main``. Binding 0 is a readonly buffer of uints, the
            live sizes ``dims`` from word ``params_base`` on; then come ``reads`` and ``writes``, in order, one binding
            each, as words with rows padded to 16 bytes. Buffers between nodes should be ``coherent``. Its push
            constants are uints: params_base, then the first word of each of ``reads`` and ``writes``, then ``push``.
        writes : mapping of name -> (shape, dtype)
            New values; the kernel must write all their live words.
        push : mapping of name -> word
        dims : sequence of int and Dim
        groups : int
            Workgroups in x; the kernel loops over what is live.
        """
        node = self._node(name, name)
        code = Path(spirv).read_bytes() if isinstance(spirv, (str, Path)) else bytes(spirv)
        if len(code) % 4 or code[:4] != b"\\x03\\x02\\x23\\x07":
            raise PlanError(f"{node}: `spirv` is not a SPIR-V module (its size is {len(code)} bytes).")
        for value in reads:
            self._use(node, "reads", value)
        made = [self._value(f"{node}.{key}", tuple(shape), dtype, node) for key, (shape, dtype) in writes.items()]
        resources = (self._params, *(self._resources[value] for value in reads), *(self._new(value) for value in made))
        names = [f"base_{index}" for index in range(1, len(resources))]
        bindings = (Binding("params", "read", False), *(Binding(n, "read", True) for n in names[: len(reads)]),
                    *(Binding(n, "write", True) for n in names[len(reads) :]))
        words = dict(push or {})
        variant = Variant(node, node, {}, bindings, ("params_base", *names, *words), (), frozenset(), (1, 1, 1), 0, "",
                          "", "")
        bases = tuple(Base(n, index, 1) for index, n in enumerate(names, start=1))
        block = DimsBlock(tuple(dims), 0)
        self._plan.dims.update((size.name, size) for size in dims if isinstance(size, Dim))
        self._plan.steps.append(Step(node, variant, resources, bases, block, words, groups, 0, code))
        return tuple(made)

    def output(self, name: str, value: Value) -> None:
        """Let every run return ``value`` under this name."""
        if name in self._plan.outputs:
            raise PlanError(f"there are two outputs called {name!r}.")
        check_value(value, self, "value", f"output {name!r}")
        if self._resources[value].pool != "arena":
            raise PlanError(f"output {name!r}: {value} is not made by a node.")
        if value.kind == "scores" and value in self._softmaxed:
            raise PlanError(f"output {name!r}: {value} is replaced by its softmax in {self._softmaxed[value]}. "
                            "Hint: declare the output before the softmax.")
        self._used.add(value)
        self._plan.outputs[name] = value
        self._plan.output_at[name] = len(self._plan.steps)

    def build(self) -> Graph:
        """Plan memory and hazards, make pipelines, record, and run once with nothing live; return the graph.

        Raises
        ------
        PlanError
            There is no output and no append, an input is not used, or the builder was built before.
        CapacityError, NoKernelError
            A buffer or kernel is beyond the device.
        """
        if self._is_built:
            raise PlanError("build() was called twice. Hint: make a new GraphBuilder; caches can be shared.")
        if not self._plan.outputs and not self._versions:
            raise PlanError("the graph has no output and appends to no cache.")
        unused = [name for name, value in self._plan.inputs.items() if value not in self._used]
        unused += [value.producer for value in self._plan.constants if value not in self._used]
        if unused:
            raise PlanError(f"nothing uses the inputs {unused}. Hint: remove them, or declare the node that does.")
        self._is_built = True
        return Graph(self.device, self._plan, self._resources)

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _take_name(self, name: str, what: str) -> None:
        if not isinstance(name, str) or not name.isidentifier():
            raise PlanError(f"{what} is called {name!r}; its name must be a Python identifier.")
        if name in self._names:
            raise PlanError(f"{what} is called {name!r}, and so is something else in this graph.")
        self._names.add(name)

    def _node(self, name: str | None, kind: str) -> str:
        if self._is_built:
            raise PlanError(f"{kind}: the graph is built; nothing can be added.")
        if name is None:
            name = f"{kind}_{len(self._plan.steps)}"
        self._take_name(name, "a node")
        return name

    def _value(self, producer: str, shape: Shape, dtype: str, node: str) -> Value:
        if dtype not in GRAPH_DTYPES:
            raise DTypeError(f"{node} is {dtype!r}; supported: {', '.join(GRAPH_DTYPES)}.")
        if not shape or any(not isinstance(size, (int, np.integer, Dim)) for size in shape) or min(
                capacities(shape)) < 1:
            raise ShapeError(f"{node} has shape {shape}; each size must be a positive int or a Dim.")
        for size in shape:
            if isinstance(size, Dim):
                known = self._plan.dims.setdefault(size.name, size)
                if known != size:
                    raise PlanError(f"{node}: there are two Dims called {size.name!r}, with max {known.max} and "
                                    f"{size.max}.")
        return Value(self, producer, tuple(size if isinstance(size, Dim) else int(size) for size in shape), dtype)

    def _new(self, value: Value) -> Resource:
        words = words_of(capacities(value.shape), value.dtype)
        self._resources[value] = Resource(value, words, "arena")
        return self._resources[value]

    def _use(self, node: str, argument: str, value: Value) -> Resource:
        check_value(value, self, argument, node)
        if value.kind != "tensor":
            raise PlanError(f"{node}: `{argument}` is {value}, a score matrix; only softmax and attn_output read those.")
        self._used.add(value)
        return self._resources[value]

    def _tensors(self, query: Value | None, key: Any, value: Any, mask: Value | None, *,
                 scores: Resource, out: Resource | None = None) -> Tensors:
        def resource(given: Any, which: int) -> Resource:
            if given is None:
                return self._nothing
            return self._cache_resources(given)[which] if isinstance(given, CacheValue) else self._resources[given]

        return Tensors(self._params, resource(query, 0), resource(key, 0), resource(value, 1), resource(mask, 0),
                       scores, self._nothing, out or self._nothing)

    def _cache_resources(self, view: CacheValue) -> tuple[Resource, Resource]:
        """Return the key and value words of a layer of a cache, or of its whole group if the run chooses the layer."""
        storage = view.cache.storage
        if isinstance(view.layer, Position):
            sizes = [buffer.num_words for buffer in storage.groups[0]]
            keys: list[Any] = [(id(view.cache), which, 0, None) for which in range(2)]
        else:
            sizes = storage.layer_words
            keys = [(id(view.cache), which, storage.place(view.layer)[0], view.layer) for which in range(2)]
        resources = [Resource(key, words, "cache") for key, words in zip(keys, sizes, strict=True)]
        for which, resource in enumerate(resources):
            group, starts = (0, (0, 0)) if isinstance(view.layer, Position) else storage.place(view.layer)
            self._plan.cache_places[resource.key] = (storage.groups[group][which], starts[which])
        return resources[0], resources[1]

    def _append_spec(self, node: str, cache: CacheValue, key: Value, value: Value, position: Position,
                     layer: int | Position, layout: str) -> tuple[AttentionSpec, CacheValue]:
        """Check an append; return a spec that describes it, and the view of the cache after it."""
        check_value(cache, self, "cache", node)
        check_value(position, self, "position", node)
        store: KVCache = cache.cache
        if isinstance(layer, Position):
            check_value(layer, self, "layer", node)
            if len(store.storage.groups) > 1:
                raise PlanError(f"{node}: the cache lies in {len(store.storage.groups)} pairs of buffers, so `layer` "
                                "must be a number.")
        else:
            layer = store.check_layer(layer)
        for argument, given in (("key", key), ("value", value)):
            self._use(node, argument, given)
            if len(given.shape) != 4:
                raise ShapeError(f"{node}: `{argument}` is {given}; it must have 4 dimensions, {' '.join(layout)}.")
        sizes = [split_shape(given.shape, layout) for given in (key, value)]  # type: ignore[arg-type]
        shapes = [(b, capacity(tokens), heads, dim) for b, heads, tokens, dim in sizes]
        try:
            dtype = store.check_rows(shapes[0], shapes[1], key.dtype, value.dtype)
        except (ShapeError, DTypeError) as error:
            raise type(error)(f"{node}: {error}") from None
        tokens = sizes[0][2]
        if tokens != sizes[1][2]:
            raise ShapeError(f"{node}: `key` is {key} but `value` is {value}; they must have the same tokens.")
        if capacity(tokens) > store.capacity:
            raise CapacityError(f"{node}: `key` has up to {capacity(tokens)} tokens; the cache holds {store.capacity}.")
        place = (id(store), layer)
        version, earlier = self._versions.get(place, (0, ""))
        rival = next((n for (owner, other), (_, n) in self._versions.items()
                      if owner == id(store) and (isinstance(other, Position) != isinstance(layer, Position))), None)
        if rival or (earlier and self._plan.appends[earlier][1] == position.name):
            raise PlanError(f"{node}: layer {layer} of cache {cache.name!r} is already appended to by "
                            f"{rival or earlier} at the same position; the second would overwrite the first.")
        self._versions[place] = (version + 1, node)
        self._plan.appends[node] = (cache.name, position.name, tokens, layer)
        view = CacheValue(self, cache.name, store, layer, position, tokens, version + 1)
        spec = AttentionSpec(
            store.batch, store.num_kv_heads, store.num_kv_heads, tokens, store.capacity, store.head_dim,
            store.value_dim, "float32", store.dtype, layout, cache=store, position=position, new_len=tokens,
            new_dtype=dtype, new_layout=layout, run_layer=layer if isinstance(layer, Position) else None)
        return spec, view

    def _append(self, node: str, spec: AttentionSpec, view: CacheValue, key: Value, value: Value) -> None:
        new = (self._resources[key], self._resources[value])
        self._plan.steps.append(append_step(node, spec, new, self._cache_resources(view), self._params,
                                            self.device.info))

    def _check_view(self, node: str, view: CacheValue) -> None:
        check_value(view, self, "key", node)
        if view.layer is None:
            raise PlanError(f"{node}: cache {view.name!r} has to be appended to first. Hint: pass what kv_append "
                            "returned, or use sdpa_with_kv_cache.")
        version, newest = self._versions[(id(view.cache), view.layer)]
        if version != view.version:
            raise PlanError(f"{node}: layer {view.layer} of cache {view.name!r} was appended to by {newest} since; "
                            "what was there before cannot be read any more. Hint: declare the reader before it.")

    def _check_keys(self, node: str, argument: str, given: Value, spec: AttentionSpec) -> int:
        """Return the last size of a key or value tensor, or raise ShapeError if it does not fit the queries."""
        self._use(node, argument, given)
        if len(given.shape) != 4:
            raise ShapeError(f"{node}: `{argument}` is {given}; it must have 4 dimensions, {' '.join(spec.layout)}.")
        batch, heads, tokens, dim = split_shape(given.shape, spec.layout)  # type: ignore[arg-type]
        if (batch, heads, tokens) != (spec.batch_size, spec.num_kv_heads, spec.kv_len) or not isinstance(dim, int):
            raise ShapeError(f"{node}: `{argument}` is {given}; it must have batch {spec.batch_size}, "
                             f"{spec.num_kv_heads} heads, {spec.kv_len} tokens and a fixed last size.")
        if given.dtype != spec.key_dtype:
            raise DTypeError(f"{node}: `{argument}` is {given.dtype} but the keys are {spec.key_dtype}.")
        return dim

    def _per_head(self, values: Any, argument: str, num_heads: int) -> tuple[float, ...] | None:
        numbers = per_head_option(values, argument, num_heads)
        return None if numbers is None else tuple(numbers.tolist())

    def _spec(self, node: str, query: Value, key: Any, value: Any, mask: Value | None, causal: Any, scale: Any,
              softcap: Any, window: Any, sinks: Any, alibi_slopes: Any, q_offset: Any, kv_len: Any, layout: str,
              return_lse: bool, append: AttentionSpec | None = None) -> AttentionSpec:
        """Check an attention node; return its spec, without a score buffer."""
        self._use(node, "query", query)
        if len(query.shape) != 4:
            raise ShapeError(f"{node}: `query` is {query}; it must have 4 dimensions, {' '.join(layout)}.")
        batch, heads, q_len, head_dim = split_shape(query.shape, layout)  # type: ignore[arg-type]
        if not all(isinstance(size, int) for size in (batch, heads, head_dim)):
            raise ShapeError(f"{node}: `query` is {query}; only its tokens may be a Dim.")
        causal, window = resolve_causal(causal), resolve_window(window)
        changes: dict[str, Any] = {"num_heads": heads, "q_len": q_len, "query_dtype": query.dtype, "layout": layout}
        if isinstance(key, CacheValue):
            self._check_view(node, key)
            if value is not None and value is not key:
                raise PlanError(f"{node}: `key` is a cache, so `value` must be the same one.")
            store: KVCache = key.cache
            if causal == "top_left":
                raise OptionError(f"{node}: `causal` is 'top_left'; with a cache it must be 'bottom_right' or None.")
            if append is not None and q_len != key.new_len:
                raise ShapeError(f"{node}: `query` is {query} but {key.new_len} rows are appended; there must be as "
                                 "many.")
            base = append or AttentionSpec(
                store.batch, heads, store.num_kv_heads, q_len, store.capacity, store.head_dim, store.value_dim,
                query.dtype, store.dtype, layout, cache=store, position=key.position, new_len=key.new_len,
                run_layer=key.layer if isinstance(key.layer, Position) else None)
            if value is None:
                changes["value_dim"] = 0
            if q_offset is None and q_len == key.new_len:
                q_offset = key.position
            if (batch, head_dim) != (store.batch, store.head_dim):
                raise ShapeError(f"{node}: `query` is {query}; the cache has batch {store.batch}, head_dim "
                                 f"{store.head_dim}.")
        else:
            self._use(node, "key", key)
            key_sizes = split_shape(key.shape, layout) if len(key.shape) == 4 else (0, 0, 0, 0)  # type: ignore[arg-type]
            if (key_sizes[0], key_sizes[3]) != (batch, head_dim) or not isinstance(key_sizes[1], int):
                raise ShapeError(f"{node}: `key` is {key} but `query` is {query}; batch and head_dim must be equal.")
            base = AttentionSpec(batch, heads, key_sizes[1], q_len, key_sizes[2], head_dim, 0, query.dtype, key.dtype,
                                 layout)
            if value is not None:
                changes["value_dim"] = self._check_keys(node, "value", value, base)
        if base.num_kv_heads == 0 or heads % base.num_kv_heads:
            raise ShapeError(f"{node}: `query` has {heads} heads; they must be a multiple of the {base.num_kv_heads} "
                             "KV heads.")
        try:
            check_mixture(query.dtype, base.key_dtype, base.key_dtype)
        except DTypeError as error:
            raise DTypeError(f"{node}: {error}") from None
        uses_position = window != (None, None) or alibi_slopes is not None
        if uses_position and causal is None and q_offset is None and not (
                kv_len is None and q_len == base.kv_len):
            raise OptionError(f"{node}: `q_offset` is needed with a window or ALiBi where causal is None.")
        for argument, given in (("q_offset", q_offset), ("kv_len", kv_len)):
            if isinstance(given, Position):
                check_value(given, self, argument, node)
        if mask is not None:
            changes |= self._mask(node, mask, (batch, heads, q_len, base.kv_len), query.dtype)
        if softcap is not None and finite_option(softcap, "softcap", "a positive finite number, or None") <= 0:
            raise OptionError(f"{node}: `softcap` is {softcap!r}; it must be positive.")
        return replace(
            base, **changes, causal=causal, q_offset=q_offset, live_kv_len=kv_len,
            scale=1 / math.sqrt(head_dim) if scale is None else finite_option(scale, "scale"),
            softcap=None if softcap is None else float(softcap), window=causal_window(causal, window),
            alibi_slopes=self._per_head(alibi_slopes, "alibi_slopes", heads),
            sinks=self._per_head(sinks, "sinks", heads), return_lse=bool(return_lse))

    def _mask(self, node: str, mask: Value, full: tuple[Size, ...], query_dtype: str) -> dict[str, Any]:
        """Return the spec's mask fields, or raise if the mask does not broadcast to ``full``."""
        self._use(node, "mask", mask)
        if mask.dtype not in ("bool", "float32"):
            raise DTypeError(f"{node}: `mask` is {mask.dtype}; supported in a graph: bool, float32.")
        fits = len(mask.shape) <= 4 and all(
            size in (1, limit) for size, limit in zip(mask.shape[::-1][1:], full[::-1][1:], strict=False))
        keys = full[3]
        if not fits or not (mask.shape[-1] in (1, keys) or isinstance(mask.shape[-1], Dim)):
            raise ShapeError(f"{node}: `mask` is {mask}; it must broadcast to "
                             f"({', '.join(map(str, full))}); its last size may be a Dim of its own.")
        return {"mask_shape": mask.shape, "mask_dtype": mask.dtype}

    def _attend(self, node: str, spec: AttentionSpec, query: Value, key: Any, value: Any, mask: Value | None) -> Any:
        spec = with_scores(spec, self.device.info, self.device.score_budget_bytes // 4, whole=False)
        scores = Resource((node, "scores"), spec.score_words, "arena")
        out = Value(self, node, join_shape(spec.batch_size, spec.num_heads, spec.q_len, spec.value_dim,  # type: ignore[arg-type]
                                           spec.layout), spec.query_dtype)
        lse = Value(self, f"{node} lse", (spec.batch_size, spec.num_heads, spec.q_len), "float32")
        tensors = self._tensors(query, key, value, mask, scores=scores, out=self._new(out))
        if spec.return_lse:
            tensors = replace(tensors, lse=self._new(lse))
        self._plan.steps += three_passes(node, spec, tensors, self.device.info)
        return (out, lse) if spec.return_lse else out
