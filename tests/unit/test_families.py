"""Which models can be trained how, and what is said to those that cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from flame.errors import TrainingError
from flame.train.families import FAMILIES, GENERIC, check_family, family_of
from flame.train.families_hf import HF_FAMILIES

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def check(model_type: str, *, varlen: bool = True, device: torch.device = CPU, **options: Any) -> None:
    if model_type in FAMILIES and FAMILIES[model_type].from_fla:
        pytest.importorskip("fla")
    check_family(AutoConfig.for_model(model_type, **options), varlen=varlen, device=device)


@pytest.mark.parametrize("model_type", [*HF_FAMILIES, "transformer"])
def test_what_trains_anywhere(model_type: str) -> None:
    options = {"attn_pdrop": 0.0} if model_type == "gpt2" else {}
    check(model_type, **options)
    check(model_type, varlen=False, **options)


@pytest.mark.parametrize("model_type", [name for name, family in FAMILIES.items() if family.needs_cuda])
def test_triton_kernels_need_a_gpu(model_type: str) -> None:
    options = {"use_l2warp": False} if model_type == "rwkv7" else {"attn": None} if model_type == "samba" else {}
    check(model_type, varlen=False, device=GPU, **options)
    with pytest.raises(TrainingError, match=f"{model_type} runs on a CUDA GPU only"):
        check(model_type, varlen=False, **options)


@pytest.mark.parametrize("model_type", ["mamba", "samba"])
def test_a_family_that_ignores_cu_seqlens_is_refused_for_packed_documents(model_type: str) -> None:
    options = {"attn": None} if model_type == "samba" else {}
    with pytest.raises(TrainingError, match=r"ignores cu_seqlens.*--training.varlen false.*llama"):
        check(model_type, device=GPU, **options)


def test_an_unknown_family_is_refused_for_packed_documents_only() -> None:
    assert family_of(AutoConfig.for_model("granite")) is GENERIC
    check("granite", varlen=False)
    with pytest.raises(TrainingError, match="packed documents cannot be used with a model of the type granite"):
        check("granite")


@pytest.mark.parametrize("varlen", [True, False])
def test_learned_positions_reach_to_the_end_of_the_longest_sequence(varlen: bool) -> None:
    config = AutoConfig.for_model("gpt2", n_positions=32, attn_pdrop=0.0)
    check_family(config, varlen=varlen, device=CPU, longest_sequence=32)
    with pytest.raises(TrainingError, match=r"n_positions 32, sequences of up to 33 tokens.*--training.context_len"):
        check_family(config, varlen=varlen, device=CPU, longest_sequence=33)
    check_family(
        AutoConfig.for_model("llama", max_position_embeddings=32), varlen=varlen, device=CPU, longest_sequence=33
    )


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gpt_oss", "qwen2_moe"])
def test_mixtures_of_experts_of_an_unknown_balance_are_refused(model_type: str) -> None:
    with pytest.raises(TrainingError, match="mixture of experts"):
        check(model_type, varlen=False)


def test_an_encoder_is_refused() -> None:
    with pytest.raises(TrainingError, match="not a causal language model"):
        check("vit", varlen=False)


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("llama", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping is 30.0"),
        (
            "llama",
            {"final_logit_softcapping": 30.0},
            "final_logit_softcapping is 30.0, which its model .* does not apply",
        ),
        ("olmo2", {"sliding_window": 8}, "sliding_window is 8"),
        ("mistral", {"logits_scaling": 8.0}, "logits_scaling is 8.0"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ("gpt2", {}, "attn_pdrop is 0.1"),
        ("gpt2", {"attn_pdrop": 0.0, "add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"attn_pdrop": 0.0, "reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
        ("transformer", {"attnres_block_size": 2}, "attnres_block_size"),
        ("transformer", {"hidden_act": "powlu"}, "only swish"),
        ("rwkv7", {"use_l2warp": True}, "use_l2warp"),
        ("gated_deltanet", {"num_heads": 4, "num_v_heads": 2}, "num_v_heads is 2"),
        ("gated_deltanet", {"num_heads": 4, "num_v_heads": 6}, "num_v_heads is 6"),
        ("kda", {"num_heads": 4, "num_v_heads": 2}, "num_v_heads is 2"),
    ],
)
def test_configurations_that_would_train_something_else_are_refused(
    model_type: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(TrainingError, match=reason):
        check(model_type, device=GPU, **options)
