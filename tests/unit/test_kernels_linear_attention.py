"""Operators around fla's chunk kernels, in Triton's interpreter: fla's own bits, one graph, nothing computed twice."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

pytest.importorskip("fla")

from flame.errors import TrainingError
from flame.kernels import linear_attention as own
from flame.kernels.fla_functions import KERNELS
from tests.linear_attention_cases import RECURRENCES
from tests.triton_interpreter import interpreted

OURS = ("gla", "gated_delta_rule", "simple_gla")
"""Kernels that have functions of our own; the others are fla's."""

# One process for all: its imports cost more than a kernel does.
PROGRAM = (
    f"""
OURS = {OURS}
"""
    + """
import json, warnings
import torch
import torch.nn.functional as F
warnings.simplefilter("ignore")
import fla
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from flame.kernels import linear_attention as own
from flame.kernels import gated_delta_rule, varlen_attention
from flame.train.families import FAMILIES
from flame.train.model import CausalLMLoss
from flame.train.parallelize import parallelize
from tests.fla_families import tiny_config
from tests.linear_attention_cases import RECURRENCES, differentiated, make_cases, recurrence, relative_error, same_bits
from tests.unit.test_model import packed_batch
from tests.unit.test_parallelize import process_group

varlen_attention.MIN_PADDED_OFFSETS = 4
SIZES = dict(heads=1, key_width=16, value_width=32, dtype=torch.float16)  # older interpreters know no bf16 constants
OFFSETS = torch.tensor([0, 7, 12, 12], dtype=torch.int32)  # the last sequence is empty, as padding makes them
CASES = make_cases(OFFSETS, **SIZES)


def bits():
    return {
        name: same_bits(case, lambda *x: own.linear_attention(name, *x, cu_seqlens=OFFSETS, **case.settings))
        for name, case in CASES.items()
        if name not in OURS
    }


def several_chunks():
    # documents of several chunks, the last of each cut short: errors beside the recurrence in fp64, ours and fla's
    offsets = torch.tensor([0, 70, 140, 140], dtype=torch.int32)
    sizes = dict.fromkeys(RECURRENCES, SIZES) | {"gated_delta_rule": {**SIZES, "key_width": 144, "value_width": 64}}
    return {name: errors(name, make_cases(offsets, **kept)[name], offsets) for name, kept in sizes.items()}


def errors(name, case, offsets):
    theirs = differentiated(lambda *x: case.theirs(*x)[0], case.inputs)
    ours = differentiated(lambda *x: own.linear_attention(name, *x, cu_seqlens=offsets, **case.settings), case.inputs)
    exact = differentiated(lambda *x: recurrence(name, *x, offsets=offsets), [x.double() for x in case.inputs])
    found = [[relative_error(a, b) for a, b in zip(gradients, exact, strict=True)] for gradients in (theirs, ours)]
    bits = [torch.equal(a, b) for a, b in zip(theirs, ours, strict=True)]
    return {"bits": bits, "theirs": found[0], "ours": found[1]}


def walks():
    # the gated delta rule by our own walks: values of several heads that share a key's, whole rows, and no fit
    found = {}
    for name, (rows, key_heads, heads, key_width, value_width) in {
        "shared keys": (1, 1, 2, 32, 64), "whole rows": (2, 1, 1, 32, 128), "no fit": (1, 1, 2, 32, 32)
    }.items():
        torch.manual_seed(0)
        offsets = torch.tensor([0, 70, 71, 100, 100] if rows == 1 else [0, 70], dtype=torch.int32)
        q, k = (torch.randn(rows, offsets[-1], key_heads, key_width).half() for _ in range(2))
        v, g, beta = (torch.randn(rows, offsets[-1], heads, *width).half() for width in ((value_width,), (), ()))
        inputs = (q, k, v, g, beta, torch.randn(heads), torch.randn(heads))
        packed = offsets if rows == 1 else None
        ours = differentiated(
            lambda *x: own.linear_attention("gated_delta_rule", *x, cu_seqlens=packed, allow_neg_eigval=True), inputs
        )
        exact = differentiated(
            lambda *x: torch.cat([
                recurrence("gated_delta_rule", *(y[row:row + 1] for y in x[:5]), *x[5:], offsets=offsets, most=2.0)
                for row in range(rows)
            ]),
            [x.double() for x in inputs],
        )
        suits = gated_delta_rule.walks_suit(k, v)
        found[name] = {"suits": suits, "errors": [relative_error(a, b) for a, b in zip(ours, exact, strict=True)]}
    return found


def candidates():
    # how far every form that a kernel may be tuned to is from the first one: forms of tiles, not of warps and stages
    offsets = torch.tensor([0, 70, 71, 71], dtype=torch.int32)
    case = make_cases(offsets, heads=1, key_width=144, value_width=128, dtype=torch.float16)["gated_delta_rule"]
    kernels, found = gated_delta_rule.kernels, {}

    def run():
        return differentiated(
            lambda *x: own.linear_attention("gated_delta_rule", *x, cu_seqlens=offsets, **case.settings), case.inputs
        )

    expected = run()
    for tuner in (kernels.walk_forward, kernels.walk_backward, kernels.chunk_gradients):
        given, tried = tuner.configs, {str(tuner.configs[0].kwargs)}
        for config in given:
            if str(config.kwargs) not in tried:
                tried.add(str(config.kwargs))
                tuner.configs = [config]
                errors = [relative_error(a, b) for a, b in zip(run(), expected, strict=True)]
                found[f"{tuner.base_fn.__name__} {config.kwargs}"] = errors
        tuner.configs = given
    return found


def opcheck():
    inputs = [x.float().requires_grad_() for x in CASES["gla"].inputs]
    utilities = ("test_schema", "test_faketensor", "test_autograd_registration")
    return torch.library.opcheck(own._OPERATOR["gla"], (*inputs, OFFSETS, 1.0), test_utils=utilities)


def steps():
    # eager, by fla's own modules; and compiled, whose activations but for what costs most are computed again
    losses, calls = {}, []
    run = own._loaded
    own._loaded = lambda function: calls.append(function) or run(function)
    in_place = torch.nn.Module.compile
    torch.nn.Module.compile = lambda block: in_place(block, backend="aot_eager")
    for way, options in {
        "eager": {},
        "compiled": {"compile_blocks": True, "checkpoint_mode": "selective", "checkpoint_option": "op"},
    }.items():
        torch.manual_seed(1)
        config = tiny_config("gla", num_hidden_layers=3)
        family = FAMILIES["gla"]
        module = CausalLMLoss(family.construct(config, "sdpa").train(), family, "torch")
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
        parallelize(module, mesh, device=torch.device("cpu"), param_dtype=torch.float32, **options)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
        losses[way] = []
        for lengths in ([9, 1, 6], [16]):
            calls.clear()
            batch = packed_batch(lengths)
            loss, *_ = module(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[way].append(loss.item())
        losses[way].append(module(**batch)[0].item())
    graphs, breaks = counters["stats"]["unique_graphs"], len(counters["graph_break"])
    return {**losses, "calls": len(calls), "graphs": graphs, "breaks": breaks}


facts = {"bits": bits(), "several_chunks": several_chunks(), "walks": walks(), "candidates": candidates()}
facts["opcheck"] = opcheck()
with process_group(0, 1):
    facts["steps"] = steps()
print("FACTS" + json.dumps(facts))
"""
)


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(interpreted(PROGRAM).partition("FACTS")[2])
    return found


