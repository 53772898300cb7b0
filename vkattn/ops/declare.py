"""What every graph declares: inputs, constants, caches, positions, kernels of one's own, outputs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..cache.kv_cache import KVCache
from ..dtypes import FLOAT_DTYPES, as_array, dtype_name
from ..errors import DTypeError, PlanError, ShapeError, VkattnError
from ..graph.steps import FAR_PARAMS, Base, Resource, Step
from ..graph.values import CacheValue, Dim, Position, Shape, Size, Value, capacities, words_of
from ..kernels.manifest import Binding, Variant
from ..layout import QUAD_WORDS
from ..mask import as_integer
from ..runtime.device import Device, resolve_device
from ..validate import per_head_option
from .assembly import Plan
from .blocks import DimsBlock
from .spec import check_value

GRAPH_DTYPES = (*FLOAT_DTYPES, "bool")

#: The first word of a SPIR-V module.
SPIRV_MAGIC = b"\x03\x02\x23\x07"


def _sizes(node: str, argument: str, sizes: Any) -> Shape:
    """Return a sequence of sizes as a tuple, or raise ShapeError; what they are is not looked at."""
    if not isinstance(sizes, Sequence) or isinstance(sizes, (str, bytes)):
        raise ShapeError(f"{node}: `{argument}` is {sizes!r}; it must be a sequence of sizes, each an int or a Dim.")
    return tuple(sizes)


def _words(node: str, push: Mapping[str, Any]) -> dict[str, int]:
    """Return push constants as ints, or raise PlanError if one is no word."""
    words = {name: as_integer(value) for name, value in push.items()}
    for name, word in words.items():
        if word is None or not 0 <= word < 1 << 32:
            raise PlanError(f"{node}: `push` gives {name!r} as {push[name]!r}; a word is an integer within 0 .. 2^32 - "
                            "1. Hint: int(np.float32(x).view(np.uint32)) is the word of a float32.")
    return cast(dict[str, int], words)


def _spirv(node: str, spirv: Any) -> bytes:
    """Return a SPIR-V module from bytes or a file, or raise PlanError."""
    try:
        code = Path(spirv).read_bytes() if isinstance(spirv, (str, Path)) else bytes(spirv)
    except (OSError, TypeError) as error:
        raise PlanError(f"{node}: `spirv` cannot be read: {error}.") from error
    if len(code) % 4 or code[:4] != SPIRV_MAGIC:
        raise PlanError(f"{node}: `spirv` is not a SPIR-V module (its size is {len(code)} bytes).")
    return code


class Declarations:
    """Names, values and resources of a graph under construction."""

    def __init__(self, device: Device | None = None) -> None:
        self.device = resolve_device(device)
        self._plan = Plan()
        self._params = FAR_PARAMS
        self._nothing = Resource("nothing", QUAD_WORDS, "nothing")
        self._resources: dict[Value, Resource] = {}
        self._used: set[Value] = set()
        self._softmaxed: dict[Value, str] = {}
        self._views: dict[Value, CacheValue] = {}
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
        self._check_name(name, "an input")
        value = self._value(name, shape, dtype, f"input {name!r}")
        self._resources[value] = Resource(value, words_of(capacities(value.shape), dtype), "input")
        self._plan.inputs[name] = value
        self._names.add(name)
        return value

    def constant(self, name: str, array: Any) -> Value:
        """Declare an array that is uploaded once, when the graph is built."""
        self._check_name(name, "a constant")
        given = as_array(array, name).copy()
        value = self._value(name, given.shape, dtype_name(given, name, GRAPH_DTYPES), f"constant {name!r}")
        self._resources[value] = Resource(value, words_of(given.shape, value.dtype), "constant")
        self._plan.constants[value] = given
        self._names.add(name)
        return value

    def kv_cache(self, name: str, *, cache: KVCache | None = None, **sizes: Any) -> CacheValue:
        """Declare a KV cache: an existing one (``cache=``), or one of the graph's own (with the sizes of `KVCache`)."""
        self._check_name(name, "a cache")
        if (cache is None) == (not sizes):
            raise PlanError(f"cache {name!r}: give either `cache` or the sizes of a new one.")
        if cache is None:
            cache = KVCache(**sizes, device=self.device)
            self._plan.own_caches.append(cache)
        if not isinstance(cache, KVCache):
            raise PlanError(f"cache {name!r} is a {type(cache).__name__}; it must be a vkattn.KVCache.")
        cache.check()
        if cache.device is not self.device:
            raise PlanError(f"cache {name!r} lies on {cache.device!r} but the graph is for {self.device!r}.")
        if any(known is cache for known in self._plan.caches.values()):
            raise PlanError(f"cache {name!r} is the same KVCache as another of this graph. Hint: use the first name.")
        self._plan.caches[name] = cache
        self._names.add(name)
        return CacheValue(self, name, cache)

    def cache_group(self, name: str, cache: KVCache, group: int) -> CacheValue:
        """Declare the layers of one pair of a cache's buffers, for a layer that every run chooses among them.

        For graphs that the cache itself keeps: the graph does not keep the cache alive.
        """
        view = replace(self.kv_cache(name, cache=cache), group=group)
        self._plan.caches[name] = weakref.proxy(cache)
        return view

    def position(self, name: str) -> Position:
        """Declare a whole number, or one for each batch entry, that every run is given by this name."""
        self._check_name(name, "a position")
        if name in self._plan.dims:
            raise PlanError(f"a position is called {name!r}, and so is a Dim; runs are given both by name.")
        self._names.add(name)
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
            A word is an integer within 0 .. 2^32 - 1.
        dims : sequence of int and Dim
        groups : int
            Workgroups in x; the kernel loops over what is live.
        """
        with self._declaring(name, name) as node:
            code = _spirv(node, spirv)
            if (as_integer(groups) or 0) < 1:
                raise PlanError(f"{node}: `groups` is {groups!r}; it must be an integer of at least 1.")
            for value in reads:
                self._use(node, "reads", value)
            made = [self._value(f"{node}.{key}", shape, dtype, node) for key, (shape, dtype) in writes.items()]
            resources = (self._params, *(self._resources[value] for value in reads),
                         *(self._new(value) for value in made))
            names = [f"base_{index}" for index in range(1, len(resources))]
            bindings = (Binding("params", "read", False), *(Binding(n, "read", True) for n in names[: len(reads)]),
                        *(Binding(n, "write", True) for n in names[len(reads) :]))
            words = _words(node, push or {})
            if clash := {"params_base", *names} & words.keys():
                raise PlanError(f"{node}: `push` holds {sorted(clash)}, which the graph sets itself.")
            dims = _sizes(node, "dims", dims)
            self._note_dims(node, dims)
            variant = Variant(node, node, {}, bindings, ("params_base", *names, *words), (), frozenset(), (1, 1, 1), 0,
                              "", "", "")
            bases = tuple(Base(n, index, 1) for index, n in enumerate(names, start=1))
            block = DimsBlock(dims, 0)
            self._plan.steps.append(Step(node, variant, resources, bases, block, words, groups, code=code))
            return tuple(made)

    def output(self, name: str, value: Value) -> None:
        """Let every run return ``value`` under this name."""
        if self._is_built:
            raise PlanError(f"output {name!r}: the graph is built; nothing can be added.")
        if not isinstance(name, str):
            raise PlanError(f"an output is called {name!r}; its name must be a text.")
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

    def _check_name(self, name: str, what: str) -> None:
        if self._is_built:
            raise PlanError(f"{what}, {name!r}: the graph is built; nothing can be added.")
        if not isinstance(name, str) or not name.isidentifier():
            raise PlanError(f"{what} is called {name!r}; its name must be a Python identifier.")
        if name in self._names:
            raise PlanError(f"{what} is called {name!r}, and so is something else in this graph.")

    @contextmanager
    def _declaring(self, name: str | None, kind: str) -> Iterator[str]:
        """Yield the name of a new node; an error in its declaration names it, and leaves nothing of it behind."""
        plan = self._plan
        node = f"{kind}_{len(plan.steps)}" if name is None else name
        self._check_name(node, "a node")
        states: tuple[Any, ...] = (plan.dims, plan.appends, plan.cache_places, self._resources, self._used,
                                   self._softmaxed, self._versions, plan.float_masks, plan.quantised_inputs)
        before, num_steps = [state.copy() for state in states], len(plan.steps)
        try:
            yield node
        except Exception as error:
            for state, old in zip(states, before, strict=True):
                state.clear()
                state.update(old)
            del plan.steps[num_steps:]
            if not isinstance(error, VkattnError) or str(error).startswith((f"{node}: ", f"{node} ")):
                raise
            raise type(error)(f"{node}: {error}") from error
        self._names.add(node)

    def _value(self, producer: str, shape: Any, dtype: str, node: str) -> Value:
        shape = _sizes(node, "shape", shape)
        if not isinstance(dtype, str) or dtype not in GRAPH_DTYPES:
            raise DTypeError(f"{node} is {dtype!r}; supported: {', '.join(GRAPH_DTYPES)}.")
        if not shape or any(not isinstance(size, (int, np.integer, Dim)) for size in shape) or min(
                capacities(shape)) < 1:
            raise ShapeError(f"{node} has shape {shape}; each size must be a positive int or a Dim.")
        self._note_dims(node, shape)
        return Value(self, producer, tuple(size if isinstance(size, Dim) else int(size) for size in shape), dtype)

    def _note_dims(self, node: str, sizes: Sequence[Size]) -> None:
        """Remember the Dims of ``sizes``, or raise PlanError if another is called the same."""
        dims = dict(self._plan.dims)
        for size in sizes:
            if isinstance(size, Dim):
                known = dims.setdefault(size.name, size)
                if known != size:
                    raise PlanError(f"{node}: there are two Dims called {size.name!r}, with max {known.max} and "
                                    f"{size.max}.")
                if size.name in self._plan.positions:
                    raise PlanError(f"{node}: a Dim is called {size.name!r}, and so is a position; runs are given both "
                                    "by name.")
            elif not isinstance(size, (int, np.integer)):
                raise ShapeError(f"{node}: {size!r} is not a size; it must be an int or a Dim.")
        self._plan.dims.update(dims)

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
