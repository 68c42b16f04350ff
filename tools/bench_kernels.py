"""How fast, how exact and how small our kernels are on this GPU, beside the peers that are installed.

    python tools/bench_kernels.py                                    # all
    python tools/bench_kernels.py --kernels attention --json         # one object a row
    python tools/bench_kernels.py --kernels loss --vocabularies 32000 --widths 1024 --chunk_mib 256,512,768,1024

Times are medians of forward and backward, in bf16. The floor of `linear_cross_entropy` is its three products alone,
of 8,192 tokens at a time; that of attention is its arithmetic, as seen by each document, at the
rate of the card's matrix products. Memory is the peak beyond the inputs and the gradients that are returned. Errors are
‖gradient − exact‖ / ‖exact‖ against fp64, over fewer tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))

from flame.kernels import reference  # noqa: E402
from flame.kernels.dispatch import ATTENTION, choose_attention  # noqa: E402
from flame.kernels.linear_cross_entropy import linear_cross_entropy  # noqa: E402
from flame.kernels.varlen_attention import longest, pad_cu_seqlens  # noqa: E402

GPU = torch.device("cuda")
LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="loss,attention")
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--vocabularies", default="32000,152064")
    parser.add_argument("--widths", default="1024,2048")
    parser.add_argument("--chunk_mib", default="0", help="budgets of our chunks; 0: what is shipped")
    parser.add_argument("--heads", default="16x16x64,8x8x128,16x4x128", help="query × key heads × dimension")
    parser.add_argument("--windows", default="0,1024", help="sliding windows of attention; 0: none")
    parser.add_argument("--peers", default="torch,fla,liger,compiled", help="of the loss; left out where absent")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="one object a row")
    options = parser.parse_args()
    rows: list[Row] = []
    for kernel in options.kernels.split(","):
        for row in {"loss": bench_losses, "attention": bench_attention}[kernel](options):
            rows.append(row)
            show(row, as_json=options.json)


def show(row: Row, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(row), flush=True)
        return
    extras = "  ".join(
        f"{key} {value:.3g}" for key, value in row.items() if isinstance(value, float) and key != "value"
    )
    print(f"{row['name']:<52}{row['value']:>9.2f} {row['unit']}  {extras}", flush=True)


# ---- loss -----------------------------------------------------------------------------------------------------------


def bench_losses(options: argparse.Namespace) -> Iterator[Row]:
    for vocabulary in map(int, options.vocabularies.split(",")):
        for width in map(int, options.widths.split(",")):
            hidden, weight, labels = loss_inputs(options.tokens, vocabulary, width)
            floor = products_ms(hidden, weight, options.repeats)
            name = f"loss/{vocabulary}x{width}"
            rate = 6 * hidden.shape[0] * weight.numel() / floor / 1e9
            yield {"name": f"{name}/three products", "value": floor, "unit": "ms", "tflops": rate}
            for peer, function in loss_functions(options):
                yield from measured_loss(f"{name}/{peer}", function, (hidden, weight, labels), floor, options.repeats)
            del hidden, weight, labels
            torch.cuda.empty_cache()


def loss_inputs(tokens: int, vocabulary: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(GPU).manual_seed(0)
    options: dict[str, Any] = {"device": GPU, "generator": generator}
    hidden = torch.randn(tokens, width, **options).bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, width, **options) / width**0.5).bfloat16().requires_grad_()
    return hidden, weight, torch.randint(0, vocabulary, (tokens,), **options)


def products_ms(hidden: Tensor, weight: Tensor, repeats: int) -> float:
    """Time of the three products of a linear cross entropy, 8,192 tokens at a time."""
    times, hidden, weight = -(-hidden.shape[0] // 8192), hidden.detach()[:8192], weight.detach()
    logits = torch.empty(hidden.shape[0], weight.shape[0], device=GPU, dtype=hidden.dtype)
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def products() -> None:
        for _ in range(times):
            torch.mm(hidden, weight.t(), out=logits)
            torch.mm(logits, weight, out=d_hidden)
            torch.mm(logits.t(), hidden, out=d_weight)

    return time_ms(products, repeats)


def loss_functions(options: argparse.Namespace) -> Iterator[tuple[str, LossFunction]]:
    for mib in map(int, options.chunk_mib.split(",")):
        yield (
            f"ours, chunks of {mib} MiB" if mib else "ours",
            lambda h, w, y, mib=mib: linear_cross_entropy(h, w, y, chunk_bytes=(mib << 20) or None).loss_sum,
        )
    peers = options.peers.split(",")
    if "torch" in peers:
        yield "ours, plain torch", lambda h, w, y: linear_cross_entropy(h, w, y, implementation="torch").loss_sum
    if "compiled" in peers:
        yield (
            "torch.compile",
            torch.compile(plain_loss),
        )
    if "fla" in peers:
        try:
            from fla.modules import FusedLinearCrossEntropyLoss

            yield "fla", lambda h, w, y: FusedLinearCrossEntropyLoss(reduction="sum")(h, y, w)
        except ImportError as error:
            print(f"fla is left out: {error}", file=sys.stderr)
    if "liger" in peers:
        try:
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            yield "liger", lambda h, w, y: LigerFusedLinearCrossEntropyLoss(reduction="sum")(w, h, y)
        except ImportError as error:
            print(f"liger-kernel is left out: {error}", file=sys.stderr)


def plain_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def measured_loss(
    name: str, function: LossFunction, inputs: tuple[Tensor, Tensor, Tensor], floor: float, repeats: int
) -> Iterator[Row]:
    hidden, weight, labels = inputs

    def step() -> None:
        function(hidden, weight, labels).backward()
        hidden.grad = weight.grad = None

    try:
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        peak = torch.cuda.max_memory_allocated() - before - 2 * (hidden.numel() + weight.numel())
        milliseconds = time_ms(step, repeats)
        errors = gradient_errors(function, hidden.shape[1], weight.shape[0])
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        print(f"{name} is out of memory", file=sys.stderr)
        return
    yield {
        "name": name,
        "value": milliseconds,
        "unit": "ms",
        "peer": "three products",
        "peer_value": floor,
        "ratio": milliseconds / floor,
        "gib": peak / 2**30,
        "error_hidden": errors[0],
        "error_weight": errors[1],
    }


def gradient_errors(function: LossFunction, width: int, vocabulary: int, tokens: int = 2048) -> list[float]:
    hidden, weight, labels = loss_inputs(tokens, vocabulary, width)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = torch.autograd.grad(reference.linear_cross_entropy(*exact, labels)[0], exact)
    ours = torch.autograd.grad(function(hidden, weight, labels), (hidden, weight))
    return [relative_error(a, b) for a, b in zip(ours, expected, strict=True)]


# ---- attention ------------------------------------------------------------------------------------------------------


def bench_attention(options: argparse.Namespace) -> Iterator[Row]:
    lengths = document_lengths(options.tokens)
    for shape in options.heads.split(","):
        heads, key_heads, dim = map(int, shape.split("x"))
        for window in map(int, options.windows.split(",")):
            for name in ATTENTION:
                if name != "sdpa":
                    yield from measured_attention(
                        name, lengths, (heads, key_heads, dim), window or None, options.repeats
                    )


def document_lengths(tokens: int) -> list[int]:
    """Documents of web-like lengths, at most 4,096, that fill a row."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.5, 1.0, tokens // 16), 16, 4096).astype(np.int64)
    ends = np.minimum(np.cumsum(lengths), tokens)
    return np.diff(ends[: int(np.searchsorted(ends, tokens)) + 1], prepend=0).tolist()  # type: ignore[no-any-return]


