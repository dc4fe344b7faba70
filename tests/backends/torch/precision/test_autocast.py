"""`polyamp_torch.autocast`: regions, nesting, the weight cache's traps, decorators, refusals."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import polyamp
from polyamp.errors import UnsupportedError
from polyamp_torch.precision.autocast import autocast
from polyamp_torch.precision.torch_only.float32_islands import current_islands

BFLOAT16, FLOAT16, FLOAT32 = (polyamp.Policy(name) for name in ("mixed_bfloat16", "mixed_float16", "float32"))
NATIVE = BFLOAT16.replace(op_list="native")
X = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)


def seen() -> tuple[torch.dtype, torch.dtype]:
    """The dtypes in which a matrix product and an exponential of its result run here."""
    product = X @ X
    return product.dtype, product.exp().dtype


MIXED, OFF = (torch.bfloat16, torch.float32), (torch.float32, torch.float32)


def test_regions_nest_and_are_entered_again() -> None:
    region = autocast(BFLOAT16, "cpu")
    for _ in range(2):
        with region:
            assert seen() == MIXED
            with region, autocast(FLOAT16, "cpu"):
                assert seen() == (torch.float16, torch.float32)
                with autocast(FLOAT32, "cpu"):
                    assert seen() == OFF
                assert seen() == (torch.float16, torch.float32)
            assert seen() == MIXED
        assert seen() == OFF
    assert current_islands("cpu") is None


def test_a_torch_region_inside_is_obeyed() -> None:
    with autocast(BFLOAT16, "cpu"):
        narrow = X @ X
        with torch.autocast("cpu", enabled=False):
            assert seen() == OFF
            assert narrow.exp().dtype == torch.bfloat16, "the islands end where autocast does"
        with torch.autocast("cpu", torch.float16):
            assert seen() == (torch.float16, torch.float32)
        assert narrow.exp().dtype == torch.float32


def test_the_native_op_list_inside_and_outside() -> None:
    native = (torch.bfloat16, torch.bfloat16)
    with autocast(NATIVE, "cpu"):
        assert current_islands("cpu") is None, "no mode, no cost"
        assert seen() == native
        with autocast(BFLOAT16, "cpu"):
            assert seen() == MIXED
            with autocast(NATIVE, "cpu"):
                assert seen() == native
                with autocast(BFLOAT16, "cpu"):
                    assert seen() == MIXED
                assert seen() == native
            assert seen() == MIXED
        assert seen() == native


def seeded(make: Any) -> Any:
    torch.manual_seed(0)
    return make()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.embedding((x > 0).long().sum(-1))
        return functional.linear(tokens, self.embedding.weight).log_softmax(-1)


MODULES = {
    "encoder": lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0),
    "encoder_eval": lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval(),
    "gru": lambda: nn.GRU(4, 3),
    "lstm_cell": lambda: nn.LSTMCell(4, 3),
    "convolution": lambda: nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.ReLU(), nn.ConvTranspose1d(4, 2, 2)),
    "group_norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.Softmax(-1)),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "tied": Tied,
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_the_native_list_equals_plain_torch_bit_for_bit(name: str, grad: bool) -> None:
    ends = []
    for region in (torch.autocast("cpu", torch.bfloat16, cache_enabled=False), autocast(NATIVE, "cpu")):
        model = seeded(MODULES[name])
        with torch.set_grad_enabled(grad), region:
            output = model(X)
        ends.append([output] if isinstance(output, torch.Tensor) else list(output))
        if grad:
            ends[-1][0].float().square().sum().backward()
            ends[-1] += [p.grad for p in model.parameters()]
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)


def test_an_error_inside_closes_everything() -> None:
    with contextlib.suppress(ZeroDivisionError), autocast(BFLOAT16, "cpu"), autocast(NATIVE, "cpu"):
        raise ZeroDivisionError
    assert seen() == OFF
    assert current_islands("cpu") is None
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    assert depth == 1


def test_the_decorator() -> None:
    @autocast(BFLOAT16, "cpu")
    def product(x: torch.Tensor) -> torch.Tensor:
        """Documented."""
        return x @ x

    class Model(nn.Module):
        @autocast(FLOAT16, "cpu")
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x

    assert product(X).dtype == torch.bfloat16
    assert (product.__name__, product.__doc__) == ("product", "Documented.")
    assert Model()(X).dtype == torch.float16
    with autocast(FLOAT32, "cpu"):
        assert product(X).dtype == torch.bfloat16

    def rows() -> Any:
        yield X @ X

    with pytest.raises(UnsupportedError, match="rows would run after its region is closed"):
        autocast(BFLOAT16, "cpu")(rows)

    async def stream() -> Any:
        yield X @ X

    with pytest.raises(UnsupportedError, match="stream would run after its region is closed"):
        autocast(BFLOAT16, "cpu")(stream)
    with pytest.raises(UnsupportedError, match=r"For a module use policy\.autocast\(module\)"):
        autocast(BFLOAT16, "cpu")(Model())


def test_refusals_name_what_is_accepted() -> None:
    with pytest.raises(UnsupportedError, match=r"must be one of cpu, cuda, mps, xpu\. Received: device_type='tpu'"):
        autocast(BFLOAT16, "tpu")
    missing = "mps" if torch.xpu.is_available() else "xpu"
    with pytest.raises(UnsupportedError, match=f"device_type='{missing}': torch finds no such device here"):
        autocast(BFLOAT16, missing)
    with pytest.raises(UnsupportedError, match="overrides name module paths, and a region knows no model"):
        autocast(BFLOAT16.replace(overrides={"head": "float32"}))
    with pytest.raises(UnsupportedError, match="mode='cast' casts a model's parameters"):
        autocast(BFLOAT16.replace(mode="cast"))


def test_trap_plain_float32_autocast_warns_and_turns_itself_off() -> None:
    with pytest.warns(UserWarning, match="target dtype is not supported"):
        torch.autocast("cpu", torch.float32)
    with autocast(BFLOAT16, "cpu"), autocast(FLOAT32, "cpu"):
        assert seen() == OFF


def test_trap_stale_weights_of_a_loop_inside_one_block() -> None:
    """torch serves the weight of the first step to every later one; polyamp's region keeps no cast weights."""

    def end(region: Any) -> torch.Tensor:
        weight = nn.Parameter(torch.eye(4))
        optimizer = torch.optim.SGD([weight], 0.5)
        with region:
            for _ in range(3):
                optimizer.zero_grad()
                output = functional.linear(X, weight)
                (output.float() - 2 * X).square().sum().backward()
                optimizer.step()
        return weight.detach()

    def apart() -> torch.Tensor:
        weight = nn.Parameter(torch.eye(4))
        optimizer = torch.optim.SGD([weight], 0.5)
        for _ in range(3):
            optimizer.zero_grad()
            with autocast(BFLOAT16, "cpu"):
                output = functional.linear(X, weight)
            (output.float() - 2 * X).square().sum().backward()
            optimizer.step()
        return weight.detach()

    right = apart()
    assert not torch.allclose(end(torch.autocast("cpu", torch.bfloat16)), right, rtol=0.05)
    assert torch.equal(end(autocast(BFLOAT16, "cpu")), right)


