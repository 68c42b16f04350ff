"""Operations of a step, held against an independent count of each layer's naive form; and what devices can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fla.models  # noqa: F401 (its model types)
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from flame.errors import UsageError
from flame.train.devices import PEAK_TFLOPS, known_peak_flops, peak_flops
from flame.train.families import FAMILIES, family_of
from flame.train.families_hf import HF_FAMILIES
from flame.train.flops import MIXERS, AttentionLayer, ModelFlops, model_flops
from flame.train.options import MetricsOptions
from tests.tiny_states import one_rank, shard, tiny_llama

SHIPPED = set(FAMILIES)  # before a test imports custom_models

T = 6
"""Tokens of the sequence that is counted."""

# Sizes that no product of others equals, so that a formula with the wrong one is wrong.
SIZES: dict[str, dict[str, Any]] = {
    "gla": {"num_heads": 2, "expand_k": 0.5, "expand_v": 1.0},
    "retnet": {"num_heads": 2, "expand_k": 1, "expand_v": 2},
    "gsa": {"num_heads": 2, "num_slots": 10},
    "hgrn2": {"num_heads": 4, "expand_ratio": 24},
    "delta_net": {"num_heads": 2, "expand_k": 1.0, "expand_v": 1.0},
    "gated_deltanet": {"num_heads": 2, "head_dim": 24, "expand_v": 2},
    "kda": {"num_heads": 2, "head_dim": 24},
    "rwkv7": {
        "head_dim": 32,
        "decay_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
    },
    "mamba": {"intermediate_size": 96, "state_size": 10},
    "mamba2": {"head_dim": 16, "num_heads": 8, "state_size": 10},
    "samba": {
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "attn": {"layers": [1, 3], "num_heads": 4, "num_kv_heads": 4, "window_size": None, "rope_theta": 10000.0},
    },
    "transformer": {"num_heads": 4, "num_kv_heads": 2},
    "stickbreaking_attn": {"num_heads": 4},
}

DECODERS = tuple(name for name, family in HF_FAMILIES.items() if not family.balances_experts)
MIXTURES = tuple(name for name in HF_FAMILIES if name not in DECODERS)
"""Hugging Face's, which run anywhere."""


def make(model_type: str, **changes: Any) -> Any:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 80, **SIZES[model_type], **changes}
    config = AutoConfig.for_model(model_type, **sizes)
    if model_type in FAMILIES:
        return family_of(config).construct(config, "sdpa")
    return AutoModelForCausalLM.from_config(config)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def counted(run: Callable[[], Tensor]) -> int:
    """Operations of forward and backward, as torch counts them in matrix products and convolutions."""
    with FlopCounterMode(display=False) as counter:
        run().sum().backward()
    return counter.get_total_flops()


def weights(model: nn.Module) -> int:
    """Every linear layer and convolution, run by itself on a sequence; an expert is not one."""
    total = 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            total += counted(lambda module=module: module(leaf(T, module.in_features)))  # type: ignore[misc]
        elif isinstance(module, nn.Conv1d):
            taps = module.kernel_size[0]  # each channel by itself: a row of weights against a window for each token
            assert module.groups == module.in_channels == module.out_channels
            channels = module.in_channels
            total += counted(lambda taps=taps, channels=channels: leaf(channels, T, taps) @ leaf(channels, taps, 1))  # type: ignore[misc]
    return total


# ---- the recurrences, a token at a time and with every product as one of matrices: S is [heads, d_k, d_v] ----------


def outer(k: Tensor, v: Tensor) -> Tensor:
    return k[..., :, None] @ v[..., None, :]


def look_up(state: Tensor, q: Tensor) -> Tensor:
    return (q[..., None, :] @ state)[..., 0, :]


def linear_attention(heads: int, d_k: int, d_v: int) -> int:
    def run() -> Tensor:
        state, total = leaf(heads, d_k, d_v), torch.zeros(heads, d_v)
        for _ in range(T):
            state = 0.9 * state + outer(leaf(heads, d_k), leaf(heads, d_v))
            total = total + look_up(state, leaf(heads, d_k))
        return total

    return counted(run)


def delta_rule(heads: int, d_k: int, d_v: int) -> int:
    def run() -> Tensor:
        state, total = leaf(heads, d_k, d_v), torch.zeros(heads, d_v)
        for _ in range(T):
            k = leaf(heads, d_k)
            state = 0.9 * state
            state = state + outer(k, 0.5 * (leaf(heads, d_v) - look_up(state, k)))
            total = total + look_up(state, leaf(heads, d_k))
        return total

    return counted(run)


