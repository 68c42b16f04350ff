"""How fast, how exact and how small our kernels are on this GPU, beside the peers that are installed.

    python tools/bench_kernels.py                                    # all
    python tools/bench_kernels.py --kernels attention --json         # one object a row
    python tools/bench_kernels.py --kernels loss --vocabularies 32000 --widths 1024 --chunk_mib 256,512,768,1024
    python tools/bench_kernels.py --kernels convolution --walks 64/4/512/4,128/4/256/2,64/8/256/2

Times are medians of forward and backward, in bf16. The floor of `linear_cross_entropy` is its three products alone,
of 8,192 tokens at a time; that of attention is its arithmetic, as seen by each document, at the
rate of the card's matrix products; that of the short convolution is its bytes, each once, at 4.8 TB/s. Memory is the
peak beyond the inputs and the gradients that are returned. Errors are ‖gradient − exact‖ / ‖exact‖ against fp64, over
fewer tokens.
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
from flame.kernels.short_convolution import positions_in_documents, short_convolution  # noqa: E402
from flame.kernels.short_convolution_torch import torch_forward  # noqa: E402
from flame.kernels.varlen_attention import longest, pad_cu_seqlens  # noqa: E402

GPU = torch.device("cuda")
LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="loss,attention,convolution")
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--vocabularies", default="32000,152064")
    parser.add_argument("--widths", default="1024,2048")
    parser.add_argument("--chunk_mib", default="0", help="budgets of our chunks; 0: what is shipped")
    parser.add_argument("--heads", default="16x16x64,8x8x128,16x4x128", help="query × key heads × dimension")
    parser.add_argument("--windows", default="0,1024", help="sliding windows of attention; 0: none")
    parser.add_argument("--channels", default="1536,3072", help="of short convolutions: those of gated_deltanet_512M")
    parser.add_argument("--walks", default="", help="run/depth/width/lanes of the convolution's kernels, beside theirs")
    parser.add_argument("--peers", default="torch,fla,liger,compiled", help="left out where absent")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="one object a row")
    options = parser.parse_args()
    rows: list[Row] = []
    for kernel in options.kernels.split(","):
        for row in BENCHES[kernel](options):
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


# ---- short convolution ----------------------------------------------------------------------------------------------

_MEMORY_BYTES_PER_MS = 4.8e9


def bench_convolution(options: argparse.Namespace) -> Iterator[Row]:
    for channels in map(int, options.channels.split(",")):
        name = f"convolution/{options.tokens}x{channels}"
        floor = 5 * 2 * options.tokens * channels / _MEMORY_BYTES_PER_MS  # x, y; x, dy and dx
        yield {"name": f"{name}/each number once", "value": floor, "unit": "ms", "forward_ms": floor * 2 / 5}
        for peer, function in convolution_functions(options):
            yield measured_convolution(f"{name}/{peer}", function, channels, floor, options)
        for text in filter(None, options.walks.split(",")):
            yield measured_walk(f"{name}/walk {text}", list(map(int, text.split("/"))), channels, options)


def convolution_inputs(tokens: int, channels: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, the taps, gradients of the result, and the offsets of documents."""
    generator = torch.Generator(GPU).manual_seed(0)
    shapes = [(1, tokens, channels), (channels, 4), (1, tokens, channels)]
    x, taps, weights = (torch.randn(shape, device=GPU, generator=generator).bfloat16() for shape in shapes)
    offsets = torch.tensor([0, *document_lengths(tokens)]).cumsum(0).int().to(GPU)
    return x.requires_grad_(), taps.requires_grad_(), weights, pad_cu_seqlens(offsets)


def convolution_functions(options: argparse.Namespace) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    yield (
        "ours",
        lambda x, w, positions, offsets: short_convolution(x, w, positions_BT=positions, silu=True),
    )
    peers = options.peers.split(",")
    if "torch" in peers:
        yield (
            "ours, plain torch",
            lambda x, w, positions, offsets: short_convolution(
                x, w, positions_BT=positions, silu=True, implementation="torch"
            ),
        )
    if "compiled" in peers:
        compiled = torch.compile(lambda x, w, positions: torch_forward(x[0], w, None, positions[0], True)[None])
        yield "torch.compile", lambda x, w, positions, offsets: compiled(x, w, positions)
    if "fla" in peers:
        try:
            from fla.modules.convolution import causal_conv1d

            yield "fla", lambda x, w, positions, offsets: causal_conv1d(x, w, activation="silu", cu_seqlens=offsets)[0]
        except ImportError as error:
            print(f"fla is left out: {error}", file=sys.stderr)


def measured_convolution(
    name: str, function: Callable[..., Tensor], channels: int, floor: float, options: argparse.Namespace
) -> Row:
    x, taps, weights, offsets = convolution_inputs(options.tokens, channels)
    positions = positions_in_documents(x, offsets)
    forward = time_ms(lambda: function(x, taps, positions, offsets), options.repeats)
    both = time_ms(
        lambda: torch.autograd.grad(function(x, taps, positions, offsets), (x, taps), weights), options.repeats
    )
    few = convolution_inputs(2048, channels)
    exact = [x.detach().double().requires_grad_() for x in few[:2]]
    y = reference.short_convolution(exact[0][0], exact[1], cu_seqlens=few[3].cpu(), silu=True)[None]
    expected = torch.autograd.grad(y, exact, few[2].double())
    ours = function(*few[:2], positions_in_documents(few[0], few[3]), few[3])
    errors = [relative_error(a, b) for a, b in zip(torch.autograd.grad(ours, few[:2], few[2]), expected, strict=True)]
    return {
        "name": name,
        "value": both,
        "unit": "ms",
        "peer": "each number once",
        "peer_value": floor,
        "ratio": both / floor,
        "forward_ms": forward,
        "error_dx": errors[0],
        "error_dw": errors[1],
    }


def measured_walk(name: str, numbers: list[int], channels: int, options: argparse.Namespace) -> Row:
    """Time of both kernels under another division of their work, without autograd."""
    from flame.kernels.short_convolution_triton import Walk, triton_backward, triton_forward

    walk = Walk(*numbers)
    x, taps, weights, offsets = convolution_inputs(options.tokens, channels)
    arguments = (x.detach()[0], taps.detach(), None, positions_in_documents(x, offsets)[0], True, walk)
    forward = time_ms(lambda: triton_forward(*arguments), options.repeats)
    backward = time_ms(lambda: triton_backward(weights[0], *arguments), options.repeats)
    bytes_once = 2.0 * options.tokens * channels
    return {
        "name": name,
        "value": forward + backward,
        "unit": "ms",
        "forward_ms": forward,
        "backward_ms": backward,
        "forward_tb_s": 2 * bytes_once / forward / 1e9,
        "backward_tb_s": 3 * bytes_once / backward / 1e9,
    }


BENCHES: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "loss": bench_losses,
    "attention": bench_attention,
    "convolution": bench_convolution,
}


# ---- for all --------------------------------------------------------------------------------------------------------


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
