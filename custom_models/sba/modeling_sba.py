"""A transformer whose attention breaks a stick: Tan et al. 2024, "Scaling Stick-Breaking Attention"."""

from fla.models import StickBreakingAttentionForCausalLM

from custom_models.sba.config_sba import SBAConfig


class SBAForCausalLM(StickBreakingAttentionForCausalLM):
    """fla's model, which reads an `SBAConfig`."""

    config_class = SBAConfig