def rwkv7(heads: int, d_k: int, d_v: int) -> int:
    def run() -> Tensor:
        state, total = leaf(heads, d_k, d_v), torch.zeros(heads, d_v)
        for _ in range(T):
            removed = outer(leaf(heads, d_k), look_up(state, leaf(heads, d_k)))
            state = 0.9 * state + removed + outer(leaf(heads, d_k), leaf(heads, d_v))
            total = total + look_up(state, leaf(heads, d_k))
        return total

    return counted(run)


def attention(width: int) -> int:
    """Half of all pairs: those that look back."""
    both = counted(lambda: (leaf(1, T, width) @ leaf(1, width, T)) @ leaf(1, T, width))
    assert both % 2 == 0
    return both // 2


MIXING: dict[str, Callable[[], int]] = {
    "gla": lambda: 2 * linear_attention(2, 16, 32),
    "retnet": lambda: 2 * linear_attention(2, 32, 64),
    "gsa": lambda: 2 * (linear_attention(2, 32, 10) + linear_attention(2, 10, 32)),
    "hgrn2": lambda: 2 * linear_attention(4, 24, 16),
    "delta_net": lambda: 2 * delta_rule(2, 32, 32),
    "gated_deltanet": lambda: 2 * delta_rule(2, 24, 48),
    "kda": lambda: 2 * delta_rule(2, 24, 24),
    "rwkv7": lambda: 2 * rwkv7(2, 32, 32),
    "mamba": lambda: 2 * linear_attention(96, 10, 1),
    "mamba2": lambda: 2 * linear_attention(8, 10, 16),
    "samba": lambda: 2 * linear_attention(96, 16, 1) + 2 * attention(64),
    "transformer": lambda: 2 * attention(64),
    "stickbreaking_attn": lambda: 2 * attention(64),
}


@pytest.mark.parametrize("model_type", SIZES)
def test_a_family_s_operations_are_those_of_its_naive_form(model_type: str) -> None:
    model = make(model_type)
    flops = model_flops(model, model.config)
    assert flops is not None
    assert flops.count(T, np.array([T])) == weights(model) + MIXING[model_type]()


def test_every_family_that_is_trained_here_has_a_formula() -> None:
    assert not SHIPPED - {*SIZES, *DECODERS, *MIXTURES}


@pytest.mark.parametrize("model_type", ["gla", "delta_net", "gated_deltanet", "rwkv7"])
def test_a_hybrid_has_attention_where_it_says_so(model_type: str) -> None:
    attn = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": None, "rope_theta": 10000.0}
    hybrid = make(model_type, attn=attn)
    flops = model_flops(hybrid, hybrid.config)
    assert flops is not None
    assert flops.attention == (AttentionLayer(width=64),) and len(flops.recurrent) == 1
    assert flops.count(T, np.array([T])) == weights(hybrid) + MIXING[model_type]() // 2 + attention(64)


