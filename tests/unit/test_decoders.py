"""Every Hugging Face decoder: trained packed as each document is by transformers, sharded, exported, read back."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from flame.export.hf import export_checkpoint
from flame.train.distributed import World
from flame.train.families_hf import HF_FAMILIES
from flame.train.hf_files import build_hf_files
from flame.train.model import CausalLMLoss, build_model
from flame.train.model_config import load_model_config
from flame.train.optimizer import build_optimizer
from flame.train.options import OptimizerOptions
from flame.train.parallelize import parallelize
from tests.ranks import on_ranks
from tests.tiny_states import one_rank, save
from tests.unit.test_model import CPU, last_hidden, packed_batch

GROUPED = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "num_attention_heads": 4}
GROUPED |= {"num_key_value_heads": 2, "intermediate_size": 48, "pad_token_id": None}
HEADS = {**GROUPED, "head_dim": 8}
# Their auxiliary loss is test_experts.py's.
EXPERTS = {**HEADS, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
# Windows are shorter than the longest document (20), and soft caps low enough to bend.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {**HEADS, "sliding_window": 6, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.5}),
    "gemma3": (
        "gemma3_text",
        {**HEADS, "num_hidden_layers": 3, "sliding_window": 6, "sliding_window_pattern": 3, "query_pre_attn_scalar": 16}
        | {"final_logit_softcapping": 0.5},
    ),
    "gpt2": (
        "gpt2",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 20, "vocab_size": 64, "pad_token_id": None}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "scale_attn_by_inverse_layer_idx": True},
    ),
    "llama": ("llama", {**HEADS, "attention_bias": True, "mlp_bias": True}),
    "llama-yarn": (
        "llama",
        {**HEADS, "max_position_embeddings": 16}
        | {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "mistral": ("mistral", {**HEADS, "sliding_window": 6}),
    "mixtral": ("mixtral", {**EXPERTS, "num_local_experts": 4, "sliding_window": 6}),
    "olmo2": ("olmo2", GROUPED),
    "olmoe": ("olmoe", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}),
    "qwen2": ("qwen2", GROUPED),
    "qwen2-windows": (
        "qwen2",
        {
            **GROUPED,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("qwen3", {**HEADS, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "mlp_only_layers": [0]}),
}


def config_of(name: str) -> PretrainedConfig:
    model_type, sizes = DECODERS[name]
    return AutoConfig.for_model(model_type, **sizes)


def built(name: str, rank: int = 0) -> CausalLMLoss:
    return build_model(config_of(name), seed=1, rank=rank, device=CPU, dtype=torch.float32, varlen=True)


def plain(name: str) -> PreTrainedModel:
    """What transformers builds from the same seed."""
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config_of(name), attn_implementation="eager", dtype=torch.float32)


def perturb(*models: torch.nn.Module) -> None:
    """Move every weight away from where it began, biases and norms too: what is 0 or 1 hides whether it is used."""
    with torch.no_grad():
        for model in models:
            generator = torch.Generator().manual_seed(5)
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)


def documents(batch: dict[str, Any]) -> Iterator[Tensor]:
    for start, stop in pairwise(batch["cu_seqlens"].tolist()):
        yield batch["input_ids"][:, start:stop].long()


def test_no_decoder_is_left_out() -> None:
    assert {model_type for model_type, _ in DECODERS.values()} == set(HF_FAMILIES)


@pytest.mark.parametrize("name", DECODERS)
def test_loss_and_gradients_are_transformers_own_of_each_document(name: str) -> None:
    module, reference = built(name), plain(name)
    for one, other in zip(module.parameters(), reference.parameters(), strict=True):
        assert torch.equal(one, other), "built from the same seed, to the bit"
    perturb(module, reference)
    batch = packed_batch()
    loss, _, token_losses, _ = module(**batch)
    loss.backward()
    expected = torch.zeros(())
    for ids in documents(batch):
        if ids.shape[1] > 1:
            own = reference(input_ids=ids, labels=ids, use_cache=False).loss * (ids.shape[1] - 1)
            own.backward()
            expected += own.detach()
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(token_losses.sum(), expected, rtol=1e-6, atol=0)
    for (key, one), other in zip(module.model.named_parameters(), reference.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None, key
        scale = float(other.grad.abs().max())
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=5e-6 * max(scale, 1.0), msg=key)


@pytest.mark.parametrize("name", DECODERS)
def test_a_packed_document_is_the_document_alone_and_touches_no_other(name: str) -> None:
    module = built(name)
    perturb(module)
    before, after = packed_batch(), packed_batch()
    own = slice(int(before["cu_seqlens"][2]), int(before["cu_seqlens"][3]))
    after["input_ids"][0, own] = (after["input_ids"][0, own] + 1) % 64
    hidden = last_hidden(module, before)
    for ids, (start, stop) in zip(documents(before), pairwise(before["cu_seqlens"].tolist()), strict=True):
        length = stop - start
        alone = {"input_ids": ids, "positions": torch.arange(length)[None], "max_seqlen": length}
        alone["cu_seqlens"] = torch.tensor([0, length], dtype=torch.int32)
        torch.testing.assert_close(last_hidden(module, alone), hidden[start:stop], rtol=1e-6, atol=5e-6)
    others = torch.ones(len(hidden), dtype=torch.bool)
    others[own] = False
    changed = last_hidden(module, after)
    # an expert's product has other rows where another document's tokens go elsewhere, and may round otherwise
    tolerance = 2e-6 if module.family.balances_experts else 0.0
    torch.testing.assert_close(changed[others], hidden[others], rtol=tolerance, atol=tolerance)
    assert not torch.allclose(changed[own], hidden[own], atol=1e-3)


def started(name: str, world: World) -> CausalLMLoss:
    module = built(name, world.rank)
    parallelize(module, world.mesh, device=CPU, param_dtype=torch.float32)
    return module


def one_step_of_two(world: World) -> None:
    """On two ranks: every weight and buffer is plain transformers', and a step changes every weight, as on one rank."""
    for name in DECODERS:
        module, reference = started(name, world), plain(name)
        buffers = dict(reference.named_buffers())
        assert {key for key, _ in module.model.named_buffers()} == set(buffers)
        for key, buffer in module.model.named_buffers():
            assert torch.equal(buffer, buffers[key]), (name, key)
        weights = dict(reference.named_parameters())
        for key, parameter in module.model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.detach().full_tensor(), weights[key]), (name, key)
        alone = built(name)
        for model in (alone.model, module.model):
            if hasattr(model.config, "router_aux_loss_coef"):
                model.config.router_aux_loss_coef = 0.5  # of a window a rank
        for lengths in ([7, 1, 20, 12], [3, 11, 1]):
            alone(**packed_batch(lengths))[0].backward()
        module(**packed_batch(([7, 1, 20, 12], [3, 11, 1])[world.rank]))[0].backward()
        expected = {key: parameter.grad for key, parameter in alone.model.named_parameters()}
        for key, parameter in module.model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            torch.testing.assert_close(parameter.grad.full_tensor(), expected[key], rtol=1e-5, atol=1e-5)


