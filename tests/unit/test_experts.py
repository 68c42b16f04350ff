"""Mixtures of experts: their auxiliary loss is transformers' own, of each window, however windows are dealt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from flame.train.activations import checkpoint_blocks
from flame.train.experts import balance_loss
from flame.train.model import CausalLMLoss, build_model
from tests.unit.test_decoders import DECODERS, perturb
from tests.unit.test_model import CPU, packed_batch

MIXTURES = ("mixtral", "olmoe", "qwen3_moe")
COEFFICIENT = 0.7  # large, so that it is seen


def built(name: str, **changes: Any) -> CausalLMLoss:
    model_type, sizes = DECODERS[name]
    config = AutoConfig.for_model(model_type, **{**sizes, "router_aux_loss_coef": COEFFICIENT, **changes})
    module = build_model(config, seed=1, rank=0, device=CPU, dtype=torch.float32, varlen=True)
    perturb(module)
    return module


def gradients(module: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return found


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        torch.testing.assert_close(one, theirs[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", MIXTURES)
def test_the_gradient_of_a_row_is_that_of_transformers_loss_with_its_auxiliary_one(name: str) -> None:
    module = built(name)
    reference = AutoModelForCausalLM.from_config(module.model.config, attn_implementation="eager")
    reference.load_state_dict(module.model.state_dict())
    batch = packed_batch([24])
    losses = module(**batch)
    loss = losses.loss_sum
    loss.backward()
    mask = torch.ones(1, 24, dtype=torch.long)
    mask[0, -1] = 0  # it has no label
    ids = batch["input_ids"].long()
    out = reference.train()(input_ids=ids, labels=ids, attention_mask=mask, output_router_logits=True, use_cache=False)
    (out.loss * 23).backward()
    found = {key.removeprefix("model."): value for key, value in gradients(module).items()}
    close(found, gradients(reference))
    cross_entropy = 23 * float(out.loss.detach() - COEFFICIENT * out.aux_loss.detach())
    assert float(loss.detach()) == pytest.approx(cross_entropy, rel=1e-5), "the value is the cross entropy's"
    assert losses.balance_sum is not None and not losses.balance_sum.requires_grad
    assert float(losses.balance_sum) == pytest.approx(23 * float(out.aux_loss.detach()), rel=1e-5)


@pytest.mark.parametrize("name", MIXTURES)
def test_windows_of_one_micro_batch_or_of_several_give_one_gradient(name: str) -> None:
    """Two windows of 24, documents in them: at once, one after the other, and with blocks computed again."""
    module = built(name)
    lengths = ([7, 1, 16], [20, 4])
    whole = packed_batch([*lengths[0], *lengths[1]])
    whole["labels"][0, 30:36] = -100
    module(**whole, window_len=24)[0].backward()
    together = gradients(module)
    for index, own in enumerate(lengths):
        part = packed_batch(own)
        for key in ("input_ids", "labels"):
            part[key] = whole[key][:, 24 * index : 24 * (index + 1)]
        module(**part, window_len=24)[0].backward()
    close(gradients(module), together)
    module(**whole)[0].backward()
    as_one = gradients(module)
    assert any(not torch.allclose(as_one[key], together[key], atol=1e-4) for key in together), "windows matter"
    checkpoint_blocks(module, module.blocks(), mode="full", option="1")
    module(**whole, window_len=24)[0].backward()
    again = {key.replace("_checkpoint_wrapped_module.", ""): value for key, value in gradients(module).items()}
    close(again, together)


@pytest.mark.parametrize("top_k", [1, 3])
def test_the_loss_of_each_window_is_transformers_function_of_its_tokens(top_k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    layers = tuple(torch.randn(3 * 8, 5, generator=generator, dtype=torch.float32) for _ in range(4))
    labelled = torch.rand(3 * 8, generator=generator) > 0.3
    labelled[16:] = False  # a window of padding
    expected = torch.zeros(())
    for window in (slice(0, 8), slice(8, 16)):
        own = tuple(layer[window] for layer in layers)
        mask = labelled[None, window].long()
        expected += labelled[window].sum() * load_balancing_loss_func(own, 5, top_k, mask)
    found = balance_loss(layers, labelled, top_k=top_k, window_len=8)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_without_a_gradient_or_a_coefficient_nothing_is_added() -> None:
    batch = packed_batch()
    module, without = built("olmoe"), built("olmoe", router_aux_loss_coef=0.0)
    with torch.no_grad():
        assert torch.equal(module(**batch)[0], without(**batch)[0])
        assert module(**batch).balance_sum is None
    balances = []
    for model in (module, without):
        losses = model(**batch)
        losses.loss_sum.backward()
        balances.append(losses.balance_sum)
    assert torch.equal(*balances), "it is told though nothing learns from it"
    router = "model.model.layers.0.mlp.gate.weight"
    assert not torch.allclose(gradients(module)[router], gradients(without)[router])


def test_the_log_tells_what_balances(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="flame"):
        built("olmoe")
    assert "experts are balanced by 0.7 of their load balancing loss, logged apart" in caplog.text
