"""Attention nodes of a graph: whole, as three passes, and over a KV cache."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ..cache.checks import query_stand_in
from ..cache.kv_cache import KVCache
from ..errors import DTypeError, OptionError, PlanError, ShapeError
from ..graph.steps import Resource
from ..graph.values import CacheValue, Dim, Position, Size, Value
from ..layout import check_layout, join_shape, split_shape
from ..mask import MAX_POSITION, resolve_causal, resolve_window
from ..validate import causal_window, check_mixture, finite_option, flag_option
from .cache_nodes import CacheNodes
from .lower import OUTPUT, SOFTMAX, WEIGHTS, Tensors, attend, can_append, pass_step, with_algorithms, with_scores
from .selftest import settle
from .spec import AttentionSpec, check_value


class AttentionNodes(CacheNodes):
    """The part of a graph builder that declares attention, whole or as three passes."""

    def attn_weights(self, query: Value, key: Value | CacheValue, *, mask: Value | None = None,
                     causal: str | None = None, scale: float | None = None, softcap: float | None = None,
                     window: Any = (None, None), alibi_slopes: Any = None, q_offset: int | Position | None = None,
                     kv_len: int | Position | None = None, layout: str = "bhsd", name: str | None = None) -> Value:
        """Declare pass 1: scaled, masked scores ``[batch, num_heads, q_len, kv_len]``, float32, for `softmax`.

        Parameters
        ----------
        query : Value, shape ``[batch, num_heads, q_len, head_dim]`` (bhsd)
        key : Value, shape ``[batch, num_kv_heads, kv_len, head_dim]`` (bhsd), or a cache as `kv_append` returned it
        q_offset, kv_len : int, Position or None
        mask, causal, scale, softcap, window, alibi_slopes, layout
            As for `vkattn.attention`; ``mask`` is a Value, bool or float32.
        """
        with self._declaring(name, "attn_weights") as node:
            spec = self._spec(node, query, key, None, mask, causal, scale, softcap, window, None, alibi_slopes,
                              q_offset, kv_len, layout, False)
            spec = with_scores(spec, self.device.info, 0, whole=True)
            scores = Value(self, node, (spec.batch_size, spec.num_heads, spec.q_len, spec.kv_len), "float32", "scores",
                           spec)
            self._resources[scores] = Resource(scores, spec.score_words, "arena")
            if isinstance(key, CacheValue):
                self._views[scores] = key
            tensors = self._tensors(query, key, None, mask, scores=self._resources[scores])
            self._plan.steps.append(pass_step(node, spec, WEIGHTS, tensors, self.device.info))
            return scores

    def softmax(self, scores: Value, *, sinks: Any = None, return_lse: bool = False, name: str | None = None) -> Any:
        """Declare pass 2: the weights of ``scores``, float32, which they replace; and the lse if ``return_lse``.

        The lse is float32 ``[batch, num_heads, q_len]``; ``sinks`` are as for `vkattn.attention`.
        """
        with self._declaring(name, "softmax") as node:
            check_value(scores, self, "scores", node)
            if scores.kind != "scores":
                raise PlanError(f"{node}: `scores` is {scores}; it must come from attn_weights.")
            if scores in self._softmaxed:
                raise PlanError(f"{node}: {scores} was already replaced by its softmax in {self._softmaxed[scores]}.")
            return_lse = flag_option(return_lse, "return_lse")
            self._softmaxed[scores] = node
            self._used.add(scores)
            spec = replace(scores.about, sinks=self._per_head(sinks, "sinks", scores.about.num_heads),
                           return_lse=return_lse)
            probs = Value(self, node, scores.shape, "float32", "probs", spec)
            self._resources[probs] = self._resources[scores]
            if scores in self._views:
                self._views[probs] = self._views[scores]
            lse = Value(self, f"{node} lse", scores.shape[:3], "float32")
            tensors = self._tensors(None, None, None, None, scores=self._resources[scores])
            if return_lse:
                tensors = replace(tensors, lse=self._new(lse))
            self._plan.steps.append(pass_step(node, spec, SOFTMAX, tensors, self.device.info))
            return (probs, lse) if return_lse else probs

    def attn_output(self, probs: Value, value: Value | CacheValue, *, name: str | None = None) -> Value:
        """Declare pass 3: weights times values, in the query's dtype and layout.

        ``value`` is a Value ``[batch, num_kv_heads, kv_len, value_dim]`` (bhsd), or the cache that the scores are of.
        """
        with self._declaring(name, "attn_output") as node:
            check_value(probs, self, "probs", node)
            if probs.kind != "probs":
                raise PlanError(f"{node}: `probs` is {probs}; it must come from softmax.")
            self._used.add(probs)
            spec: AttentionSpec = probs.about
            if spec.storage is not None or isinstance(value, CacheValue):
                if not isinstance(value, CacheValue) or value is not self._views.get(probs):
                    raise PlanError(f"{node}: `value` is {value}; the scores and the values must be read from the same "
                                    "append to a cache, or neither from one.")
                self._check_view(node, value)
                spec = replace(spec, value_dim=value.cache.value_dim)
            else:
                spec = replace(spec, value_dim=self._check_keys(node, "value", value, spec))
            out = Value(self, node, join_shape(spec.batch_size, spec.num_heads, spec.q_len,  # type: ignore[arg-type]
                                               spec.value_dim, spec.layout),
                        spec.query_dtype)
            tensors = self._tensors(None, None, value, None, scores=self._resources[probs], out=self._new(out))
            self._plan.steps.append(pass_step(node, spec, OUTPUT, tensors, self.device.info))
            return out

    def attention(self, query: Value, key: Value | CacheValue, value: Value | CacheValue, *, mask: Value | None = None,
                  causal: str | None = None, scale: float | None = None, softcap: float | None = None,
                  window: Any = (None, None), sinks: Any = None, alibi_slopes: Any = None,
                  q_offset: int | Position | None = None, kv_len: int | Position | None = None, layout: str = "bhsd",
                  return_lse: bool = False, algorithm: str = "auto", name: str | None = None) -> Any:
        """Declare attention as one node; the options are those of `vkattn.attention`.

        Returns
        -------
        out : Value, the query's shape with value_dim last; with ``return_lse`` also the lse
        """
        with self._declaring(name, "attention") as node:
            spec = self._spec(node, query, key, value, mask, causal, scale, softcap, window, sinks, alibi_slopes,
                              q_offset, kv_len, layout, return_lse)
            return self._attend(node, spec, query, key, value, mask, algorithm)

    def sdpa_with_kv_cache(self, query: Value, key: Value, value: Value, cache: CacheValue, position: Position, *,
                           layer: int | Position = 0, mask: Value | None = None, causal: str | None = "bottom_right",
                           layout: str = "bshd", name: str | None = None, **options: Any) -> Any:
        """Declare an append to a cache and attention over what is live then; see `vkattn.sdpa_with_kv_cache`."""
        with self._declaring(name, "sdpa_with_kv_cache") as node:
            append, view = self._append_spec(node, cache, key, value, position, layer, layout)
            known = ("scale", "softcap", "window", "sinks", "alibi_slopes", "return_lse", "algorithm")
            if unknown := sorted(set(options) - set(known)):
                raise OptionError(f"{node}: unknown options {', '.join(unknown)}; there are: {', '.join(known)}.")
            scale, softcap, window, sinks, slopes, return_lse = (
                options.get(name, default) for name, default in (
                    ("scale", None), ("softcap", None), ("window", (None, None)), ("sinks", None),
                    ("alibi_slopes", None), ("return_lse", False)))
            spec = self._spec(node, query, view, view, mask, causal, scale, softcap, window, sinks, slopes, None, None,
                              layout, return_lse, append)
            return self._attend(node, spec, query, view, view, mask, options.get("algorithm", "auto"), (key, value))

    def algorithms_of(self, node: str) -> tuple[str, ...]:
        """Return the algorithms that compute an attention node: one, or one for short runs and one for long ones."""
        found = [step.block.algorithms for step in self._plan.steps
                 if step.node == node and isinstance(step.block, AttentionSpec) and step.block.algorithms]
        if not found:
            raise PlanError(f"{node!r} is no attention node of this GraphBuilder.")
        return found[0]

    def _tensors(self, query: Value | None, key: Any, value: Any, mask: Value | None, *,
                 scores: Resource, out: Resource | None = None) -> Tensors:
        def resource(given: Any, which: int) -> Resource:
            if given is None:
                return self._nothing
            return self._cache_resources(given)[which] if isinstance(given, CacheValue) else self._resources[given]

        return Tensors(self._params, resource(query, 0), resource(key, 0), resource(value, 1), resource(mask, 0),
                       scores, self._nothing, out or self._nothing)

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

    def _spec(self, node: str, query: Value, key: Any, value: Any, mask: Value | None, causal: Any, scale: Any,
              softcap: Any, window: Any, sinks: Any, alibi_slopes: Any, q_offset: Any, kv_len: Any, layout: str,
              return_lse: Any, append: AttentionSpec | None = None) -> AttentionSpec:
        """Check an attention node; return its spec, without a score buffer."""
        check_layout(layout)
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
            if kv_len is not None:
                raise OptionError(f"{node}: `kv_len` is given, but the live length of a cache is that of the append "
                                  "before.")
            if causal == "top_left":
                raise OptionError(f"{node}: `causal` is 'top_left'; with a cache it must be 'bottom_right' or None.")
            if append is not None and q_len != key.new_len:
                raise ShapeError(f"{node}: `query` is {query} but {key.new_len} rows are appended; there must be as "
                                 "many.")
            base = append or AttentionSpec(
                store.batch, heads, store.num_kv_heads, q_len, store.capacity, store.head_dim, store.value_dim,
                query.dtype, store.dtype, layout, value_dtype=store.value_dtype, storage=store.storage,
                position=key.position, new_len=key.new_len,
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
        if not isinstance(key, CacheValue):
            check_mixture(query.dtype, base.key_dtype, base.key_dtype)
        else:
            query_stand_in(key.cache, query.dtype)
        uses_position = window != (None, None) or alibi_slopes is not None
        if uses_position and causal is None and q_offset is None and not (
                kv_len is None and q_len == base.kv_len):
            raise OptionError(f"{node}: `q_offset` is needed with a window or ALiBi where causal is None.")
        for argument, given in (("q_offset", q_offset), ("kv_len", kv_len)):
            self._check_scalar(node, argument, given)
        if mask is not None:
            changes |= self._mask(node, mask, (batch, heads, q_len, base.kv_len))
        if softcap is not None and finite_option(softcap, "softcap", "a positive finite number, or None") <= 0:
            raise OptionError(f"{node}: `softcap` is {softcap!r}; it must be positive.")
        spec = replace(
            base, **changes, causal=causal, q_offset=q_offset, live_kv_len=kv_len,
            scale=1 / math.sqrt(head_dim) if scale is None else finite_option(scale, "scale"),
            softcap=None if softcap is None else float(softcap), window=causal_window(causal, window),
            alibi_slopes=self._per_head(alibi_slopes, "alibi_slopes", heads),
            sinks=self._per_head(sinks, "sinks", heads), return_lse=flag_option(return_lse, "return_lse"))
        if mask is not None and mask.dtype != "bool" and self._may_be_wrong(mask):
            self._plan.float_masks.add((mask, spec))
        return spec

    def _check_scalar(self, node: str, argument: str, given: Any) -> None:
        """Raise unless ``given`` is a position of this graph, an integer or None."""
        if isinstance(given, Position):
            check_value(given, self, argument, node, Position)
        elif given is not None:
            is_integer = isinstance(given, (int, np.integer)) and not isinstance(given, bool)
            if not is_integer or not -MAX_POSITION <= given <= MAX_POSITION:
                raise OptionError(f"{node}: `{argument}` is {given!r}; it must be a position of this GraphBuilder, or "
                                  f"an integer within +-{MAX_POSITION}.")

    def _mask(self, node: str, mask: Value, full: tuple[Size, ...]) -> dict[str, Any]:
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

    def _may_be_wrong(self, mask: Value) -> bool:
        """Whether a float mask may hold NaN or plus infinity, and the host sees it: an input, or such a constant."""
        if mask in self._plan.constants:
            return not self._plan.constants[mask].max() < np.inf
        return mask in self._plan.inputs.values()

    def _attend(self, node: str, spec: AttentionSpec, query: Value, key: Any, value: Any, mask: Value | None,
                algorithm: str, new: tuple[Value, Value] | None = None) -> Any:
        """Add the steps of an attention node, and before them the append of ``new`` rows to its cache."""
        settle(self.device, spec.problem, algorithm)
        spec = with_algorithms(spec, self.device.info, self.device.score_budget_bytes // 4, algorithm)
        if new is not None:
            spec = replace(spec, appends=can_append(spec, self.device.info))
            if not spec.appends or len(spec.algorithms) > 1:
                self._append(node, spec, key, *new, mode="long" if spec.appends else "")
        out = Value(self, node, join_shape(spec.batch_size, spec.num_heads, spec.q_len,  # type: ignore[arg-type]
                                           spec.value_dim, spec.layout), spec.query_dtype)
        lse = Value(self, f"{node} lse", (spec.batch_size, spec.num_heads, spec.q_len), "float32")
        tensors = self._tensors(query, key, value, mask, scores=self._nothing, out=self._new(out))
        if spec.return_lse:
            tensors = replace(tensors, lse=self._new(lse))
        named = dict(tensors.__dict__)
        for which, name in enumerate(("new_key", "new_value")):
            named[name] = self._resources[new[which]] if new and spec.appends else self._nothing
        for name, words in spec.scratch:  # counters keep what they hold from run to run; the rest is shared scratch
            named[name] = Resource((node, name), words, "zeroed" if name == "tickets" else "arena")
        self._plan.steps += attend(node, spec, named, self.device.info)
        return (out, lse) if spec.return_lse else out
