"""Seeds: inside ``seeded_init`` every random operation draws from a seed of its own.

Plain torch draws all numbers from one stream per device, so a value depends on everything drawn before it. Here the
k-th random operation of a build gets the seed ``derive_seed(seed, k)``: its bits depend on the seed, on k and on its
own shape, dtype and device type, and on nothing else. So a recording can be replayed in any order and in parts, and
agrees with the same build run eagerly.

==============================  ===============================================================================
who draws                       from what
==============================  ===============================================================================
torch's default generators      the operation's own seed; the generator's state is put back afterwards
a generator the user passes     a seed derived from its state, which then moves on (same rule in every way)
rejection loops (trunc_normal)  one seed for the call, one below it for each operation inside: their number varies
``random``, numpy               seeded on entry, state put back on exit
==============================  ===============================================================================

``torch.empty`` gives zeros inside the context: what a build leaves unwritten has the same bits everywhere too.
"""

from __future__ import annotations

import functools
import hashlib
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.init
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_SEED_MASK = (1 << 63) - 1  # generators take signed 64-bit seeds

BLANK_OPS = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_permuted.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)
"""Operations whose result is uninitialised memory."""


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part, and on no process, platform or Python hash seed."""
    text = "/".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") & _SEED_MASK


class SeedSource:
    """Hands out the seeds of one build, in program order."""

    __slots__ = ("position", "seed")

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.position = 0

    def next_seed(self) -> int:
        seed = derive_seed(self.seed, self.position)
        self.position += 1
        return seed


class _State(threading.local):
    """Which source is in force, and whether the modes of this package look away (torch's modes are per thread too)."""

    source: SeedSource | None = None
    is_paused: bool = False


_state = _State()


def current_source() -> SeedSource | None:
    """The source of the innermost ``seeded_init``, if there is one."""
    return _state.source


def is_paused() -> bool:
    """True while an operation runs for real on behalf of this package: nobody may seed or record it again."""
    return _state.is_paused


@contextmanager
def paused() -> Iterator[None]:
    previous, _state.is_paused = _state.is_paused, True
    try:
        yield
    finally:
        _state.is_paused = previous


@contextmanager
def drawing_from(source: SeedSource) -> Iterator[None]:
    """Make ``source`` the one in force."""
    previous, _state.source = _state.source, source
    try:
        yield
    finally:
        _state.source = previous


_is_random_cache: dict[Any, bool] = {}


def is_random(op: Any) -> bool:
    """True for operations that draw random numbers (by torch's own tag, or because they take a generator)."""
    known = _is_random_cache.get(op)
    if known is None:
        takes_generator = any(argument.name == "generator" for argument in op._schema.arguments)
        known = _is_random_cache[op] = takes_generator or torch.Tag.nondeterministic_seeded in op.tags
    return known


def draw_seed(source: SeedSource, generator: torch.Generator | None) -> int:
    """The seed of the random operation about to run; moves the source, or the user's generator, on."""
    if generator is None:
        return source.next_seed()
    state = bytes(generator.get_state().tolist())
    seed = int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little") & _SEED_MASK
    generator.manual_seed(derive_seed(seed, "next"))
    return derive_seed(seed, "draw")


@contextmanager
def _default_generator_at(device: torch.device, seed: int) -> Iterator[None]:
    if device.type == "cpu":
        generator = torch.default_generator
        state = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(state)
        return
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    with module.device(index):
        state = module.get_rng_state(index)
        module.manual_seed(seed)
        try:
            yield
        finally:
            module.set_rng_state(state, index)


def _device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            return value[0].device
    return torch.device("cpu")


def run_seeded(op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], seed: int) -> Any:
    """Run one random operation on real tensors with a seed of its own; every generator is left as it was."""
    with paused():
        device = _device_of(args, kwargs)
        if device.type == "meta":
            return op(*args, **kwargs)
        if "generator" in kwargs:
            kwargs = {**kwargs, "generator": None}
        with _default_generator_at(device, seed):
            return op(*args, **kwargs)


