"""Mixture-of-experts layers that compute the same bits in training and in inference."""

from samebits._version import __version__ as __version__
from samebits.activation import Activation as Activation
from samebits.backends import explain as explain
from samebits.errors import UnsupportedError as UnsupportedError
from samebits.experts import experts as experts
from samebits.experts import grouped_experts as grouped_experts
from samebits.formats import QuantizedWeights as QuantizedWeights
from samebits.formats import WeightFormat as WeightFormat
from samebits.formats import dequantize as dequantize
from samebits.formats import quantize as quantize
from samebits.integrations.configs import from_hf_config as from_hf_config
from samebits.integrations.configs import from_megatron_args as from_megatron_args
from samebits.problem import Problem as Problem
from samebits.problem import ProbPlacement as ProbPlacement
from samebits.routing import Permutation as Permutation
from samebits.routing import Routing as Routing
from samebits.routing import RoutingRule as RoutingRule
from samebits.warmup import warmup as warmup
from samebits.weight_gradients import WeightGradients as WeightGradients
from samebits.weights import ExpertWeights as ExpertWeights
from samebits.weights import Layout as Layout
from samebits.weights import PostExpertNorm as PostExpertNorm
