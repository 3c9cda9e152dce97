"""Experts cut over a mesh axis: ``parallelize_module(model, mesh["etp"], plan)``."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from samebits.arguments import require_int, require_type
from samebits.errors import UnsupportedError, must
from samebits.nn.experts import Experts
from samebits.parallel.ranks import Capacity, Ranks
from samebits.parallel.style import agree, require_whole, spread_tensors
from samebits.parallel.tensor_modules import CutOver, TensorParallelExperts, check_cuttable


class ExpertTensorParallel(ParallelStyle):
    """Cut each expert of a ``samebits.nn.Experts`` over a mesh axis, without splitting a sum.

    On a mesh of two dimensions experts are spread over one, and each is cut over the other. Ranks
    along the axis that cuts have the same tokens.

    Args:
        ep_dim: Name or number of the dimension over which experts are spread, of a mesh with two;
            0 on a mesh with one, which cuts.
        capacity: For that dimension; see ``ExpertParallel``.
    """

    def __init__(self, *, ep_dim: str | int = 0, capacity: Capacity | None = None) -> None:
        super().__init__()
        if not isinstance(ep_dim, str):
            require_int("ep_dim", ep_dim, minimum=0)
        if capacity is not None:
            require_type("capacity", capacity, Capacity)
        self.ep_dim, self.capacity = ep_dim, capacity

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not Experts:
            actual = type(module).__name__
            raise UnsupportedError(
                f"ExpertTensorParallel cuts Experts of samebits.nn, not {actual}"
            )
        ep, cut = self._dimensions(device_mesh)
        group = device_mesh.get_group(cut)
        require_whole(module)
        device = torch.device(device_mesh.device_type)
        ranks = differ = None
        if ep is not None:
            spread_over = device_mesh.get_group(ep)
            ranks = Ranks.of(spread_over, module.num_experts, capacity=self.capacity)
            try:
                ranks.agree(device)
                agree(module, spread_over, device)
            except ValueError as error:
                # Raised at once, it would let those wait that only the other axis shares with it.
                differ = error
        agree(module, group, device, besides="" if differ is None else "unlike others along ep_dim")
        if differ is not None:
            raise differ
        check_cuttable(module, device_mesh.size(cut))
        # Rows of gate_up, and of down, are cut; so is what a bias adds to them.
        matrix = 1 if module.orientation == "out_in" else 2

        def placements_of(name: str) -> list[Placement]:
            placements: list[Placement] = [Shard(0)] * device_mesh.ndim
            placements[cut] = Shard(1 if name.endswith("bias") else matrix)
            return placements

        spread_tensors(module, device_mesh, placements_of)
        module.__class__ = TensorParallelExperts
        assert isinstance(module, TensorParallelExperts)
        module.cut_over, module.ranks = CutOver(group), ranks
        return module

    def _dimensions(self, mesh: DeviceMesh) -> tuple[int | None, int]:
        """Return the dimensions that spread and that cut."""
        if mesh.ndim == 1 and self.capacity is None and self.ep_dim == 0:
            return None, 0
        if mesh.ndim != 2:
            rule = (
                "have two dimensions, one spreads and one cuts, or one without capacity and ep_dim"
            )
            raise ValueError(must("device_mesh", rule, mesh.ndim))
        names = mesh.mesh_dim_names or ()
        known = (*range(2), *names)
        if self.ep_dim not in known:
            raise ValueError(must("ep_dim", f"be one of {known}", repr(self.ep_dim)))
        ep = names.index(self.ep_dim) if isinstance(self.ep_dim, str) else self.ep_dim
        return ep, 1 - ep
