"""What the kernels on matrix units share: sizes, which devices they fit, and the self-test that lets them be used.

The two families for prefill keep the queries, the scores and the sums of a row tile in the registers of a few
subgroups, as cooperative matrices of EDGE x EDGE. They differ in how a subgroup goes from scores to weights. The third
kernel is one of `split` (`vkattn.kernels.split_matrix`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..caps.model import DeviceInfo, MatrixShape
from ..dtypes import AXIS
from ..problem import Problem
from .grid import items_that_fit, row_tiles, too_long
from .manifest import Variant, load_manifest
from .passes import Cut, Pass, even_cut
from .support import device_reasons
from .three_pass import DISPATCH_SECONDS
from .tiers import allowed_tiers
from .verdicts import verdict

#: head_dim and value_dim at most, by the axis `width`; the size of a subgroup by `lanes`, and the edge of its matrices.
#: Tests tie them to the shaders.
WIDTHS = {"d64": 64, "d128": 128, "d256": 256}
LANES = {"l8": 8, "l32": 32, "l64": 64}
EDGES = {"l8": 8, "l32": 16, "l64": 16}
OPERANDS = ("float16", "bfloat16")
#: head_dim and value_dim at the least. A narrower row would be mostly padding, and the fewer elements a row has, the
#: more often weights rounded to half precision cancel to less than the tolerance grants (docs/decisions/0007).
NARROWEST = 16

#: The extensions of each kernel, and what it needs of the second.
EXTENSIONS = {"attn_coopmat": ("VK_KHR_cooperative_matrix",),
              "attn_coopmat2": ("VK_KHR_cooperative_matrix", "VK_NV_cooperative_matrix2"),
              "attn_split_quant_coopmat": ("VK_KHR_cooperative_matrix",)}
FEATURES = {"attn_coopmat": frozenset[str](), "attn_coopmat2": frozenset({"reductions", "conversions", "per_element"}),
            "attn_split_quant_coopmat": frozenset[str]()}

#: What these kernels do in a second at the least, in multiply-adds, by device type.
MULTIPLY_ADDS_PER_SECOND = {"cpu": 1e8, "integrated": 2e11, "virtual": 2e11, "discrete": 4e12, "other": 2e11}

#: Device types on which units are emulated: there a family is used only if it is asked for by name.
ONLY_BY_NAME_ON = ("cpu",)

TENSORS = ("query", "key", "value", "mask", "out", "lse")


def problem_reasons(problem: Problem) -> list[str]:
    """Return why no device can compute ``problem`` on matrix units; empty if some can."""
    reasons = []
    dtypes = (problem.query_dtype, problem.key_dtype, problem.value_dtype)
    if problem.query_dtype not in OPERANDS or len(set(dtypes)) > 1:
        reasons.append(f"query, key and value are {', '.join(dtypes)}; they must be float16, or all bfloat16")
    widest = max(WIDTHS.values())
    for name, dim in (("head_dim", problem.head_dim), ("value_dim", problem.value_dim)):
        if not NARROWEST <= dim <= widest:
            reasons.append(f"{name} {dim}; it must be {NARROWEST} to {widest}")
    if "coopmat" not in allowed_tiers():
        reasons.append("VKATTN_TIERS does not name coopmat")
    return reasons


def may_take(problem: Problem, info: DeviceInfo) -> bool:
    """Whether "auto" may have matrix units compute ``problem``, as far as is known without self-tests."""
    return info.device_type not in ONLY_BY_NAME_ON and any(
        shape.operand == problem.query_dtype and shape.result == "float32" for shape in info.matrix_shapes
    ) and not problem_reasons(problem)


def candidates(kernel: str, endings: tuple[str, ...], problem: Problem, info: DeviceInfo) -> list[Variant]:
    """Return the compiled variants of ``kernel`` that fit ``problem`` and the device's subgroups, best first."""
    widest = max(problem.head_dim, problem.value_dim)
    width = next((name for name, dim in WIDTHS.items() if widest <= dim), "")
    stem = f"{kernel}_{AXIS[problem.query_dtype]}_{width}_l{info.subgroup_size}"
    known = load_manifest()
    return [known[name] for ending in endings if (name := f"{stem}{ending}") in known]


def matrix_shape(kernel: Variant) -> MatrixShape:
    """Return the multiplication that ``kernel`` is made of."""
    if kernel.kernel == "attn_split_quant_coopmat":  # codes are exact in float16
        return MatrixShape(16, 8, 16, "float16", "float32")
    edge = EDGES[kernel.axes["lanes"]]
    operand = next(dtype for dtype, axis in AXIS.items() if axis == kernel.axes["dtype"])
    return MatrixShape(edge, edge, edge, operand, "float32")


def static_reasons(kernel: Variant, info: DeviceInfo) -> list[str]:
    """Return why the device does not report what ``kernel`` needs; empty if it does."""
    for extension in EXTENSIONS[kernel.kernel]:  # without it there is nothing more to say
        if extension not in info.extensions:
            return [f"needs {extension}, which the device does not report"]
    reasons = device_reasons(kernel, info)
    shape = matrix_shape(kernel)
    if shape not in info.matrix_shapes:
        reasons.append(f"needs matrices of {shape.m} x {shape.n} x {shape.k} {shape.operand} summed in {shape.result}, "
                       "which the device does not report")
    lanes = LANES[kernel.axes["lanes"]]
    if info.subgroup_size != lanes:
        reasons.append(f"needs subgroups of {lanes} invocations, the device has {info.subgroup_size}")
    missing = sorted(FEATURES[kernel.kernel] - info.matrix_features)
    if missing:
        reasons.append(f"needs {', '.join(missing)} of VK_NV_cooperative_matrix2, which the device does not report")
    return reasons


