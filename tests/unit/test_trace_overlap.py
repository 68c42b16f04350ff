"""Communication in a trace: all of it, and what no computation hides."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.trace_overlap import Overlap, joined, overlap_of, read_overlap


def event(category: str, name: str, start: float, duration: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}


# 0         10        20        30        40        50
# matmul----          matmul----          copy
#      nccl-----------                nccl----
#           nccl-  (a second stream)
ON_A_GPU = [
    {"ph": "M", "name": "process_name", "pid": 0},
    {"ph": "i", "name": "Iteration Start", "ts": -100.0},
    event("cpu_op", "aten::mm", -90, 300),
    event("user_annotation", "gloo:all_reduce", -50, 500),
    event("kernel", "sm90_gemm", 0, 10),
    event("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 5, 15),
    event("kernel", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 10, 5),
    event("kernel", "sm90_gemm", 20, 10),
    event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 35, 8),
    event("kernel", "elementwise_copy", 40, 10),
    event("gpu_memcpy", "Memcpy HtoD", 35, 5),
]


def test_kernels_of_nccl_beside_others_and_alone() -> None:
    told = overlap_of(ON_A_GPU)
    assert told == Overlap(step=50.0, communication=15.0 + 8.0, exposed=10.0 + 5.0)
    assert (told.communication_share, told.exposed_share) == (0.46, 0.3)


def test_on_a_cpu_a_rank_that_waits_within_a_hook_does_not_compute() -> None:
    told = overlap_of(
        [
            event("cpu_op", "aten::mm", 0, 4),
            event("cpu_op", "autograd::engine::evaluate_function: HookBackward", 4, 10),
            event("cpu_op", "HookBackward", 4, 10),
            event("cpu_op", "c10d::_reduce_scatter_base_", 5, 1),
            event("user_annotation", "gloo:all_reduce", 6, 6),
            event("cpu_op", "aten::copy_", 11, 2),
            event("user_annotation", "FSDP::post_backward_reduce", 4, 10),
        ]
    )
    assert told == Overlap(step=13.0, communication=6.0, exposed=5.0)


@pytest.mark.parametrize("alone", ["ncclKernel_AllReduce", "gemm"])
def test_only_one_kind_of_kernel(alone: str) -> None:
    told = overlap_of([event("kernel", alone, 3, 2)])
    seconds = 2.0 if alone.startswith("nccl") else 0.0
    assert told == Overlap(step=2.0, communication=seconds, exposed=seconds)


def test_a_trace_without_work_has_no_shares(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": []}))
    told = read_overlap(tmp_path / "trace.json")
    assert (told.step, told.communication_share, told.exposed_share) == (0.0, 0.0, 0.0)


WHOLE = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=12)


@given(WHOLE, WHOLE)
def test_microseconds_are_counted_as_one_by_one(nccl: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    events = [event("kernel", "nccl", *span) for span in nccl] + [event("kernel", "mm", *span) for span in others]
    sending, computing = ({at for start, n in spans for at in range(start, start + n)} for spans in (nccl, others))
    told = overlap_of(events)
    assert told.communication == len(sending) and told.exposed == len(sending - computing)
    either = sending | computing
    assert told.step == (max(either) + 1 - min(either) if either else 0)
    apart = joined([(float(start), float(start + n)) for start, n in nccl])
    assert all(one[1] < other[0] for one, other in itertools.pairwise(apart))
