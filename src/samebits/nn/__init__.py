"""Modules: ``Experts`` owns parameters, ``Router`` chooses, ``MoE`` puts a whole layer together."""

from samebits.nn.experts import Experts as Experts
from samebits.nn.linear import RowLinear as RowLinear
from samebits.nn.lora import LoRAExperts as LoRAExperts
from samebits.nn.losses import expert_counts as expert_counts
from samebits.nn.losses import load_balancing_loss as load_balancing_loss
from samebits.nn.losses import router_z_loss as router_z_loss
from samebits.nn.moe import MoE as MoE
from samebits.nn.moe import MoEOutput as MoEOutput
from samebits.nn.quantized import QuantizedExperts as QuantizedExperts
from samebits.nn.router import Router as Router
from samebits.nn.router import RouterOutput as RouterOutput
