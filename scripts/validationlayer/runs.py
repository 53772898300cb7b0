"""The runs under the layer: what is switched on, on which driver, and which tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LAYER = "VK_LAYER_KHRONOS_validation"
SYNCHRONIZATION = "VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION"
GPU_ASSISTED = "VK_VALIDATION_FEATURE_ENABLE_GPU_ASSISTED"

#: Tests that open devices in coherent mode themselves, whatever the run's mode is.
OWN_MODE = {"[coherent]": "opens a device in coherent mode by name"}

#: Tests that take long because of how much they compute. The layer watches what is recorded and submitted, not how
#: many words a dispatch goes over, so they show it nothing that the others do not; they run without it in scripts/test.
LONG = {
    "test_a_matrix_far_beyond_the_budget": "computes 16 heads of 4096 x 4096 scores",
    "test_many_heads_and_batches": "computes 70000 batch rows",
    "test_grid_of_shapes[": "576 shapes, one after another",
    "tests/property/": "hundreds of random shapes",
    "test_smollm2": "a whole language model",
}

#: Each kernel family at least once, and half precision; each new variant costs seconds. A test that is gone fails.
SHORT_GPU_ASSISTED = (
    "tests/gpu/kernels/test_fill_copy.py",
    "tests/gpu/test_check.py::test_part[words]",
    "tests/gpu/test_check.py::test_part[caches]",
    "tests/gpu/test_check.py::test_a_small_problem_by_each_algorithm",
    "tests/gpu/ops/test_attention.py::test_half_dot_products_beyond_the_range_of_half",
)


@dataclass(frozen=True)
class Run:
    """One run of pytest under the layer.

    ``part`` is the part of scripts/run_tests.py whose driver it uses, ``boundary`` the mode (docs/hazards.md),
    ``feature`` what is switched on in the layer, ``plant`` the fault that it must report and ``planted_id`` how;
    ``tests`` are pytest arguments, ``leave_out`` parts of test names with the reason; ``short`` and ``short_leave_out``
    stand in their place for ``--ci``.
    """

    name: str
    part: str
    boundary: str
    feature: str
    plant: str
    planted_id: str
    tests: tuple[str, ...]
    short: tuple[str, ...]
    leave_out: dict[str, str]
    short_leave_out: dict[str, str]

    def settings(self, pipe: Path) -> str:
        """Return the layer's settings file. Without a limit, as a message allowed often must not hide others."""
        return (
            "khronos_validation.debug_action = VK_DBG_LAYER_ACTION_LOG_MSG\n"
            f"khronos_validation.log_filename = {pipe}\n"
            "khronos_validation.report_flags = error,warn,perf,info\n"
            "khronos_validation.enable_message_limit = false\n"
            f"khronos_validation.enables = {self.feature}_EXT\n"
        )


_HAZARD, _OVERRUN = "SYNC-HAZARD-READ-AFTER-WRITE", "VUID-vkCmdDispatch-None-02706"
_ALL = ("tests", "-m", "gpu")

RUNS = (
    Run("full", "lavapipe", "full", SYNCHRONIZATION, "hazard", _HAZARD, _ALL, _ALL, OWN_MODE, OWN_MODE | LONG),
    # On SwiftShader, because LLVM takes a minute or more over an attention kernel with the layer's checks in it.
    Run("gpu-assisted", "swiftshader", "full", GPU_ASSISTED, "overrun", _OVERRUN,
        ("tests/gpu", "-m", "gpu"), SHORT_GPU_ASSISTED, OWN_MODE | LONG, {}),
    # For docs/hazards.md, and for the messages that are not hazards.
    Run("coherent", "lavapipe", "coherent", SYNCHRONIZATION, "hazard", _HAZARD, _ALL, _ALL, {}, LONG),
)
