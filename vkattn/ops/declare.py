"""What every graph declares: inputs, constants, caches, positions, kernels of one's own, outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..cache.kv_cache import KVCache
from ..dtypes import FLOAT_DTYPES, dtype_name
from ..errors import DTypeError, PlanError, ShapeError
from ..graph.steps import Base, Resource, Step
from ..graph.values import CacheValue, Dim, Position, Shape, Size, Value, capacities, words_of
from ..kernels.manifest import Binding, Variant
from ..layout import QUAD_WORDS
from ..runtime.device import Device, default_device
from ..validate import per_head_option
from .graph import Plan
from .spec import DimsBlock, check_value

GRAPH_DTYPES = (*FLOAT_DTYPES, "bool")


class Declarations:
    """Names, values and resources of a graph under construction."""

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
        """Declare a KV cache: an existing one (``cache=``), or one of the graph's own (with the sizes of `KVCache`)."""
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

    def cache_group(self, name: str, cache: KVCache, group: int) -> CacheValue:
        """Declare the layers of one pair of a cache's buffers, for a layer that every run chooses among them."""
        return replace(self.kv_cache(name, cache=cache), group=group)

    def position(self, name: str) -> Position:
        """Declare a whole number, or one for each batch entry, that every run is given by this name."""
        self._take_name(name, "a position")
        self._plan.positions.append(name)
        return Position(self, name)

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
            raise PlanError(f"{node}: `{argument}` is {value}, a score matrix, which only the passes after it read.")
        self._used.add(value)
        return self._resources[value]

    def _per_head(self, values: Any, argument: str, num_heads: int) -> tuple[float, ...] | None:
        numbers = per_head_option(values, argument, num_heads)
        return None if numbers is None else tuple(numbers.tolist())
