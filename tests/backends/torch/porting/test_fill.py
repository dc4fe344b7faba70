"""`fill`: values into a torch model in place, all of them or none."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import polyamp
from polyamp import porting
from polyamp.errors import PortError
from polyamp.porting import Lazy, rollback
from polyamp_torch.porting import fill as fill_room
from polyamp_torch.porting.converter import CONVERTER
from polyamp_torch.porting.torch_only import numpy_conversion

fill = CONVERTER.fill


def model() -> nn.Module:
    """Tied, shared, of two dtypes, with statistics."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 3).bfloat16())
    made[1].weight = made[0].weight
    return made


def values(made: nn.Module, seed: int = 1) -> dict[str, Lazy]:
    """Others for every leaf, each made anew by every read."""
    rng = np.random.default_rng(seed)
    return {
        leaf.name: made_anew((rng.random(leaf.array.shape) + 1).astype(leaf.array.dtype))
        for layer in CONVERTER.inventory(made).layers
        for leaf in layer.leaves.values()
        if leaf.tied is None
    }


def made_anew(array: np.ndarray[Any, Any]) -> Lazy:
    return Lazy(array.shape, array.dtype, array.copy)


def bits(made: nn.Module) -> dict[str, bytes]:
    state = made.state_dict()
    return {name: tensor.clone().reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in state.items()}


def test_everything_is_written_in_place() -> None:
    made = model()
    before = {name: (tensor, tensor.data_ptr(), tensor._version) for name, tensor in made.named_parameters()}
    new = values(made)
    counted = made[2].num_batches_tracked.clone()
    assert fill(made, new) is made
    for name, array in new.items():
        found = CONVERTER.inventory(made)
        (leaf,) = (leaf for layer in found.layers for leaf in layer.leaves.values() if leaf.name == name)
        assert np.array_equal(leaf.array.read(), array.read())
    assert made[1].weight is made[0].weight
    for name, parameter in made.named_parameters():
        old, place, version = before[name]
        assert parameter is old
        assert parameter.data_ptr() == place
        assert parameter._version == version + 1  # written once, and autograd knows
        assert parameter.requires_grad
        assert parameter.grad is None
    assert made[2].num_batches_tracked == counted


