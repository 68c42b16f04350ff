"""The example of a model of one's own: stick-breaking attention by its definition, its kernel, its model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from custom_models.sba.config_sba import SBAConfig
from custom_models.sba.modeling_sba import SBAForCausalLM
from custom_models.sba.stick_breaking import stick_breaking
from flame.train.flops import model_flops
from flame.train.model import CausalLMLoss, build_model
from tests.triton_interpreter import interpreted
from tests.unit.test_model import packed_batch

OFFSETS = torch.tensor([0, 5, 6, 12], dtype=torch.int32)


def inputs(*, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(12, heads, 3), (12, kv_heads, 3), (12, kv_heads, 3)]
    q, k, v = (torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes)
    return 3 * q, k, v


def test_it_is_the_stick_that_the_paper_breaks() -> None:
    q, k, v = inputs()
    out = stick_breaking(q, k, v, OFFSETS, 6, scale=0.5)
    for start, stop in ((0, 5), (5, 6), (6, 12)):
        for j in range(start, stop):
            for head in range(4):
                left, expected = 1.0, torch.zeros(3, dtype=torch.float64)
                for i in range(j - 1, start - 1, -1):
                    beta = torch.sigmoid(q[j, head] @ k[i, head // 2] * 0.5).item()
                    expected += left * beta * v[i, head // 2]
                    left *= 1 - beta
                torch.testing.assert_close(out[j, head], expected)


def test_its_gradient_is_that_of_its_values() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(heads=2, kv_heads=1))
    assert torch.autograd.gradcheck(lambda *qkv: stick_breaking(*qkv, OFFSETS, 6, scale=0.5), (q, k, v))


def test_long_sticks_neither_vanish_nor_overflow() -> None:
    """Scores of ±100: weights are 0 and 1, and every gradient is finite."""
    q, k, v = inputs(dtype=torch.float32)
    q = (100 * q).requires_grad_()
    out = stick_breaking(q, k, v, OFFSETS, 6, scale=0.5)
    (gradient,) = torch.autograd.grad(out.square().sum(), q)
    assert torch.isfinite(out).all() and torch.isfinite(gradient).all() and out.any()


IN_INTERPRETER = """
import torch
from custom_models.sba.stick_breaking import torch_stick_breaking
from custom_models.sba.stick_breaking_triton import triton_stick_breaking

torch.manual_seed(0)
ONE, FEW = [0, 45], [0, 5, 6, 45]  # a document of three blocks; one within a block, one token, and three blocks
EDGES = [0, 16, 32, 32, 49, 64]  # on the edges of blocks and beside them, and an empty document
for offsets, heads, dim, dtype, size, longest in (
    (FEW, 2, 16, torch.float32, 1, 39),
    (FEW, 1, 20, torch.float32, 1, 39),  # a width that is no power of 2
    (FEW, 2, 16, torch.float16, 1, 39),
    (FEW, 1, 16, torch.float32, 1, 64),  # max_seqlen is a limit, and may be more than the longest
    (EDGES, 3, 16, torch.float32, 1, 17),
    (ONE, 1, 32, torch.float32, 8, 45),  # scores so large that sticks are used up
):
    tolerance = 1e-2 if dtype == torch.float16 else 5e-5 * size
    q, k, v = (torch.randn(heads, offsets[-1], dim).transpose(0, 1).to(dtype) for _ in range(3))
    q, k, v = ((x * scale).requires_grad_() for x, scale in ((q, size), (k, 1), (v, 1)))
    weight = torch.randn(offsets[-1], heads, dim)
    limits = torch.tensor(offsets, dtype=torch.int32)
    results = []
    for out in (
        triton_stick_breaking(q, k, v, limits, longest, dim**-0.5, block=16),
        torch_stick_breaking(q.double(), k.double(), v.double(), limits, dim**-0.5),
    ):
        results.append([out, *torch.autograd.grad((out * weight).sum(), (q, k, v))])
    for ours, exact in zip(*results):
        torch.testing.assert_close(ours.double(), exact.double(), rtol=tolerance, atol=tolerance)
"""


def test_the_kernel_in_its_interpreter_equals_plain_torch() -> None:
    pytest.importorskip("triton")
    interpreted(IN_INTERPRETER)


def build(**options: int) -> CausalLMLoss:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    config = SBAConfig(**{**sizes, **options})
    return build_model(config, seed=1, rank=0, device=torch.device("cpu"), dtype=torch.float32, varlen=True)


def test_its_packed_documents_are_those_alone_and_rows_are_documents() -> None:
    module = build()
    batch = packed_batch([12, 12])
    rows = {name: batch[name].view(2, 12) for name in ("input_ids", "labels", "positions")}
    packed, unpacked = module(**batch), module(**rows)
    torch.testing.assert_close(packed, unpacked)
    logits = module.model(input_ids=rows["input_ids"].long(), labels=rows["input_ids"].long())
    torch.testing.assert_close(logits.loss * 22, packed.loss_sum)


def test_it_reads_no_padding() -> None:
    module = build()
    with pytest.raises(ValueError, match="padded rows"):
        module.model(torch.zeros(1, 3, dtype=torch.long), attention_mask=torch.tensor([[0, 1, 1]]))
    with pytest.raises(ValueError, match="multiple of num_heads"):
        SBAConfig(hidden_size=30, num_heads=4)


def test_its_operations_are_what_torch_counts_when_it_runs() -> None:
    """Plain torch multiplies all pairs: twice the half that is counted."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    model = SBAForCausalLM(SBAConfig(vocab_size=80, **sizes))
    flops = model_flops(model, model.config)
    assert flops is not None and [layer.width for layer in flops.attention] == [32, 32]
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(6)[None]).logits.sum().backward()
    half = flops.count(6, np.array([6])) - flops.count(6, np.array([0]))
    assert counter.get_total_flops() == flops.count(6, np.array([6])) + half
