"""`polyamp_torch.autocast` typed as `torch.autocast` is: its signature, attributes, warnings, and errors that help."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import polyamp
from polyamp.errors import PolicyError
from polyamp_torch import autocast, custom_bwd, custom_fwd
from polyamp_torch.precision.torch_only.autocast_argument_parsing import RegionError

X = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)
VALUES = {"device_type": "cpu", "dtype": torch.float16, "enabled": False, "cache_enabled": True}
"""Another value than the default for each parameter of torch's signature."""


def seen() -> tuple[torch.dtype, torch.dtype]:
    """The dtypes in which a matrix product and an exponential of its result run here."""
    product = X @ X
    return product.dtype, product.exp().dtype


MIXED, HALF = (torch.bfloat16, torch.float32), (torch.float16, torch.float32)
OFF = (torch.float32, torch.float32)


def test_every_parameter_of_torch_by_position_and_by_name() -> None:
    names = list(inspect.signature(torch.autocast).parameters)
    assert names == list(VALUES), "torch.autocast has new parameters: take them, and add them here"
    for split in range(len(names) + 1):
        given = [VALUES[name] for name in names[:split]]
        for left_out in itertools.combinations(names[max(split, 1) :], 2):
            named = {name: VALUES[name] for name in names[split:] if name not in left_out}
            theirs, ours = torch.autocast(*given, **named), autocast(*given, **named)
            wanted = {**vars(theirs), "_cache_enabled": named.get("cache_enabled", split > 3)}
            assert {name: vars(ours)[name] for name in wanted} == wanted


def test_it_is_a_torch_autocast_and_says_so_inside() -> None:
    with autocast("cpu", torch.float16) as region:
        assert seen() == HALF
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16
        assert not torch.is_autocast_cache_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert isinstance(region, torch.autocast)
    assert isinstance(region, autocast)
    assert (region.device, region.fast_dtype, region._enabled) == ("cpu", torch.float16, True)
    assert (region.prev, region.prev_fastdtype, region.prev_cache_enabled) == (False, torch.bfloat16, True)
    assert region.policy == polyamp.Policy("mixed_float16")
    for again in (copy.deepcopy(region), pickle.loads(pickle.dumps(region))):
        with again:
            assert seen() == HALF
    assert seen() == OFF


def test_the_dtype_is_torchs_for_the_device_and_float32_stays_where_torch_has_it_on_cuda() -> None:
    with autocast("cpu"):
        assert seen() == MIXED
    with autocast(device_type="cpu", dtype=torch.bfloat16), torch.autocast("cpu", torch.float16):
        assert seen() == HALF, "torch's own region inside; S4's families stay float32"
    with torch.autocast("cpu", torch.float16), autocast("cpu", enabled=False):
        assert seen() == OFF
        assert torch.get_autocast_dtype("cpu") == torch.float16, "as torch.autocast('cpu', enabled=False) leaves it"


def test_enabled_in_both_forms() -> None:
    for on, want in ((True, HALF), (False, OFF)):
        with autocast("cpu", torch.float16, on):
            assert seen() == want
        with autocast(polyamp.Policy("mixed_float16"), "cpu", enabled=on) as region:
            assert seen() == want
        assert region._enabled is on
    with autocast("cpu", dtype=torch.float16), autocast("cpu", enabled=False):
        narrow = X.half()
        assert narrow.exp().dtype == torch.float16, "no float32 islands where autocast is off"


def test_the_same_code_with_torchs_and_with_polyamps() -> None:
    def loss(region: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))

        @region(device_type="cpu", dtype=torch.bfloat16, cache_enabled=False)
        def forward(x: torch.Tensor) -> torch.Tensor:
            return functional.mse_loss(model(x).float(), torch.zeros(4, 2))

        forward(X).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    assert torch.equal(loss(autocast), loss(torch.autocast))


def test_policies_and_device_types_in_every_order() -> None:
    policy = polyamp.Policy("mixed_float16")
    for region in (
        autocast(policy, "cpu"),
        autocast(policy, device_type="cpu"),
        autocast(policy=policy, device_type="cpu"),
        autocast("mixed_float16", "cpu"),
        autocast("fp16", "cpu"),
        autocast("16-mixed", device_type="cpu"),
    ):
        assert (region.policy, region.device, region._enabled) == (policy, "cpu", True)
        with region:
            assert seen() == HALF
    assert not autocast("float32", "cpu")._enabled


MISTAKES: list[tuple[str, Any, dict[str, Any], str]] = [
    ("a typo", ("cudaa",), {}, r"device type \(cpu, cuda, mps, xpu\) or a policy \(float32, .*mean 'cuda'"),
    ("another word", ("gpu",), {}, r"Received: 'gpu'. Did you mean 'cuda'\?"),
    ("a typo in a policy", ("mixed_flot16",), {}, r"Did you mean 'mixed_float16'"),
    ("an index", ("cuda:0",), {}, r"A type has no number: 'cuda'"),
    ("a torch.device", (torch.device("cpu"),), {}, r"Received: device\(type='cpu'\). Write 'cpu'"),
    ("a dtype first", (torch.float16,), {}, r"The dtype comes second: autocast\('cuda', torch.float16\)"),
    ("torch.cuda.amp's", (True,), {}, r"Write autocast\('cuda', enabled=True\)"),
    ("no parentheses", (seen,), {}, r"As a decorator it is @autocast\('cuda'\)"),
    ("a module", (nn.Linear(1, 1),), {}, r"For a module use policy\.autocast\(module\)"),
    ("the dtype as a word", ("cpu",), {"dtype": "float16"}, r"dtype must be a torch.dtype, such as torch.float16"),
    ("two dtypes", ("fp16", "cpu"), {"dtype": torch.float16}, r"a policy has its own dtype"),
    ("a device twice", ("cpu",), {"device_type": "cpu"}, r"device_type is given twice"),
    ("a device twice", ("fp16", "cpu"), {"device_type": "cpu"}, r"device_type is given twice"),
    ("a policy twice", ("fp16",), {"policy": "fp16"}, r"policy is given twice"),
]


