"""The fake device: tensors without memory, and the recorder that writes down what happens to them.

===================  =================  =========================================================================
tensor               memory             what an operation on it does
===================  =================  =========================================================================
``DeferredTensor``   none               recorded; shapes come from torch's meta kernels
real, in the build   as eager           among themselves they run at once; large results are recorded instead;
                                        one that is written from deferred values makes those values real first
===================  =================  =========================================================================

A deferred tensor says the device it would lie on, is a ``Parameter`` where eager building would make one, and can be
viewed, written, cast, cloned, deep-copied and re-pointed (``.data =``). Code that asks for values (``.item()``,
``bool``, ``.tolist()``, ``.numpy()``, boolean indexing) gets the exact ones: what they need is replayed at once and
dropped again. What has no exact answer raises ``InitError``.

A deferred tensor keeps recording after the build: ``model.to(torch.bfloat16)`` and ``model.apply(init)`` work.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_core.errors import InitError
from fsdp_core.init.fake_tensor import SET_DATA, DeferredTensor, refusal, set_data, show_geometry
from fsdp_core.init.operations import (
    METADATA_OPS,
    OVERWRITING_OPS,
    OpTraits,
    result_device,
    traits_of,
    written_tensors,
)
from fsdp_core.init.recording import (
    CLONE_LIMIT_BYTES,
    Node,
    Recording,
    Slot,
    TensorRef,
    map_leaves,
    tensors_in,
)
from fsdp_core.init.replay import replay, view
from fsdp_core.init.seeding import (
    BLANK_OPS,
    SeedSource,
    current_source,
    draw_seed,
    is_paused,
    is_random,
    paused,
    run_seeded,
)

aten = torch.ops.aten


class Recorder:
    """Records operations on deferred tensors and makes new ones. One lives as long as any of its tensors."""

    def __init__(self) -> None:
        self.recording = Recording()
        self.read_only_arrays: list[str | None] = []  # labels of tensors handed out as arrays
        self._source = SeedSource(0)
        self._num_open = 0
        self._values: dict[Slot, tuple[int, torch.UntypedStorage]] = {}  # small slots made real, and when

    @contextmanager
    def open(self, source: SeedSource) -> Iterator[None]:
        """Record everything that happens in the context; random operations draw from ``source`` also afterwards."""
        self._source = source
        self._num_open += 1
        self.recording.num_builds += 1
        try:
            with _RecordingMode(self), _RepointingMode():
                yield
        finally:
            self._num_open -= 1

    def source(self) -> SeedSource:
        return current_source() or self._source

    # -- operations --------------------------------------------------------------------------------------------------

    def dispatch(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Carry out one operation: record it, or run it for real where nothing in it is deferred."""
        if op in METADATA_OPS:
            with torch._C._DisableTorchDispatch():
                return op(*args, **kwargs)
        tensors = list(tensors_in([args, kwargs]))
        deferred = [t for t in tensors if isinstance(t, DeferredTensor)]
        traits = traits_of(op)
        seed = draw_seed(self.source(), kwargs.get("generator")) if is_random(op) else None
        with paused():
            if tensors and not deferred and not self._worth_deferring(traits, tensors, kwargs.get("device")):
                self._freeze_written(traits, args, kwargs)
                return self._run_real(op, args, kwargs, seed)
            self._check_alive(op, traits, deferred)
            written = written_tensors(traits, args, kwargs)
            if traits.returns_only_values or any(not isinstance(t, DeferredTensor) for t in written):
                self._freeze_written(traits, args, kwargs)
                return self._run_now(op, args, kwargs, seed)
            return self._record(op, traits, args, kwargs, seed)

    @staticmethod
    def _worth_deferring(traits: OpTraits, tensors: Sequence[Tensor], device: Any) -> bool:
        """Whether an operation among real tensors alone would copy something large."""
        if not traits.makes_only_fresh or traits.written:
            return False
        if device is not None and torch.device(device).type != "meta" and all(t.is_meta for t in tensors):
            return True  # Module.to_empty of a module built on the meta device
        return sum(t.numel() * t.itemsize for t in tensors if not t.is_meta) > CLONE_LIMIT_BYTES

    def _freeze_written(self, traits: OpTraits, args: Any, kwargs: Any) -> None:
        for tensor in written_tensors(traits, args, kwargs):
            for constant in self.recording.constants:
                if not isinstance(tensor, DeferredTensor) and constant.shares_memory_with(tensor):
                    constant.freeze()

    def _check_alive(self, op: Any, traits: OpTraits, deferred: Sequence[DeferredTensor]) -> None:
        for tensor in deferred:
            if tensor.is_delivered and (traits.makes_only_fresh or traits.written):
                raise InitError(
                    f"{op} uses a deferred tensor that was already materialised",
                    parameter=tensor.slot.label,
                    remedy="use the module's present parameter; this one is from before materialize()",
                )
        if self._num_open == 0 and torch.is_grad_enabled() and traits.makes_only_fresh:
            for tensor in deferred:
                if tensor.requires_grad:
                    raise InitError(
                        f"{op} computes with a parameter that is not materialised",
                        parameter=tensor.slot.label,
                        remedy="call materialize(model) or fully_shard(model) before the first forward",
                    )

    def _record(self, op: Any, traits: OpTraits, args: Any, kwargs: dict[str, Any], seed: int | None) -> Any:
        to_meta = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta"
        metas: dict[int, DeferredTensor] = {}
        device = result_device(args, kwargs)
        recorded = map_leaves(self._reference, args), map_leaves(self._reference, kwargs)
        written = [t for t in written_tensors(traits, args, kwargs) if isinstance(t, DeferredTensor)]
        meta_args = map_leaves(lambda leaf: _meta_of(leaf, metas), args)
        meta_kwargs = map_leaves(lambda leaf: _meta_of(leaf, metas), kwargs)
        if traits.has_device:
            meta_kwargs["device"] = torch.device("meta")
        if "generator" in meta_kwargs:
            meta_kwargs["generator"] = None
        try:
            result = op(*meta_args, **meta_kwargs)
        except Exception as error:  # no meta kernel, or a shape that depends on values, or the user's own mistake
            if not written:
                return self._run_now(op, args, kwargs, seed)
            if traits.changes_geometry or not isinstance(error, NotImplementedError):
                raise
            result = written[0].meta if len(written) == 1 else tuple(t.meta for t in written)
        if to_meta:
            return result
        known = {t.meta.untyped_storage()._cdata: t.slot for t in metas.values()}
        outputs, made = self._wrap(result, metas, known, device)
        if traits.changes_geometry:
            self._sync_geometry(op, written, known)
        if made or (written and op._schema.name != "aten::set_"):
            self._append(op, recorded, metas.values(), written, made, seed)
        return outputs

    def _reference(self, leaf: Any) -> Any:
        if isinstance(leaf, DeferredTensor):
            return leaf.ref()
        if isinstance(leaf, Tensor):
            return self.recording.constant(leaf)
        return None if isinstance(leaf, torch.Generator) else leaf

    def _wrap(
        self, result: Any, metas: dict[int, DeferredTensor], known: dict[int, Slot], device: torch.device
    ) -> tuple[Any, list[tuple[int, TensorRef]]]:
        """The operation's outputs as deferred tensors, and the storages among them that are new."""
        made: list[tuple[int, TensorRef]] = []
        count = 0

        def wrap(leaf: Any) -> Any:
            nonlocal count
            position, count = count, count + isinstance(leaf, Tensor)
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) in metas:
                return metas[id(leaf)]
            storage = leaf.untyped_storage()
            slot = known.get(storage._cdata)
            is_new = slot is None
            if slot is None:
                slot = known[storage._cdata] = self.recording.new_slot(storage.nbytes(), device)
            tensor = DeferredTensor(leaf, slot, self)
            if is_new:
                made.append((position, tensor.ref()))
            return tensor

        return map_leaves(wrap, result), made

    def _append(
        self,
        op: Any,
        recorded: tuple[Any, dict[str, Any]],
        inputs: Any,
        written: Sequence[DeferredTensor],
        made: list[tuple[int, TensorRef]],
        seed: int | None,
        is_composite: bool = False,
    ) -> None:
        args, kwargs = recorded
        writes = tuple(dict.fromkeys([*(t.slot for t in written), *(ref.slot for _, ref in made)]))
        overwrites = made[0][1].slot if len(made) == 1 and not written else None
        reads = tuple(dict.fromkeys(t.slot for t in inputs))
        if op in OVERWRITING_OPS and isinstance(args[0], TensorRef) and args[0].covers_slot():
            target = args[0].slot
            others = {ref.slot for ref in _refs_in((args[1:], kwargs))}
            if target not in others:
                overwrites, reads = target, tuple(others)
        node = Node(
            op=op,
            args=args,
            kwargs=kwargs,
            reads=reads,
            writes=writes,
            made=tuple(made),
            overwrites=overwrites,
            is_blank=op in BLANK_OPS,
            seed=seed,
            is_composite=is_composite,
            default_dtype=torch.get_default_dtype(),
        )
        self.recording.append(node)

    def _sync_geometry(self, op: Any, written: Sequence[DeferredTensor], known: dict[int, Slot]) -> None:
        """After transpose_, resize_, set_: the tensor itself shows the new geometry and, for set_, the new slot."""
        for tensor in written:
            storage = tensor.meta.untyped_storage()
            slot = known.get(storage._cdata)
            if slot is None:
                raise refusal(str(op), tensor)
            slot.nbytes = max(slot.nbytes, storage.nbytes())
            tensor.slot = slot
            show_geometry(tensor, DeferredTensor(tensor.meta, slot, self))

    def record_composite(self, function: Callable[..., Any], tensor: Tensor, rest: tuple[Any, ...], seed: int) -> bool:
        """Record a Python function that writes its first argument; False if that has real memory."""
        if not isinstance(tensor, DeferredTensor):
            return False
        self._append(function, ((tensor.ref(), *rest), {}), [tensor], [tensor], [], seed, is_composite=True)
        return True

    def adopt(self, tensor: Tensor) -> DeferredTensor:
        """A deferred tensor with the values of a real one."""
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        slot = self.recording.new_slot(meta.untyped_storage().nbytes(), tensor.device)
        adopted = DeferredTensor(meta, slot, self)
        with paused():
            args = (self.recording.constant(tensor),)
        self._append(aten.clone.default, (args, {}), [], [], [(0, adopted.ref())], None)
        return adopted

    # -- values ------------------------------------------------------------------------------------------------------

    def _run_now(self, op: Any, args: Any, kwargs: dict[str, Any], seed: int | None) -> Any:
        """Run one operation for real, on the exact values of its deferred arguments; the results are real."""
        lost = [t for t in written_tensors(traits_of(op), args, kwargs) if isinstance(t, DeferredTensor)]
        if lost:
            raise refusal(str(op), *lost)
        deferred = [t for t in tensors_in([args, kwargs]) if isinstance(t, DeferredTensor)]
        real = dict(zip(map(id, deferred), self.evaluate(deferred, str(op)), strict=True))
        args = map_leaves(lambda leaf: real.get(id(leaf), leaf), args)
        kwargs = map_leaves(lambda leaf: real.get(id(leaf), leaf), kwargs)
        return self._run_real(op, args, kwargs, seed)

    def _run_real(self, op: Any, args: Any, kwargs: dict[str, Any], seed: int | None) -> Any:
        if seed is None:
            return op(*args, **kwargs)
        device = result_device(args, kwargs)
        if device.type != "meta":
            self.recording.note_host_draw(str(op), None, device.type)
        return run_seeded(op, args, kwargs, seed)

    def evaluate(self, tensors: Sequence[DeferredTensor], reason: str) -> list[Tensor]:
        """The present values of some deferred tensors, on the device the build believes in. Not to be written to."""
        storages: dict[Slot, torch.UntypedStorage] = {}
        wanted: dict[Slot, str] = {}
        for tensor in tensors:
            slot = tensor.slot
            known = self._values.get(slot)
            if known is not None and known[0] == len(slot.writers):
                storages[slot] = known[1]
            else:
                wanted[slot] = slot.label or repr(tensor)
        for slot, storage in replay(self.recording, wanted, None):
            storages[slot] = storage
            if slot.nbytes <= CLONE_LIMIT_BYTES:
                self._values[slot] = (len(slot.writers), storage)
        for index in self.recording.plan(wanted):
            node = self.recording.nodes[index]
            if node.seed is not None:
                label = node.writes[0].label or next(iter(wanted.values()))
                self.recording.note_host_draw(reason, label, node.writes[0].device.type)
                break
        return [view(tensor.ref(), storages[tensor.slot]) for tensor in tensors]