def test_two_ranks_begin_with_the_weights_of_a_plain_construction_and_sum_its_gradients() -> None:
    on_ranks(2, one_step_of_two)


@pytest.mark.parametrize("name", DECODERS)
def test_a_step_later_it_is_exported_and_computes_the_same(name: str, tmp_path: Path) -> None:
    with one_rank() as world:
        module = started(name, world)
        perturb_sharded(module)
        optimizer = build_optimizer(module.model, OptimizerOptions(name="AdamW", lr=0.01), CPU)
        batch = packed_batch()
        first = module(**batch)[0]
        first.backward()
        optimizer.step()
        loss, first = module(**batch)[0].detach(), first.detach()
        assert loss < first
        files = build_hf_files(module.model, None, eos_id=3)
        path = save(tmp_path, module.model, None, 1, world, hf_files=files)
    export_checkpoint(path, tmp_path / "hf", check=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", local_files_only=True, attn_implementation="eager")
    total = 0.0
    for ids in documents(batch):
        if ids.shape[1] > 1:
            total += float(loaded(input_ids=ids, labels=ids).loss.detach()) * (ids.shape[1] - 1)
    assert total == pytest.approx(float(loss), rel=1e-6)
    head, embedding = loaded.get_output_embeddings().weight, loaded.get_input_embeddings().weight
    assert (head is embedding) == bool(loaded.config.tie_word_embeddings)


def perturb_sharded(module: CausalLMLoss) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.to_local().add_(torch.randn_like(parameter.to_local()), alpha=0.1)


@pytest.mark.parametrize("name", DECODERS)
def test_rows_for_a_larger_tokenizer_are_initialised_as_the_others(name: str, tmp_path: Path) -> None:
    """A padded vocabulary: no row stays at zero, or as memory happened to be."""
    config_of(name).to_json_file(tmp_path / "config.json", use_diff=False)
    config = load_model_config(str(tmp_path / "config.json"), vocab_size=300, eos_id=7)
    assert config.vocab_size == 384 and config.pad_token_id is None
    module = build_model(config, seed=1, rank=0, device=CPU, dtype=torch.float32, varlen=True)
    rows_VD = module.model.get_input_embeddings().weight.detach()
    assert rows_VD.shape[0] == 384
    assert rows_VD[300:].std().item() == pytest.approx(config.initializer_range, rel=0.1)
    assert float(rows_VD.abs().sum(1).min()) > 0
