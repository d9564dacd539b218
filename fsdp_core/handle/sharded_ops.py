"""What each operation means on sharded tensors: element-wise on the local part, a reduction, or refused by name.

The table is filled as operations are met: one look at an operator's schema decides its rule for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fsdp_core.comm.wire import Label
from fsdp_core.errors import StateError
from fsdp_core.handle.sharded_tensor import ShardedTensor, ShardSpec, hear_own_gradients, local_part

aten = torch.ops.aten
_current_graph_task_id = torch._C._current_graph_task_id
_LABEL = Label(unit_id=-1, phase="norm")

# Element-wise in effect, though torch does not tag them so.
_LOCAL_NAMES = {
    "clone", "detach", "alias", "copy_", "_to_copy", "zero_", "fill_", "zeros_like", "ones_like", "empty_like",
    "full_like", "lift_fresh", "masked_fill", "masked_fill_", "isnan", "isinf", "isfinite", "where",
    "_amp_foreach_non_finite_check_and_unscale_", "nan_to_num", "nan_to_num_", "_local_copy", "resolve_conj",
    "resolve_neg",
}  # fmt: skip
_LOCAL_PREFIXES = ("_foreach_", "_fused_")
_CLEARING_NAMES = {"zero_", "_foreach_zero_", "fill_"}
_Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_rules: dict[Any, _Rule] = {}


def run_operation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Entry point of ``ShardedTensor.__torch_dispatch__``."""
    rule = _rules.get(func)
    if rule is None:
        rule = _rules[func] = _choose_rule(func)
    if torch.is_grad_enabled() and rule is not _detach:
        _hear((*args, *kwargs.values()))
    return rule(func, args, kwargs)


def _hear(values: Iterable[Any]) -> None:
    """A term of a loss looks at parameters outside of their unit: gradients will come to them from autograd itself."""
    for value in values:
        if isinstance(value, (list, tuple)):
            _hear(value)
        elif type(value) is ShardedTensor and value.owner is not None and value.requires_grad:
            hear_own_gradients(value)


def _choose_rule(func: Any) -> _Rule:
    name = func._schema.name.removeprefix("aten::")
    if name in _REDUCTIONS:
        return _REDUCTIONS[name]
    if name == "detach":
        return _detach
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _refuse_random
    if torch.Tag.pointwise in func.tags or name in _LOCAL_NAMES or name.startswith(_LOCAL_PREFIXES):
        return _local_rule(func, name)
    return _refuse


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = _first_sharded((args, kwargs))
    raise StateError(
        f"The operation {func._schema.name} needs the full values of a sharded parameter.",
        parameter=first.spec.fqn if first is not None else None,
        expected="use inside the forward of the unit that owns the parameter, or an element-wise operation",
        got="use outside of it, where only this rank's part is there",
        remedy="run it inside `with fsdp_core.full_parameters(model):`, or make the method that uses the parameter a "
        "forward method with fsdp_core.register_forward_method(module, name)",
    )


def _refuse_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = _first_sharded((args, kwargs))
    raise StateError(
        f"The operation {func._schema.name} would draw other random numbers on each rank that holds a part.",
        parameter=first.spec.fqn if first is not None else None,
        expected="the same numbers however the parameter is sharded",
        got="use on this rank's part",
        remedy="initialise before sharding (or with deferred_init), or seed all ranks alike and draw inside "
        "`with fsdp_core.full_parameters(model):`",
    )


def _first_sharded(values: Any) -> ShardedTensor | None:
    if isinstance(values, ShardedTensor):
        return values
    if isinstance(values, dict):
        values = values.values()
    if isinstance(values, (tuple, list)) or not isinstance(values, (Tensor, str, int, float)):
        try:
            items = iter(values)
        except TypeError:
            return None
        for item in items:
            found = _first_sharded(item)
            if found is not None:
                return found
    return None


def _detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value = args[0]
    return ShardedTensor(value.local, value.spec, count=value.count)


# -- element-wise ---------------------------------------------------------------------------------------------------


