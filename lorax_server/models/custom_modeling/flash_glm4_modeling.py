"""GLM-4: GLM with additional norms after attention and MLP."""

from dataclasses import replace
from typing import Any

from lorax_server.models.custom_modeling.architecture import Architecture
from lorax_server.models.custom_modeling.common import SandwichNormLayer
from lorax_server.models.custom_modeling.flash_glm_modeling import FlashGLMForCausalLM


class FlashGLM4ForCausalLM(FlashGLMForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        glm = FlashGLMForCausalLM.describe(config)
        names = glm.names._replace(added_norms=("post_self_attn_layernorm", "post_mlp_layernorm"))
        return replace(glm, names=names, layer_class=SandwichNormLayer)
