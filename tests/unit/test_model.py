"""The model and its loss: packed documents equal documents alone, and one never touches another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from flame.train.families import FAMILIES
from flame.train.model import CausalLMLoss, build_model

CPU = torch.device("cpu")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "tie_word_embeddings": False}
DECODER = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
LENGTHS = [7, 1, 20, 12]


def make_config(model_type: str, **options: Any) -> PretrainedConfig:
    if model_type == "transformer":
        pytest.importorskip("fla")
        return AutoConfig.for_model(model_type, **{**SIZES, "num_heads": 4, "num_kv_heads": 2, **options})
    return AutoConfig.for_model(model_type, **{**SIZES, **DECODER, **options})


def build(config: PretrainedConfig, *, varlen: bool = True, **options: Any) -> CausalLMLoss:
    return build_model(config, seed=1, rank=0, device=CPU, dtype=torch.float32, varlen=varlen, **options)


def packed_batch(lengths: list[int] = LENGTHS, *, seed: int = 0) -> dict[str, Any]:
    """A packed micro-batch as the loader makes it: int32, the last label of each sequence ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, SIZES["vocab_size"], (1, sum(lengths)), dtype=torch.int32, generator=generator)
    labels = ids.roll(-1, dims=1)
    ends = torch.tensor(lengths).cumsum(0)
    labels[0, ends - 1] = -100
    return {
        "input_ids": ids,
        "labels": labels,
        "positions": torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])[None],
        "cu_seqlens": torch.tensor([0, *ends.tolist()], dtype=torch.int32),
        "max_seqlen": max(lengths),
    }


def last_hidden(module: CausalLMLoss, batch: dict[str, Any]) -> Tensor:
    where = (batch["positions"], batch["cu_seqlens"], batch["max_seqlen"])
    arguments = module.family.sequence_arguments(module.model, *where)
    return module.model.base_model(input_ids=batch["input_ids"], **arguments)[0][0]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_packed_logits_equal_those_of_each_sequence_alone(model_type: str, attention: str) -> None:
    options = {"sliding_window": None} if model_type == "mistral" else {}
    module = build(make_config(model_type, **options))
    batch = packed_batch()
    logits = last_hidden(module, batch) @ module.model.lm_head.weight.T
    plain = AutoModelForCausalLM.from_config(make_config(model_type, **options), attn_implementation=attention)
    plain.load_state_dict(module.model.state_dict())
    for start, stop in zip(batch["cu_seqlens"], batch["cu_seqlens"][1:], strict=False):
        alone = plain(input_ids=batch["input_ids"][:, start:stop].long(), use_cache=False).logits[0]
        torch.testing.assert_close(logits[start:stop], alone, rtol=0, atol=1e-5)


FLA_NAMES = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "embeddings": "embed_tokens",
    ".attn.": ".self_attn.",
}


@pytest.mark.parametrize(
    ("model_type", "options"), [("llama", {}), ("qwen2", {"qkv_bias": True}), ("qwen3", {"qk_norm": True})]
)
def test_fla_transformer_is_a_known_model_under_other_names(model_type: str, options: dict[str, Any]) -> None:
    module = build(make_config("transformer", intermediate_size=48, **options))
    state = {}
    for name, value in module.model.state_dict().items():
        for ours, theirs in FLA_NAMES.items():
            name = name.replace(ours, theirs)
        state[name] = torch.nn.init.normal_(value) if "bias" in name or "norm" in name else value
    plain = AutoModelForCausalLM.from_config(make_config(model_type), attn_implementation="eager")
    plain.load_state_dict(state)
    for name, part in plain.named_modules():
        if name.endswith(("q_norm", "k_norm")):
            part.variance_epsilon = 1e-5  # fla's, whatever norm_eps says
    batch = packed_batch()
    logits = last_hidden(module, batch) @ module.model.lm_head.weight.T
    for start, stop in zip(batch["cu_seqlens"], batch["cu_seqlens"][1:], strict=False):
        alone = plain(input_ids=batch["input_ids"][:, start:stop].long(), use_cache=False).logits[0]
        torch.testing.assert_close(logits[start:stop], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "transformer"])
def test_changing_one_document_leaves_the_others_bitwise(model_type: str) -> None:
    module = build(make_config(model_type))
    before, after = packed_batch(), packed_batch()
    own = slice(int(before["cu_seqlens"][2]), int(before["cu_seqlens"][3]))
    after["input_ids"][0, own] = (after["input_ids"][0, own] + 1) % SIZES["vocab_size"]
    embedding = module.model.get_input_embeddings()
    results = []
    for batch in (before, after):
        embedded: list[Tensor] = []
        hook = embedding.register_forward_hook(lambda *args, kept=embedded: kept.append(args[-1]))
        hidden = last_hidden(module, batch)
        loss, *_ = module(**batch)
        hook.remove()
        (gradient,) = torch.autograd.grad(loss, embedded[-1])
        results.append((hidden, gradient[0]))
    others = torch.ones(sum(LENGTHS), dtype=torch.bool)
    others[own] = False
    for a, b in zip(*results, strict=True):
        assert torch.equal(a[others], b[others])
        assert not torch.equal(a[own], b[own])