class _SeededMode(TorchDispatchMode):
    """Gives each random operation its own seed and each blank tensor zeros, while it is the innermost mode.

    Args:
        private: draw from this source even while the package is paused, and keep every other mode from seeing the
            operations; ``None`` draws from the source in force.
    """

    def __init__(self, private: SeedSource | None = None) -> None:
        super().__init__()
        self._private = private

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._private is not None:
            with paused():
                return self._run(self._private, op, args, kwargs)
        if is_paused() or _state.source is None:
            return op(*args, **kwargs)
        return self._run(_state.source, op, args, kwargs)

    @staticmethod
    def _run(source: SeedSource, op: Any, args: Any, kwargs: Any) -> Any:
        if is_random(op):
            return run_seeded(op, args, kwargs, draw_seed(source, kwargs.get("generator")))
        result = op(*args, **kwargs)
        if op in BLANK_OPS and result.layout is torch.strided and not result.is_quantized:
            result.zero_()
        return result


def run_composite(function: Callable[..., Any], args: Sequence[Any], seed: int) -> Any:
    """Run a Python function on real tensors, the operations inside it seeded one by one below ``seed``."""
    with paused(), _SeededMode(SeedSource(seed)):
        return function(*args)


@contextmanager
def rejection_loops_seeded(
    record: Callable[[Callable[..., Any], Tensor, tuple[Any, ...], int], bool] | None = None,
    fallback: SeedSource | None = None,
) -> Iterator[None]:
    """``trunc_normal_`` draws until all samples are inside: one seed for the call keeps later positions fixed.

    torch offers no hook below ``nn.init.trunc_normal_``, whose loop asks the values when to stop; so the function
    that holds the loop is replaced for the duration. Where torch names it otherwise the loop is simply followed, which
    is exact too, only slower under ``deferred_init`` (see ``Tape.evaluate``).

    Args:
        record: asked first, with (function, tensor, other arguments, seed); True if it took the call.
        fallback: the source outside ``seeded_init``.
    """
    name = "_no_grad_trunc_normal_"
    original = getattr(torch.nn.init, name, None)
    if original is None:
        yield
        return

    @functools.wraps(original)
    def call(
        tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> Tensor:
        source = current_source() or fallback
        if source is None or is_paused() or tensor.is_meta:
            return original(tensor, mean, std, a, b, generator)
        seed = draw_seed(source, generator)
        if record is not None and record(original, tensor, (mean, std, a, b), seed):
            return tensor
        return run_composite(original, (tensor, mean, std, a, b), seed)

    setattr(torch.nn.init, name, call)
    try:
        yield
    finally:
        setattr(torch.nn.init, name, original)


@contextmanager
def _host_streams_at(seed: int) -> Iterator[None]:
    """Python's and numpy's generators and torch's default one, seeded for the duration."""
    numpy = sys.modules.get("numpy")
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    random.seed(derive_seed(seed, "python"))
    torch.default_generator.manual_seed(derive_seed(seed, "torch"))
    if numpy is not None:
        numpy.random.seed(derive_seed(seed, "numpy") % (1 << 32))
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


@contextmanager
def seeded_init(seed: int) -> Iterator[None]:
    """Build a model whose bits depend on ``seed`` alone, however and wherever it is built.

    Works around eager building (``model = build()``) and around ``deferred_init(build)``, and gives the same bits for
    both, on any number of ranks. Plain eager code outside this context draws from one stream and differs. Random
    state of torch, Python and numpy is the same after the context as before it. ``torch.manual_seed`` called inside
    has no effect on what the operations draw.

    Args:
        seed: any integer, the same on all ranks.

    Raises:
        TypeError: ``seed`` is not an integer.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seeded_init takes an integer seed, got {seed!r}")
    with _host_streams_at(seed), drawing_from(SeedSource(seed)), rejection_loops_seeded(), _SeededMode():
        yield