@pytest.mark.parametrize("name", [name for name in KERNELS if name not in OURS])
def test_an_operator_has_the_bits_of_flas_function(facts: dict[str, Any], name: str) -> None:
    """Of the result, and of the gradient of each input."""
    assert facts["bits"][name] == [True] * (1 + len(KERNELS[name].inputs))


@pytest.mark.parametrize("name", RECURRENCES)
def test_kernels_are_near_their_recurrence_and_ours_as_near_as_flas(facts: dict[str, Any], name: str) -> None:
    """Over several chunks; gradients of one number a head are sums that may differ by more."""
    found = facts["several_chunks"][name]
    tensors = slice(0, 1 + len(KERNELS[name].inputs) - 2 * (name == "gated_delta_rule"))
    ours, theirs = found["ours"], found["theirs"]
    assert all(own <= 1.1 * fla for own, fla in zip(ours[tensors], theirs[tensors], strict=True)), found
    assert max(ours[tensors]) < 1e-3 and max(ours) < 1e-2


def test_gla_moves_fewer_bytes_and_keeps_flas_bits(facts: dict[str, Any]) -> None:
    """Of the result and the gradients of q, k and v; that of g is of states that were rounded."""
    assert facts["several_chunks"]["gla"]["bits"][:4] == [True] * 4


