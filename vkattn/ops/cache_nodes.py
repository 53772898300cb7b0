"""Appends to KV caches in a graph, and the order in which their layers may be read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..cache.checks import rows_dtype
from ..cache.kv_cache import KVCache
from ..errors import CapacityError, PlanError, ShapeError
from ..formats import QUANTISED, check_range
from ..graph.steps import Resource
from ..graph.values import CacheValue, Position, Value, capacity
from ..layout import check_layout, split_shape
from .assembly import Append
from .declare import Declarations
from .lower import append_step
from .spec import AttentionSpec, check_value


class CacheNodes(Declarations):
    """The part of a graph builder that knows KV caches."""

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
        with self._declaring(name, "kv_append") as node:
            spec, view = self._append_spec(node, cache, key, value, position, layer, layout)
            self._append(node, spec, view, key, value)
            return view

    def _cache_resources(self, view: CacheValue) -> tuple[Resource, Resource]:
        """Return the key and value words of a layer of a cache, or of its whole group if the run chooses the layer."""
        storage = view.cache.storage
        if isinstance(view.layer, Position):
            group, starts = view.group or 0, (0, 0)
            sizes = [buffer.num_words for buffer in storage.groups[group]]
            keys: list[Any] = [(id(view.cache), which, group, None) for which in range(2)]
        else:
            group, starts = storage.place(view.layer)
            sizes = storage.layer_words
            keys = [(id(view.cache), which, group, view.layer) for which in range(2)]
        resources = [Resource(key, words, "cache") for key, words in zip(keys, sizes, strict=True)]
        for which, resource in enumerate(resources):
            self._plan.cache_places[resource.key] = (storage.groups[group][which], starts[which])
        return resources[0], resources[1]

    def _append_spec(self, node: str, cache: CacheValue, key: Value, value: Value, position: Position,
                     layer: int | Position, layout: str) -> tuple[AttentionSpec, CacheValue]:
        """Check an append; return a spec that describes it, and the view of the cache after it."""
        check_layout(layout)
        check_value(cache, self, "cache", node, CacheValue)
        check_value(position, self, "position", node, Position)
        store: KVCache = cache.cache
        if isinstance(layer, Position):
            check_value(layer, self, "layer", node, Position)
            if len(store.storage.groups) > 1 and cache.group is None:
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
        dtype = rows_dtype(store, shapes[0], shapes[1], key.dtype, value.dtype)
        tokens = sizes[0][2]
        if tokens != sizes[1][2]:
            raise ShapeError(f"{node}: `key` is {key} but `value` is {value}; they must have the same tokens.")
        if capacity(tokens) > store.capacity:
            raise CapacityError(f"{node}: `key` has up to {capacity(tokens)} tokens; the cache holds {store.capacity}.")
        place = (id(store), layer)
        version, earlier = self._versions.get(place, (0, ""))
        rival = next((n for (owner, other), (_, n) in self._versions.items()
                      if owner == id(store) and (isinstance(other, Position) != isinstance(layer, Position))), None)
        if rival or (earlier and self._plan.appends[earlier].position == position):
            raise PlanError(f"{node}: layer {layer} of cache {cache.name!r} is already appended to by "
                            f"{rival or earlier} at the same position; the second would overwrite the first.")
        self._versions[place] = (version + 1, node)
        self._plan.appends[node] = Append(cache.name, position, tokens, layer, cache.group)
        view = replace(cache, layer=layer, position=position, new_len=tokens, version=version + 1)
        spec = AttentionSpec(
            store.batch, store.num_kv_heads, store.num_kv_heads, tokens, store.capacity, store.head_dim,
            store.value_dim, "float32", store.dtype, layout, storage=store.storage, position=position, new_len=tokens,
            new_dtype=dtype, new_layout=layout, value_dtype=store.value_dtype,
            run_layer=layer if isinstance(layer, Position) else None)
        return spec, view

    def _append(self, node: str, spec: AttentionSpec, view: CacheValue, key: Value, value: Value,
                mode: str = "") -> None:
        new = (self._resources[key], self._resources[value])
        for argument, given, dtype in (("key", key, view.cache.dtype), ("value", value, view.cache.value_dtype)):
            if given in self._plan.constants:
                check_range(argument, self._plan.constants[given], dtype)
            for name, declared in self._plan.inputs.items():
                if declared is given and dtype in QUANTISED:
                    known = self._plan.quantised_inputs
                    known[name] = known.get(name, frozenset()) | {dtype}
        self._plan.steps.append(append_step(node, spec, new, self._cache_resources(view), self._params,
                                            self.device.info, mode))

    def _check_view(self, node: str, view: CacheValue) -> None:
        check_value(view, self, "key", node, CacheValue)
        if view.layer is None:
            raise PlanError(f"{node}: cache {view.name!r} has to be appended to first. Hint: pass what kv_append "
                            "returned, or use sdpa_with_kv_cache.")
        version, newest = self._versions[(id(view.cache), view.layer)]
        if version != view.version:
            raise PlanError(f"{node}: layer {view.layer} of cache {view.name!r} was appended to by {newest} since; "
                            "what was there before cannot be read any more. Hint: declare the reader before it.")
