"""Stick-breaking attention under the model type `sba`: an example of a model of one's own.

Where nothing else knows a configuration's model type, the packages in custom_models/ are imported, the one of that name
first, until one defines it. A package has to register its classes with transformers. The entry in `FAMILIES` is
optional: with it the model gets the fused loss and packed documents, without it its own logits and unpacked rows.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from custom_models.sba.config_sba import SBAConfig
from custom_models.sba.modeling_sba import SBAForCausalLM
from flame.train.families import FAMILIES

AutoConfig.register(SBAConfig.model_type, SBAConfig, exist_ok=True)
AutoModelForCausalLM.register(SBAConfig, SBAForCausalLM, exist_ok=True)
FAMILIES[SBAConfig.model_type] = FAMILIES["stickbreaking_attn"]
