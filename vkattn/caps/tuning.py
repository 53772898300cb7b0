"""Numbers that make kernels fast and never wrong, as data: defaults for each type of device, and what a user measured.

``vkattn/_tuning/<device type>.toml`` holds the defaults. ``vkattn tune`` measures and writes a user's file, with a
table for each device by its name; it is read when a device is opened. Its place is ``vkattn/tuning.toml`` in the folder
of the user's settings ($XDG_CONFIG_HOME, else ~/.config); the environment variable VKATTN_TUNING names another, and if
it is empty there is none.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..errors import OptionError
from ..paths import write_whole

ENVIRONMENT = "VKATTN_TUNING"

#: The least and the most of each number.
RANGES = {
    "grid_groups": (1, 1 << 20),
    "split_groups": (1, 1 << 16),
    "split_root_divisor": (0.01, 1000.0),
    "split_max_rows": (1, 256),
    "split_total_rows": (1, 1 << 30),
    "split_total_rows_matrix": (1, 1 << 30),
}

#: What may be chosen where not every number between would do.
CHOICES = {"split_threads": (128, 256)}


@dataclass(frozen=True)
class Tuning:
    """What may differ between devices of one ability.

    Attributes
    ----------
    grid_groups : workgroups of a dispatch; they loop over what is live
    split_groups : workgroups that fill the device: no more splits of all heads together
    split_threads : invocations of a workgroup of `split` with subgroup shuffles, where the device allows them: fewer,
        larger workgroups leave fewer parts to merge
    split_root_divisor : splits of one head at most: the root of its keys over this, since merging them costs time too
    split_max_rows : query rows of a KV head up to which `split` is chosen
    split_total_rows : query rows of all KV heads and batch entries together up to which `split` is chosen where there
        are more than a few of a head; `split_total_rows_matrix` where matrix units can take the problem
    split_subgroups : whether `split` shares rows by subgroup shuffles, where the device has them
    split_lanes : whether `split`, without them, lets a subgroup go through the keys alone, where it has 8 invocations:
        for software devices, which load for each invocation in turn
    fused_subgroups : whether `fused` shares keys by subgroup shuffles, where the device has them
    fused_large_tiles : whether `fused` takes large tiles, where the device has the shared memory; software devices go
        through the invocations of a workgroup in turn, and are faster with small ones
    """

    grid_groups: int
    split_groups: int
    split_threads: int
    split_root_divisor: float
    split_max_rows: int
    split_total_rows: int
    split_total_rows_matrix: int
    split_subgroups: bool
    split_lanes: bool
    fused_subgroups: bool
    fused_large_tiles: bool


NAMES = tuple(field.name for field in fields(Tuning))


@functools.cache
def default_tuning(device_type: str) -> Tuning:
    """Return the numbers of the package for a type of device."""
    file = importlib.resources.files("vkattn") / "_tuning" / f"{device_type}.toml"
    return Tuning(**checked(tomllib.loads(file.read_text(encoding="utf-8")), str(file)))


def checked(table: Any, where: str) -> dict[str, Any]:
    """Return ``table`` if its keys are known and its values fit, else raise OptionError that names ``where``."""
    if not isinstance(table, Mapping):
        raise OptionError(f"{where} is {table!r}; it must be a table of {', '.join(NAMES)}.")
    unknown = sorted(set(table) - set(NAMES))
    if unknown:
        raise OptionError(f"{where} has the keys {', '.join(unknown)}; known: {', '.join(NAMES)}.")
    result: dict[str, Any] = {}
    for name, value in table.items():
        if name in CHOICES:
            if isinstance(value, bool) or value not in CHOICES[name]:
                raise OptionError(f"{where}: `{name}` is {value!r}; it must be one of "
                                  f"{', '.join(map(str, CHOICES[name]))}.")
            result[name] = int(value)
            continue
        if name not in RANGES:
            if not isinstance(value, bool):
                raise OptionError(f"{where}: `{name}` is {value!r}; it must be true or false.")
            result[name] = value
            continue
        least, most = RANGES[name]
        kinds = (int,) if isinstance(least, int) else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not (
                math.isfinite(value) and least <= value <= most):
            kind = "an integer" if isinstance(least, int) else "a number"
            raise OptionError(f"{where}: `{name}` is {value!r}; it must be {kind} within {least} .. {most}.")
        result[name] = value if isinstance(least, int) else float(value)
    return result


def user_path() -> Path | None:
    """Return where the user's file is or would be; None if VKATTN_TUNING is empty, or the user has no home."""
    named = os.environ.get(ENVIRONMENT)
    if named is not None:
        return Path(named) if named else None
    folder = os.environ.get("XDG_CONFIG_HOME")
    try:
        return (Path(folder) if folder else Path.home() / ".config") / "vkattn" / "tuning.toml"
    except RuntimeError:
        return None


def read_tables(path: Path) -> dict[str, dict[str, Any]]:
    """Return the tables of a user's file by the name of the device; OptionError if any of it makes no sense."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"the tuning file {path} cannot be read: {error}. Hint: {ENVIRONMENT}= (empty) goes without "
                          "one; vkattn tune writes one where there is none.") from error
    return {name: checked(table, f"the tuning file {path}, device {name!r}") for name, table in data.items()}


def tuning_for(device_type: str, device_name: str) -> Tuning:
    """Return the defaults with what the user's file says of a device."""
    default, path = default_tuning(device_type), user_path()
    if path is None or (ENVIRONMENT not in os.environ and not _is_there(path)):
        return default
    return replace(default, **read_tables(path).get(device_name, {}))


def _is_there(path: Path) -> bool:
    """Return whether there is a file that this user may see."""
    try:
        return path.exists()
    except OSError:
        return False


def write_table(path: Path, device_name: str, tuning: Tuning, device_type: str) -> None:
    """Write into a user's file what differs from the defaults; the tables of other devices stay."""
    tables = read_tables(path) if path.exists() else {}
    default = asdict(default_tuning(device_type))
    tables[device_name] = {name: value for name, value in asdict(tuning).items() if value != default[name]}
    lines = ["# Written by vkattn tune; what each number means is in vkattn/caps/tuning.py."]
    for name, table in tables.items():
        lines += ["", f"[{json.dumps(name)}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    write_whole(path, "\n".join(lines) + "\n")
