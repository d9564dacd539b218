"""Do all ranks issue the same collectives in the same order? For wires that send no header of their own.

Every collective adds its label to a running digest. At ``quiesce``, which every rank calls before an optimizer may
write, the digests of the group are compared: one all-gather of 16 bytes per rank and step, whatever the number of
units. Only when they differ are the labels themselves exchanged, to name the first pair that does not match.

gloo ends the process when a message is longer than its receiver expects. Where it carries the collectives, the
digests are compared before each of them, too: 16 bytes per rank that always fit.

On CUDA the comparison is read when the optimizer steps (a global step hook) or at the next use of the wire,
whichever comes first, so that the host does not wait for the device at the end of backward.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_core.comm.wire import Label
from fsdp_core.errors import MismatchError

MAX_REMEMBERED = 4096  # labels between two comparisons that can be named
_TEXT_BYTES = 160

Gather = Callable[[Tensor], list[Tensor]]


def describe_call(primitive: str, label: Label) -> str:
    where = label.unit or "no unit"
    return f"{primitive} of unit {where} in phase {label.phase}"


class CallRecord:
    """The collectives of one wire since the last comparison."""

    def __init__(self, ranks: Sequence[int], device: torch.device, gather: Gather) -> None:
        self._ranks, self._device, self._gather = tuple(ranks), device, gather
        self._calls: list[tuple[str, Label]] = []
        self._num_calls = 0
        self._digest = 0
        self._pending: tuple[list[Tensor], torch.cuda.Event, list[tuple[str, Label]]] | None = None
        if device.type == "cuda":
            read_before_steps(self)

    def add(self, primitive: str, label: Label, numel: int) -> None:
        self._num_calls += 1
        # tuples of integers hash alike in every process; strings do not, hence their codes
        self._digest = hash((self._digest, _code(primitive), label.unit_id, _code(label.phase), numel))
        if len(self._calls) < MAX_REMEMBERED:
            self._calls.append((primitive, label))

    def compare(self) -> None:
        """Collective. Raises ``MismatchError`` on all ranks if their calls differ (on CUDA: later, see above)."""
        self.read_pending()
        mine = torch.tensor([self._num_calls, self._digest], dtype=torch.int64, device=self._device)
        gathered = self._gather(mine)
        calls = self._take_calls()
        if self._device.type != "cuda":
            self._judge(gathered, calls)
            return
        on_host = [one.to("cpu", non_blocking=True) for one in gathered]
        event = torch.cuda.Event()
        event.record()
        self._pending = (on_host, event, calls)

    def compare_first(self, gather: Gather) -> None:
        """Collective, behind ``add`` and before the call itself. A rank that is in ``compare`` meanwhile meets this
        and knows: it has issued a call less. Raises ``MismatchError`` on all ranks, and forgets their calls."""
        gathered = gather(torch.tensor([self._num_calls, self._digest], dtype=torch.int64, device=self._device))
        if any(not torch.equal(one, gathered[0]) for one in gathered):
            self._judge(gathered, self._take_calls())

    def _take_calls(self) -> list[tuple[str, Label]]:
        calls, self._calls, self._num_calls, self._digest = self._calls, [], 0, 0
        return calls

    def read_pending(self) -> None:
        """Wait for and judge a comparison that is still on the device."""
        pending, self._pending = self._pending, None
        if pending is not None:
            on_host, event, calls = pending
            event.synchronize()
            self._judge(on_host, calls)

    def _judge(self, gathered: list[Tensor], calls: list[tuple[str, Label]]) -> None:
        facts = [tuple(one.tolist()) for one in gathered]
        if all(one == facts[0] for one in facts):
            return
        most = min(max(count for count, _ in facts), MAX_REMEMBERED)
        texts = self._exchange(calls, most)
        index = next((i for i in range(most) if len({rows[i] for rows in texts}) > 1), 0)
        raise MismatchError(
            f"The ranks issued different collectives; call {index} since the last end of backward differs.",
            expected="the same units in the same order on every rank",
            got="; ".join(f"rank {rank}: {rows[index]}" for rank, rows in zip(self._ranks, texts, strict=True)),
            remedy="run the same units on every rank (feed unused ones with zeros), and equally many batches "
            "(fsdp_core.join)",
        )

    def _exchange(self, calls: list[tuple[str, Label]], most: int) -> list[list[str]]:
        """All ranks' calls as text, padded to the same number."""
        rows = ([describe_call(*call) for call in calls] + ["nothing"] * most)[:most]
        packed = b"".join(row.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES) for row in rows)
        gathered = self._gather(torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(self._device))
        texts = []
        for one in gathered:
            data = bytes(one.cpu().tolist())
            texts.append(
                [data[i : i + _TEXT_BYTES].decode(errors="replace").rstrip() for i in range(0, len(data), _TEXT_BYTES)]
            )
        return texts


def hash_of(text: str) -> int:
    """56 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


@functools.cache
def _code(text: str) -> int:
    return hash_of(text)


_waiting: weakref.WeakSet[CallRecord] = weakref.WeakSet()
_hook_handles: list[object] = []


def read_before_steps(record: CallRecord) -> None:
    """From now on every optimizer's step reads what ``record`` has pending."""
    _waiting.add(record)
    if not _hook_handles:
        _hook_handles.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(*_: object) -> None:
    for record in list(_waiting):
        record.read_pending()
