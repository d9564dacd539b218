"""Which parameters belong to which unit: reads the module tree, changes nothing.

Rules. A parameter belongs to the nearest unit module above it. A parameter reachable from several units (tied
weights) is lifted to the lowest unit above all of them. Ignored modules keep their parameters as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from fsdp_core.errors import WrapError
from fsdp_core.handle.flat_param_handle import Place
from fsdp_core.handle.sharded_tensor import ShardedTensor
from fsdp_core.init import is_deferred
from fsdp_core.layout.unit_policy import ModuleFacts, UnitPolicy, as_policy, has_forward
from fsdp_core.runtime.hooks import unit_of
from fsdp_core.runtime.names import TransparentWrapper, join, unit_title, walk
from fsdp_core.runtime.options import ShardingOptions
from fsdp_core.runtime.unit import Unit


@dataclass(eq=False)
class PlannedParameter:
    """One original parameter and everywhere it is reachable."""

    tensor: Tensor
    places: list[Place] = field(default_factory=list)
    units: list[PlannedUnit] = field(default_factory=list)

    @property
    def fqn(self) -> str:
        return self.places[0].fqn


@dataclass(eq=False)
class PlannedUnit:
    """A unit to be built."""

    name: str
    modules: tuple[nn.Module, ...]
    parents: tuple[PlannedUnit, ...]  # from the nearest to the root
    parameters: list[PlannedParameter] = field(default_factory=list)


@dataclass(eq=False)
class Plan:
    """All that building needs. ``units`` are in the order of the tree, the root first."""

    units: list[PlannedUnit]
    inner: list[Unit]  # units that were built before, module by module
    lifted: list[PlannedParameter]
    ignored: set[nn.Module]


def plan_units(root: nn.Module, options: ShardingOptions) -> Plan:
    """Choose units, check them, and give every parameter to one."""
    if unit_of(root) is not None:
        raise WrapError(
            "The module is sharded already.",
            unit=unit_title(""),
            expected="each module is given to fully_shard once, children before their parents",
            got=type(root).__name__,
        )
    ignored = _ignored(root, options.ignored_modules)
    names = _names(root)
    inner = list({id(u): u for m in names if (u := unit_of(m)) is not None}.values())
    _check_inner(inner, names)
    inner_modules = {m for unit in inner for top in unit.modules for m in top.modules()}
    groups = _choose(root, as_policy(options.units), names, ignored, inner_modules)
    units = _unit_tree(root, groups, names)
    owners = {module: unit for unit in units for module in unit.modules}
    found = _find_parameters(root, owners, ignored, inner_modules)
    lifted = []
    for parameter in found:
        if len(parameter.units) > 1:
            lifted.append(parameter)
        _lowest_common(parameter).parameters.append(parameter)
    _check_modules(names, ignored)
    _check_memory(found)
    kept = [unit for unit in units if unit.parameters or not unit.parents]
    return Plan(kept, inner, lifted, ignored)


def _names(root: nn.Module) -> dict[nn.Module, str]:
    names: dict[nn.Module, str] = {}
    for name, module in walk(root):
        names.setdefault(module, name)
    return names


def _ignored(root: nn.Module, modules: Sequence[nn.Module]) -> set[nn.Module]:
    tree = set(root.modules())
    for module in modules:
        if module not in tree:
            raise WrapError(
                "An ignored module is not part of the model.",
                got=type(module).__name__,
                remedy="pass modules of the model given to fully_shard",
            )
    return {inner for module in modules for inner in module.modules()}


def _check_inner(inner: Sequence[Unit], names: dict[nn.Module, str]) -> None:
    """Units that were built before may be taken in only with all of the model they belong to."""
    for unit in inner:
        root = unit.context.root
        if any(module not in names for module in root.modules):
            raise WrapError(
                "A unit belongs to another sharded model already.",
                unit=unit_title(names[unit.modules[0]]),
                expected="units of this model only",
                got=f"a part of {type(root.modules[0]).__name__} that both models use",
                remedy="give both models one parent module that has a forward, and shard that one, with the part that "
                "they share and each of them as `units`",
            )


def _choose(
    root: nn.Module,
    policy: UnitPolicy | None,
    names: dict[nn.Module, str],
    ignored: set[nn.Module],
    inner_modules: set[nn.Module],
) -> list[tuple[nn.Module, ...]]:
    if policy is None:
        return []
    candidates = {m: n for m, n in names.items() if m not in ignored and m not in inner_modules}
    facts = []
    for module, name in candidates.items():
        own = sum(p.numel() for p in module._parameters.values() if p is not None)
        tree = sum(p.numel() for p in module.parameters())
        facts.append(ModuleFacts(name, module, own, tree))
    groups: list[tuple[nn.Module, ...]] = []
    seen: dict[nn.Module, int] = {}
    for group in policy.choose(facts):
        modules = tuple(module for module in group if module is not root)
        for module in modules:
            _check_choice(module, names, ignored, inner_modules, seen)
            seen[module] = len(groups)
        if modules:
            groups.append(modules)
    return groups


def _check_choice(
    module: nn.Module,
    names: dict[nn.Module, str],
    ignored: set[nn.Module],
    inner_modules: set[nn.Module],
    seen: dict[nn.Module, int],
) -> None:
    if not isinstance(module, nn.Module) or module not in names:
        raise WrapError(
            "A chosen unit is not a module of the model.", got=type(module).__name__, remedy="pass its submodules"
        )
    title = unit_title(names[module])
    if module in seen:
        raise WrapError("A module was chosen for two units.", unit=title, expected="each module once")
    if module in ignored:
        raise WrapError("A module is both ignored and chosen as a unit.", unit=title)
    if module in inner_modules:
        raise WrapError(
            "A chosen unit is sharded already, or lies inside a unit that is.",
            unit=title,
            expected="each module is given to fully_shard once, children before their parents",
        )
    if not has_forward(module):
        raise WrapError(
            f"{type(module).__name__} has no forward of its own and cannot be a unit: its hooks would never run.",
            unit=title,
            expected="a module that is called",
            remedy="choose the modules inside it",
        )


def _unit_tree(root: nn.Module, groups: list[tuple[nn.Module, ...]], names: dict[nn.Module, str]) -> list[PlannedUnit]:
    """Planned units in tree order, each with its chain of parents."""
    if not has_forward(root):
        raise WrapError(
            f"{type(root).__name__} has no forward of its own and cannot be a unit: its hooks would never run.",
            unit=unit_title(""),
            remedy="shard the modules inside it, or the module that calls them",
        )
    top = PlannedUnit(unit_title(""), (root,), ())
    chosen = {module: group for group in groups for module in group}
    above: dict[nn.Module, list[set[nn.Module]]] = {module: [] for module in chosen}
    for module in chosen:
        below = set(module.modules())
        for other in below:
            if other is not module and other in above:
                above[other].append({module})
    order = list(names)
    planned: dict[int, PlannedUnit] = {}
    units = [top]
    for module in order:
        group = chosen.get(module)
        if group is None or id(group) in planned:
            continue
        enclosing = [{next(iter(one)) for one in above[member]} for member in group]
        common = set.intersection(*enclosing) if enclosing else set()
        parents = sorted((planned[id(chosen[m])] for m in common if id(chosen[m]) in planned), key=units.index)
        chain = tuple(dict.fromkeys(reversed(parents)))
        name = "+".join(unit_title(names[member]) for member in group)
        unit = PlannedUnit(name, group, (*chain, top))
        planned[id(group)] = unit
        units.append(unit)
    return units


def _find_parameters(
    root: nn.Module,
    owners: dict[nn.Module, PlannedUnit],
    ignored: set[nn.Module],
    inner_modules: set[nn.Module],
) -> list[PlannedParameter]:
    """All parameters, each once, with their places and the units they are reachable from; tree order."""
    found: dict[int, PlannedParameter] = {}
    ignored_ids = {id(p) for module in ignored for p in module._parameters.values() if p is not None}
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, prefix: str, unit: PlannedUnit) -> None:
        unit = owners.get(module, unit)
        if module in seen or module in ignored or module in inner_modules:
            return
        seen.add(module)
        for name, tensor in module._parameters.items():
            if tensor is None or id(tensor) in ignored_ids:
                continue
            fqn = join(prefix, name)
            _check_parameter(tensor, fqn)
            planned = found.setdefault(id(tensor), PlannedParameter(tensor))
            planned.places.append(Place(module, name, fqn))
            if unit not in planned.units:
                planned.units.append(unit)
        for name, child in module._modules.items():
            if child is not None:
                is_transparent = isinstance(module, TransparentWrapper) and name == "module"
                visit(child, prefix if is_transparent else join(prefix, name), unit)

    visit(root, "", owners[root])
    return list(found.values())


def _check_parameter(tensor: Tensor, fqn: str) -> None:
    if isinstance(tensor, ShardedTensor):
        raise WrapError(
            "A parameter is part of a unit already.",
            parameter=f"{fqn} (sharded as {tensor.spec.fqn})",
            expected="tied weights inside one call of fully_shard, and children sharded before their parents",
            got="a parameter of a unit that was built earlier, reached from outside of it",
            remedy="choose both modules as `units` of one fully_shard call: a shared weight is then lifted to the "
            "lowest unit above them",
        )
    if isinstance(tensor, UninitializedParameter):
        raise WrapError(
            "A lazy parameter has no shape yet.", parameter=fqn, remedy="run one forward before sharding the model"
        )


def _check_memory(found: Sequence[PlannedParameter]) -> None:
    """Parameters that overlap in memory (tied by their data, not as objects) would part when they are sharded."""
    spans = []
    for parameter in found:
        tensor = parameter.tensor
        if tensor.numel() and not (tensor.is_meta or is_deferred(tensor)):
            last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            is_dense = last + 1 == tensor.numel()
            spans.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes * is_dense, parameter.fqn))
    spans.sort(key=lambda span: span[0])
    for (_, end, fqn), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise WrapError(
                "Two parameters share memory without being the same parameter: sharding would part them.",
                parameter=f"{fqn} and {other}",
                expected="memory of its own for each parameter",
                got="overlapping memory",
                remedy="tie weights by assigning the same nn.Parameter to both modules",
            )


def _lowest_common(parameter: PlannedParameter) -> PlannedUnit:
    """The lowest unit above (or equal to) all units the parameter is reachable from."""
    first, *others = [(unit, *unit.parents) for unit in parameter.units]
    for candidate in first:
        if all(candidate in chain for chain in others):
            return candidate
    raise AssertionError("the root is above every unit")


def _check_modules(names: dict[nn.Module, str], ignored: set[nn.Module]) -> None:
    """Modules that write their weights in ways that cannot be kept equal on all ranks are refused."""
    for module, name in names.items():
        if module in ignored or not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        for option in ("sparse", "max_norm"):
            if getattr(module, option):
                raise WrapError(
                    f"{type(module).__name__} with {option} cannot be sharded: "
                    + (
                        "its gradients are sparse."
                        if option == "sparse"
                        else "each rank would renormalise the rows that it looks up, and ranks would differ."
                    ),
                    unit=unit_title(name),
                    parameter=join(name, "weight"),
                    remedy=f"build it without {option}, or pass the module in ignored_modules",
                )
