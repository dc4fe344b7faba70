"""A Ctrl-C at any line of a region's own code: nothing of the region is there when the next one begins (S12, S3)."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

import polyamp
from polyamp_torch.precision.autocast import autocast
from polyamp_torch.precision.torch_only.autocast_region_stack import autocast_nesting
from polyamp_torch.precision.torch_only.open_blocks import OPEN_BLOCKS

pytestmark = pytest.mark.usefixtures("ctrl_c")

X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)
POLICY = polyamp.Policy("mixed_bfloat16", float32_matmul="medium")
FILES = ("polyamp_torch/", "torch/amp/autocast_mode.py", "/contextlib.py")
"""An interrupt in torch's own `no_grad` (torch/utils/_contextlib.py) may leave gradients off, with plain torch too."""


def ambient() -> dict[str, Any]:
    """What a region changes in a thread and in the process."""
    return {
        "enabled": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_autocast_dtype("cpu"),
        "cache": torch.is_autocast_cache_enabled(),
        "nesting": autocast_nesting(),
        "modes": sum(not mode.closed for mode in modes()),
        "precision": torch.get_float32_matmul_precision(),
        "blocks": (
            len(OPEN_BLOCKS.regions),
            len(OPEN_BLOCKS.installed),
            len(OPEN_BLOCKS.bound),
            len(OPEN_BLOCKS.overrides),
        ),
    }


def modes() -> list[Any]:
    """The function modes that are open; all of them are polyamp's here."""
    found: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # torch's
    return found


def interrupted(run: Callable[[], Any], number: int, *, real: bool) -> BaseException | None:
    """Run with an interrupt at the n-th line of the library's own code, or of torch's region; the exception.

    Args:
        real: send the process a SIGINT, as Ctrl-C does, instead of raising what it raises.
    """
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        code = frame.f_code
        if code.co_name == "<genexpr>" or not any(part in code.co_filename for part in FILES):
            return None  # an error in a generator that ends is swallowed
        count += event in ("line", "call")
        if count == number:
            count += 1
            if not real:
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt as error:
        return error
    finally:
        sys.settrace(None)
    return KeyboardInterrupt("swallowed") if count >= number else None


def bound(policy: polyamp.Policy) -> tuple[nn.Sequential, Callable[[], Any]]:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval()
    run = policy.autocast(model)
    return model, lambda: run(X)


def a_region() -> None:
    with autocast(POLICY, "cpu"):
        X @ X.T


def regions_in_one_another() -> None:
    with autocast(POLICY, "cpu"):
        with autocast(POLICY.replace(op_list="native"), "cpu"):
            X @ X.T
        with autocast(polyamp.Policy("float32"), "cpu"):
            X @ X.T


def a_region_by_name() -> None:
    region = autocast(POLICY, "cpu")
    with region:
        X @ X.T


def cases() -> dict[str, tuple[nn.Module, Callable[[], Any]]]:
    overridden = POLICY.replace(overrides={"2": "float32"})
    made = polyamp.Recipe(policy=overridden, optimizer=polyamp.sgd(0.0))
    model, _ = bound(POLICY)
    state, step = polyamp.init(model, made), polyamp.train_step(lambda model, x: model(x).square().mean(), made)
    functions = {"region": a_region, "nested": regions_in_one_another, "named": a_region_by_name}
    return {
        **{name: (nn.Sequential(), function) for name, function in functions.items()},
        "overrides": bound(overridden),
        "cast": bound(polyamp.Policy("mixed_bfloat16", mode="cast")),
        "step": (model, lambda: step(state, X)),
    }


STRIDES = {"region": 1, "named": 1, "nested": 3, "overrides": 5, "cast": 5, "step": 23}
"""Every how many lines the interrupt comes. All were 1 once, by hand: nothing was left."""


@pytest.mark.parametrize("case", STRIDES)
def test_an_interrupt_at_any_line_leaves_nothing_for_the_next_region(case: str) -> None:
    model, run = cases()[case]
    run()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    before = ambient()
    number, came, later = 1, 0, 0
    while interrupted(run, number, real=case == "step") is not None:
        later += ambient() != before
        with autocast(polyamp.Policy("float32"), "cpu"):
            inside = ambient()
        assert (inside["enabled"], inside["nesting"], modes()) == (False, before["nesting"] + 1, [])
        assert ambient() == before, f"interrupted at line {number}"
        assert all("forward" not in part.__dict__ for part in model.modules())
        assert all(value.dtype == torch.float32 for value in model.state_dict().values() if value.is_floating_point())
        came += 1
        number += STRIDES[case]
    assert came > 20
    # A region with a name of its own outlives its block; then plain code runs in 16 bits until the next region begins.
    assert later <= (3 if case == "named" else 0), "plain code after the exception is gone"
    run()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_while_the_exception_is_kept_the_next_region_repairs() -> None:
    """As in a notebook, where `sys.last_value` keeps the traceback and with it the region's object."""
    before, left, number = ambient(), 0, 1
    while (error := interrupted(a_region, number, real=False)) is not None:
        left += ambient() != before
        with autocast(POLICY, "cpu"):
            pass
        assert ambient() == before, f"interrupted at line {number}: {error!r}"
        number += 1
    assert number > 60
    assert 0 < left <= 3, "the lines in which __exit__ begins; plain code runs in 16 bits until the next region"


def test_an_error_inside_closes_what_was_left_behind_inside() -> None:
    before = ambient()

    def leave_open() -> None:
        autocast(POLICY.replace(op_list="native"), "cpu").__enter__()
        torch.autocast("cpu", torch.float16).__enter__()  # type: ignore[no-untyped-call]  # torch's
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), autocast(POLICY, "cpu"):
        leave_open()
    assert ambient() == before


def test_regions_opened_by_hand_and_in_generators_are_not_taken_for_left_behind() -> None:
    def generator() -> Any:
        with autocast(POLICY, "cpu"):
            yield

    def opened_by_hand() -> Any:
        region = autocast(POLICY, "cpu")
        region.__enter__()
        return region

    suspended, region = generator(), opened_by_hand()
    next(suspended)
    with autocast(POLICY, "cpu"):
        pass
    assert (X @ X.T).dtype == torch.bfloat16
    suspended.close()
    assert (X @ X.T).dtype == torch.bfloat16
    region.__exit__(None, None, None)
    assert (X @ X.T).dtype == torch.float32