def _local_rule(func: Any, name: str) -> _Rule:
    """Run on local parts; mark what was written; give results of the local size the logical shape again."""
    schema = func._schema
    written = tuple(
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    clears = name in _CLEARING_NAMES
    is_foreach = name.startswith(_LOCAL_PREFIXES) or name.startswith("_amp_foreach")
    returns_written = bool(written) and len(schema.returns) == 1

    def rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        spec = None if is_foreach else _common_spec(func, args, kwargs)
        if is_foreach:
            _check_lists(func, (*args, *kwargs.values()))
        if written and not is_foreach and not _is_sharded_target(written, args, kwargs):
            return _refuse(func, args, kwargs)  # whole values would be written from parts
        if spec is not None and not _fit(spec, (*args, *kwargs.values())):
            return _refuse(func, args, kwargs)
        result = func(
            *[_unwrap(value, spec) for value in args], **{key: _unwrap(value, spec) for key, value in kwargs.items()}
        )
        for index, argument in written:
            _mark(args[index] if index < len(args) else kwargs.get(argument), clears)
        if returns_written:
            index, argument = written[0]
            return args[index] if index < len(args) else kwargs[argument]
        if result is None or (written and not is_foreach):
            return result
        return _wrap(result, args, spec)

    return rule


def _check_lists(func: Any, values: Iterable[Any]) -> None:
    """A tensor of the whole shape beside a sharded one (state of an optimizer that stepped before sharding) would be
    read from its beginning, whatever part this rank holds."""
    lists = [value for value in values if isinstance(value, (list, tuple))]
    for other in lists[1:]:
        for item, first in zip(other, lists[0], strict=False):
            if (type(item) is ShardedTensor) == (type(first) is ShardedTensor):
                continue
            whole, sharded = (first, item) if type(item) is ShardedTensor else (item, first)
            if isinstance(whole, Tensor) and whole.dim() > 0:
                raise StateError(
                    f"The operation {func._schema.name} was given a whole tensor beside a sharded one.",
                    parameter=sharded.spec.fqn,
                    expected="sharded tensors only",
                    got=f"a plain tensor of shape {tuple(whole.shape)}",
                    remedy="build the optimizer after sharding, or before but without a step; load earlier state with "
                    "fsdp_core.load_optim_state_dict",
                )


def _is_sharded_target(written: tuple[tuple[int, str], ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return all(
        isinstance(args[index] if index < len(args) else kwargs.get(name), ShardedTensor) for index, name in written
    )


def _common_spec(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardSpec | None:
    """The one spec of all sharded arguments; two different shapes or cuts cannot meet element by element."""
    spec: ShardSpec | None = None
    for value in (*args, *kwargs.values()):
        if not isinstance(value, ShardedTensor):
            continue
        if spec is None:
            spec = value.spec
        elif value.spec is not spec and (value.spec.shape != spec.shape or value.spec.span != spec.span):
            _refuse(func, args, kwargs)
    return spec


def _fit(spec: ShardSpec, values: Iterable[Any]) -> bool:
    """Do all plain tensors broadcast to the parameter's shape? A larger result (a parameter times a batch) has no
    part of its own on this rank."""
    for value in values:
        if not isinstance(value, Tensor) or isinstance(value, ShardedTensor) or value.dim() == 0:
            continue
        sizes = zip(reversed(value.shape), reversed(spec.shape), strict=False)
        if value.dim() > len(spec.shape) or any(size not in (1, wanted) for size, wanted in sizes):
            return False
    return True


def _unwrap(value: Any, spec: ShardSpec | None) -> Any:
    if isinstance(value, ShardedTensor):
        return value.local
    if isinstance(value, (list, tuple)):
        return [_unwrap(item, spec) for item in value]
    if spec is not None and isinstance(value, Tensor) and value.dim() > 0:
        return local_part(value, spec)
    return value


def _mark(value: Any, clears: bool) -> None:
    if isinstance(value, ShardedTensor):
        value.count.writes += 1
        if _current_graph_task_id() != -1:
            value.count.in_backward += 1
        if clears:
            value.count.zeroed += 1
    elif isinstance(value, (list, tuple)):
        for item in value:
            _mark(item, clears)


def _wrap(result: Any, args: tuple[Any, ...], spec: ShardSpec | None) -> Any:
    if isinstance(result, (list, tuple)):
        if spec is None:  # foreach: result i belongs to item i of the first list
            first = next(value for value in args if isinstance(value, (list, tuple)))
            return [
                ShardedTensor(item, source.spec) if isinstance(source, ShardedTensor) else item
                for item, source in zip(result, first, strict=True)
            ]
        return type(result)(_wrap(item, args, spec) for item in result)
    if isinstance(result, Tensor) and spec is not None:
        return ShardedTensor(result, spec)
    return result


# -- reductions: every rank of the sharding group has to call them ----------------------------------------------------


def _combine(partial: Tensor, spec: ShardSpec, op: str) -> Tensor:
    flat = partial.reshape(-1).contiguous()
    spec.wire.all_reduce(flat, _LABEL, op).wait()  # type: ignore[arg-type]
    return flat.reshape(partial.shape)


def _whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], first_option: int = 1) -> ShardedTensor:
    """The one sharded argument of a reduction over all elements; a reduction along a dim is refused."""
    dims = [
        value for value in args[first_option:] if isinstance(value, (list, tuple, int)) and not isinstance(value, bool)
    ]
    dims += [value for key, value in kwargs.items() if key == "dim" and value is not None]
    if any(dim not in ([], ()) for dim in dims):
        _refuse(func, args, kwargs)
    return args[0]


def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    value = _whole(func, args, kwargs)
    return _combine(value.local.sum(dtype=kwargs.get("dtype")), value.spec, "sum")


def _mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    value = _whole(func, args, kwargs)
    return _combine(value.local.sum(dtype=kwargs.get("dtype")), value.spec, "sum") / value.spec.numel


def _extreme(op: str) -> _Rule:
    def rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        value = _whole(func, args, kwargs)
        local = value.local
        if local.numel() == 0:
            worst = float("-inf") if op == "max" else float("inf")
            local = torch.full((1,), worst, dtype=torch.float64, device=local.device).to(local.dtype)
        return _combine(local.amax() if op == "max" else local.amin(), value.spec, op)

    return rule


def _any(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    value = _whole(func, args, kwargs)
    return _combine(value.local.any().to(torch.int32), value.spec, "max").bool()


def _all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    value = _whole(func, args, kwargs)
    return _combine(value.local.all().to(torch.int32), value.spec, "min").bool()


_AS_THEY_ARE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def _norm_terms(parts: list[Tensor], power: float) -> Tensor:
    """Per part: the sum of |x|^power (power 0: how many are not zero; inf, -inf: the largest, the least |x|); 1-D."""
    wide = [part if part.dtype in _AS_THEY_ARE else part.float() for part in parts]
    if power == 0:
        rows = [part.count_nonzero().to(part.real.dtype) for part in wide]
    elif power == float("inf"):
        rows = [part.abs().amax() if part.numel() else part.real.new_zeros(()) for part in wide]
    elif power == float("-inf"):
        rows = [part.abs().amin() if part.numel() else part.real.new_full((), float("inf")) for part in wide]
    else:
        nothing = [part.real.new_zeros(()) for part in wide]  # torch has no answer for orders below 0
        pairs = zip(wide, nothing, strict=True)
        rows = [torch.linalg.vector_norm(part, power).pow(power) if part.numel() else zero for part, zero in pairs]
    return torch.stack(rows)


def _norm_of(values: list[ShardedTensor], power: float) -> list[Tensor]:
    """The norm of each, equal on all ranks. ``values`` share a sharding group."""
    op = {float("inf"): "max", float("-inf"): "min"}.get(power, "sum")
    terms = _combine(_norm_terms([value.local for value in values], power), values[0].spec, op)
    norms = terms if op != "sum" or power == 0 else terms.pow(1.0 / power)
    return [norm.to(value.local.real.dtype) for norm, value in zip(norms.unbind(), values, strict=True)]


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    power = args[1] if len(args) > 1 and args[1] is not None else kwargs.get("ord", kwargs.get("p", 2))
    value = _whole(func, args, kwargs, first_option=2)
    return _norm_of([value], float(power))[0]


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    power = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    norms: list[Tensor] = [torch.empty(0)] * len(args[0])
    by_wire: dict[Any, list[int]] = {}
    for index, value in enumerate(args[0]):
        if isinstance(value, ShardedTensor):
            by_wire.setdefault(value.spec.wire, []).append(index)
        else:
            norms[index] = torch.linalg.vector_norm(value, power)
    for indices in by_wire.values():
        for index, norm in zip(indices, _norm_of([args[0][i] for i in indices], power), strict=True):
            norms[index] = norm
    return norms


def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value = args[0]
    if value.spec.numel != 1:
        return _refuse(func, args, kwargs)
    part = value.local.sum() if value.local.numel() else value.local.new_zeros(())
    return _combine(part, value.spec, "sum").item()


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    first, second = args
    spec = first.spec if isinstance(first, ShardedTensor) else second.spec
    if first.shape != second.shape:
        return False
    same = torch.equal(local_part(first, spec), local_part(second, spec))
    return bool(_combine(torch.tensor(int(same), device=first.device), spec, "min").item())


_REDUCTIONS: dict[str, _Rule] = {
    "sum": _sum,
    "mean": _mean,
    "amax": _extreme("max"),
    "amin": _extreme("min"),
    "max": _extreme("max"),
    "min": _extreme("min"),
    "any": _any,
    "all": _all,
    "norm": _vector_norm,
    "linalg_vector_norm": _vector_norm,
    "_foreach_norm": _foreach_norm,
    "_local_scalar_dense": _item,
    "equal": _equal,
}

ShardedTensor.run_operation = staticmethod(run_operation)