def test_trap_nested_dtypes_on_one_weight() -> None:
    weight = nn.Parameter(torch.eye(4))
    with torch.autocast("cpu", torch.bfloat16):
        functional.linear(X, weight)
        with torch.autocast("cpu", torch.float16), pytest.raises(RuntimeError, match="same dtype"):
            functional.linear(X, weight)
    with autocast(BFLOAT16, "cpu"):
        assert functional.linear(X, weight).dtype == torch.bfloat16
        with autocast(FLOAT16, "cpu"):
            assert functional.linear(X, weight).dtype == torch.float16


def test_other_modes_still_see_everything() -> None:
    class Watch(TorchFunctionMode):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    outer, inner = Watch(), Watch()
    with outer, autocast(BFLOAT16, "cpu"), inner:
        torch.exp(X)
    assert "exp" in outer.seen
    assert "exp" in inner.seen


def test_an_override_is_another_region() -> None:
    """S5: float32 in a module means autocast off in it and float32 inputs, its islands' results included."""
    inner: list[tuple[torch.dtype, ...]] = []

    class Part(nn.Module):
        def forward(self, *, x: torch.Tensor) -> torch.Tensor:
            product = x @ X
            inner.append((x.dtype, product.dtype, product.exp().dtype))
            return product

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = Part(), Part(), Part()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.third(x=self.second(x=self.first(x=x)))
            return out

    overrides = {"second": "float32", "third": "bfloat16"}
    FLOAT16.replace(overrides=overrides).autocast(Model())(X)
    assert inner == [
        (torch.float32, torch.float16, torch.float32),
        (torch.float32, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32),
    ]


def test_float32_matmul_is_scoped() -> None:
    before = torch.get_float32_matmul_precision()
    with autocast(BFLOAT16.replace(float32_matmul="medium"), "cpu"):
        assert torch.get_float32_matmul_precision() == "medium"
    assert torch.get_float32_matmul_precision() == before
    with contextlib.suppress(ZeroDivisionError), autocast(BFLOAT16.replace(float32_matmul="medium"), "cpu"):
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == before


def test_a_policy_in_one_dtype_turns_autocast_off() -> None:
    with autocast(BFLOAT16, "cpu"), autocast(polyamp.Policy("bfloat16"), "cpu"):
        assert seen() == OFF
        assert X.bfloat16().exp().dtype == torch.bfloat16
