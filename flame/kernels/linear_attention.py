"""flash-linear-attention's chunk kernels as operators, so that a compiled block holds them in its graph.

fla offers each as a `torch.autograd.Function`, which `torch.compile` may not enter. An operator here calls that very
function, forward and backward, and hands what it keeps between the two to the graph as tensors: results are the same
to the last bit. What a graph must know of a function without running it stands in `flame/kernels/fla_functions.py`, and
is compared whenever one runs: a version of fla that keeps something else is an error, not a wrong gradient.

Packed documents come as `cu_seqlens`. How many chunks they make is data, for which fla waits for the device: here once
a batch and not in each layer (`_one_object`, `totals_known`).
"""

from __future__ import annotations

import importlib
import inspect
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from flame.errors import TrainingError
from flame.kernels.fla_functions import KERNELS, NEVER, Kernel, Shapes, Tensors

OPERATORS = tuple(f"flame::linear_{name}" for name in KERNELS)


# ---- the operators --------------------------------------------------------------------------------------------------


class _Context:
    """Stands for autograd's context in a call of an `autograd.Function`'s own forward or backward."""

    saved_tensors: tuple[Tensor | None, ...] = ()
    cu_seqlens: Tensor | None = None
    chunk_indices: Tensor | None = None

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


def linear_attention(
    name: str, *inputs: Tensor, cu_seqlens: Tensor | None = None, scale: float | None = None, **settings: Any
) -> Tensor:
    """Return `[B, T, H, V]`: the kernel `name` of `KERNELS`, of its inputs in their order, each state beginning at 0.

    With `cu_seqlens` B is 1. `scale` of the scores is 1 / √K where it is not given.
    """
    kernel = KERNELS[name]
    scale = inputs[0].shape[-1] ** -0.5 if scale is None else scale
    chosen = (settings[key] for key in kernel.settings)
    return _results(_OPERATOR[name](*(x.contiguous() for x in inputs), cu_seqlens, scale, *chosen))[0]


