"""What flame-train does not do is refused by its name, on the command line and in a file, with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from flame.config import Option
from flame.errors import UsageError
from flame.train.refusals import NOT_AVAILABLE_YET
from tests.unit.test_train_config import OPTIONS, parse, with_toml


def _another_value(option: Option) -> str:
    if option.is_flag:
        return "false" if option.default else "true"
    if option.info.choices is not None:
        return next(choice for choice in option.info.choices if choice != option.default)
    return "3"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("", "(got --training.max_norm 1.0). Add --training.max_norm inf"),
        ("--training.max_norm inf --training.skip_nan_inf", "Add --training.skip_nan_inf false"),
        (
            "--training.max_norm inf --training.gradient_accumulation_steps 2",
            "Add --training.gradient_accumulation_steps 1",
        ),
        ("--training.max_norm inf --optimizer.name Muon", "Choose another --optimizer.name"),
    ],
)
def test_updates_in_backward_are_refused_with_what_needs_the_whole_gradient(argv: str, told: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse("--optimizer.early_step_in_backward", *argv.split())
    assert told in str(refused.value)
    parse("--optimizer.early_step_in_backward", "--training.max_norm", "inf")


@pytest.mark.parametrize("name", NOT_AVAILABLE_YET)
def test_what_has_no_engine_is_refused_by_name(name: str, tmp_path: Path) -> None:
    value = _another_value(OPTIONS[name])
    with pytest.raises(UsageError, match=rf"--{name} {value} is not available yet"):
        parse(f"--{name}={value}")
    with pytest.raises(UsageError, match=rf"--{name} {value} is not available yet"):
        with_toml(tmp_path, f'{name} = "{value}"')


def test_compiled_autograd_is_refused_with_its_reason() -> None:
    with pytest.raises(UsageError, match=r"enable_compiled_autograd .* hooks of FSDP2 .* training.compile"):
        parse("--experimental.enable_compiled_autograd")


@pytest.mark.parametrize("name", ["scaling_type_input", "scaling_type_weight", "scaling_type_grad_output"])
def test_delayed_scaling_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(UsageError, match="no longer has delayed scaling"):
        parse(f"--float8.{name}", "delayed")


def test_defaults_of_what_has_no_engine_may_be_written_out() -> None:
    config = parse("--training.tensor_parallel_degree=1", "--checkpoint.async_mode=disabled", "--optimizer.name=SGD")
    assert config.optimizer.name == "SGD"
