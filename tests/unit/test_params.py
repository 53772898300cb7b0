"""The params block: names, places, types, and the generated GLSL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vkattn.kernels import params

ROOT = Path(__file__).resolve().parents[2]


def test_the_generated_include_is_fresh() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "gen_params.py"), "--check"],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_fields_fit_the_header_and_have_known_types() -> None:
    assert len(params.FIELDS) <= params.HEADER_WORDS
    assert len(params.INDEX) == len(params.FIELDS), "a name occurs twice"
    assert {kind for _, kind in params.FIELDS} <= {"u", "i", "f"}


def test_values_land_as_their_type_says() -> None:
    words = np.zeros(params.block_words(2, 4), np.uint32)
    params.write_header(words, {"q_len": 7, "scale": 0.5, "window_left": -3})
    assert words[params.INDEX["q_len"]] == 7
    assert words[params.INDEX["scale"]] == 0x3F000000
    assert words[params.INDEX["window_left"]] == 0xFFFFFFFD


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(KeyError):
        params.write_header(np.zeros(64, np.uint32), {"qlen": 1})


def test_arrays_follow_the_header_in_order() -> None:
    words = np.full(params.block_words(2, 3), 99, np.uint32)
    params.write_lengths(words, 2, np.array([5, 6]), np.array([-1, 2]), np.array([7, 8]))
    params.write_heads(words, 2, 3, np.array([0.5, 1, 2], np.float32), np.array([-1, 0, 1], np.float32))
    tail = words[params.HEADER_WORDS :]
    assert tail[:2].tolist() == [5, 6]
    assert tail[2:4].view(np.int32).tolist() == [-1, 2]
    assert tail[4:6].tolist() == [7, 8]
    assert tail[6:9].view(np.float32).tolist() == [0.5, 1, 2]
    assert tail[9:].view(np.float32).tolist() == [-1, 0, 1]
    assert (words[: params.HEADER_WORDS] == 99).all()