@pytest.mark.parametrize("model_type", DECODERS)
def test_a_hugging_face_decoder_is_what_torch_counts_when_it_runs(model_type: str) -> None:
    """Run whole, attention as two matrix products of all pairs: twice the half that is counted."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"sliding_window": 10 * T if model_type.startswith("gemma") else None}
    if model_type not in ("gpt2", "olmo2"):
        sizes["head_dim"] = 16
    config = AutoConfig.for_model(model_type, vocab_size=80, num_hidden_layers=2, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    flops = model_flops(model, config)
    assert flops is not None
    width = flops.attention[0].width
    assert width == (64 if "head_dim" in sizes else 32)
    ran = counted(lambda: model(inputs_embeds=leaf(1, T, 32), use_cache=False).logits)
    assert flops.count(T, np.array([T])) == ran - 2 * attention(width)


@pytest.mark.parametrize("model_type", MIXTURES)
def test_a_mixture_of_experts_counts_those_that_a_token_goes_to(model_type: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "num_experts_per_tok": 2}
    sizes["num_local_experts" if model_type == "mixtral" else "num_experts"] = 8
    if model_type == "qwen3_moe":
        sizes |= {"head_dim": 8, "intermediate_size": 48, "moe_intermediate_size": 24}
    config = AutoConfig.for_model(model_type, vocab_size=80, num_hidden_layers=2, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    flops = model_flops(model, config)
    assert flops is not None
    one_expert = counted(lambda: leaf(T, 32) @ leaf(32, 48)) + counted(lambda: leaf(T, 24) @ leaf(24, 32))
    router = counted(lambda: leaf(T, 32) @ leaf(32, 8))
    assert flops.count(T, np.array([T])) == weights(model) + 2 * (2 * one_expert + router) + 2 * attention(32)


def test_flops_of_a_transformer_by_hand() -> None:
    model = tiny_llama()
    per_layer = 16 * 16 + 2 * 8 * 16 + 16 * 16 + 3 * 16 * 24  # q, k and v, o, mlp
    parameters = 2 * per_layer + 40 * 16  # and the head, not the embedding
    flops = model_flops(model, model.config)
    assert flops == ModelFlops(matmul_parameters=parameters, attention=(AttentionLayer(width=16),) * 2)
    assert flops.count(100, np.array([60, 40])) == 6 * parameters * 100 + 2 * 6 * 16 * (60**2 + 40**2)
    assert flops.count(100, np.array([100])) > flops.count(100, np.full(10, 10))
    tied = tiny_llama(tied=True)
    assert model_flops(tied, tied.config) == flops, "a tied head multiplies all the same"
    with one_rank() as world:
        assert model_flops(shard(model, world), model.config) == flops


def test_a_window_limits_the_pairs() -> None:
    flops = ModelFlops(matmul_parameters=0, attention=(AttentionLayer(width=1, window=4),))
    full = ModelFlops(matmul_parameters=0, attention=(AttentionLayer(width=1),))
    assert flops.count(0, np.array([3, 4])) == full.count(0, np.array([3, 4]))
    assert flops.count(0, np.array([10])) == 6 * (4 * 4 + 2 * 4 * 6)


_WINDOWS: tuple[tuple[str, tuple[int | None, ...]], ...] = (
    ("mistral", (5, 5)),
    ("gemma2", (5, None)),
    ("gemma3_text", (5, 5)),
    ("olmo2", (None, None)),
    ("qwen3", (None, None)),
)


def test_a_layer_s_window_is_the_one_that_it_attends_in() -> None:
    sizes = {"vocab_size": 80, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    for model_type, windows in _WINDOWS:
        config = AutoConfig.for_model(model_type, num_hidden_layers=2, intermediate_size=48, sliding_window=5, **sizes)
        flops = model_flops(AutoModelForCausalLM.from_config(config), config)
        assert flops is not None
        assert flops.attention == tuple(AttentionLayer(width=32, window=window) for window in windows)


def test_large_steps_do_not_overflow() -> None:
    flops = ModelFlops(matmul_parameters=7 * 10**9, attention=(AttentionLayer(width=4096),) * 32)
    lengths = np.full(16, 2**20, dtype=np.int32)
    assert flops.count(2**24, lengths) == 6 * 7 * 10**9 * 2**24 + 32 * 6 * 4096 * 16 * 2**40


def test_a_model_with_a_layer_that_is_not_known_has_none() -> None:
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt_neox", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    )
    assert model_flops(model, model.config) is None
    llama = tiny_llama()
    llama.model.layers[1].self_attn = nn.Identity()
    assert model_flops(llama, llama.config) is None
    assert "LlamaAttention" in MIXERS


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA GeForce RTX 4090", 165),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce GTX 1080", None),
        ("Tesla V100-SXM2-32GB", None),
    ],
)
def test_peaks_of_devices_by_their_names(name: str, tflops: float | None) -> None:
    assert known_peak_flops(name) == (None if tflops is None else tflops * 1e12)
    assert min(PEAK_TFLOPS.values()) > 50


def test_an_unknown_device_is_said_once_and_its_peak_can_be_given(caplog: pytest.LogCaptureFixture) -> None:
    cpu = torch.device("cpu")
    with caplog.at_level("INFO", logger="flame"):
        assert peak_flops(cpu) is None
    (said,) = caplog.messages
    assert "mfu is null" in said and "--metrics.peak_tflops" in said
    caplog.clear()
    assert peak_flops(cpu, 0.5) == 0.5e12 and not caplog.messages
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="peak_tflops"):
            MetricsOptions(peak_tflops=wrong)
