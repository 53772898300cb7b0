"""``vkattn info``: what is installed, which devices there are, and which kernels each can run, or why not.

Opens no device and does not import kp.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections import Counter
from typing import Any

import numpy as np

from . import __version__
from .caps.model import DeviceInfo
from .caps.probe import devices, select_device
from .caps.tuning import tuning_for
from .errors import DeviceError, OptionError
from .kernels import matrix
from .kernels.manifest import load_manifest
from .paths import cache_dir
from .reach import unable

#: Variants that are named together at most; ``--json`` names them all.
MOST_NAMES = 4

#: Variables that change what vkattn or the Vulkan loader does.
VARIABLES = (
    "VKATTN_DEVICE",
    "VKATTN_TIERS",
    "VKATTN_BOUNDARY",
    "VKATTN_TUNING",
    "VKATTN_CACHE",
    "VK_ICD_FILENAMES",
    "VK_DRIVER_FILES",
    "VK_ADD_DRIVER_FILES",
    "VK_INSTANCE_LAYERS",
    "VK_LOADER_LAYERS_ENABLE",
    "VK_LAYER_SETTINGS_PATH",
    "MESA_SHADER_CACHE_DISABLE",
)

_SELF_TEST = "reported; used after a self-test of the kernel"


def main(args: argparse.Namespace) -> int:
    """Print the report, as text or with ``--json`` as JSON; return 1 if there is no device."""
    report = collect(getattr(args, "device", None))
    if getattr(args, "json", False):
        print(json.dumps(report, indent=2))
    else:
        print(as_text(report))
    if report["error"]:
        print(f"error: {report['error']}", file=sys.stderr)
        return 1
    return 0


def collect(select: int | str | None = None) -> dict[str, Any]:
    """Return the whole report as plain values.

    Parameters
    ----------
    select : a device, as in `vkattn.Device`; None for all.

    Raises
    ------
    DeviceError : there are devices, and ``select`` or VKATTN_DEVICE fits none of them.
    """
    found, error, default = [], None, None
    try:
        found = devices()
    except DeviceError as missing:
        error = str(missing)
    if found:
        default = select_device(found, select).index
    variants = load_manifest().values()
    return {
        "vkattn": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "kompute": _kompute_version(),
        "shaders": {
            "variants": len(variants),
            "kernels": len({variant.kernel for variant in variants}),
            "compilers": dict(sorted(Counter(variant.compiler for variant in variants).items())),
        },
        "cache": _cache(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "default_device": default,
        "devices": [_device(info) for info in found if select is None or info.index == default],
        "error": error,
    }


def _cache() -> str | None:
    """Return the folder of what is kept between runs, or None if there is none to be had."""
    try:
        return str(cache_dir())
    except OptionError:
        return None


def _kompute_version() -> str | None:
    """Return the version of the kp that can be imported, without importing it (that changes the root logger)."""
    if importlib.util.find_spec("kp") is None:
        return None
    try:
        return importlib.metadata.version("kp")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _device(info: DeviceInfo) -> dict[str, Any]:
    """Return one device: its fields, its tiers, and for each kernel the variants and why they do not run."""
    kernels: dict[str, dict[str, Any]] = {}
    for variant in load_manifest().values():
        entry = kernels.setdefault(variant.kernel, {"variants": 0, "unsupported": {}})
        entry["variants"] += 1
        reasons = matrix.use_reasons(variant, info) if variant.kernel in matrix.FEATURES else unable(variant, info)
        if reasons:
            entry["unsupported"][variant.name] = reasons
    fields = dataclasses.asdict(info)
    fields |= {name: sorted(fields[name]) for name in ("subgroup_operations", "extensions", "matrix_features")}
    fields["tuning"] = dataclasses.asdict(tuning_for(info.device_type, info.name))
    return {**fields, "tiers": tiers(info), "kernels": dict(sorted(kernels.items()))}


def tiers(info: DeviceInfo) -> dict[str, str]:
    """Return for each tier of kernels "yes", or why not, or on what it depends (docs/kernels.md)."""
    found = {"base": "yes" if info.api_version >= (1, 1) else "needs Vulkan 1.1"}
    missing = sorted({"arithmetic", "shuffle"} - info.subgroup_operations)
    found["subgroup"] = f"no subgroup {' and '.join(missing)} operations in compute" if missing else "yes"
    for tier, extension in (("coopmat", "VK_KHR_cooperative_matrix"), ("coopmat2", "VK_NV_cooperative_matrix2")):
        found[tier] = _SELF_TEST if extension in info.extensions else f"{extension} is not reported"
    return found


def as_text(report: dict[str, Any]) -> str:
    """Return the report for people."""
    shaders = report["shaders"]
    compilers = ", ".join(f"{count} by {name}" for name, count in shaders["compilers"].items())
    kompute = f"kp {report['kompute']}" if report["kompute"] else "not installed. Hint: python -m vkattn setup"
    lines = [
        f"vkattn {report['vkattn']}, Python {report['python']}, numpy {report['numpy']}",
        f"Kompute      {kompute}",
        f"shaders      {shaders['variants']} variants of {shaders['kernels']} kernels (compiled: {compilers})",
        f"cache        {report['cache'] or 'none: the user has no home. Hint: VKATTN_CACHE names a folder'}",
    ]
    lines += [f"environment  {name}={value}" for name, value in report["environment"].items()]
    for device in report["devices"]:
        lines += ["", *_device_text(device, device["index"] == report["default_device"])]
    return "\n".join(lines)


def _device_text(device: dict[str, Any], is_default: bool) -> list[str]:
    """Return one device as lines."""
    memory = ", ".join(
        f"{_bytes(heap['size_bytes'])} {'device' if heap['device_local'] else 'host'}" for heap in device["heaps"]
    )
    lines = [f"device {device['index']}: {device['name']}{' (the one that opens)' if is_default else ''}"]
    version = ".".join(map(str, device["api_version"]))
    rows = {
        "type": f"{device['device_type']}, Vulkan {version}, vendor {device['vendor_id']:#06x}",
        "driver": " ".join(filter(None, [device["driver_name"], device["driver_info"]])) or "unknown",
        "memory": memory,
        "buffers": f"{_bytes(device['max_storage_buffer_range'])} each, {device['max_storage_buffers_per_stage']} in a "
        f"shader, {device['max_memory_allocation_count']} allocations",
        "workgroup": f"{device['max_workgroup_invocations']} invocations, size {_by(device['max_workgroup_size'])}, "
        f"count {_by(device['max_workgroup_count'])}",
        "shared": f"{_bytes(device['max_shared_memory_bytes'])}; {device['max_push_constants_bytes']} bytes of push "
        "constants",
        "subgroup": f"{device['subgroup_size']} invocations; {', '.join(device['subgroup_operations']) or 'none'}",
        "matrices": _matrices(device["matrix_shapes"], device["matrix_features"]),
        "timestamps": f"{device['timestamp_period_ns']:g} ns a tick, {device['timestamp_valid_bits']} bits"
        if device["timestamp_valid_bits"] else "none in the compute queue: nothing can be timed on the device",
    }
    lines += [f"  {name:<11}{text}" for name, text in rows.items()]
    lines += ["  tiers", *(f"    {tier:<10}{text}" for tier, text in device["tiers"].items()), "  kernels"]
    width = max(map(len, device["kernels"]), default=0) + 2
    for kernel, entry in device["kernels"].items():
        lines += _kernel_text(kernel, entry, width)
    return lines


def _matrices(shapes: list[dict[str, Any]], features: list[str]) -> str:
    """Return the shapes of float operands that matrix units multiply, and what VK_NV_cooperative_matrix2 adds."""
    texts = [f"{shape['m']} x {shape['n']} x {shape['k']} {shape['operand']} to {shape['result']}"
             for shape in shapes if "other" not in (shape["operand"], shape["result"])]
    return ", ".join(texts) + (f"; {', '.join(features)}" if features else "") if texts else "none"


def _kernel_text(kernel: str, entry: dict[str, Any], width: int) -> list[str]:
    """Return one kernel: yes, or how many variants run, and below it the reasons of those that do not."""
    runs = entry["variants"] - len(entry["unsupported"])
    verdict = "yes" if runs == entry["variants"] else "no" if not runs else f"{runs} of them"
    plural = "" if entry["variants"] == 1 else "s"
    lines = [f"    {kernel:<{width}}{entry['variants']:>3} variant{plural:<1}  {verdict}"]
    by_reason: dict[str, list[str]] = {}
    for name, reasons in entry["unsupported"].items():
        by_reason.setdefault("; ".join(reasons), []).append(name)
    for reason, names in by_reason.items():
        which = ", ".join(names)
        if len(names) == entry["variants"]:
            which = "all"
        elif len(names) > MOST_NAMES:
            which = f"{', '.join(names[: MOST_NAMES - 1])} and {len(names) - MOST_NAMES + 1} more"
        lines.append(f"      {which}: {reason}")
    return lines


def _bytes(size: int) -> str:
    """Return a number of bytes as the largest binary unit of which there is at least one."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << shift:
            return f"{size / (1 << shift):.4g} {unit}"
    return f"{size} bytes"


def _by(sizes: tuple[int, int, int]) -> str:
    """Return three numbers as one text."""
    return " x ".join(map(str, sizes))