@pytest.mark.parametrize("small", [True, False], ids=["kept", "read again"])
def test_a_read_that_fails_leaves_the_model_as_it_was(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not small:
        monkeypatch.setattr(rollback, "_MIN_BUDGET", 0)
        monkeypatch.setattr(rollback, "_BUDGET_SHARE", 0.0)
    made = model()
    before, new = bits(made), values(made)
    for fails_at in range(1, 3):
        for name in new:
            reads = 0

            def read(good: Lazy = new[name], at: int = fails_at) -> Any:
                nonlocal reads
                reads += 1
                if reads == at:
                    raise OSError("the file is gone")
                return good.read()

            leaves = {**new, name: Lazy(new[name].shape, new[name].dtype, read)}
            if small and fails_at == 2:
                fill(model(), leaves)  # never read twice
                continue
            with pytest.raises(OSError, match="the file is gone"):
                fill(made, leaves)
            assert bits(made) == before


def test_an_interrupt_comes_before_or_after(ctrl_c: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made, wanted = model(), model()
    new = values(made)
    fill(wanted, new)
    written = fill_room.write_tensor

    def interrupted(*args: Any) -> None:
        written(*args)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(fill_room, "write_tensor", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fill(made, new)
    assert bits(made) == bits(wanted)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str, Lazy, str]] = {
    "name": (model, "0/bias", Lazy.of(np.zeros(4, "float32")), "the model has no tensor '0/bias'."),
    "shape": (
        model,
        "0/weight",
        Lazy.of(np.zeros((4, 5), "float32")),
        "'0/weight' is float32[5, 4] in the model. Received: float32[4, 5].",
    ),
    "dtype": (
        model,
        "3/weight",
        Lazy.of(np.zeros((3, 5), "float32")),
        "'3/weight' is bfloat16[3, 5] in the model. Received: float32[3, 5].",
    ),
    "meta": (
        lambda: nn.Linear(2, 2, device="meta"),
        "weight",
        Lazy.of(np.zeros((2, 2), "float32")),
        "'weight' is on the meta device, which holds no values.",
    ),
    "expanded": (
        lambda: nn.ParameterList([nn.Parameter(torch.zeros(1).expand(3))]),
        "0",
        Lazy.of(np.zeros(3, "float32")),
        "'0' is an expanded tensor",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(name: str) -> None:
    make, leaf, array, message = REFUSED[name]
    made = make()
    new = values(made) if name in ("name", "shape", "dtype") else {}
    before = bits(made) if new else {}
    with pytest.raises(PortError) as error:
        fill(made, {**new, leaf: array})
    assert message in str(error.value)
    assert not new or bits(made) == before


def test_tensors_of_any_stride_and_of_inference_mode() -> None:
    with torch.inference_mode():
        made = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    wanted = np.arange(54, dtype=np.float32).reshape(3, 2, 3, 3)
    stride = made.weight.stride()
    fill(made, {"weight": Lazy.of(wanted)})
    assert made.weight.tolist() == wanted.tolist()
    assert made.weight.stride() == stride


@pytest.mark.parametrize("device", ["cpu", "another"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int64", "bool"])
def test_an_array_of_any_strides_is_written(dtype: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "another":  # the way that accelerators take
        monkeypatch.setattr(numpy_conversion, "copy_into", None)
        monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda"))
    known = np.dtype(getattr(ml_dtypes, dtype, dtype))
    base = np.array([[0, 1, 2], [3, 4, 5]]).astype(known)
    fixed = base.copy()
    fixed.flags.writeable = False
    unaligned = np.frombuffer(b"\0" + base.tobytes(), known, offset=1).reshape(base.shape)
    for array in [base, base.T, fixed, base[::-1], base[:, ::-1].T, base[:, ::2], base[0, 0], base[:0], unaligned]:
        tensor = torch.zeros(array.shape, dtype=getattr(torch, dtype))
        version = tensor._version
        numpy_conversion.write_tensor(tensor, np.asarray(array))
        assert tensor.double().tolist() == array.astype(np.float64).tolist()
        assert tensor._version == version + 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "bool"])
def test_a_large_matrix_is_transposed(dtype: str) -> None:
    known = np.dtype(getattr(ml_dtypes, dtype, dtype))
    base = (np.arange(300 * 400) % 7).reshape(300, 400).astype(known)
    base.flags.writeable = False
    for array in (base.T, base[:, ::2].T, base.T[::-1]):
        tensor = torch.zeros(array.shape, dtype=getattr(torch, dtype))
        numpy_conversion.write_tensor(tensor, array)
        assert np.array_equal(tensor.double().numpy(), array.astype(np.float64))
        assert tensor._version == 1
    assert base[1, 2] == known.type(402 % 7)


def test_a_lent_model_is_filled_from_itself() -> None:
    made = model()
    before = bits(made)
    found = CONVERTER.inventory(made)
    fill(made, {leaf.name: leaf.array for layer in found.layers for leaf in layer.leaves.values()})
    assert bits(made) == before


def test_a_port_warns_of_an_epsilon_where_it_is_called() -> None:
    source, target = nn.Sequential(nn.LayerNorm(4)), nn.Sequential(nn.LayerNorm(4, eps=1e-3))
    said = r"what the weights do not carry differs: 0: epsilon is 0\.001, in the source \(0\) 1e-05\. Write: "
    for call in (lambda: polyamp.port(source, target), lambda: porting.load(target, porting.export(source))):
        with pytest.warns(UserWarning, match=said) as caught:
            _, report = call()
        assert [each.filename for each in caught] == [__file__]
        assert not report.clean
