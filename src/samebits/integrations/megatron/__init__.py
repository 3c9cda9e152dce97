"""Megatron-LM: safe fused activations, its experts modules on this library, inference drop-ins.

Importing this package imports nothing of Megatron-LM.
"""

from samebits.integrations.megatron.adapter import Adapted as Adapted
from samebits.integrations.megatron.adapter import adapt as adapt
from samebits.integrations.megatron.fused import Patch as Patch
from samebits.integrations.megatron.fused import fused_swiglu_patched as fused_swiglu_patched
from samebits.integrations.megatron.fused import patch_fused_swiglu as patch_fused_swiglu
from samebits.integrations.megatron.inference import InferenceFunctions as InferenceFunctions
from samebits.integrations.megatron.inference import inference_functions as inference_functions
from samebits.integrations.megatron.validation import check as check
from samebits.integrations.megatron.validation import conflicts as conflicts
