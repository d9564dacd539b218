"""The wrapper front end: a module around the user's, over the same code as ``fully_shard``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_core.api import clip_grad_norm_, fully_shard, load_state_dict, no_sync, state_dict
from fsdp_core.errors import WrapError
from fsdp_core.policy import RateLimit
from fsdp_core.runtime.names import TransparentWrapper, join, walk


class ShardedWrapper(TransparentWrapper):
    """Forwards calls and attribute look-ups to ``module``; parameter names are those of ``module``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._named("_parameters", prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        yield from self._named("_buffers", prefix, recurse, remove_duplicate)

    def _named(self, table: str, prefix: str, recurse: bool, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
        """As torch does, under names that skip this level and the wrappers below it."""
        seen: set[int] = set()
        modules: set[nn.Module] = set()
        for name, module in walk(self, prefix) if recurse else [(prefix, self.module)]:
            if remove_duplicate and module in modules:
                continue
            modules.add(module)
            for key, value in getattr(module, table).items():
                if value is not None and not (remove_duplicate and id(value) in seen):
                    seen.add(id(value))
                    yield join(name, key), value


class FullyShardedDataParallel(ShardedWrapper):
    """The wrapper front end: ``FullyShardedDataParallel(module, ...)`` shards ``module`` and stands in its place.

    Takes the arguments of ``fully_shard`` and, for moving over, torch's names of the same things:
    ``auto_wrap_policy`` (``units``), ``limit_all_gathers`` (``rate_limit``), ``device_id`` (``device``) and
    ``device_mesh`` (``mesh``); ``backward_prefetch`` and ``cpu_offload`` also in torch's values, ignored modules as
    ``ignored_states`` too. A sharding strategy is given as the two numbers it stands for, F and
    ``reshard_after_forward``. ``use_orig_params`` changes nothing: original parameters are always there.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        *,
        auto_wrap_policy: Any = None,
        limit_all_gathers: bool | None = None,
        device_id: int | torch.device | None = None,
        device_mesh: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(module)
        _adapt_options(options)
        if auto_wrap_policy is not None:
            options["units"] = _adapt_policy(auto_wrap_policy)
        if limit_all_gathers is not None:
            options.setdefault("rate_limit", RateLimit() if limit_all_gathers else RateLimit(kind="unlimited"))
        if device_id is not None:
            options["device"] = torch.device("cuda", device_id) if isinstance(device_id, int) else device_id
        if device_mesh is not None:
            options["mesh"] = device_mesh
        fully_shard(self, process_group=process_group, **options)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        return clip_grad_norm_(self, max_norm, norm_type, error_if_nonfinite)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with no_sync(self):
            yield

    def state_dict(  # type: ignore[override]
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """The full kind. A plain module around this one hands over its own ``destination``, and the prefix here."""
        state = {prefix + name: value for name, value in state_dict(self).items()}
        if destination is None:
            return state
        destination.update(state)
        return destination

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return load_state_dict(self, state, strict)


def _adapt_options(options: dict[str, Any]) -> None:
    """torch's keywords and values become those of ``fully_shard``, or are refused with what to use here."""
    strategy = options.pop("sharding_strategy", None)
    if strategy is not None:
        raise WrapError(
            "There is no sharding strategy here, but two numbers.",
            expected="sharding_factor and reshard_after_forward",
            got=strategy,
            remedy="FULL_SHARD: F = W, True. SHARD_GRAD_OP: F = W, False. NO_SHARD: F = 1. "
            "HYBRID_SHARD: F = ranks per host, True. _HYBRID_SHARD_ZERO2: F = ranks per host, False",
        )
    if options.pop("param_init_fn", None) is not None:
        raise WrapError(
            "There is no `param_init_fn` here.", remedy="build the model with fsdp_core.deferred_init, then shard it"
        )
    options.pop("use_orig_params", None)
    prefetch = options.get("backward_prefetch", True)
    if getattr(prefetch, "name", None) in ("BACKWARD_PRE", "BACKWARD_POST") or prefetch is None:
        options["backward_prefetch"] = prefetch is not None
    offload = options.get("cpu_offload", False)
    options["cpu_offload"] = False if offload is None else getattr(offload, "offload_params", offload)
    states = tuple(options.pop("ignored_states", None) or ())
    if any(not isinstance(state, nn.Module) for state in states):
        raise WrapError(
            "Only whole modules can be ignored.",
            expected="modules in ignored_states or ignored_modules",
            got="parameters",
            remedy="name the modules that hold them",
        )
    if states:
        options["ignored_modules"] = (*(options.get("ignored_modules") or ()), *states)


def _adapt_policy(policy: Any) -> Any:
    """torch's policies: a set of classes, objects that hold classes or a lambda, or partial functions."""
    wrapped = policy.func if isinstance(policy, functools.partial) else policy
    name = getattr(wrapped, "__name__", type(wrapped).__name__)
    if name == "size_based_auto_wrap_policy":
        return int(policy.keywords.get("min_num_params", 1e8)) if isinstance(policy, functools.partial) else int(1e8)
    if name == "transformer_auto_wrap_policy":
        return tuple(policy.keywords["transformer_layer_cls"])
    if name == "always_wrap_policy":
        return lambda fqn, module: any(True for _ in module.parameters()) and _is_callable_module(module)
    if name == "ModuleWrapPolicy":
        return tuple(policy._module_classes)
    if name == "lambda_auto_wrap_policy":
        return lambda fqn, module: bool(policy.keywords["lambda_fn"](module))
    if name == "CustomPolicy":
        return lambda fqn, module: _chosen(policy._lambda_fn(module))
    if isinstance(policy, (set, frozenset)):
        return tuple(policy)
    if inspect.isroutine(wrapped) and "nonwrapped_numel" in inspect.signature(wrapped).parameters:
        raise WrapError(
            "A policy of the form (module, recurse, nonwrapped_numel) cannot be used here.",
            expected="a predicate (fqn, module), a size, classes, or one of torch's own policies",
            got=name,
            remedy="return True for the modules that become units, or give their least number of elements",
        )
    return policy


def _chosen(answer: Any) -> bool:
    if isinstance(answer, dict):
        raise WrapError(
            "A policy gave options for one module.",
            expected="True or False",
            got=answer,
            remedy="shard that module first, with its own options, then the model",
        )
    return bool(answer)


def _is_callable_module(module: nn.Module) -> bool:
    return type(module).forward.__name__ != "_forward_unimplemented"
