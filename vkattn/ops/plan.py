"""Plans of the functional API: buffers, pipelines and one recording, for every call that fits their capacities.

A plan knows only dtypes and how many words each buffer holds. Sizes, strides, lengths and options are words of the
params block, so one plan serves any shapes within its capacities, and the recording never changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np

from ..cache.move import run_once
from ..errors import CapacityError
from ..graph.hazards import segments
from ..graph.node import Binding, Dispatch
from ..kernels import params
from ..kernels.manifest import variant
from ..kernels.passes import Cut, Pass
from ..kernels.three_pass import CHUNKS_PER_SUBMISSION
from ..layout import packed_words, unpack
from ..runtime.buffer import Buffer
from ..runtime.device import Device
from ..validate import Call
from .inputs import array_words, header, mask_words, write_array, write_mask

#: Kernels index the elements of a bool mask in 32 bits.
MAX_MASK_BITS = 1 << 32

INPUTS = ("query", "key", "value", "mask")

#: Over what a call may be split where one head of one batch entry is too large, by the array that is.
_ROWS, _KEYS = ", or over query rows", ", or over keys, and join the parts with vkattn.merge_states"
FURTHER_SPLIT = {"query": _ROWS, "key": _KEYS, "value": _KEYS, "mask": _ROWS, "out": _ROWS, "lse": _ROWS, "params": ""}

#: The smallest capacity of a buffer, in words (64 KiB): small problems of any shape share a plan.
MIN_WORDS = 1 << 14


def bucket(words: int) -> int:
    """Return the capacity that serves ``words``: the next power of two, at least `MIN_WORDS`."""
    return max(MIN_WORDS, 1 << max(words - 1, 0).bit_length())


@dataclass(frozen=True)
class PlanKey:
    """What a plan is made for: an algorithm, its kernels, and the capacities in words.

    ``passes`` are those of the algorithm; ``scratch`` names the words of each buffer that it needs besides. A plan
    records ``chunks`` chunks of query rows.
    """

    algorithm: str
    passes: tuple[Pass, ...]
    query: int
    key: int
    value: int
    mask: int
    out: int
    lse: int
    params: int
    scratch: tuple[tuple[str, int], ...]
    chunks: int

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of such a plan, where inputs are not copied."""
        return 4 * (self.query + self.key + self.value + self.mask + self.out + self.lse + self.params
                    + sum(words for _, words in self.scratch))


def clear(device: Device, buffer: Buffer) -> None:
    """Fill a buffer of the device's own memory with zeros, now."""
    push = {"offset": 0, "count": buffer.num_words, "value": 0}
    run_once(device, [Dispatch(variant("fill"), (Binding(buffer),), push, 64)])


def lse_shape(call: Call) -> tuple[int, int, int]:
    """Return (batch_size, num_heads, q_len)."""
    return call.problem.batch_size, call.problem.num_heads, call.options.q_len


def live_words(call: Call) -> dict[str, int]:
    """Return the words that each array of ``call`` takes in its buffer."""
    problem = call.problem
    return {
        "query": packed_words(call.query.shape, problem.query_dtype),
        "key": array_words(call.key, problem.key_dtype),
        "value": array_words(call.value, problem.value_dtype),
        "mask": mask_words(call.mask),
        "out": packed_words((*call.query.shape[:3], problem.value_dim), problem.out_dtype),
        "lse": packed_words(lse_shape(call), "float32") if call.options.return_lse else 0,
        "params": params.block_words(problem.batch_size, problem.num_heads),
    }


def plan_key(call: Call, device: Device, algorithm: ModuleType) -> tuple[PlanKey, Cut]:
    """Return the key of the plan that serves ``call`` by ``algorithm``, and how its work is cut.

    Raises
    ------
    CapacityError
        An array is larger than the device's largest buffer.
    """
    words = live_words(call)
    limit = device.info.max_storage_buffer_range
    for name, count in words.items():
        if 4 * count > limit:
            raise CapacityError(f'`{name}` needs {4 * count} bytes; the largest storage buffer of "{device.info.name}" '
                                f"is {limit} bytes. Hint: split the call over heads or batch{FURTHER_SPLIT[name]}.")
    if call.problem.mask == "bool" and 32 * words["mask"] > MAX_MASK_BITS:
        raise CapacityError(f"`mask` has {32 * words['mask']} elements, rows padded to 32; kernels count up to "
                            f"{MAX_MASK_BITS}. Hint: split the call over heads or batch, or pass the mask broadcast.")
    room = limit // 16 * 4
    problem, q_len = call.problem, call.options.q_len
    max_kv_len = int(call.options.kv_len.max(initial=0))
    budget = device.score_budget_bytes // 4
    needed = algorithm.scratch_words(problem, device.info, min(budget, room))
    scratch = {name: min(bucket(count), budget if name == "scores" else room, room) for name, count in needed.items()}
    cut = algorithm.cut(problem, q_len, max_kv_len, scratch, device.info)
    capacities = {name: min(bucket(count), room) for name, count in words.items()}
    passes = tuple(one.for_any_size() for one in algorithm.passes(problem, device.info))
    return PlanKey(algorithm.NAME, passes, **capacities, scratch=tuple(sorted(scratch.items())),
                   chunks=1 << (max(cut.num_chunks, 1) - 1).bit_length()), cut