@pytest.mark.parametrize(("given", "named", "said"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_s20_mistakes_name_what_to_type(given: Any, named: dict[str, Any], said: str) -> None:
    with pytest.raises(RegionError, match=said) as caught:
        autocast(*given, **named)
    assert isinstance(caught.value, ValueError | RuntimeError | TypeError)
    assert isinstance(caught.value, PolicyError)


def test_cuda_where_there_is_none_is_a_warning_and_off_as_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for made in (lambda: autocast("cuda", dtype=torch.float16), lambda: autocast(), lambda: autocast(enabled=True)):
        with pytest.warns(UserWarning, match=r"CUDA is not available\. Disabling autocast") as caught:
            region = made()
        assert caught[0].filename == __file__, "at the user's line"
        with region:
            assert seen() == OFF
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not autocast("cuda", enabled=False)._enabled
    with pytest.warns(UserWarning, match="target dtype is not supported") as caught:
        assert not autocast("cpu", torch.float32)._enabled
    assert caught[0].filename == __file__
    with pytest.raises(RegionError, match="torch finds no such device here"):
        autocast("mixed_float16", "cuda")


def test_the_cache_is_torchs_where_it_is_asked_for() -> None:
    weight = nn.Parameter(torch.eye(4))
    ends = []
    for cache in (None, False, True):
        with autocast("cpu", torch.bfloat16, cache_enabled=cache):
            assert torch.is_autocast_cache_enabled() is bool(cache)
            functional.linear(X, weight)
            with torch.no_grad():
                weight.mul_(2.0)
            ends.append(functional.linear(X, weight).float().abs().sum().item())
    assert ends[1] == 2 * ends[0]
    assert ends[2] == ends[1], "a stale weight, as with torch"


def test_in_threads_and_when_torchs_own_name_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    region, found = autocast("cpu", torch.float16), []

    def work() -> None:
        with region:
            found.append(seen())
        found.append(seen())

    with region:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [HALF, OFF]
    monkeypatch.setattr(torch, "autocast", autocast)  # as one does to bring it into a library
    monkeypatch.setattr(torch.amp, "autocast", autocast)
    with torch.autocast("cpu", dtype=torch.float16), torch.amp.autocast("cpu", enabled=False):
        assert seen() == OFF
    with torch.autocast("cpu"):
        assert seen() == MIXED


def test_under_torch_compile() -> None:
    outside = autocast("cpu", dtype=torch.float16)

    def inside(x: torch.Tensor, on: bool) -> torch.Tensor:
        with autocast("cpu", dtype=torch.float16, enabled=on) as region:
            assert region.fast_dtype == torch.float16
            return torch.softmax(x @ x, -1)

    def nested(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16), autocast("cpu", enabled=False):
            return x @ x

    for on in (True, False):
        compiled: Any = torch.compile(inside, fullgraph=True, backend="eager")
        assert torch.equal(compiled(X, on), inside(X, on))
    assert torch.compile(nested, fullgraph=True, backend="eager")(X).dtype == torch.float32
    decorated = outside(lambda x: torch.softmax(x @ x, -1))
    whole: Any = torch.compile(decorated, fullgraph=True, backend="eager")
    assert torch.equal(whole(X), decorated(X))

    def entered(x: torch.Tensor) -> torch.Tensor:
        with outside:
            return torch.softmax(x @ x, -1)

    mixed: Any = torch.compile(entered, backend="eager")
    assert torch.equal(mixed(X), entered(X)), "never torch's plain region in the place of this one"
    assert mixed(X).dtype == torch.float32
    assert seen() == OFF


def test_custom_functions_with_torchs_arguments() -> None:
    for ours, theirs in ((custom_fwd, torch.amp.custom_fwd), (custom_bwd, torch.amp.custom_bwd)):
        assert set(inspect.signature(theirs).parameters) <= set(inspect.signature(ours).parameters)


@pytest.mark.parametrize(
    ("forward_of", "backward_of"),
    [(custom_fwd, torch.amp.custom_bwd), (torch.amp.custom_fwd, custom_bwd)],
    ids=["torch's backward", "torch's forward"],
)
def test_custom_functions_of_which_one_half_is_somebody_elses(forward_of: Any, backward_of: Any) -> None:
    found: list[Any] = []

    class Square(torch.autograd.Function):
        @staticmethod
        @forward_of(device_type="cpu")
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            found.append((ctx._fwd_used_autocast, ctx._dtype))
            return x @ x

        @staticmethod
        @backward_of(device_type="cpu")
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            (x,) = ctx.saved_tensors
            found.append((grad @ x.T).dtype)
            return (grad @ x.T + x.T @ grad).float()

    x = X.clone().requires_grad_()
    with autocast("cpu", torch.float16):
        y = Square.apply(x)
    y.float().sum().backward()
    assert found == [(True, torch.float16), torch.float16]