def measured_attention(
    name: str, lengths: list[int], shape: tuple[int, int, int], window: int | None, repeats: int
) -> Iterator[Row]:
    heads, key_heads, dim = shape
    try:
        choose_attention(name, device=GPU, dtype=torch.bfloat16, head_dim=dim, deterministic=False)
    except Exception as error:
        print(f"{name} is left out: {error}", file=sys.stderr)
        return
    attend = ATTENTION[name].run
    qkv = attention_inputs(sum(lengths), shape)
    offsets = pad_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0).int().to(GPU))
    arguments = (offsets, longest(max(lengths)))
    options: dict[str, Any] = {"scale": dim**-0.5, "window": window}
    weights = torch.randn(sum(lengths), heads, dim, device=GPU, dtype=torch.bfloat16)
    began = time.monotonic()
    torch.autograd.grad(attend(*qkv, *arguments, **options), qkv, weights)
    torch.cuda.synchronize()
    first = time.monotonic() - began
    forward = time_ms(lambda: attend(*qkv, *arguments, **options), repeats)
    both = time_ms(lambda: torch.autograd.grad(attend(*qkv, *arguments, **options), qkv, weights), repeats)
    width = max(lengths) if window is None else window
    seen = sum(min(n, width) * (2 * n + 1 - min(n, width)) / 2 for n in lengths)
    yield {
        "name": f"attention/{heads}x{key_heads}x{dim}/window {window}/{name}",
        "value": both,
        "unit": "ms",
        "forward_ms": forward,
        "tflops": 14 * seen * heads * dim / both / 1e9,
        "first_call_s": first,
        "error_dk": attention_error(attend, shape, options),
    }


def attention_inputs(tokens: int, shape: tuple[int, int, int]) -> list[Tensor]:
    heads, key_heads, dim = shape
    generator = torch.Generator(GPU).manual_seed(0)
    return [
        torch.randn(tokens, n, dim, device=GPU, generator=generator).bfloat16().requires_grad_()
        for n in (heads, key_heads, key_heads)
    ]


def attention_error(attend: Callable[..., Tensor], shape: tuple[int, int, int], options: dict[str, Any]) -> float:
    lengths = [700, 1, 33, 1290, 24]
    qkv = attention_inputs(sum(lengths), shape)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int().to(GPU)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    out = reference.varlen_attention(*exact, offsets, **options)
    weights = torch.randn_like(out).bfloat16()
    expected = torch.autograd.grad(out, exact, weights.double())
    ours = torch.autograd.grad(attend(*qkv, pad_cu_seqlens(offsets), longest(max(lengths)), **options), qkv, weights)
    return relative_error(ours[1], expected[1])


def relative_error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


def time_ms(function: Callable[[], Any], repeats: int) -> float:
    """Return the median time of a call on the device, after three that do not count."""
    for _ in range(3):
        function()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in events:
        start.record()
        function()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events)


if __name__ == "__main__":
    main()
