"""What a deferred module is, what materialising keeps, what is refused, and how much memory lives."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_core.errors import InitError
from fsdp_core.init import deferred_init, is_deferred, materialize, materialize_unit, seeded_init, stream_unit
from fsdp_core.init.recording import CLONE_LIMIT_BYTES

BIG = CLONE_LIMIT_BYTES // 4 + 1


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.cache = [torch.zeros(2), {"mask": torch.ones(2, 2).tril()}]


def linear() -> nn.Linear:
    return nn.Linear(3, 3)


def test_a_deferred_module_says_what_it_will_be() -> None:
    module = deferred_init(nn.Linear, 4, 3, dtype=torch.bfloat16)
    weight = module.weight
    assert is_deferred(module)
    assert is_deferred(weight)
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    assert weight.is_leaf
    assert (tuple(weight.shape), weight.dtype, weight.device.type) == ((3, 4), torch.bfloat16, "cpu")
    assert not weight.is_meta
    assert "DeferredTensor(Parameter, size=(3, 4)" in repr(weight)
    assert sum(p.numel() for p in module.parameters()) == 15


def test_a_175b_layer_takes_no_memory() -> None:
    module = deferred_init(nn.Linear, 1 << 18, 1 << 18, bias=False)  # 256 GiB
    assert module.weight.numel() == 1 << 36


def test_tied_weights_stay_tied_and_plain_attributes_get_memory() -> None:
    module = materialize(deferred_init(Tied))
    assert module.head.weight is module.embed.weight
    assert not is_deferred(module.cache[0])
    assert module.cache[1]["mask"].tolist() == [[1, 0], [1, 1]]


def test_tied_weights_stay_tied_across_partial_calls() -> None:
    module = deferred_init(Tied)
    materialize(module, only=module.head)
    assert not is_deferred(module.embed.weight)
    assert module.head.weight is module.embed.weight


def test_storages_shared_by_views_stay_shared() -> None:
    def build() -> nn.Module:
        module = nn.Module()
        flat = torch.zeros(6)
        module.register_buffer("flat", flat)
        module.part = nn.Parameter(flat[2:4])
        return module

    module = deferred_init(build)
    materialize(module, only=[module.part])
    materialize(module)
    with torch.no_grad():
        module.part.fill_(5)
    assert module.flat.tolist() == [0, 0, 5, 5, 0, 0]


def test_only_leaves_the_rest_deferred() -> None:
    module = deferred_init(lambda: nn.Sequential(linear(), linear()))
    materialize(module, only=[module[0].weight])
    assert [is_deferred(p) for p in module.parameters()] == [False, True, True, True]
    with pytest.raises(InitError, match="Only deferred tensors"):
        materialize(module, only=[module[0].weight])


def test_attributes_and_hooks_of_parameters_are_kept() -> None:
    fired = []

    def build() -> nn.Module:
        module = linear()
        module.weight._no_weight_decay = True
        module.weight.register_hook(lambda grad: fired.append("hook"))
        module.weight.register_post_accumulate_grad_hook(lambda p: fired.append("post"))
        module.bias.requires_grad_(False)
        module.table = nn.Buffer(torch.arange(3), persistent=False)
        return module

    module = materialize(deferred_init(build))
    module(torch.ones(1, 3)).sum().backward()
    assert module.weight._no_weight_decay is True
    assert fired == ["hook", "post"]
    assert module.bias.grad is None
    assert type(module.table) is torch.Tensor or isinstance(module.table, nn.Buffer)
    assert "table" not in module.state_dict()


def test_rnn_weight_lists_follow() -> None:
    module = materialize(deferred_init(nn.LSTM, 3, 4))
    assert all(a is b for a, b in zip(module._flat_weights, module.parameters(), strict=True))
    module(torch.ones(2, 1, 3))[0].sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_two_deferred_models_can_share_a_weight() -> None:
    first, second = deferred_init(linear), deferred_init(linear)
    second.weight = first.weight
    with torch.no_grad():
        second.bias.copy_(first.weight[0])
    materialize(first)
    materialize(second)
    assert second.weight is not first.weight  # two calls on two modules: two objects, one memory
    assert second.weight.data_ptr() == first.weight.data_ptr()
    assert torch.equal(second.bias, first.weight[0])


def test_a_large_table_is_not_copied_while_recording() -> None:
    table = np.arange(2 * BIG, dtype=np.float64)

    class Meter(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            result = op(*args, **kwargs or {})
            aliases = op._schema.returns[0].alias_info is not None
            if isinstance(result, torch.Tensor) and not aliases and not result.is_meta:
                self.largest = max(self.largest, result.numel() * result.itemsize)
            return result

    def build() -> nn.Module:
        module = nn.Module()
        module.table = nn.Parameter(torch.from_numpy(table).float() * 2)
        return module

    with Meter() as meter:
        module = deferred_init(build)
    assert is_deferred(module.table)
    assert meter.largest < CLONE_LIMIT_BYTES
    assert torch.equal(materialize(module).table, torch.from_numpy(table).float() * 2)


def test_a_table_changed_during_the_build_keeps_its_earlier_values() -> None:
    def build() -> nn.Module:
        table = torch.from_numpy(np.ones(2 * BIG))
        module = nn.Module()
        module.table = nn.Parameter(table * 2)
        table.zero_()
        return module

    assert materialize(deferred_init(build)).table[0] == 2


def test_a_table_changed_after_the_build_is_an_error_with_names() -> None:
    table = np.ones(2 * BIG)

    def build() -> nn.Module:
        module = nn.Module()
        module.table = nn.Parameter(torch.from_numpy(table) * 2)
        return module

    module = deferred_init(build)
    table[5] = 3.0
    with pytest.raises(InitError, match=r"(?s)changed after it was read \(by aten.mul.*parameter: table"):
        materialize(module)


def test_a_write_to_a_real_tensor_happens_at_once() -> None:
    real = torch.zeros(3, 3)
    log = nn.Parameter(torch.zeros(1))

    def build() -> nn.Module:
        module = linear()
        real.copy_(module.weight.detach())
        log.data = module.bias.detach()
        return module

    with seeded_init(3):
        module = deferred_init(build)
    materialize(module)
    assert torch.equal(real, module.weight)
    assert torch.equal(log, module.bias)


# -- refusals --------------------------------------------------------------------------------------------------------


def writes_through_numpy() -> nn.Module:
    module = linear()
    module.weight.data.numpy()[:] = 1.0
    return module


def asks_for_the_address() -> nn.Module:
    module = linear()
    assert module.weight.data_ptr()
    return module


def asks_for_the_storage() -> nn.Module:
    module = linear()
    module.weight.untyped_storage().fill_(0)
    return module


@pytest.mark.parametrize(
    ("build", "operation"),
    [
        (writes_through_numpy, "numpy"),
        (asks_for_the_address, r"Tensor\.data_ptr\(\)"),
        (asks_for_the_storage, r"Tensor\.untyped_storage\(\)"),
    ],
)
def test_what_has_no_replay_is_named(build: Callable[[], nn.Module], operation: str) -> None:
    with pytest.raises(InitError, match=rf"(?s){operation}.*parameter: Linear\.weight"):
        deferred_init(build)


def test_lazy_modules_are_refused() -> None:
    with pytest.raises(InitError, match="lazy module"):
        deferred_init(nn.LazyLinear, 3)


def test_a_module_from_the_meta_device_has_nothing_to_materialise() -> None:
    with torch.device("meta"):
        module = linear()
    with pytest.raises(InitError, match=r"(?s)no recording.*parameter: weight.*to_empty"):
        materialize(module, "cpu")


def test_pickling_is_refused() -> None:
    module = deferred_init(linear)
    with pytest.raises(InitError, match=r"(?s)pickling.*Linear\.weight"):
        pickle.dumps(module)


def test_something_else_than_a_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, got dict"):
        deferred_init(dict)  # type: ignore[type-var]


def test_the_users_own_mistakes_come_through() -> None:
    def build() -> nn.Module:
        module = linear()
        module.weight.data.copy_(torch.empty(5, 5))
        return module

    with pytest.raises(RuntimeError, match=r"must match|same size|expand"):
        deferred_init(build)
    with pytest.raises(ZeroDivisionError):
        deferred_init(lambda: 1 / 0)  # type: ignore[arg-type,return-value]


def test_computing_before_materialising_is_an_error() -> None:
    module = deferred_init(linear)
    with pytest.raises(InitError, match=r"(?s)not materialised.*parameter: Linear\.(weight|bias)"):
        module(torch.ones(1, 3))


def test_a_stale_tensor_is_an_error() -> None:
    module = deferred_init(linear)
    stale = module.weight
    materialize(module)
    with pytest.raises(InitError, match=r"(?s)already materialised.*parameter: Linear\.weight"), torch.no_grad():
        stale.mul_(2)


def test_random_values_used_while_recording_bind_the_device_type() -> None:
    def build() -> nn.Module:
        module = linear()
        if module.weight.sum().item() > 0:
            module.bias.data.zero_()
        return module

    module = deferred_init(build)
    with pytest.raises(InitError, match=r"(?s)random values while it was recorded.*Linear\.weight.*got: cuda"):
        materialize(module, "cuda")
    materialize(module, "cpu")


def test_a_replay_that_fails_names_operation_and_parameter() -> None:
    module = deferred_init(linear)
    node = module.weight.recorder.recording.nodes[-1]
    object.__setattr__(node, "args", (*node.args[:1], 2.0, 1.0))  # an empty interval
    with pytest.raises(InitError, match=r"(?s)aten\.uniform_\.default failed when it was replayed.*parameter: bias"):
        materialize(module, only=[module.bias])


# -- memory ----------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Bytes of real CPU memory that replayed operations made and somebody still holds, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[int, object]] = {}
        self.peak = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **kwargs or {})
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = (
                    storage.nbytes(),
                    torch.multiprocessing.reductions.StorageWeakRef(storage),
                )
        self.storages = {key: value for key, value in self.storages.items() if not value[1].expired()}
        self.peak = max(self.peak, sum(nbytes for nbytes, _ in self.storages.values()))
        return result


WIDTH = 128
LAYER_BYTES = WIDTH * WIDTH * 4


def chain() -> nn.Module:
    """Eight layers; each is scaled by the norm of the one before it."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)]
    with torch.no_grad():
        for before, layer in pairwise(layers):
            layer.weight.mul_(before.weight.norm(dim=1, keepdim=True))
    return nn.Sequential(*layers)


def test_peak_of_one_unit_is_the_unit_and_what_it_reads() -> None:
    module = deferred_init(chain)
    for unit in module:
        with LiveBytes() as live:
            for _, real in stream_unit([unit.weight]):
                del real
        assert live.peak <= 2.1 * LAYER_BYTES  # the layer, the one it reads, a vector of norms


def test_peak_of_a_streamed_unit_is_one_tensor() -> None:
    module = deferred_init(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8))))
    with LiveBytes() as live:
        for _, real in stream_unit(list(module.parameters())):
            del real
    assert live.peak <= 1.1 * LAYER_BYTES
    assert is_deferred(module)


def test_recording_keeps_no_memory() -> None:
    with LiveBytes() as live:
        deferred_init(chain)
    assert live.peak < LAYER_BYTES / 10


def test_aliases_in_one_call_share_memory() -> None:
    module = deferred_init(Tied)
    real = materialize_unit([module.embed.weight, module.embed.weight.data])
    first, second = real.values()
    assert first.data_ptr() == second.data_ptr()


def test_deepcopy_of_a_materialised_model_trains() -> None:
    module = copy.deepcopy(materialize(deferred_init(linear)))
    module(torch.ones(1, 3)).sum().backward()
    assert module.weight.grad is not None
