"""What a graph holds, for people and for tests."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Row:
    """One buffer: its name, its kind ("host" and "synced" are staging, "storage" is the device's own), its bytes."""

    name: str
    kind: str
    size_bytes: int


@dataclass(frozen=True)
class Report:
    """Buffers of a graph, and who shares scratch.

    ``scratch`` maps each temporary to (arena, start byte, bytes, first step, last step); temporaries whose steps do not
    meet may lie on the same bytes. ``caches`` maps a cache's name to its bytes, which are not the graph's own.
    """

    buffers: list[Row]
    scratch: dict[str, tuple[str, int, int, int, int]]
    caches: dict[str, int]
    num_dispatches: int
    num_pipelines: int
    num_segments: int
    num_submissions: int

    @property
    def device_bytes(self) -> int:
        """Bytes of buffers in the device's own memory."""
        return sum(row.size_bytes for row in self.buffers if row.kind == "storage")

    @property
    def staging_bytes(self) -> int:
        """Bytes of host-visible buffers."""
        return sum(row.size_bytes for row in self.buffers if row.kind != "storage")

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the arenas that temporaries share."""
        return sum(row.size_bytes for row in self.buffers if row.name.startswith("arena"))

    def as_dict(self) -> dict[str, object]:
        """Return all of it for JSON."""
        totals = {"device_bytes": self.device_bytes, "staging_bytes": self.staging_bytes,
                  "scratch_bytes": self.scratch_bytes}
        return asdict(self) | totals

    def __str__(self) -> str:
        lines = [f"{self.num_dispatches} dispatches in {self.num_segments} segments and {self.num_submissions} "
                 f"submissions, {self.num_pipelines} pipelines",
                 f"device memory {self.device_bytes} bytes, of it scratch {self.scratch_bytes}; "
                 f"staging {self.staging_bytes} bytes"]
        lines += [f"  {row.size_bytes:>12}  {row.kind:8} {row.name}" for row in self.buffers]
        lines += [f"  {size:>12}  cache    {name}" for name, size in self.caches.items()]
        lines += [f"  scratch {name}: {size} bytes at {start} of {arena}, steps {first} to {last}"
                  for name, (arena, start, size, first, last) in self.scratch.items()]
        return "\n".join(lines)
