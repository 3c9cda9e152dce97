"""vLLM: its ``fused_experts`` on this library, and a plug-in that puts it under vLLM's layers.

Importing this package imports nothing of vLLM.
"""

from samebits.integrations.vllm.activations import activation_of as activation_of
from samebits.integrations.vllm.fused import fused_experts as fused_experts
from samebits.integrations.vllm.plugin import Swap as Swap
from samebits.integrations.vllm.plugin import load as load
from samebits.integrations.vllm.plugin import swap_in as swap_in
