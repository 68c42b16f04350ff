"""The configuration of a stick-breaking transformer."""

from typing import Any

from fla.models import StickBreakingAttentionConfig


class SBAConfig(StickBreakingAttentionConfig):
    """fla's configuration under another model type."""

    model_type = "sba"

    def __init__(self, **values: Any) -> None:  # transformers would write one that skips fla's
        super().__init__(**values)