def params_copy(num_words: int) -> tuple[dict[str, int], int]:
    """Return the push constants and the workgroups of a copy of that many words of params."""
    return params.pushed_count(num_words), max(1, min(-(-num_words // 64), 512))


class AttentionPlan:
    """One algorithm, for every call with one `PlanKey`."""

    def __init__(self, device: Device, key: PlanKey) -> None:
        self.device = device
        self.key = key
        self.buffers: list[Buffer] = []
        try:
            self._host = {name: self._buffer(name, getattr(key, name), "host")
                          for name in (*INPUTS, "out", "lse", "params")}
            self.scratch = {name: self._buffer(name, words, "storage") for name, words in key.scratch}
            uploads, near = self._uploads()
            if "tickets" in self.scratch:
                clear(device, self.scratch["tickets"])
            self.recording = device.recording(segments([*uploads, *self._passes(self._host | near | self.scratch)]))
        except BaseException:
            self._free()
            raise

    def _buffer(self, name: str, num_words: int, kind: str) -> Buffer:
        self.buffers.append(self.device.buffer(num_words, kind, name))  # type: ignore[arg-type]
        return self.buffers[-1]

    def _uploads(self) -> tuple[list[Dispatch], dict[str, Buffer]]:
        """Return copies of inputs and params into the device's memory, and where kernels read them; none if it is one.

        Kernels read params word after word, so what is far away costs them many times its latency.
        """
        if self.device.info.is_unified:
            return [], self._host
        copies, near = [], {"params": self._buffer("params (device)", self.key.params, "storage")}
        far = Binding(self._host["params"])
        copies.append(Dispatch(variant("copy"), (far, far, Binding(near["params"])), *params_copy(self.key.params)))
        for name, field in zip(INPUTS, ("q_words", "k_words", "v_words", "mask_words"), strict=True):
            near[name] = self._buffer(f"{name} (device)", getattr(self.key, name), "storage")
            bindings = (Binding(self._host["params"]), Binding(self._host[name]), Binding(near[name]))
            push = {"count_index": params.INDEX[field], "count": 0, "src_offset": 0, "dst_offset": 0}
            copies.append(Dispatch(variant("copy"), bindings, push, groups=512))
        return copies, near

    def _passes(self, buffers: dict[str, Buffer]) -> list[Dispatch]:
        """Return the algorithm's dispatches, once for each chunk of query rows."""
        buffers = buffers | dict.fromkeys(("new_key", "new_value"), buffers["params"])  # nothing is appended here
        dispatches = []
        for chunk in range(self.key.chunks):
            for one in self.key.passes:
                bindings = tuple(Binding(buffers[name]) for name in ("params", *one.tensors))
                push = {name: chunk if name == "chunk" else 0 for name in one.kernel.push}
                dispatches.append(Dispatch(one.kernel, bindings, push, one.groups(self.device.info),
                                           chunk // CHUNKS_PER_SUBMISSION, spec=one.spec, unwritten=one.appended))
        return dispatches

    @property
    def nbytes(self) -> int:
        """Bytes allocated for this plan."""
        return sum(buffer.allocated_bytes for buffer in self.buffers)

    def run(self, call: Call, cut: Cut) -> tuple[np.ndarray, np.ndarray | None]:
        """Compute ``call``; return fresh arrays: the output, and lse float32 ``[B, H, L]`` if asked for."""
        problem, options = call.problem, call.options
        words = live_words(call)
        with self.device.lock:
            for name, array, dtype in (("query", call.query, problem.query_dtype), ("key", call.key, problem.key_dtype),
                                       ("value", call.value, problem.value_dtype)):
                write_array(self._host[name].words[: words[name]], array, dtype)
            if call.mask is not None:
                write_mask(self._host["mask"].words[: words["mask"]], call.mask)
            block = self._host["params"].words
            params.write_header(block, header(call, cut, words))
            params.write_lengths(block, problem.batch_size, options.kv_len, options.q_offset)
            params.write_heads(block, problem.batch_size, problem.num_heads, options.alibi_slopes, options.sinks)
            self.recording.run()
            shape = (*call.query.shape[:3], problem.value_dim)
            out = unpack(self._host["out"].words[: words["out"]], shape, problem.out_dtype)
            if not options.return_lse:
                return out, None
            return out, unpack(self._host["lse"].words[: words["lse"]], lse_shape(call), "float32")

    def _free(self) -> None:
        for buffer in self.buffers:
            buffer.destroy()

    def close(self) -> None:
        """Free pipelines and buffers."""
        self.recording.close()
        self._free()
