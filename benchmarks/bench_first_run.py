"""Seconds to make each variant's pipeline and to evaluate it once, which is when drivers compile.

Mesa keeps what it compiled on disk unless it is told not to. The project's bound is 3 seconds on lavapipe; where the
machine has other work too, the process's CPU seconds say more than the clock.

    MESA_SHADER_CACHE_DISABLE=true VK_ICD_FILENAMES=/usr/share/vulkan/icd.d/lvp_icd.x86_64.json \
        python benchmarks/bench_first_run.py [part of a name ...]
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np
from common import describe

import vkattn
from vkattn.graph.node import Binding, Dispatch
from vkattn.kernels.manifest import Variant, load_manifest
from vkattn.kernels.support import device_reasons

BOUND_SECONDS = 3.0
#: Lengths are 0 and so is every loop: what is left is the compiler's work.
WORDS = 1 << 12


def first_run(device: vkattn.Device, kernel: Variant) -> tuple[float, float]:
    """Return the seconds of the pipeline and its first evaluation: by the clock, and of CPU time."""
    buffer = device.buffer(WORDS, "host", "zeros")
    buffer.words[...] = 0
    bindings = tuple(Binding(buffer) for _ in kernel.bindings)
    push = {name: np.uint32(0) for name in kernel.push}
    clock, cpu = time.perf_counter(), time.process_time()
    recording = device.recording([[Dispatch(kernel, bindings, push, 1)]])
    recording.run()
    seconds = time.perf_counter() - clock, time.process_time() - cpu
    recording.close()
    buffer.destroy()
    return seconds


def main(parts: list[str]) -> None:
    if os.environ.get("MESA_SHADER_CACHE_DISABLE") != "true":
        print("MESA_SHADER_CACHE_DISABLE is not true: Mesa may take what it compiled before")
    with vkattn.Device() as device:
        print(describe(device))
        seconds = {}
        for name, kernel in load_manifest().items():
            if all(part in name for part in parts) and not device_reasons(kernel, device.info):
                clock, cpu = seconds[name] = first_run(device, kernel)
                print(f"{name:44} {clock:7.2f} s   {cpu:7.2f} CPU s{'   ABOVE' if cpu > BOUND_SECONDS else ''}",
                      flush=True)
        print("the longest:")
        for name, (clock, cpu) in sorted(seconds.items(), key=lambda item: -item[1][1])[:10]:
            print(f"{name:44} {clock:7.2f} s   {cpu:7.2f} CPU s")
        above = sum(cpu > BOUND_SECONDS for _, cpu in seconds.values())
        print(f"{len(seconds)} variants, {above} above {BOUND_SECONDS} s")


if __name__ == "__main__":
    main(sys.argv[1:])
