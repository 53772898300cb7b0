"""`vkattn bench --graph` on the device: what it prints, in all forms; that it refuses to time a wrong result."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from vkattn import cli, oracle
from vkattn.bench import clock
from vkattn.bench.step import DecodeStep, Settings
from vkattn.errors import CapacityError, OptionError
from vkattn.runtime.device import Device

pytestmark = pytest.mark.once

TINY = ("--heads", "6/2", "--head-dim", "8", "--capacity", "40", "--length", "9", "--repeat", "2")
KEYS = {"device", "driver", "settings", "graph", "worst_share", "device_ns", "host_ns", "bytes_read",
        "gigabytes_per_second", "timings"}  # fmt: skip


@pytest.fixture(autouse=True)
def _short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "WARM_UP_SECONDS", dict.fromkeys(clock.WARM_UP_SECONDS, 0.001))


def run(device: Device, *arguments: str) -> int:
    return cli.main(["bench", "--graph", "--device", device.info.name, *arguments])


@pytest.mark.parametrize("dtype, layers, q_len", [
    ("float32", 1, 1), ("float16", 1, 1), ("bfloat16", 1, 1), ("float16", 3, 1), ("float32", 2, 9)])
def test_json_has_everything(
    device: Device, capsys: pytest.CaptureFixture[str], dtype: str, layers: int, q_len: int
) -> None:
    status = run(device, *TINY, "--json", "--dtype", dtype, "--layers", str(layers), "--q-len", str(q_len))
    assert status == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == KEYS
    assert found["device"] == device.info.name
    assert found["settings"] == {"num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "capacity": 40, "length": 9,
                                 "q_len": q_len, "num_layers": layers, "dtype": dtype, "repeat": 2}
    assert 0 <= found["worst_share"] <= 1
    dispatches = found["timings"]["dispatches"]
    assert len(dispatches) == found["graph"]["dispatches"]
    assert {span["node"] for span in dispatches} >= {f"layer_{layer}" for layer in range(layers)}
    axis = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[dtype]
    assert sum(span["variant"] == f"kv_append_{axis}_{axis}" for span in dispatches) == layers
    assert all(span["nanoseconds"] > 0 for span in dispatches)
    assert found["device_ns"] == found["timings"]["total_ns"] == pytest.approx(
        sum(span["nanoseconds"] for span in dispatches))
    assert found["host_ns"] > 0
    assert found["bytes_read"] == layers * 2 * 9 * 2 * 8 * (4 if dtype == "float32" else 2)
    assert found["gigabytes_per_second"] == found["bytes_read"] / found["device_ns"]


def test_text_has_a_line_for_each_dispatch(device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(device, *TINY) == 0
    printed = capsys.readouterr().out
    assert device.info.name in printed
    assert "6 query heads on 2 KV heads, head_dim 8, float16, q_len 1, length 9 of 40" in printed
    assert "layer_0  kv_append_f16_f16" in printed
    assert "total of" in printed
    assert "GB/s" in printed


def test_a_wrong_result_is_not_timed(
    device: Device, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle, "worst_share", lambda *args, **options: 1.5)
    assert run(device, *TINY) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "1.5 times its bound" in printed.err


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("fault", ["output", "cache"])
def test_its_check_finds_a_fault(device: Device, monkeypatch: pytest.MonkeyPatch, layers: int, fault: str) -> None:
    """One element of the last output, or one old key of the last layer, slightly off."""
    step = DecodeStep(device, Settings(6, 2, 8, 40, 9, 1, layers, "float32", 1))
    assert step.worst_share() <= 1
    if fault == "output":
        real = step.run

        def off() -> np.ndarray:
            out = real()
            out[0, 0, 5, 3] *= np.float32(1.01)
            return out

        monkeypatch.setattr(step, "run", off)
    else:
        key, value = step.cache.read(layers - 1)
        real_read = step.cache.read
        key[0, 3, 1, 2] += np.float32(0.5)
        monkeypatch.setattr(step.cache, "read",
                            lambda layer: (key, value) if layer == layers - 1 else real_read(layer))
    assert step.worst_share() > 1
    step.close()


def test_wrong_usage_is_status_2(device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--sets", "nothing"]) == 2
    assert "there are: targets, scaling" in capsys.readouterr().err
    assert cli.main(["bench", "--peers", "somebody"]) == 2
    assert "there is no peer somebody" in capsys.readouterr().err
    assert cli.main(["bench", "--algorithms", "magic"]) == 2
    assert "there is no algorithm magic; there are: split" in capsys.readouterr().err
    assert cli.main(["bench", "--compare", "no such file", "another"]) == 2
    assert "no result of vkattn bench" in capsys.readouterr().err
    assert run(device, "--heads", "6/4") == 2
    assert "multiple of the KV heads" in capsys.readouterr().err
    assert run(device, *TINY, "--length", "41") == 2
    assert "--capacity 40" in capsys.readouterr().err
    assert cli.main(["bench", "--graph", "--device", "no such device"]) == 2
    assert device.info.name in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--heads", "0/1"), ("--heads", "a"), ("--repeat", "0"), ("--dtype", "int8")])
def test_arguments_that_make_no_sense_stop_the_parser(arguments: tuple[str, str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.build_parser().parse_args(["bench", "--graph", *arguments])
    assert stopped.value.code == 2


def test_heads_may_be_one_number() -> None:
    args: Any = cli.build_parser().parse_args(["bench", "--graph", "--heads", "8"])
    assert args.heads == (8, 8)


def test_settings_are_checked() -> None:
    with pytest.raises(OptionError):
        Settings(num_heads=5)
    with pytest.raises(CapacityError):
        Settings(q_len=251)
    assert Settings().bytes_read == 8 * 250 * 256 * 2
