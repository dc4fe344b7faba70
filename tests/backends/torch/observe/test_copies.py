"""Copies of models that `copy.deepcopy` alone would refuse, or copy wrongly."""

from __future__ import annotations

import functools
import threading
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import polyamp
from polyamp_torch.observe.model_copy import copy_model
from polyamp_torch.observe.observer import OBSERVER


def moved(twin: nn.Module, x: Any = None) -> Any:
    """What a copy gives after every parameter of it was made zero."""
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    return twin(torch.ones(2, 3) if x is None else x)


def patched(how: str) -> nn.Module:
    """A model with a function in it that holds the model."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    inner, before = model[0], model[0].forward

    def closed(x: Any) -> Any:
        return before(x) + inner.bias

    if how == "closure":
        inner.forward = closed
    elif how == "default":
        inner.forward = lambda x, again=before: again(x)
    elif how == "method":
        inner.forward = types.MethodType(lambda self, x: nn.functional.linear(x, self.weight), inner)
    elif how == "partial":
        inner.forward = functools.partial(closed)
    else:
        model.register_forward_hook(lambda module, args, output: output + inner.bias)
    return model


@pytest.mark.parametrize("how", ["closure", "default", "method", "partial", "hook"])
def test_functions_in_a_model_are_those_of_the_copy(how: str) -> None:
    model = patched(how)
    before = model(torch.ones(2, 3)).detach().clone()
    assert float(moved(copy_model(model)).detach().abs().max()) == 0.0
    assert torch.equal(model(torch.ones(2, 3)), before)


def test_a_function_that_holds_nothing_of_the_model_is_the_same() -> None:
    model, one = nn.Linear(3, 3), torch.ones(1)
    model.activation = lambda x: x * one
    assert copy_model(model).activation is model.activation


def test_hooks_on_parameters_come_along() -> None:
    model = nn.Linear(3, 1, bias=False)
    model.weight.register_hook(lambda gradient: gradient * 3)
    seen: list[Any] = []
    model.weight.register_post_accumulate_grad_hook(seen.append)
    twin = copy_model(model)
    twin(torch.ones(1, 3)).sum().backward()
    assert torch.equal(twin.weight.grad, torch.full((1, 3), 3.0))
    assert seen[0] is twin.weight
    assert model.weight.grad is None


def test_what_autograd_made_and_random_streams_are_copied() -> None:
    model = nn.Linear(3, 3)
    model.made = model.weight * 2
    model.stream = torch.Generator().manual_seed(7)
    twin = copy_model(model)
    assert torch.equal(twin.made, model.made)
    first = torch.rand(2, generator=twin.stream)
    assert torch.equal(first, torch.rand(2, generator=model.stream))


def test_an_rnn_keeps_its_weights_in_one_piece_and_in_its_list() -> None:
    model = nn.LSTM(3, 4, 2)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    offset = 0
    for p in model.parameters():
        p.data = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    twin = copy_model(model)
    storages = {p.untyped_storage().data_ptr() for p in twin.parameters()}
    assert len(storages) == 1
    assert storages != {flat.untyped_storage().data_ptr()}
    assert float(moved(twin, torch.ones(5, 2, 3))[0].detach().abs().max()) == 0.0


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_what_cannot_be_copied_says_why() -> None:
    model = nn.Linear(3, 3)
    model.lock = threading.Lock()
    said = r"a Linear \(torch\) cannot be copied: TypeError: cannot pickle '_thread.lock' object\. Give the class"
    with pytest.raises(polyamp.ModelError, match=said), OBSERVER.model_copy(model):
        pass
    scripted = nn.Sequential(torch.jit.script(nn.Linear(3, 3)))
    with pytest.raises(polyamp.ModelError, match="'0' is a scripted module"), OBSERVER.model_copy(scripted):
        pass


def test_memory_seen_in_two_dtypes_is_refused() -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("bits", model.weight.data.view(torch.int32))
    with pytest.raises(polyamp.ModelError, match="one memory in float32 and in int32"), OBSERVER.model_copy(model):
        pass


def test_the_default_dtype_is_wide_in_a_wide_block_alone() -> None:
    with OBSERVER.model_copy(nn.Linear(3, 3), wide=True) as twin:
        assert twin(torch.ones(2, 3)).dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32


def test_sparse_buffers_have_no_wide_copy() -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("graph", torch.eye(3).to_sparse())
    assert copy_model(model).graph.is_sparse
    with pytest.raises(polyamp.UnsupportedError, match=r"layout torch\.sparse_coo and dtype float32 has no float64"):
        copy_model(model, wide=True)


@pytest.fixture
def group(tmp_path: Any) -> Any:
    """A process group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_data_parallel_wrappers_are_copied_as_wrappers() -> None:
    loss_fn = lambda model, batch: model(batch).square().mean()  # noqa: E731
    plain = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    found = []
    for model in (plain, nn.parallel.DistributedDataParallel(copy_model(plain)), nn.DataParallel(copy_model(plain))):
        with OBSERVER.model_copy(model) as twin:
            assert type(twin) is type(model)
            seen: list[tuple[str, str]] = []
            state = polyamp.init(twin, recipe)
            x = torch.ones(4, 3).numpy()
            OBSERVER.capture_pass(state, loss_fn, x, lambda path, what, *_, seen=seen: seen.append((path, what)))
            _, result = polyamp.train_step(loss_fn, recipe)(state, x)
            found.append((seen, float(result.loss), float(result.grad_norm)))
    assert found[0] == found[1] == found[2]
    assert found[0][0][:4] == [("0", "input"), ("0", "output"), ("1", "input"), ("1", "output")]


@pytest.mark.usefixtures("group")
def test_a_group_of_its_own_is_refused_as_torch_refuses_it() -> None:
    own = dist.new_group([0])
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1), process_group=own)
    with pytest.raises(polyamp.ModelError, match="default process group"), OBSERVER.model_copy(model):
        pass
