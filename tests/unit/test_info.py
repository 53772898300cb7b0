"""The report of ``vkattn info`` on devices that are not there."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest

from tests.fakes import fake_device_info
from vkattn import info
from vkattn.caps.model import DeviceInfo
from vkattn.errors import DeviceError
from vkattn.kernels.manifest import load_manifest


def run(monkeypatch: pytest.MonkeyPatch, *infos: DeviceInfo, **options: object) -> int:
    """Run the command as if `infos` were the devices."""
    monkeypatch.delenv("VKATTN_DEVICE", raising=False)
    monkeypatch.setattr(info, "devices", lambda: list(infos))
    return info.main(argparse.Namespace(**{"device": None, "json": False, **options}))


def test_text(monkeypatch, capsys) -> None:
    monkeypatch.setenv("VK_ICD_FILENAMES", "/some/icd.json")
    small = fake_device_info(index=1, name="Small one", device_type="cpu", max_shared_memory_bytes=1024)
    assert run(monkeypatch, fake_device_info(), small) == 0
    out = capsys.readouterr().out
    assert "environment  VK_ICD_FILENAMES=/some/icd.json" in out
    assert f"{len(load_manifest())} variants of" in out
    first, second = out.split("device 0: ")[1].split("device 1: ")
    assert first.startswith("Fake GPU (the one that opens)")
    assert "memory     8 GiB device, 16 GiB host" in first
    assert "subgroup  no subgroup arithmetic and shuffle operations in compute" in first
    assert second.startswith("Small one\n")
    assert "bytes of shared memory, the device has 1024\n" in second


def test_json_holds_every_kernel_with_its_reasons(monkeypatch, capsys) -> None:
    assert run(monkeypatch, fake_device_info(max_workgroup_invocations=64), json=True) == 0
    report = json.loads(capsys.readouterr().out)
    (device,) = report["devices"]
    assert report["default_device"] == 0
    assert report["error"] is None
    assert set(device["kernels"]) == {variant.kernel for variant in load_manifest().values()}
    assert sum(kernel["variants"] for kernel in device["kernels"].values()) == len(load_manifest())
    assert device["kernels"]["fill"] == {"variants": 1, "unsupported": {}}
    assert device["kernels"]["attn_softmax"]["unsupported"] == {
        "attn_softmax": ["needs 128 invocations in a workgroup, the device has 64"]
    }
    assert device["max_workgroup_size"] == [128, 128, 64]
    assert sum(report["shaders"]["compilers"].values()) == len(load_manifest())


def test_one_device_is_asked_for(monkeypatch, capsys) -> None:
    two = fake_device_info(), fake_device_info(index=1, name="Other")
    assert run(monkeypatch, *two, device="other", json=True) == 0
    assert [device["name"] for device in json.loads(capsys.readouterr().out)["devices"]] == ["Other"]
    with pytest.raises(DeviceError, match="part of no device's name"):
        run(monkeypatch, *two, device="radeon")


def test_without_a_driver_the_rest_is_printed(monkeypatch, capsys) -> None:
    def none() -> list[DeviceInfo]:
        raise DeviceError("No Vulkan device was found.")

    monkeypatch.setattr(info, "devices", none)
    assert info.main(argparse.Namespace()) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("vkattn ")
    assert printed.err == "error: No Vulkan device was found.\n"


def test_kompute_is_named_whether_it_is_there_or_not(monkeypatch, capsys) -> None:
    monkeypatch.setattr(info.importlib.util, "find_spec", lambda name: None)
    run(monkeypatch, fake_device_info())
    assert "Kompute      not installed. Hint: python -m vkattn setup" in capsys.readouterr().out
    monkeypatch.setattr(info.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(info.importlib.metadata, "version", lambda name: "0.9.0")
    run(monkeypatch, fake_device_info())
    assert "Kompute      kp 0.9.0\n" in capsys.readouterr().out


def test_a_kernel_of_which_some_variants_run() -> None:
    entry = {"variants": 3, "unsupported": {"k_a": ["needs x"], "k_b": ["needs x"]}}
    assert info._kernel_text("k", entry, 4) == ["    k     3 variants  1 of them", "      k_a, k_b: needs x"]
    entry["unsupported"]["k_c"] = ["needs x"]
    assert info._kernel_text("k", entry, 4) == ["    k     3 variants  no", "      all: needs x"]
    entry = {"variants": 9, "unsupported": {f"k_{letter}": ["needs x"] for letter in "abcdef"}}
    assert info._kernel_text("k", entry, 4)[1] == "      k_a, k_b, k_c and 3 more: needs x"


def test_kp_is_not_imported() -> None:
    code = "import sys, vkattn.info; vkattn.info._kompute_version(); assert 'kp' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
