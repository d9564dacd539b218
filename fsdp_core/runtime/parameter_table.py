"""A module's ``_parameters`` whose look-ups during a recomputation give the full tensors.

Activation checkpointing inside a unit runs submodules again during backward, when no forward hook of the unit
fires. Such a look-up is recognised by two facts: autograd is executing a graph, and gradients are enabled (hooks
and optimizers that run inside backward have them disabled). Every other look-up, and every iteration over the
table, gives the sharded parameter itself.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdp_core.handle.sharded_tensor import ShardedTensor

_current_graph_task_id = torch._C._current_graph_task_id


class ParameterTable(dict[str, Any]):
    """Takes the place of ``module._parameters`` in modules that hold parameters of a unit."""

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        is_recompute = _current_graph_task_id() != -1 and torch.is_grad_enabled()
        if is_recompute and isinstance(value, ShardedTensor) and value.owner is not None:
            return value.owner.unit.tensor_for_recompute(value)
        return value
