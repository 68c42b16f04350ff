"""Products of one input with several matrices: as one in a compiled graph, apart elsewhere, the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from flame.train.joint_products import joint_products, narrow_products


class Gated(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(24, 40, bias=bias), nn.Linear(24, 40, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = joint_products(x, self.gate, self.up)
        return F.silu(gate) * up


def results(function: Any, module: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the result, and the gradients of the input and of every parameter."""
    x = x.clone().requires_grad_()
    y = function(x)
    weights = torch.linspace(-1, 1, y.numel()).view_as(y)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], weights)]


@pytest.mark.parametrize(("bias", "products"), [(False, 1), (True, 2)])
def test_a_graph_has_one_product_and_one_gradient_of_the_input(bias: bool, products: int) -> None:
    torch.manual_seed(0)
    module, x = Gated(bias=bias), torch.randn(2, 7, 24)
    counts = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets = [getattr(node.target, "overloadpacket", None) for node in graph.graph.nodes]
        counts.append(sum(target in (torch.ops.aten.mm, torch.ops.aten.addmm) for target in targets))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(module, backend=aot_autograd(fw_compiler=count, bw_compiler=count), fullgraph=True)
    found, expected = results(compiled, module, x), results(module, module, x)
    assert counts == [products, 2 * products]  # backward has a gradient of the input and one of the weight for each
    for ours, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)


def test_eager_keeps_modules_apart() -> None:
    """So that what is hooked on a projection is called."""
    module, called = Gated(bias=False), []
    module.up.register_forward_hook(lambda *_: called.append(True))
    module(torch.randn(1, 3, 24))
    assert called == [True]


@pytest.mark.parametrize("widths", [(6, 6), (3, 5), (1, 2)])
def test_narrow_products_are_those_of_each(widths: tuple[int, int]) -> None:
    """Where the rows that fill up the matrix are four, none and five."""
    torch.manual_seed(0)
    module = nn.ModuleList(nn.Linear(24, width, bias=False) for width in widths)
    found = results(lambda x: torch.cat(narrow_products(x, *module), -1), module, x := torch.randn(2, 7, 24))
    expected = results(lambda x: torch.cat([part(x) for part in module], -1), module, x)
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
