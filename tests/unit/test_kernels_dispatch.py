"""The choice of an implementation: named, checked, refused with a reason."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from flame.errors import UsageError
from flame.kernels import dispatch
from flame.kernels.dispatch import ATTENTION, choose_attention, choose_loss, walks_refusal

CPU = torch.device("cpu")


def choose(requested: str, *, deterministic: bool = False) -> str:
    return choose_attention(requested, device=CPU, dtype=torch.float32, head_dim=64, deterministic=deterministic)


def test_auto_takes_what_runs_on_a_cpu() -> None:
    assert choose("auto") == choose("sdpa") == choose("auto", deterministic=True) == "sdpa"


def test_one_that_cannot_run_here_is_an_error_with_the_reason() -> None:
    with pytest.raises(UsageError, match=r"torch_varlen cannot be used here: it needs a CUDA device.*auto, sdpa"):
        choose("torch_varlen")


def test_an_unknown_one_names_those_that_exist() -> None:
    with pytest.raises(UsageError, match=r"got flash; expected auto, fa4, torch_varlen, sdpa"):
        choose("flash")


def test_deterministic_refuses_what_was_not_shown_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    unproven = dataclasses.replace(ATTENTION["sdpa"], deterministic=False)
    monkeypatch.setattr(dispatch, "ATTENTION", {"unproven": unproven, **ATTENTION})
    assert choose("auto") == "unproven"
    assert choose("auto", deterministic=True) == "sdpa"
    with pytest.raises(UsageError, match=r"unproven cannot be used here: training.deterministic is on"):
        choose("unproven", deterministic=True)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "reason"),
    [(torch.float32, 64, "needs bfloat16 or float16"), (torch.bfloat16, 512, "heads of up to 256")],
)
def test_torch_varlen_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, head_dim: int, reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    refusal = ATTENTION["torch_varlen"].refusal(torch.device("cuda"), dtype, head_dim)
    assert refusal is not None and reason in refusal


def test_torch_varlen_is_first_on_a_gpu_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(dispatch, "_installed", lambda module: False)
    gpu = torch.device("cuda")
    assert (
        choose_attention("auto", device=gpu, dtype=torch.bfloat16, head_dim=64, deterministic=False) == "torch_varlen"
    )


def test_fa4_is_first_where_it_is_installed_and_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def on(capability: int, **options: Any) -> str:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
        needs = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 64, "deterministic": False}
        return choose_attention(options.pop("requested", "auto"), **{**needs, **options})

    with pytest.raises(UsageError, match=r"fa4 cannot be used here: it needs the package flash-attn-4"):
        on(9, requested="fa4")
    monkeypatch.setattr(dispatch, "_installed", lambda module: True)
    assert on(9) == on(9, softcap=True) == on(9, deterministic=True) == "fa4"
    assert on(8) == on(10) == "torch_varlen"
    with pytest.raises(UsageError, match=r"fa4 cannot be used here: it is used on GPUs of compute capability 9.0"):
        on(10, requested="fa4")


def test_soft_caps_need_what_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(dispatch, "_installed", lambda module: False)
    options = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 64, "deterministic": False}
    assert choose_attention("auto", softcap=True, **options) == "sdpa"
    with pytest.raises(UsageError, match=r"torch_varlen cannot be used here: it cannot cap attention scores"):
        choose_attention("torch_varlen", softcap=True, **options)


def test_the_loss_is_chosen_too() -> None:
    assert choose_loss("auto", device=CPU, dtype=torch.float32) == "torch"
    assert choose_loss("auto", device=torch.device("cuda"), dtype=torch.bfloat16) == "triton"
    assert choose_loss("auto", device=torch.device("cuda"), dtype=torch.float64) == "torch"
    with pytest.raises(
        UsageError, match=r"linear cross entropy implementation triton cannot be used here: it needs a C"
    ):
        choose_loss("triton", device=CPU, dtype=torch.float32)
    with pytest.raises(
        UsageError, match=r"no such implementation of linear cross entropy \(got liger; expected auto, tr"
    ):
        choose_loss("liger", device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(
    ("device", "major", "dtype", "key_dim", "value_dim", "refusal"),
    [
        ("cuda", 9, torch.bfloat16, 256, 512, None),
        ("cuda", 9, torch.float16, 16, 64, None),
        ("cuda", 9, torch.bfloat16, 240, 192, None),
        ("cuda", 9, torch.bfloat16, 272, 512, "keys of 16 to 256 in steps of 16.* these have 272 and 512"),
        ("cuda", 9, torch.bfloat16, 40, 64, "these have 40 and 64"),
        ("cuda", 9, torch.bfloat16, 128, 96, "values in steps of 64.* these have 128 and 96"),
        ("cuda", 9, torch.float32, 256, 512, "and not float32"),
        ("cuda", 8, torch.bfloat16, 256, 512, "compute capability 9.0"),
        ("cuda", 10, torch.bfloat16, 256, 512, "compute capability 9.0"),
        ("cpu", 9, torch.bfloat16, 256, 512, "this one is cpu"),
    ],
)
def test_where_our_walks_carry_states(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    major: int,
    dtype: torch.dtype,
    key_dim: int,
    value_dim: int,
    refusal: str | None,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    found = walks_refusal(device=torch.device(device), dtype=dtype, key_dim=key_dim, value_dim=value_dim)
    assert found is None if refusal is None else re.search(refusal, found or "")
