"""Any optimizer that works one parameter at a time, on shards: each rank runs it on the parameters it owns, whole.

    optimizer = WholeParameterOptimizer(flat_parameters(model), lambda groups: MyOptimizer(groups, lr=0.1))

The wrapped optimizer sees ordinary parameters with ordinary gradients, in their original shapes; whatever it computes
from one parameter's norm, rows or matrix is right. Its state lives whole at the owner, so state memory is as even as
the parameters' sizes allow. What it must not do is mix parameters (global norms, LBFGS): nobody here sees them all.

A step costs an all-gather of parameters and of gradients and a reduce-scatter of the result; memory at its peak is the
owned parameters and gradients (about 2/F of the model) and one unit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_core.errors import StateError
from fsdp_core.numerics.optimizers.base import ShardedOptimizer
from fsdp_core.numerics.optimizers.exactness import refuse_mixing
from fsdp_core.numerics.optimizers.geometry import Holding, Piece
from fsdp_core.numerics.optimizers.owners import (
    Owned,
    assign_owners,
    by_home,
    gather,
    local_part,
    scatter,
    share,
    write_window,
)

Factory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class WholeParameterOptimizer(ShardedOptimizer):
    """See the module's docstring.

    Args:
        params: parameters or groups of them; any kind that ``geometry`` lists. A group's options reach the wrapped
            optimizer's group, also when a scheduler changes them later.
        factory: makes the wrapped optimizer from parameter groups; called once, with this rank's whole parameters.

    Raises:
        NumericsError: the wrapped optimizer is known to mix parameters.
    """

    def __init__(self, params: Any, factory: Factory) -> None:
        super().__init__(params, {})
        self._owned: list[list[Owned]] = []
        self._stand_ins: dict[int, nn.Parameter] = {}  # by id of the piece: what the wrapped optimizer holds
        groups = []
        load = assign_owners(self._holdings.values(), lambda piece: float(piece.numel))
        owners = {id(one.piece): one for one in load}
        for group in self.param_groups:
            owned = [owners[id(piece)] for param in group["params"] for piece in self._holding(param).pieces]
            self._owned.append(owned)
            for one in owned:
                if one.is_mine:
                    self._stand_ins[id(one.piece)] = nn.Parameter(torch.empty(0, dtype=one.holding.param.dtype))
            mine = [self._stand_ins[id(one.piece)] for one in owned if one.is_mine]
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": mine})
        self._has_anything = any(group["params"] for group in groups)
        self._placeholder = nn.Parameter(torch.empty(0))
        if not self._has_anything:  # torch refuses an optimizer without parameters
            groups[0]["params"] = [self._placeholder]
        self.wrapped = factory(groups)
        refuse_mixing(self.wrapped)
        for group, inner in zip(self.param_groups, self.wrapped.param_groups, strict=True):
            for name, value in inner.items():
                group.setdefault(name, value)
        self.defaults = {**self.wrapped.defaults}

    def live_states(self) -> Iterator[tuple[Holding, Piece, dict[str, Any]]]:
        """What the wrapped optimizer keeps of each parameter this rank owns, empty before its first step; no copies."""
        for one in self._everything():
            if one.is_mine:
                yield one.holding, one.piece, self.wrapped.state.get(self._stand_ins[id(one.piece)], {})

    def owned_state(self) -> dict[str, dict[str, Any]]:
        """The wrapped optimizer's state of the parameters this rank owns, by original name, in original shapes."""
        return {piece.fqn: copy.deepcopy(state) for _, piece, state in self.live_states() if state}

    def full_state(self) -> dict[str, dict[str, Any]]:
        """The same for all parameters, on every rank. Every rank calls; one broadcast per parameter."""
        own, full = self.owned_state(), {}
        for one in self._everything():
            home, fqn = one.holding.home, one.piece.fqn
            state = own.get(fqn) if home is None else share(home.wire, own.get(fqn), one.owner)
            if state:
                full[fqn] = state
        return full

    def load_owned_state(self, states: dict[str, dict[str, Any]]) -> None:
        """Take the states of the parameters this rank owns from ``states`` by name; others there are ignored."""
        for one in self._everything():
            if one.is_mine:
                stand_in = self._stand_ins[id(one.piece)]
                self.wrapped.state.pop(stand_in, None)
                if one.piece.fqn in states:
                    self.wrapped.state[stand_in] = copy.deepcopy(states[one.piece.fqn])

    def state_dict(self) -> dict[str, Any]:
        """This rank's own part: ``{"state": {name: ...}, "param_groups": [options]}``. For checkpoints that outlive
        the number of ranks use ``fsdp_core.optim_state_dict``."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {"state": self.owned_state(), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave on this rank."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)
        self.load_owned_state(state_dict["state"])

    def __getstate__(self) -> dict[str, Any]:
        raise StateError(
            "A WholeParameterOptimizer is tied to its ranks and cannot be copied or pickled",
            remedy="save state_dict(), or fsdp_core.optim_state_dict(model, optimizer)",
        )

    def _everything(self) -> Iterator[Owned]:
        for owned in self._owned:
            yield from owned

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the wrapped optimizer on whole parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, inner in zip(self.param_groups, self.wrapped.param_groups, strict=True):
            inner.update({name: value for name, value in group.items() if name != "params"})
        active = [h for h in self._holdings.values() if h.param.grad is not None]
        pieces = {id(piece) for holding in active for piece in holding.pieces}
        owned = [one for one in self._everything() if id(one.piece) in pieces]
        self._lend(active, [one for one in owned if one.is_mine])
        with torch.enable_grad():
            self.wrapped.step()
        self._take_back(active, owned)
        return loss

    def _step_group(self, group: dict[str, Any], holdings: Sequence[Holding]) -> None:
        raise AssertionError("WholeParameterOptimizer steps all groups at once")

    def _lend(self, active: Sequence[Holding], mine: Sequence[Owned]) -> None:
        """Give the stand-ins of what this rank owns their whole values and gradients."""
        for home, members in by_home(active):
            values = gather(home, [(h, h.data) for h in members], members[0].param.dtype)
            own = [one for one in mine if one.holding.home is not None and one.holding.home.key == home.key]
            for one in own:
                self._stand_ins[id(one.piece)].data = one.piece.whole(values).clone(memory_format=torch.preserve_format)
            grads = [(h, grad) for h in members if (grad := h.grad) is not None]
            gathered = gather(home, grads, grads[0][1].dtype)
            for one in own:
                whole = one.piece.whole(gathered).clone(memory_format=torch.preserve_format)
                self._stand_ins[id(one.piece)].grad = whole
        for one in mine:
            if one.holding.home is None:
                stand_in, grad = self._stand_ins[id(one.piece)], one.holding.grad
                assert grad is not None
                stand_in.data = one.piece.whole(one.holding.data)
                stand_in.grad = one.piece.whole(grad)

    def _take_back(self, active: Sequence[Holding], owned: Sequence[Owned]) -> None:
        """Every rank writes its part of the new values; stand-ins let go of their memory."""
        shards: list[tuple[Holding, Tensor]] = []
        for home, members in by_home(active):
            keys = {id(piece) for holding in members for piece in holding.pieces}
            mine = [one for one in owned if one.is_mine and id(one.piece) in keys]
            done: list[tuple[Piece, Tensor]] = [(one.piece, self._stand_ins[id(one.piece)].data) for one in mine]
            shard = scatter(home, done, members[0].param.dtype)
            shards += [(h, local_part(h, shard)) for h in members]
        write_window(holding.home.wire for holding in active if holding.home is not None)
        for holding, shard in shards:
            holding.data.copy_(shard)
        for stand_in in self._stand_ins.values():
            stand_in.data, stand_in.grad = stand_in.data.new_empty(0), None
