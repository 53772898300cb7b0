"""The runs under the layer: what is switched on, on which driver, and which tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LAYER = "VK_LAYER_KHRONOS_validation"
SYNCHRONIZATION = "VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION"
GPU_ASSISTED = "VK_VALIDATION_FEATURE_ENABLE_GPU_ASSISTED"

#: Tests that cannot hold, or mean something else, under the layer or in `full`.
OWN_MODE = {
    "[coherent]": "opens a device in coherent mode by name",
    "test_full_boundaries": "opens a device in the other mode than the run's",
    "test_the_proxy_counts": "expects the boundaries of coherent mode",
    "test_opening_and_closing_is_flat": "counts open files; the layer opens its log anew for each instance",
}

#: Left out with --ci. The layer watches what is recorded and submitted, not the values, nor how many there are: these
#: tests take long and show it nothing that the others do not. They run without it in scripts/test.
LONG = {
    "tests/gpu/kernels/": "one dispatch each, so nothing to order; test_check.py reaches every variant",
    "test_races.py": "the same recordings again and again; test_check.py reaches every variant",
    "test_onnx_attention.py": "other values for recordings that test_attention*.py make too",
    "test_torch_peer.py": "other values for recordings that test_attention*.py make too",
    "test_grid_of_shapes[": "576 shapes, one after another",
    "test_a_matrix_far_beyond_the_budget": "computes 16 heads of 4096 x 4096 scores",
    "test_many_heads_and_batches": "computes 70000 batch rows",
    "test_three_passes_of_a_large_matrix": "computes 8 heads of 1500 x 1500 scores",
    "test_upstream_sequences[24-8-128": "the largest of the sequences",
    "test_1000_decode_steps": "replays one recording 1000 times",
    "tests/property/": "hundreds of random shapes",
    "test_smollm2": "a whole language model",
}

#: Few, as each pipeline that a test makes costs seconds here. A test that is gone fails the run.
GPU_ASSISTED_TESTS = (
    "tests/gpu/kernels/test_fill_copy.py",
    "tests/gpu/test_check.py::test_part[words]",
    "tests/gpu/test_check.py::test_part[caches]",
    "tests/gpu/test_check.py::test_part[quantised caches]",
    "tests/gpu/test_check.py::test_a_small_problem_by_each_algorithm",
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
        GPU_ASSISTED_TESTS, GPU_ASSISTED_TESTS, {}, {}),
    # For docs/hazards.md, and for the messages that are not hazards.
    Run("coherent", "lavapipe", "coherent", SYNCHRONIZATION, "hazard", _HAZARD, _ALL, _ALL, {}, LONG),
)