def use_reasons(kernel: Variant, info: DeviceInfo) -> list[str]:
    """Return why ``kernel`` is not used on the device: what it does not report, or the verdict of the self-test."""
    reasons = static_reasons(kernel, info)
    if reasons:
        return reasons
    found = verdict(kernel, info)
    return [] if found == "" else [found or "not tested on this device yet"]


def loop_reasons(kernel: Variant, problem: Problem, info: DeviceInfo) -> list[str]:
    """Return why ``kernel`` cannot go through as many keys on the device; empty if it can."""
    worst = item_iterations(problem.max_kv_len)
    return [too_long(f"kv_len {problem.max_kv_len}", worst)] if items_that_fit(worst, info) == 0 else []


def item_iterations(max_kv_len: int) -> int:
    """Return the most loop iterations of one item: per tile of 16 keys those of the mask, and of dirty values."""
    return 600 + (max_kv_len // 16 + 2) * 120


def able(fitting: list[Variant], info: DeviceInfo) -> Variant | None:
    """Return the first of the candidates that the device reports all for and that passed its self-test."""
    return next((kernel for kernel in fitting if not use_reasons(kernel, info)), None)


def untested(fitting: list[Variant], info: DeviceInfo) -> Variant | None:
    """Return the first candidate that only a self-test keeps from use, or None if a better one passed."""
    for kernel in fitting:
        if static_reasons(kernel, info):
            continue
        found = verdict(kernel, info)
        if found is None:
            return kernel
        if found == "":
            return None
    return None


def reasons_of(problem: Problem, info: DeviceInfo, fitting: list[Variant]) -> list[str]:
    """Return why none of the candidates can be used; empty if one can."""
    kernel = able(fitting, info)
    if kernel is not None:
        return loop_reasons(kernel, problem, info)
    if not fitting:
        widest = max(problem.head_dim, problem.value_dim)
        return [f"no variant is compiled for subgroups of {info.subgroup_size} invocations and {problem.query_dtype} "
                f"in rows of {widest}"]
    reasons: list[str] = []
    for candidate in fitting:
        found = static_reasons(candidate, info) or [f"{candidate.name}: {use_reasons(candidate, info)[0]}"]
        reasons += [reason for reason in found if reason not in reasons]
    return reasons


def one_pass(kernel: Variant, problem: Problem) -> tuple[Pass, ...]:
    """Return the one pass; its recording is repeated for each chunk of query rows."""
    return (Pass(kernel, TENSORS, most_groups=row_tiles(problem, problem.max_q_len, block_rows(kernel))),)


def block_rows(kernel: Variant) -> int:
    """Return the query rows of a tile of ``kernel``: a matrix of them to each subgroup."""
    return kernel.local_size[0] // LANES[kernel.axes["lanes"]] * EDGES[kernel.axes["lanes"]]


def cut_of(kernel: Variant, problem: Problem, q_len: int, max_kv_len: int, info: DeviceInfo) -> Cut:
    """Return how the rows of a run are cut so that no dispatch is long."""
    rows = block_rows(kernel)
    tiles = row_tiles(problem, q_len, rows)
    work = rows * max(max_kv_len, 1) * 2 * WIDTHS[kernel.axes["width"]]
    short = max(1, int(DISPATCH_SECONDS * MULTIPLY_ADDS_PER_SECOND[info.device_type] / work))
    fit = items_that_fit(item_iterations(max_kv_len), info)
    return even_cut(tiles, max(1, min(short, tiles if fit is None else fit, tiles)))


@dataclass(frozen=True)
class Family:
    """The functions that every algorithm has, for one kernel and the ``endings`` of its variants, best first."""

    kernel: str
    endings: tuple[str, ...]

    def candidates(self, problem: Problem, info: DeviceInfo) -> list[Variant]:
        """Return the compiled variants that fit ``problem`` and the device's subgroups, best first."""
        return candidates(self.kernel, self.endings, problem, info)

    def untested(self, problem: Problem, info: DeviceInfo) -> Variant | None:
        """Return the variant whose self-test decides next, or None if nothing is left to decide."""
        return None if problem_reasons(problem) else untested(self.candidates(problem, info), info)

    def not_supported_reasons(self, problem: Problem, info: DeviceInfo) -> list[str]:
        """Return why this family cannot compute ``problem`` on the device; empty if it can."""
        return problem_reasons(problem) or reasons_of(problem, info, self.candidates(problem, info))

    def variants(self, problem: Problem, info: DeviceInfo) -> tuple[Variant]:
        """Return the first candidate that may be used, or the last one if none may."""
        fitting = self.candidates(problem, info)
        return (able(fitting, info) or fitting[-1],)

    def passes(self, problem: Problem, info: DeviceInfo) -> tuple[Pass, ...]:
        """Return the one pass; its recording is repeated for each chunk of query rows."""
        return one_pass(self.variants(problem, info)[0], problem)

    def scratch_words(self, problem: Problem, info: DeviceInfo, budget_words: int) -> dict[str, int]:
        """Return no buffer at all: scores stay in the workgroups."""
        return {}

    def cut(self, problem: Problem, q_len: int, max_kv_len: int, scratch: dict[str, int], info: DeviceInfo) -> Cut:
        """Return how the rows of a run are cut so that no dispatch is long."""
        return cut_of(self.variants(problem, info)[0], problem, q_len, max_kv_len, info)