@pytest.mark.parametrize(("case", "suits"), [("shared keys", True), ("whole rows", True), ("no fit", False)])
def test_walks_along_documents_are_the_recurrence(facts: dict[str, Any], case: str, suits: bool) -> None:
    """With several heads of values to one of keys, of rows without documents, and where fla's kernels take over."""
    found = facts["walks"][case]
    assert found["suits"] == suits
    assert max(found["errors"][:6]) < 1e-3 and max(found["errors"]) < 1e-2


def test_all_that_a_kernel_may_be_tuned_to_has_the_same_numbers(facts: dict[str, Any]) -> None:
    """Tiles of 64 and 128 rows of a state, with rows by pointers and by descriptors; and of 32 and 64 values.

    They are the same to the bit on a GPU (tests/gpu/); the products here are numpy's, which add up in another order.
    """
    kernels = [name.split()[0] for name in facts["candidates"]]
    counts = {name: kernels.count(name) for name in kernels}
    assert counts == {"walk_forward": 3, "walk_backward": 3, "chunk_gradients": 1}
    for name, errors in facts["candidates"].items():
        assert max(errors[:6]) < 1e-4 and max(errors) < 1e-3, (name, errors)


def test_an_operator_is_what_torch_expects(facts: dict[str, Any]) -> None:
    assert set(facts["opcheck"].values()) == {"SUCCESS"}


def test_compiled_steps_are_those_of_flas_own_modules(facts: dict[str, Any]) -> None:
    """Two steps and the loss after them, of three layers that share a graph, with other documents in each step."""
    steps = facts["steps"]
    assert steps["compiled"] == pytest.approx(steps["eager"], rel=1e-6)
    assert len(set(steps["eager"])) == 3
    assert (steps["graphs"], steps["breaks"]) == (1, 0)


def test_what_a_kernel_made_is_not_computed_again(facts: dict[str, Any]) -> None:
    """Three layers, forward and backward, and forward once more; a repetition would be three further calls."""
    assert facts["steps"]["calls"] == 9


# Of tensors that would fill gigabytes nothing is read or written: where an access would go is noted.
FAR = """
import json
from types import SimpleNamespace
import numpy as np
import torch
from triton.runtime import interpreter
from flame.kernels import gated_delta_rule_triton as kernels

CHUNK, HEADS, KEYS, VALUES = 64, 16384, 16, 64
TOKENS = 2**31 // (HEADS * VALUES) + CHUNK
memory, accesses = interpreter._interpreter, []
numbers = {
    "cu_seqlens": [0, TOKENS], "chunk_offsets": [0, TOKENS // CHUNK], "longest_first": [0],
    "chunk_indices": [[0, TOKENS // CHUNK - 1]],
}
numbers = {name: torch.tensor(value) for name, value in numbers.items()}
halves = "q k u w o v_new states do dv d_states dq dk dw".split()
tensors = {name: torch.zeros(1, dtype=torch.half) for name in halves} | {name: torch.zeros(1) for name in ("g", "dg")}
first = min(x.data_ptr() for x in tensors.values())


def note(pointers, mask):
    if mask.any():
        accesses.append(int(pointers.astype(np.int64)[mask].min()) - first)


def load(pointers, mask, other, dtype):
    if any(0 <= int(pointers.flat[0]) - x.data_ptr() < x.nbytes for x in numbers.values()):
        return memory.load(pointers, mask, other, dtype)
    note(pointers, mask)
    return np.zeros_like(other)


def lowest(name, **options):
    kernel = getattr(kernels, name)
    while hasattr(kernel, "configs") or hasattr(kernel, "values"):  # autotuner and heuristics
        kernel = kernel.fn
    sizes = dict(H=1, HV=HEADS, K=KEYS, V=VALUES, BT=CHUNK, BK=KEYS, BV=VALUES, IS_PACKED=True)
    given = {**tensors, **numbers, **sizes, "scale": 1.0, "T": TOKENS, "all_tokens": TOKENS, **options}
    accesses.clear()
    kernel[(1, 1)](**{key: value for key, value in given.items() if key in kernel.arg_names})
    return min(accesses)


stand_in = {"load": load, "store": lambda pointers, value, mask: note(pointers, mask)}
interpreter._interpreter = SimpleNamespace(**{**vars(memory), **stand_in})
found = {
    "outputs": lowest("walk_forward", BY_ROWS=False, WITH_OUTPUT=True),
    "outputs, by rows": lowest("walk_forward", BY_ROWS=True, WITH_OUTPUT=True),
    "states": lowest("walk_forward", BY_ROWS=True, WITH_OUTPUT=False),
    "backward": lowest("walk_backward", BY_ROWS=False),
    "backward, by rows": lowest("walk_backward", BY_ROWS=True),
    "gradients of a chunk": lowest("chunk_gradients", WITH_W=True),
}
print("FACTS" + json.dumps(found))
"""