def _results(returned: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return what an operator returned as a tuple, of one tensor too."""
    return (returned,) if isinstance(returned, Tensor) else returned


def _split(kernel: Kernel, names: Sequence[str], arguments: Sequence[Any]) -> tuple[Tensors, Tensor | None, Any]:
    """Return an operator's arguments as tensors by name, the offsets, and the settings by name."""
    tensors = dict(zip(names, arguments, strict=False))
    offsets, *settings = arguments[len(names) :]
    return tensors, offsets, dict(zip(("scale", *kernel.settings), settings, strict=True))


def _forward(kernel: Kernel, *arguments: Any) -> tuple[Tensor, ...]:
    inputs, offsets, settings = _split(kernel, kernel.inputs, arguments)
    offsets = None if offsets is None else _one_object(offsets)
    function, parameters = _loaded(kernel.function)
    context = _Context()
    options = {**NEVER, **kernel.options, **settings, "chunk_size": kernel.chunk(inputs["q"])}
    given = {**options, **inputs, **kernel.computed(inputs), "cu_seqlens": offsets}
    out, *_ = function.forward(context, **{key: value for key, value in given.items() if key in parameters})
    made = kernel.makes(inputs, options["chunk_size"], offsets)
    _compare_attributes(kernel, context, options)
    return out, *_made(kernel, context.saved_tensors, inputs, made)


def _made(kernel: Kernel, saved: Sequence[Tensor | None], inputs: Tensors, made: Shapes) -> list[Tensor | None]:
    """Return what the function made for its backward, or raise if it is not what `KERNELS` says."""
    names = kernel.saved.split()
    if len(saved) != len(names):
        raise _another_fla(kernel, f"it keeps {len(saved)} tensors for backward, and not {len(names)}")
    found = {}
    for name, tensor in zip(names, saved, strict=True):
        if name in made:
            shape, dtype = made[name]
            right = tensor is not None and (tuple(tensor.shape), tensor.dtype) == (tuple(shape), dtype)
            found[name] = tensor
        else:
            right = name in ("offsets", "indices") or tensor is inputs.get(name)
        if not right:
            raise _another_fla(kernel, f"{name} is not kept as it is known to be")
    return list(found.values())


def _compare_attributes(kernel: Kernel, context: _Context, options: Mapping[str, Any]) -> None:
    for key, value in vars(context).items():
        if key in ("saved_tensors", "cu_seqlens", "chunk_indices") or key.startswith("_"):
            continue
        if key not in options or options[key] != value:
            raise _another_fla(kernel, f"it keeps {key} = {value}")


def _another_fla(kernel: Kernel, what: str) -> TrainingError:
    return TrainingError(
        f"{kernel.function} is not as flame/kernels/fla_functions.py knows it: {what}",
        fix="Install flash-linear-attention 0.6.0, or train without --training.compile",
    )


def _backward(kernel: Kernel, d_out: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    kept, offsets, settings = _split(kernel, kernel.kept, arguments)
    function, parameters = _loaded(kernel.function)
    chunk = kernel.chunk(kept[kernel.stands_for.get("q", "q")])
    context = _Context()
    vars(context).update({**NEVER, **kernel.options, **settings, "chunk_size": chunk})
    vars(context).update(_fwd_used_autocast=False, _dtype=None)
    if offsets is not None:
        context.cu_seqlens = _one_object(offsets)
        context.chunk_indices = _chunk_indices(context.cu_seqlens, chunk)
    known = {"offsets": context.cu_seqlens, "indices": context.chunk_indices, "-": None}
    context.save_for_backward(*({**known, **kept}[name] for name in kernel.saved.split()))
    gradients = dict(zip(parameters, function.backward(context, d_out, None), strict=True))
    return tuple(
        gradients[name].to(like).view_as(like)
        for name, like in ((name, kept[kernel.stands_for.get(name, name)]) for name in kernel.inputs)
    )


def _forward_shapes(kernel: Kernel, *arguments: Any) -> tuple[Tensor, ...]:
    inputs, offsets, _ = _split(kernel, kernel.inputs, arguments)
    q, v = inputs["q"], inputs["v"]
    made = kernel.makes(inputs, kernel.chunk(q), offsets)
    out = q.new_empty(v.shape)
    return out, *(q.new_empty(made[name][0], dtype=made[name][1]) for name in kernel.made)


def _backward_shapes(kernel: Kernel, d_out: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    kept, _, _ = _split(kernel, kernel.kept, arguments)
    return tuple(torch.empty_like(kept[kernel.stands_for.get(name, name)]) for name in kernel.inputs)


def _keep(kernel: Kernel, ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
    tensors, offsets, settings = _split(kernel, kernel.inputs, inputs)
    tensors = {**tensors, **dict(zip(kernel.made, _results(output)[1:], strict=True))}
    ctx.save_for_backward(*(tensors[name] for name in kernel.kept), *(() if offsets is None else (offsets,)))
    ctx.settings = tuple(settings.values())
    ctx.dtypes = [tensors[name].dtype for name in kernel.inputs]


def _differentiate(kernel: Kernel, operator: Any, ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    offsets = saved[len(kernel.kept)] if len(saved) > len(kernel.kept) else None
    gradients = operator(d_out.contiguous(), *saved[: len(kernel.kept)], offsets, *ctx.settings)
    return *(x.to(dtype) for x, dtype in zip(gradients, ctx.dtypes, strict=True)), None, *(None for _ in ctx.settings)


def _define(name: str, kernel: Kernel) -> Any:
    """Register the two operators of a kernel, and return that of forward."""
    common = ["Tensor? cu_seqlens", "float scale", *(f"{kind} {key}" for key, kind in kernel.settings.items())]

    def operator(suffix: str, run: Any, shapes: Any, tensors: Sequence[str], results: int) -> Any:
        schema = f"({', '.join([*(f'Tensor {name}' for name in tensors), *common])})"
        name_and_suffix, returns = f"flame::linear_{name}{suffix}", ", ".join(["Tensor"] * results)
        single = (lambda f: lambda *arguments: f(*arguments)[0]) if results == 1 else (lambda f: f)
        defined = torch.library.custom_op(
            name_and_suffix, single(partial(run, kernel)), mutates_args=(), schema=f"{schema} -> ({returns})"
        )
        defined.register_fake(single(partial(shapes, kernel)))
        return defined

    forward = operator("", _forward, _forward_shapes, kernel.inputs, 1 + len(kernel.made))
    backward = operator("_backward", _backward, _backward_shapes, ["d_out", *kernel.kept], len(kernel.inputs))
    forward.register_autograd(partial(_differentiate, kernel, backward), setup_context=partial(_keep, kernel))
    return forward


# ---- fla's own ------------------------------------------------------------------------------------------------------


@cache
def _loaded(function: str) -> tuple[Any, tuple[str, ...]]:
    """Return one of fla's functions and the names of its forward's parameters, the context left out."""
    totals_known()
    module, _, name = function.rpartition(".")
    loaded = getattr(importlib.import_module(module), name)
    return loaded, tuple(inspect.signature(loaded.forward).parameters)[1:]


_recent: deque[tuple[Tensor, tuple[Any, ...]]] = deque(maxlen=4)


def _one_object(offsets: Tensor) -> Tensor:
    """Return the tensor that stands for these offsets in all layers, forward and backward.

    fla keeps what it derives from offsets as long as it is asked about the same object, and a graph may hand another
    one for the same memory. While a tensor is remembered here its memory is not used again, so that equal address,
    shape and version mean equal offsets.
    """
    mark = (offsets.data_ptr(), offsets.shape, offsets.dtype, offsets._version)
    for known, known_mark in _recent:
        if known_mark == mark:
            return known
    _recent.append((offsets.detach(), mark))
    return _recent[-1][0]


def _chunk_indices(offsets: Tensor, chunk: int) -> Tensor:
    from fla.ops.utils.index import prepare_chunk_indices

    indices: Tensor = prepare_chunk_indices(offsets, chunk)
    return indices


class _Offsets(Tensor):
    """Where each sequence's chunks begin; the host knows the last, which is how many there are."""

    total: int

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor(self.total) if index == -1 else super().__getitem__(index)


@cache
def totals_known() -> None:
    """Let fla's kernels of states not ask the device in each layer, three times, how many chunks there are."""
    from fla.ops.common import chunk_h

    offsets_of = chunk_h.prepare_chunk_offsets

    def with_total(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
        offsets = offsets_of(cu_seqlens, chunk_size).as_subclass(_Offsets)
        offsets.total = len(_chunk_indices(cu_seqlens, chunk_size))
        return offsets

    chunk_h.prepare_chunk_offsets = with_total


_OPERATOR = {name: _define(name, kernel) for name, kernel in KERNELS.items()}
