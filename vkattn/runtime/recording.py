"""Recordings: dispatches in segments, put into kp Sequences once and replayed.

A boundary between segments is realised in one of two ways. "coherent": both segments lie in one Sequence with the
read-back of a 16-byte tensor between them; its barrier compute -> transfer chains with the transfer -> compute barrier
that kp records before every dispatch, and buffers that carry data are ``coherent`` in GLSL. "full": each segment is a
Sequence of its own, evaluated in turn; slow, and clean under synchronization validation (which sees whole buffers, so
dispatches on different regions of one buffer do not share a Sequence there).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ClosedError, DeviceError
from ..graph.hazards import split_at_regions
from ..graph.node import Binding, Dispatch
from ..kernels.manifest import variant
from ..kernels.params import pushed_count
from .pipeline import Pipelines
from .ticks import check_timestamps, spans_ns

if TYPE_CHECKING:
    from .device import Device

#: kp takes one timestamp per recorded operation and crashes beyond the number that it was told.
SPARE_TIMESTAMPS = 8


class Recording:
    """A replayable list of segments. Made by `Device.recording` only."""

    def __init__(self, device: Device, segments: Sequence[Sequence[Dispatch]], pipelines: Pipelines | None) -> None:
        self.device = device
        self._segments = [list(segment) for segment in segments]
        self._owns_pipelines = pipelines is None
        self._pipelines = Pipelines(device) if pipelines is None else pipelines
        self._canary = device.buffer(4, "host", "canary")
        self._canary_pipelines = Pipelines(device)
        self._run_number = 0
        self._timed: list[tuple[Any, list[str | None]]] = []
        canary = Binding(self._canary)
        self._last = Dispatch(variant("copy"), (canary, canary, canary), pushed_count(1, dst_offset=1))
        self._sequences: list[Any] = []
        try:
            for group in self._grouped():
                self._sequences.append(self._record(group, None))
        except BaseException:  # an interrupt too must not leave sequences and pipelines behind
            self.close()
            raise

    @property
    def num_pipelines(self) -> int:
        """Pipelines that this recording uses or shares, without the canary's."""
        return self._pipelines.count

    @property
    def dispatches(self) -> list[Dispatch]:
        """Recorded dispatches in their order, without the canary's."""
        return [dispatch for segment in self._segments for dispatch in segment]

    @property
    def num_dispatches(self) -> int:
        """Recorded dispatches, without the canary's."""
        return len(self.dispatches)

    @property
    def num_segments(self) -> int:
        """Segments, without the canary's."""
        return len(self._segments)

    @property
    def num_submissions(self) -> int:
        """Submissions of one run."""
        return len(self._sequences)

    def _grouped(self) -> list[list[list[Dispatch]]]:
        """Return the segments of each Sequence; the canary's comes last of all."""
        if self.device.boundary == "full":
            parts = [part for segment in self._segments for part in split_at_regions(segment)]
            return [[part] for part in [*parts, [self._last]]]
        groups: list[list[list[Dispatch]]] = []
        for segment in [*self._segments, [self._last]]:
            new = not groups
            if not new and segment[0] is not self._last:
                new = segment[0].submission != groups[-1][-1][0].submission
            groups.append([segment]) if new else groups[-1].append(segment)
        return groups

    def _pipelines_of(self, dispatch: Dispatch) -> Pipelines:
        return self._canary_pipelines if dispatch is self._last else self._pipelines

    def _record(self, segments: list[list[Dispatch]], labels: list[str | None] | None) -> Any:
        """Record one Sequence; with ``labels``, one that takes timestamps, and note what each operation is."""
        if labels is None:
            sequence = self.device.adopt(self.device.manager.sequence())
        else:
            count = len(segments) + sum(len(segment) for segment in segments) + SPARE_TIMESTAMPS
            sequence = self.device.adopt(self.device.manager.sequence(0, count))
        try:
            self._fill(sequence, segments, labels)
        except BaseException:
            self.device.release(sequence)
            raise
        return sequence

    def _fill(self, sequence: Any, segments: list[list[Dispatch]], labels: list[str | None] | None) -> None:
        """Record the segments with their boundaries into ``sequence``."""
        kp = self.device.kp
        for index, segment in enumerate(segments):
            if index:
                sequence.record(kp.OpTensorSyncLocal([self.device.boundary_tensor]))
                if labels is not None:
                    labels.append(None)
            for dispatch in segment:
                sequence.record(kp.OpAlgoDispatch(self._pipelines_of(dispatch).get(dispatch), dispatch.push_words))
                if labels is not None:
                    labels.append(None if dispatch is self._last else dispatch.variant.name)

    def run(self) -> None:
        """Submit everything and wait; DeviceError if the last word was not written."""
        self._evaluate([sequence.eval for sequence in self._checked()])

    def _checked(self) -> list[Any]:
        self.device.check()
        if not self._sequences:
            raise ClosedError("a recording was used after it was closed.")
        return self._sequences

    def _evaluate(self, evaluations: list[Callable[[], Any]]) -> None:
        with self.device.lock:
            words = self._canary.words
            self._run_number = self._run_number % 0x7FFFFFFF + 1
            words[0] = self._run_number
            try:
                for evaluate in evaluations:
                    evaluate()
            except RuntimeError as error:
                raise DeviceError(f'"{self.device.info.name}" refused a submission: {error}') from error
            if words[1] != self._run_number:
                raise DeviceError(f'"{self.device.info.name}" did not finish a submission: the device was lost. '
                                  "Hint: open a new Device; results of this run are void.")

    def timings(self) -> list[tuple[str, float]]:
        """Run once with timestamps and return (variant name, nanoseconds on the device) of each dispatch in order.

        DeviceError if the device has no timestamps.
        """
        result = []
        for ticks, labels in self._run_timed():
            spans = spans_ns(ticks, self.device.info)
            result += [(label, float(span)) for label, span in zip(labels, spans, strict=True) if label]
        return result

    def elapsed_ns(self) -> float:
        """Run once with timestamps; return the nanoseconds from each submission's first to its last, boundaries too."""
        return sum(float(spans_ns(ticks, self.device.info).sum()) for ticks, _ in self._run_timed())

    def _run_timed(self) -> list[tuple[np.ndarray, list[str | None]]]:
        """Run once with timestamps; return each submission's ticks, and what lies between two of them."""
        self._checked()
        check_timestamps(self.device.info)
        if not self._timed:
            timed = []
            for group in self._grouped():
                labels: list[str | None] = []
                timed.append((self._record(group, labels), labels))
            self._timed = timed
        self._evaluate([sequence.eval for sequence, _ in self._timed])
        return [(np.array(sequence.get_timestamps(), np.uint64), labels) for sequence, labels in self._timed]

    def close(self) -> None:
        """Free sequences and pipelines; the buffers belong to whoever made them."""
        sequences = self._sequences + [sequence for sequence, _ in self._timed]
        self._sequences, self._timed = [], []
        for sequence in sequences:
            self.device.release(sequence)
        self._canary_pipelines.close()
        if self._owns_pipelines:
            self._pipelines.close()
        self._canary.destroy()
