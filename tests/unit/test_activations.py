"""Activations that are computed again, or wait in host memory: fewer are kept, and no bit of a gradient changes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flame.errors import UsageError
from flame.train.__main__ import main
from flame.train.activations import checkpoint_blocks, offloading
from flame.train.checkpoint_tensors import named_tensors
from flame.train.model import CausalLMLoss, build_model
from flame.train.options import ActivationCheckpointOptions
from tests.runs import arguments, losses_and_norms, make_training_folder
from tests.unit.test_model import make_config

CPU = torch.device("cpu")
T = 48


def make_module(model_type: str) -> CausalLMLoss:
    return build_model(make_config(model_type), seed=1, rank=0, device=CPU, dtype=torch.float32, varlen=True)


def forward_and_backward(module: CausalLMLoss) -> tuple[Tensor, dict[str, Tensor], int]:
    """The loss, the gradients by name, and the bytes that forward kept for backward outside of checkpoints."""
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 60, (1, T), generator=generator, dtype=torch.int32)
    cu_seqlens = torch.tensor([0, 20, T], dtype=torch.int32)
    positions = torch.cat([torch.arange(20), torch.arange(T - 20)])[None].int()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, *_ = module(ids, ids, positions, cu_seqlens, T - 20)
    loss.backward()
    grads = {name: tensor.grad for name, tensor in named_tensors(module.model).items() if tensor.grad is not None}
    return loss.detach(), grads, kept


@pytest.mark.parametrize("model_type", ["llama", "transformer"])
@pytest.mark.parametrize(
    ("mode", "option"), [("full", "2"), ("selective", "1"), ("selective", "2"), ("selective", "op")]
)
def test_checkpointed_blocks_have_the_same_gradients(model_type: str, mode: str, option: str) -> None:
    plain = make_module(model_type)
    module = copy.deepcopy(plain)
    names = list(named_tensors(module.model))
    checkpoint_blocks(module, module.blocks(), mode=mode, option=option)
    assert list(named_tensors(module.model)) == names, "checkpoints hold the same names"
    loss, grads, kept = forward_and_backward(module)
    expected_loss, expected, all_kept = forward_and_backward(plain)
    assert torch.equal(loss, expected_loss)
    assert grads.keys() == expected.keys() and all(torch.equal(grads[name], expected[name]) for name in expected)
    assert kept < all_kept, "fewer activations are kept"


def test_every_nth_block_is_computed_again() -> None:
    kept = {}
    for option in ("1", "2", "3"):
        module = make_module("llama")
        checkpoint_blocks(module, module.blocks(), mode="selective", option=option)
        kept[option] = forward_and_backward(module)[2]
    assert kept["1"] < kept["2"], "with 2 the second block keeps its own"
    assert kept["2"] == kept["3"], "of two blocks, every third is the first"


def test_offloaded_activations_have_the_same_gradients() -> None:
    plain = make_module("llama")
    module = copy.deepcopy(plain)
    with offloading("full", CPU)():
        loss, grads, _ = forward_and_backward(module)
    expected_loss, expected, _ = forward_and_backward(plain)
    assert torch.equal(loss, expected_loss)
    assert all(torch.equal(grads[name], expected[name]) for name in expected)
    with offloading("none", CPU)() as nothing:
        assert nothing is None


@pytest.mark.parametrize("value", ["0", "-1", "two", ""])
def test_a_wrong_choice_is_named(value: str) -> None:
    with pytest.raises(UsageError, match="selective_ac_option"):
        ActivationCheckpointOptions(selective_ac_option=value)


def test_a_run_computes_again_and_offloads(tmp_path: Path, tiny_tokenizer: Path) -> None:
    folder = make_training_folder(tmp_path, tiny_tokenizer)
    ways: dict[str, dict[str, str]] = {
        "plain": {},
        "full": {"activation_checkpoint__mode": "full", "activation_offload__mode": "full"},
        "op": {"activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "op"},
    }
    for name, options in ways.items():
        assert main(arguments(folder, tmp_path / name, training__steps=3, **options)) == 0
    assert losses_and_norms(tmp_path / "full") == losses_and_norms(tmp_path / "plain")
    assert losses_and_norms(tmp_path / "op") == losses_and_norms(tmp_path / "plain")
    # Checkpoints carry the model's own names: a run goes on with another choice.
    assert main(arguments(folder, tmp_path / "full", training__steps=4)) == 0
