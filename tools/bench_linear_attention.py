"""How long linear attention takes on this GPU, by fla's functions and by our operators, as a layer of a config has it.

    python tools/bench_linear_attention.py                       # gla_374M: 65,536 tokens, 4 heads of 128 × 256
    python tools/bench_linear_attention.py --kernels gated_delta_rule --heads 6x256x512

Times are medians of forward and backward, and of forward alone, in bf16, of documents of web-like lengths up to 4,096.
Memory is what is kept for backward, beyond the inputs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from fla.ops.common import chunk_o
from torch import Tensor

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))

from flame.kernels.linear_attention import linear_attention  # noqa: E402
from flame.kernels.tuning import keep_tuned_configurations  # noqa: E402
from flame.kernels.varlen_attention import pad_cu_seqlens  # noqa: E402
from tests.linear_attention_cases import make_cases  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="gla")
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--heads", default="4x128x256", help="heads × width of keys × width of values")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    keep_tuned_configurations(torch.cuda.get_device_name())
    chunk_o.TRITON_ABOVE_3_7_1 = True  # times are asked for, also where fla refuses (flame/kernels/hopper_check.py)
    heads, key_width, value_width = map(int, options.heads.split("x"))
    offsets = pad_cu_seqlens(document_offsets(options.tokens).cuda())
    cases = make_cases(offsets, heads=heads, key_width=key_width, value_width=value_width, dtype=torch.bfloat16)
    print(f"{'kernel':<28}{'forward ms':>12}{'both ms':>10}{'kept MiB':>10}")
    for name in options.kernels.split(","):
        inputs, theirs, settings = cases[name]
        ours = lambda *x, name=name, settings=settings: linear_attention(name, *x, cu_seqlens=offsets, **settings)  # noqa: E731
        for label, function in (("fla", lambda *x, theirs=theirs: theirs(*x)[0]), ("ours", ours)):
            forward, both, kept = measured(function, inputs, options.repeats)
            print(f"{name + ' ' + label:<28}{forward:>12.3f}{both:>10.3f}{kept / 2**20:>10.0f}", flush=True)


def document_offsets(tokens: int) -> Tensor:
    """Return offsets of documents whose lengths are log-normal with a mean of about 1,100, and at most 4,096."""
    lengths = np.clip(np.random.default_rng(0).lognormal(6.5, 1.0, tokens // 16 + 1), 16, 4096).astype(np.int64)
    ends = np.minimum(np.cumsum(lengths), tokens)
    return torch.tensor([0, *ends[: int(np.searchsorted(ends, tokens)) + 1].tolist()], dtype=torch.int32)


def measured(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], repeats: int) -> tuple[float, float, int]:
    """Return the medians of forward, and of forward and backward, in ms, and the bytes between the two."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    weight, forwards, boths, kept = torch.randn_like(function(*inputs)), [], [], 0
    for repeat in range(repeats + 3):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        before = torch.cuda.memory_allocated()
        marks[0].record()
        out = function(*inputs)
        marks[1].record()
        kept = torch.cuda.memory_allocated() - before
        torch.autograd.grad(out, inputs, weight)
        marks[2].record()
        torch.cuda.synchronize()
        if repeat >= 3:  # those before it tune and compile
            forwards.append(marks[0].elapsed_time(marks[1]))
            boths.append(marks[0].elapsed_time(marks[2]))
        del out
    return statistics.median(forwards), statistics.median(boths), kept


if __name__ == "__main__":
    main()
