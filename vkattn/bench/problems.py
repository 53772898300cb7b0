"""The problems that are measured: sizes as plain data, read from ``grid.toml``, and what each costs at the least."""

from __future__ import annotations

import importlib.resources
import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import OptionError
from ..formats import QUANTISED

KINDS = ("decode", "prefill")

#: Bytes of 32 elements as a cache of each dtype holds them: q8_0 and q4_0 have a half-precision scale for each block of
#: 32. The scale and the zero point of an int8 row are left out here: 8 bytes, a sixteenth of a row of 128 elements.
BLOCK_BYTES = {"float32": 128, "float16": 64, "bfloat16": 64, "int8": 32, "q8_0": 34, "q4_0": 18}

#: Keys of an entry in grid.toml, and what those that are left out stand for.
ENTRY_DEFAULTS: dict[str, Any] = {"batches": [1], "dtypes": ["float16"], "causal": True, "algorithms": ["auto"]}
ENTRY_KEYS = {"kind", "models", "lengths", *ENTRY_DEFAULTS}


@dataclass(frozen=True)
class BenchProblem:
    """One problem: a token over a cache of ``length`` tokens (decode), or ``length`` tokens over themselves (prefill).

    ``dtype`` is that of the keys and values; ``algorithms`` are the ways of vkattn that are measured: names, "auto" or
    "all".
    """

    kind: str
    model: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    length: int
    batch_size: int = 1
    dtype: str = "float16"
    causal: bool = True
    algorithms: tuple[str, ...] = ("auto",)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise OptionError(f"`kind` is {self.kind!r}; supported: {', '.join(KINDS)}.")
        if self.dtype not in BLOCK_BYTES:
            raise OptionError(f"`dtype` is {self.dtype!r}; supported: {', '.join(BLOCK_BYTES)}.")
        if min(self.num_heads, self.num_kv_heads, self.head_dim, self.length, self.batch_size) < 1 or (
                self.num_heads % self.num_kv_heads):
            raise OptionError(f"{self.name}: every size must be positive, and the query heads a multiple of the KV "
                              "heads.")

    @property
    def name(self) -> str:
        """For people and for comparing runs; two problems of a grid never share it."""
        mask = "" if self.kind == "decode" else " causal" if self.causal else " full"
        return (f"{self.kind} {self.num_heads}/{self.num_kv_heads} D{self.head_dim} S{self.length} "
                f"B{self.batch_size} {self.dtype}{mask}")

    @property
    def is_quantised(self) -> bool:
        """Whether the cache holds integers with scales."""
        return self.dtype in QUANTISED

    @property
    def query_dtype(self) -> str:
        """Of queries, output and new rows: the cache's, float32 where the cache is quantised."""
        return "float32" if self.is_quantised else self.dtype

    @property
    def q_len(self) -> int:
        """Query tokens."""
        return 1 if self.kind == "decode" else self.length

    @property
    def group_size(self) -> int:
        """Query heads to a KV head."""
        return self.num_heads // self.num_kv_heads

    def _bytes_of(self, heads: int, tokens: int, dtype: str) -> int:
        return self.batch_size * heads * tokens * self.head_dim * BLOCK_BYTES[dtype] // 32

    @property
    def cache_bytes(self) -> int:
        """Bytes of all keys and values."""
        return 2 * self._bytes_of(self.num_kv_heads, self.length, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes that must move at the least: queries, keys and values once, and the output."""
        return self.cache_bytes + 2 * self._bytes_of(self.num_heads, self.q_len, self.query_dtype)

    @property
    def num_operations(self) -> int:
        """Additions and multiplications of both products, of the pairs that are not masked."""
        pairs = self.q_len * self.length
        if self.kind == "prefill" and self.causal:
            pairs = self.length * (self.length + 1) // 2
        return 4 * self.batch_size * self.num_heads * self.head_dim * pairs

    def as_dict(self) -> dict[str, Any]:
        """Return the sizes for JSON."""
        return {"name": self.name, **{key: value for key, value in asdict(self).items() if key != "algorithms"}}


def read_grid(text: str | None = None) -> dict[str, list[BenchProblem]]:
    """Return the problems of each set of ``grid.toml`` (or of ``text``).

    Raises
    ------
    OptionError
        A key, kind or model is unknown.
    """
    if text is None:
        text = (importlib.resources.files("vkattn.bench") / "grid.toml").read_text(encoding="utf-8")
    grid = tomllib.loads(text)
    return {name: [problem for entry in entries for problem in expand(entry, grid["models"])]
            for name, entries in grid["sets"].items()}


def expand(entry: Mapping[str, Any], models: Mapping[str, Sequence[int]]) -> list[BenchProblem]:
    """Return every combination of one entry's lists."""
    unknown = sorted(set(entry) - ENTRY_KEYS)
    if unknown:
        raise OptionError(f"an entry of the grid has the keys {unknown}; supported: {sorted(ENTRY_KEYS)}.")
    given = ENTRY_DEFAULTS | dict(entry)
    lost = [model for model in given["models"] if model not in models]
    if lost:
        raise OptionError(f"an entry of the grid names the models {lost}; there are: {sorted(models)}.")
    return [BenchProblem(given["kind"], model, models[model][0], models[model][1], models[model][2], length, batch,
                         dtype, given["causal"], tuple(given["algorithms"]))
            for dtype, model, batch, length in itertools.product(given["dtypes"], given["models"], given["batches"],
                                                                 given["lengths"])]


def choose(names: Sequence[str], sets: Mapping[str, Sequence[BenchProblem]]) -> list[BenchProblem]:
    """Return the problems of these sets, each once, in order; OptionError for a set that is not there."""
    unknown = [name for name in names if name not in sets]
    if unknown:
        raise OptionError(f"there is no set {', '.join(unknown)}; there are: {', '.join(sets)}.")
    chosen: dict[str, BenchProblem] = {}
    for name in names:
        for problem in sets[name]:
            chosen.setdefault(problem.name, problem)
    return list(chosen.values())
