"""PyTorch as a peer: on the CPU by the host's clock; on CUDA each backend by events around a captured graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..caps.model import DeviceInfo
from ..kernels.matrix import OPERANDS
from .case import MOST_EXECUTIONS, RECORDING_SECONDS, Inputs
from .clock import Spread, host_times, warm_up
from .peers import CPU_OPERATIONS, Outcome, checked, first_line, module
from .problems import BenchProblem

#: Name of a backend of torch.nn.attention.SDPBackend -> what it is called here.
BACKENDS = {"FLASH_ATTENTION": "flash", "CUDNN_ATTENTION": "cudnn", "EFFICIENT_ATTENTION": "efficient", "MATH": "math"}

#: Bytes of scores beyond which the math backend, which keeps them, is not asked.
MOST_SCORE_BYTES = 8 << 30

#: Seconds of replays before the first is timed, and replays that are timed.
WARM_UP = 0.7
REPLAYS = 9

#: Size of the matrix product whose rate is taken for that of the matrix units.
MATMUL_SIZE = 8192


def _arguments(torch: Any, inputs: Inputs, index: int, where: str) -> list[Any]:
    """Return query, key and value of a set as tensors."""
    arrays = (inputs.query(index), inputs.rows(index, 0), inputs.rows(index, 1))
    return [torch.from_numpy(array).to(where) for array in arrays]


def _options(problem: BenchProblem) -> dict[str, Any]:
    return {"is_causal": problem.kind == "prefill" and problem.causal, "enable_gqa": problem.group_size > 1}


def torch_cpu(problem: BenchProblem, inputs: Inputs, sets: int, seconds: float) -> Iterator[Outcome]:
    """Time torch's function on the CPU, on tensors that are there."""
    torch = module("torch")
    if problem.num_operations > CPU_OPERATIONS:
        yield Outcome("torch cpu", reason=f"{problem.num_operations:.1g} operations are too many for it")
        return
    tensors = _arguments(torch, inputs, 0, "cpu")

    def run() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(*tensors, **_options(problem))

    yield checked("torch cpu", run().float().numpy(), inputs,
                  lambda: Outcome("torch cpu", call_ns=host_times(run, seconds)))


def torch_cuda(problem: BenchProblem, inputs: Inputs, sets: int, seconds: float) -> Iterator[Outcome]:
    """Time each backend of torch on CUDA over the rotating input sets; nothing where there is no CUDA."""
    torch = module("torch")
    if not torch.cuda.is_available():
        yield Outcome("torch cuda", reason="torch sees no CUDA device")
        return
    tensors = [_arguments(torch, inputs, index, "cuda") for index in range(sets)]
    for backend, name in BACKENDS.items():
        runner = f"torch cuda {name}"
        scores = 4 * problem.batch_size * problem.num_heads * problem.q_len * problem.length
        if name == "math" and scores > MOST_SCORE_BYTES:
            yield Outcome(runner, reason=f"its scores take {scores >> 30} GiB")
            continue
        try:
            with module("torch.nn.attention").sdpa_kernel(getattr(module("torch.nn.attention").SDPBackend, backend)):
                yield _captured(torch, runner, problem, inputs, tensors)
        except (RuntimeError, AttributeError, TypeError) as error:
            yield Outcome(runner, reason=first_line(error))
        torch.cuda.empty_cache()


def _captured(torch: Any, runner: str, problem: BenchProblem, inputs: Inputs, tensors: list[list[Any]]) -> Outcome:
    """Capture executions over the sets into a graph, replay it until the clock is up, and time replays by events."""

    def run(index: int) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(*tensors[index % len(tensors)], **_options(problem))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():  # capture wants its first calls elsewhere
        out = run(0).float().cpu().numpy()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run(1)
        end.record()
        end.synchronize()
    torch.cuda.current_stream().wait_stream(side)
    count = max(1, min(MOST_EXECUTIONS, int(RECORDING_SECONDS * 1e3 / max(begin.elapsed_time(end), 1e-3))))
    count = max(count, min(MOST_EXECUTIONS, 4))

    def measure() -> Outcome:
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            for index in range(count):
                run(index)

        def replay() -> None:
            graph.replay()
            torch.cuda.synchronize()

        warm_up(replay, WARM_UP)
        found = []
        for _ in range(REPLAYS):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) * 1e6 / count)
        # Of float32 it depends on the backend and on torch's settings (TF32).
        return Outcome(runner, device_ns=Spread.of(found),
                       uses_matrix_units=True if problem.query_dtype in OPERANDS else None)

    return checked(runner, out, inputs, measure)


def matrix_rate(info: DeviceInfo) -> tuple[float | None, str]:
    """Return operations in a nanosecond of a float16 product on CUDA and where that is from, or (None, why not)."""
    if info.device_type == "cpu":
        return None, "a software device has no matrix units"
    try:
        torch = module("torch")
        if not torch.cuda.is_available():
            return None, "torch sees no CUDA device"
        return _matmul_rate(torch)
    except ImportError:
        return None, "torch is not installed"
    except RuntimeError as error:
        return None, first_line(error)


def _matmul_rate(torch: Any) -> tuple[float, str]:
    """Return operations in a nanosecond of a large float16 product, and what it was."""
    left, right = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.float16, device="cuda") for _ in range(2))
    out = torch.empty_like(left)

    def run() -> None:
        torch.matmul(left, right, out=out)
        torch.cuda.synchronize()

    warm_up(run, WARM_UP)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(REPLAYS):
        begin.record()
        torch.matmul(left, right, out=out)
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e6)
    return 2 * MATMUL_SIZE**3 / float(np.median(found)), f"torch {torch.__version__}, float16 product of {MATMUL_SIZE}"
