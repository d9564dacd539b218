"""What to change, read off a plan. Each rule looks at one thing and names overrides that help."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from recipes.amounts import gb
from recipes.plan.result import Advice, Plan
from recipes.schema import RecipeConfig

_MUCH = 0.1  # of a step's time
_THIN = 0.05  # of usable memory

Rule = Callable[[Plan, RecipeConfig], Iterator[Advice]]


def advice_for(plan: Plan, config: RecipeConfig) -> Plan:
    """The plan with its advice, what blocks first. Where memory decides, nothing is said of a time that is not told."""
    of_time = () if plan.rates is None else (_talking, _latency, _host)
    found = [one for rule in (_out_of_memory, _retries, _thin_margin, *of_time) for one in rule(plan, config)]
    return replace(plan, advice=tuple(sorted(found, key=lambda one: not one.is_blocking)))


def smaller(plan: Plan, config: RecipeConfig) -> str:
    """Overrides that lower the peak, the cheapest first."""
    changes = []
    if not config.train.activation_checkpointing and plan.memory.at_peak.get("activations", 0) > 0:
        changes.append("train.activation_checkpointing=true")
    if not plan.reshard_after_forward:
        changes.append("sharding.reshard_after_forward=true")
    if config.sharding.gather_buffers == "allocator":
        changes.append("sharding.gather_buffers=pooled")
    if plan.sharding_factor < plan.world_size:
        changes.append(f"sharding.factor={plan.world_size}")
    if plan.micro_batch > 1:
        changes.append(f"train.micro_batch={plan.micro_batch // 2}")
    if config.rate_limiter.kind == "unlimited":
        changes.append("rate_limiter=fixed")
    elif config.rate_limiter.max_inflight > 2:
        changes.append("rate_limiter.max_inflight=2")
    return ", ".join(changes) or "more ranks (cluster.num_nodes)"


def _out_of_memory(plan: Plan, config: RecipeConfig) -> Iterator[Advice]:
    if plan.fits:
        return
    memory = plan.memory
    what = f"out of memory: {gb(memory.needed)} needed, {gb(memory.usable)} usable"
    yield Advice(what, smaller(plan, config), is_blocking=True)


def _retries(plan: Plan, config: RecipeConfig) -> Iterator[Advice]:
    if plan.fits and plan.has_retries:
        times = f"{plan.memory.num_alloc_retries} times a step"
        what = f"the allocator runs out and gives its cache back {times}, the device standing still: no speed is told"
        yield Advice(what, smaller(plan, config))


def _thin_margin(plan: Plan, config: RecipeConfig) -> Iterator[Advice]:
    memory = plan.memory
    if plan.fits and not plan.has_retries and memory.margin < _THIN * memory.usable:
        yield Advice(f"only {gb(memory.margin)} are left before the allocator retries", smaller(plan, config))


def _talking(plan: Plan, config: RecipeConfig) -> Iterator[Advice]:
    time = plan.time
    if time.exposed_s <= _MUCH * time.step_s:
        return
    changes = []
    if not config.sharding.backward_prefetch:
        changes.append("sharding.backward_prefetch=true")
    if not config.sharding.forward_prefetch:
        changes.append("sharding.forward_prefetch=true")
    spans_hosts = plan.ranks_per_host < plan.sharding_factor
    if spans_hosts:
        changes.append(f"sharding.factor={plan.ranks_per_host} (if it fits)")
    changes.append(f"train.micro_batch={2 * plan.micro_batch} (if it fits)")
    share = 100 * time.exposed_s / time.step_s
    yield Advice(f"{share:.0f} % of the step waits for communication", ", ".join(changes))


def _latency(plan: Plan, config: RecipeConfig) -> Iterator[Advice]:
    time = plan.time
    if time.communication_s and time.latency_s > 0.5 * time.communication_s and time.exposed_s > _MUCH * time.step_s:
        share = 100 * time.latency_s / time.communication_s
        what = f"{share:.0f} % of the communication is latency: units are small for {plan.sharding_factor} ranks"
        yield Advice(what, "larger units (sharding.units=size), or a smaller sharding.factor")


def _host(plan: Plan, config: RecipeConfig) -> Iterator[Advice]:
    time = plan.time
    if time.idle_s > _MUCH * time.step_s:
        share = 100 * time.idle_s / time.step_s
        what = f"{share:.0f} % of the step waits for the host to issue work"
        yield Advice(what, f"train.micro_batch={2 * plan.micro_batch} (if it fits), train.compile=true")
