"""Plan once, replay: what a decode step makes, records, moves and keeps is counted from outside the library."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from tests.caches import Session
from tests.counting import CountingWords, counted_device, resident_bytes
from tests.graphs import FORMS, Decoder
from vkattn import GraphBuilder, KVCache, sdpa_with_kv_cache
from vkattn.ops import live as live_module
from vkattn.runtime.device import Device

MADE = ("tensor_t", "algorithm", "sequence", "record", "OpAlgoDispatch", "OpTensorSyncLocal")
STEPS = 1000


def test_the_proxy_counts(device: Device, rng: np.random.Generator) -> None:
    with counted_device(device.info.index) as (own, calls):
        made = Decoder(own, (2, 1, 8), 8, 1)
        for name in MADE:
            assert calls[name] > 0, name
        before = calls["eval"]
        made.step(made.arrays(rng, 1), 0)
        assert calls["eval"] > before


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.once), "int8"])
def test_1000_decode_steps_make_and_record_nothing(device: Device, rng: np.random.Generator, dtype: str) -> None:
    """A graph of one layer, and the functional API between.

    SwiftShader's scheduler makes fibers while it runs, 3 MiB once or twice in a thousand bare evaluations, so growth
    there is judged by the quieter two quarters: a leak would be in all of them.
    """
    with counted_device(device.info.index) as (own, calls):
        cache = KVCache(1, 1, STEPS + 20, 8, num_layers=2, dtype=dtype, device=own)
        session = Session(cache, 2, rng)
        builder = GraphBuilder(own)
        query, rows = (builder.input(name, (1, 1, heads, 8), "float32")
                       for name, heads in (("query", 2), ("rows", 1)))
        out = builder.sdpa_with_kv_cache(query, rows, rows, builder.kv_cache("cache", cache=cache),
                                         builder.position("at"), layer=0)
        builder.output("out", out)
        graph = builder.build()
        arrays = session.arrays(1)[:2]
        given = {"query": arrays[0], "rows": arrays[1]}

        def step(at: int) -> Any:
            if at % 4:
                return graph.run(given, at=at)["out"]
            return sdpa_with_kv_cache(arrays[0], arrays[1], arrays[1], cache.layer(0), at)

        for at in range(20):  # warm-up
            step(at)
        before = {name: calls[name] for name in MADE}
        evaluated = calls["eval"]
        allocated = own.allocation_count, own.allocated_bytes
        resident = []
        for at in range(20, STEPS + 20):
            if (at - 20) % (STEPS // 4) == 0:
                gc.collect()
                resident.append(resident_bytes())
            out = step(at)
        gc.collect()
        quarters = np.diff([*resident, resident_bytes()])
        grown = 4 * sorted(quarters)[1] if "SwiftShader" in own.info.name else sum(quarters)
        assert {name: calls[name] for name in MADE} == before
        assert calls["eval"] - evaluated >= STEPS
        assert (own.allocation_count, own.allocated_bytes) == allocated
        assert grown < 1 << 20, f"resident memory grew by {quarters.tolist()} bytes"
        for at in range(STEPS + 20):
            session.model.update(arrays[1], arrays[1], at)
        session.compare(out, None, arrays[0], STEPS + 19)


def traffic(made: Decoder, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return the bytes that the host writes and reads in a decode step at position 5."""
    made.step(made.arrays(rng, min(4, made.max_q_len)), 0)
    for start in (4, 5):
        made.step(made.arrays(rng, 1), start)
    read = []
    original = live_module.Rows.read

    def counted(rows: live_module.Rows) -> np.ndarray:
        read.append(4 * rows.num_words)
        return original(rows)

    monkeypatch.setattr(live_module.Rows, "read", counted)
    made.graph._live.clear()  # views of the words as they were
    buffers = [buffer for buffer in made.graph._buffers if buffer._words is not None]
    for buffer in buffers:
        buffer._words = buffer._words.view(CountingWords)
    CountingWords.written = 0
    made.graph.run(made.arrays(rng, 1), input_pos=5)
    written = CountingWords.written
    for buffer in buffers:
        buffer._words = buffer._words.view(np.ndarray)
    monkeypatch.undo()
    return written, sum(read)


@pytest.mark.parametrize("form", FORMS)
def test_what_the_host_moves_does_not_depend_on_capacities(device: Device, rng: np.random.Generator, form: str,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (traffic(Decoder(device, (4, 2, 16), capacity, q_len, form=form), rng, monkeypatch)
                    for capacity, q_len in ((12, 4), (2500, 2048)))
    assert small == large
    row = 4 * 16  # bytes
    assert small[0] >= (4 + 2 + 2) * row  # a query, a key, a value, and params
    assert small[0] <= (4 + 2 + 2) * row + 2000
    assert small[1] >= 4 * row


def layered(device: Device, num_layers: int, chained: bool) -> Any:
    """Return a decode graph: each layer has queries of its own, or those that the layer before gave."""
    cache = KVCache(1, 2, 256, 16, num_layers=num_layers, dtype="float16", device=device)
    builder = GraphBuilder(device)
    view, at = builder.kv_cache("cache", cache=cache), builder.position("at")
    query: Any = None
    for layer in range(num_layers):
        if not chained or query is None:
            query = builder.input(f"query{layer}", (1, 1, 4, 16), "float32")
        rows = builder.input(f"rows{layer}", (1, 1, 2, 16), "float32")
        query = builder.sdpa_with_kv_cache(query, rows, rows, view, at, layer=layer)
        if not chained or layer == num_layers - 1:
            builder.output(f"out{layer}", query)
    return builder.build(), cache


@pytest.mark.parametrize("chained", [False, True])
def test_28_layers_have_the_pipelines_and_the_scratch_of_few(device: Device, rng: np.random.Generator,
                                                             chained: bool) -> None:
    """Layers that are alike share pipelines and scratch; in a chain the first and the last bind other buffers.

    A device with memory of its own first copies the inputs into its scratch, each layer's own.
    """
    few = 3 if chained else 1
    (small, _), (large, cache) = (layered(device, count, chained) for count in (few, 28))
    one, many = small.report(), large.report()
    assert many.num_pipelines == one.num_pipelines
    near_inputs = sum(size for name, (_, _, size, _, _) in many.scratch.items() if name.endswith("near"))
    assert (near_inputs > 0) == (not device.info.is_unified)
    assert many.scratch_bytes <= one.scratch_bytes + near_inputs
    assert many.num_dispatches * few == one.num_dispatches * 28 or not device.info.is_unified
    session = Session(cache, 4, rng)
    for start in range(2):
        given = {name: session.arrays(1)[0 if name.startswith("query") else 1]
                 for name in large._plan.inputs}
        result = large.run(given, at=start)
        for layer in range(28):
            session.model.update(given[f"rows{layer}"], given[f"rows{layer}"], start, layer)
            if not chained:
                session.compare(result[f"out{layer}"], None, given[f"query{layer}"], start, layer)


def test_recordings_of_a_graph_share_their_pipelines(device: Device) -> None:
    """Short and long runs have a recording each; what both dispatch is made once."""
    made = Decoder(device, (4, 2, 16), 300, 64)
    recorded = [recording.num_dispatches for recording in made.graph._recordings.values()]
    assert made.graph.report().num_pipelines < sum(recorded) or len(recorded) == 1