class _RecordingMode(TorchDispatchMode):
    """Sends operations that touch no deferred tensor yet (factories above all) to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_paused():
            return op(*args, **kwargs or {})
        return self._recorder.dispatch(op, args, kwargs or {})


class _RepointingMode(TorchFunctionMode):
    """Sees ``real.data = deferred``, which asks no subclass and would leave a tensor without memory behind."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == SET_DATA and isinstance(args[1], DeferredTensor):
            return set_data(*args)
        return function(*args, **kwargs or {})


def _meta_of(leaf: Any, metas: dict[int, DeferredTensor]) -> Any:
    if isinstance(leaf, DeferredTensor):
        metas[id(leaf.meta)] = leaf
        return leaf.meta
    if isinstance(leaf, Tensor) and leaf.device.type != "meta":
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return leaf


def _refs_in(value: Any) -> Iterator[TensorRef]:
    if isinstance(value, TensorRef):
        yield value
    elif isinstance(value, dict):
        yield from _refs_in(tuple(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _refs_in(item)


_live: weakref.ref[Recorder] | None = None


def live_recorder() -> Recorder:
    """The recorder that some tensors still belong to, or a new one: two deferred models can share a weight."""
    global _live
    recorder = _live() if _live is not None else None
    if recorder is None:
        recorder = Recorder()
        _live = weakref.ref(recorder)
    return recorder