def test_a_document_may_have_more_elements_than_a_number_of_32_bits_holds() -> None:
    """Of 700,000 tokens by 6 heads of 512 values, say; no access lies before all tensors."""
    found = json.loads(interpreted(FAR).partition("FACTS")[2])
    assert {name: place for name, place in found.items() if place < 0} == {}


@pytest.mark.parametrize(("values", "tiles"), [(64, {64}), (192, {64}), (512, {64, 128})])
def test_tiles_of_walks_divide_the_values(values: int, tiles: set[int]) -> None:
    """Else a program would write over the next head's states. Triton calls what sorts them out with all arguments."""
    from flame.kernels.gated_delta_rule_triton import walk_backward, walk_forward

    for walk in (walk_forward, walk_backward):
        walk.nargs = {"K": 16}
        assert {config.kwargs["BV"] for config in walk.prune_configs({"V": values, "warmup": True})} == tiles


def test_a_function_that_keeps_something_else_is_an_error() -> None:
    kernel = KERNELS["retention"]
    q, k, v = (torch.zeros(1, 4, 2, 8) for _ in range(3))
    inputs, made = {"q": q, "k": k, "v": v}, kernel.makes({"q": q, "k": k, "v": v}, 64, None)
    right = (q, k, v, None, torch.zeros(2), None, torch.zeros(1, 2))
    assert own._made(kernel, right, inputs, made)[0] is right[4]
    for wrong in (right[:-1], (*right[:3], q, *right[4:]), (*right[:4], torch.zeros(3), *right[5:]), (k, *right[1:])):
        with pytest.raises(TrainingError, match=r"is not as flame/kernels/fla_functions\.py knows it"):
            own._made(kernel, wrong, inputs, made)
    context = own._Context()
    vars(context).update(scale=1.0, chunk_size=32)
    with pytest.raises(TrainingError, match="it keeps chunk_size = 32"):
        own._compare_attributes(kernel, context, {"scale": 1.0, "chunk_size": 64})


def test_offsets_are_known_again_by_their_memory_until_it_is_written() -> None:
    offsets = torch.tensor([0, 3, 5])
    known = own._one_object(offsets)
    assert own._one_object(offsets.detach()) is known and own._one_object(offsets.view(3)) is known
    assert own._one_object(offsets[:2]) is not known and own._one_object(offsets.clone()) is not known
    offsets[1] = 4
    assert own._one_object(offsets) is not known


def test_how_many_chunks_there_are_is_known_without_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from fla.ops.common import chunk_h

    own.totals_known()
    offsets = chunk_h.prepare_chunk_offsets(torch.tensor([0, 65, 70]), 64)
    assert offsets.tolist() == [0, 2, 3]
    monkeypatch.setattr(offsets, "total", 7)  # what is asked for comes from the host, whatever the tensor holds
    assert offsets[-1].item() == 7