@pytest.mark.parametrize("model_type", ["llama", "transformer"])
def test_the_loss_is_a_sum_over_labels(model_type: str) -> None:
    module = build(make_config(model_type))
    batch = packed_batch()
    loss, num_labels, *_ = module(**batch)
    logits = last_hidden(module, batch) @ module.model.lm_head.weight.T
    expected = torch.nn.functional.cross_entropy(logits, batch["labels"][0].long(), reduction="sum")
    torch.testing.assert_close(loss, expected)
    assert loss.dtype == torch.float32
    assert int(num_labels) == sum(LENGTHS) - len(LENGTHS)


@pytest.mark.parametrize(
    ("model_type", "name", "length"),
    [("llama", "cu_seq_lens_q", 256), ("transformer", "cu_seqlens", 256), ("gla", "cu_seqlens", 256)],
)
def test_offsets_are_padded_behind_their_own(model_type: str, name: str, length: int) -> None:
    model = build(make_config(model_type)).model if model_type != "gla" else None
    batch = packed_batch()
    arguments = FAMILIES[model_type].sequence_arguments(model, batch["positions"], batch["cu_seqlens"], 20)
    assert arguments[name].shape == (length,)
    assert torch.equal(arguments[name][:5], batch["cu_seqlens"])


@pytest.mark.parametrize("lengths", [[1] * 16, [16], [1, 15]])
def test_batches_at_the_edge_train(lengths: list[int]) -> None:
    """One-token documents only, one document, a one-token document beside a long one: finite losses and gradients."""
    module = build(make_config("llama"))
    loss, num_labels, *_ = module(**packed_batch(lengths))
    loss.backward()
    assert int(num_labels) == sum(lengths) - len(lengths)
    assert torch.isfinite(loss) and (loss == 0) == (int(num_labels) == 0)
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    assert gradients and all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("model_type", ["llama", "transformer"])
def test_without_document_masks_rows_are_causal(model_type: str) -> None:
    module = build(make_config(model_type), varlen=False)
    batch = packed_batch([24, 24])
    rows = {name: batch[name].view(2, 24) for name in ("input_ids", "labels", "positions")}
    torch.testing.assert_close(module(**rows), module(**batch))


def test_any_other_model_takes_its_own_logits_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    config = make_config("gpt_neox")
    with caplog.at_level("INFO", logger="flame"):
        module = build(config, varlen=False)
    assert "gpt_neox, by the generic path" in caplog.text
    batch = packed_batch([24])
    loss, num_labels, *_ = module(batch["input_ids"], batch["labels"], batch["positions"])
    logits = module.model(input_ids=batch["input_ids"].long()).logits[0]
    expected = torch.nn.functional.cross_entropy(logits, batch["labels"][0].long(), reduction="sum")
    torch.testing.assert_close(loss, expected)
    assert int(num_labels) == 23 and len(module.blocks()) == 2


def test_weights_come_from_the_seed_alone() -> None:
    config = make_config("llama")
    one, again = build(config), build(config)
    other = build_model(config, seed=2, rank=0, device=CPU, dtype=torch.float32, varlen=True)
    for name, value in one.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
        assert value.dtype == torch.float32
    assert not torch.equal(one.model.lm_head.weight, other.model.lm_head.weight)
    assert one.model.lm_head.weight.std().item() == pytest.approx(config.initializer_range, rel=0.1)


@pytest.mark.parametrize("model_type", ["llama", "transformer"])
def test_other_ranks_hold_no_weights(model_type: str) -> None:
    module = build_model(make_config(model_type), seed=1, rank=1, device=CPU, dtype=torch.float32, varlen=True)
    tensors = [*module.parameters(), *module.buffers()]
    assert tensors and all(tensor.is_meta for tensor in tensors)


def test_the_configuration_that_is_saved_names_nothing_of_ours() -> None:
    for model_type in ("llama", "transformer"):
        config = make_config(model_type)
        asked = copy.deepcopy(config.to_dict())
        module = build(config)
        saved = module.model.config
        assert "flame" not in saved.to_json_string()
        assert {name: value for name, value in saved.to_dict().items() if name != "dtype"} == {
            name: value for name, value in asked.items() if name != "dtype"
        }


def test_keys_are_the_inner_models_own() -> None:
    module = build(make_config("transformer"))
    keys = set(module.model.state_dict())
    assert "model.layers.0.attn.q_proj.weight" in keys and "model.layers.1.mlp.down_proj.weight" in keys
    assert not any("inv_freq" in key for key in keys)


def test_our_attention_refuses_to_read_a_cache() -> None:
    module = build(make_config("llama"))
    with pytest.raises(AssertionError, match="reads no cache"):
        module.model.generate(torch.zeros(1, 3, dtype=torch.long), max_new_tokens=2, do_sample=False)
