"""What flame-train does not do: options without an engine yet, what is gone for good, and what excludes each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flame.config import Option
from flame.errors import UsageError

NOT_AVAILABLE_YET = (
    "model.converters",
    "training.tensor_parallel_degree",
    "training.disable_loss_parallel",
    "float8.enable_float8_linear",
    "float8.enable_fsdp_float8_all_gather",
    "float8.precompute_float8_dynamic_scale_for_fsdp",
    "float8.force_recompute_fp8_weight_in_bwd",
    "float8.recipe_name",
    "experimental.enable_async_tensor_parallel",
    "experimental.context_parallel_degree",
    "experimental.context_parallel_rotate_method",
    "experimental.pipeline_parallel_degree",
    "experimental.pipeline_parallel_split_points",
    "experimental.pipeline_parallel_schedule",
    "experimental.pipeline_parallel_schedule_csv",
    "experimental.pipeline_parallel_microbatches",
    "experimental.enable_compiled_autograd",
)
"""Options whose engine is not here yet: accepted by the parser, refused by name for any value but the default. A name
goes when its engine comes."""

# Why, where it is not only that nobody has written it.
_REASONS = {
    "experimental.enable_compiled_autograd": "torch runs no hooks of FSDP2 in a backward that is compiled as a whole, "
    "so that gradients would not be summed over the ranks; training.compile compiles each block's backward",
}

_FLOAT8_SCALING = ("float8.scaling_type_input", "float8.scaling_type_weight", "float8.scaling_type_grad_output")


def refuse_not_available(values: Mapping[str, Any], options: Mapping[str, Option]) -> None:
    """Raise `UsageError` for the first option that asks for what is not here yet; `values` are by name."""
    for name in _FLOAT8_SCALING:
        if values[name] == "delayed":
            raise UsageError(
                f"--{name} cannot be delayed: torchao, which computes in float8, no longer has delayed scaling",
                fix="Leave it away: scaling is dynamic",
            )
    for name in NOT_AVAILABLE_YET:
        default = options[name].default
        if values[name] != default:
            fix = "Leave it away" if default in (None, ()) else f"Leave it away: the default is {shown(default)}"
            reason = f": {_REASONS[name]}" if name in _REASONS else ""
            raise UsageError(f"--{name} {shown(values[name])} is not available yet{reason}", fix=fix)


def refuse_with_early_step(values: Mapping[str, Any]) -> None:
    """Refuse what needs the whole gradient, or several backwards, where weights are updated in backward."""
    if not values["optimizer.early_step_in_backward"]:
        return
    for name, needed in (
        ("training.max_norm", math.inf),
        ("training.skip_nan_inf", False),
        ("training.gradient_accumulation_steps", 1),
    ):
        if values[name] != needed:
            raise UsageError(
                "--optimizer.early_step_in_backward updates each weight before the whole gradient is known",
                got=f"--{name} {shown(values[name])}",
                fix=f"Add --{name} {shown(needed)}, or leave early_step_in_backward away",
            )
    if values["optimizer.name"] == "Muon":
        raise UsageError(
            "--optimizer.early_step_in_backward updates one weight at a time, and Muon needs several: ranks share them",
            fix="Choose another --optimizer.name, or leave early_step_in_backward away",
        )


def shown(value: Any) -> str:
    """Return an option's value as it is typed."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
