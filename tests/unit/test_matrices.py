"""What the driver says about matrix units, read through functions that stand in for the driver's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cffi
import pytest

from vkattn.caps import matrices
from vkattn.caps.matrices import KHR, NV2, matrix_features, matrix_shapes
from vkattn.caps.model import MatrixShape

FLOAT16, FLOAT32, UINT32, BFLOAT16, SUBGROUP, WORKGROUP = 0, 1, 9, 1000141000, 3, 2


class FakeDriver:
    """A binding whose vkGetInstanceProcAddr returns two functions of its own."""

    def __init__(self, shapes: list[tuple[int, ...]], features: tuple[int, ...], error: int = 0) -> None:
        self.ffi = ffi = cffi.FFI()
        ffi.cdef(matrices._DECLARATIONS)
        self.lib = SimpleNamespace(vkGetInstanceProcAddr=self.address)

        def get_shapes(device: Any, count: Any, found: Any) -> int:
            if found != ffi.NULL:
                for shape, fields in zip(found[0 : count[0]], shapes, strict=True):
                    assert shape.type == 1000506001
                    shape.m, shape.n, shape.k, shape.a, shape.b, shape.c, shape.result, shape.scope = fields
            count[0] = len(shapes)
            return error

        def get_features(device: Any, found: Any) -> None:
            assert found.type == 1000059000
            matrix = ffi.cast("Matrix2*", found.next)
            assert matrix.type == 1000593000
            matrix.features = features

        self.functions = {
            b"vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR":
                ffi.callback("int32_t(void*, uint32_t*, Shape*)", get_shapes),
            b"vkGetPhysicalDeviceFeatures2": ffi.callback("void(void*, Features*)", get_features)}

    def address(self, instance: Any, name: bytes) -> Any:
        return self.ffi.cast("void*", self.functions.get(name, 0))


SHAPES = [(16, 8, 16, FLOAT16, FLOAT16, FLOAT32, FLOAT32, SUBGROUP),
          (16, 16, 16, BFLOAT16, BFLOAT16, FLOAT32, FLOAT32, SUBGROUP),
          (64, 64, 16, FLOAT16, FLOAT16, FLOAT32, FLOAT32, WORKGROUP),
          (8, 8, 32, UINT32, UINT32, UINT32, UINT32, SUBGROUP),
          (16, 16, 16, FLOAT16, FLOAT16, FLOAT32, FLOAT16, SUBGROUP)]


def handle(driver: FakeDriver) -> Any:
    return driver.ffi.cast("void*", 1)


def test_shapes_of_subgroups_with_equal_types() -> None:
    driver = FakeDriver(SHAPES, (0,) * 7)
    assert matrix_shapes(driver, None, handle(driver), frozenset({KHR})) == (
        MatrixShape(16, 8, 16, "float16", "float32"), MatrixShape(16, 16, 16, "bfloat16", "float32"),
        MatrixShape(8, 8, 32, "other", "other"))


def test_features_by_their_place() -> None:
    driver = FakeDriver([], (0, 1, 1, 0, 0, 0, 1))
    assert matrix_features(driver, None, handle(driver), frozenset({KHR, NV2})) == {
        "flexible_dimensions", "reductions", "block_loads"}


@pytest.mark.parametrize("driver", [FakeDriver([], (1,) * 7), FakeDriver(SHAPES, (1,) * 7, error=-1)])
def test_a_driver_without_an_answer_has_no_shapes(driver: FakeDriver) -> None:
    assert matrix_shapes(driver, None, handle(driver), frozenset({KHR})) == ()


def test_nothing_is_asked_without_the_extension_or_the_function() -> None:
    driver = FakeDriver(SHAPES, (1,) * 7)
    assert matrix_shapes(driver, None, handle(driver), frozenset()) == ()
    assert matrix_features(driver, None, handle(driver), frozenset({KHR})) == frozenset()
    driver.functions.clear()
    assert matrix_shapes(driver, None, handle(driver), frozenset({KHR})) == ()
    assert matrix_features(driver, None, handle(driver), frozenset({NV2})) == frozenset()
