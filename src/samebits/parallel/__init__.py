"""Experts spread over the ranks of a process group, with the bits of one rank.

The one-rank run that all is compared with has the tokens of the ranks concatenated in rank order.
"""

from samebits.parallel.all_to_all import Dispatched as Dispatched
from samebits.parallel.all_to_all import combine as combine
from samebits.parallel.all_to_all import dispatch as dispatch
from samebits.parallel.by_rank import experts_by_rank as experts_by_rank
from samebits.parallel.layer import parallel_experts as parallel_experts
from samebits.parallel.modules import ParallelExperts as ParallelExperts
from samebits.parallel.modules import ParallelLoRAExperts as ParallelLoRAExperts
from samebits.parallel.modules import ParallelQuantizedExperts as ParallelQuantizedExperts
from samebits.parallel.ranks import Capacity as Capacity
from samebits.parallel.ranks import Ranks as Ranks
from samebits.parallel.ranks import expert_bounds as expert_bounds
from samebits.parallel.row_parallel import row_parallel_experts as row_parallel_experts
from samebits.parallel.row_parallel import row_parallel_part as row_parallel_part
from samebits.parallel.style import ExpertParallel as ExpertParallel
from samebits.parallel.tensor import tensor_parallel_experts as tensor_parallel_experts
from samebits.parallel.tensor_modules import TensorParallelExperts as TensorParallelExperts
from samebits.parallel.tensor_style import ExpertTensorParallel as ExpertTensorParallel
from samebits.parallel.tensor_weights import TensorParallelWeights as TensorParallelWeights
