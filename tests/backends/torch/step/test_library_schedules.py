"""`schedules.like` gives the rates of torch's and transformers' own schedulers, update for update (S13)."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import optimization

from polyamp import schedules
from polyamp.schedules.library_schedules import LIBRARY_SCHEDULES
from polyamp_torch.arrays import XP

CASES: list[tuple[str, dict[str, Any], int]] = [
    ("torch.ConstantLR", {"lr": 0.3, "factor": 0.5, "total_iters": 7}, 20),
    ("torch.LinearLR", {"lr": 0.3, "total_iters": 9}, 20),
    ("torch.LinearLR", {"lr": 0.3, "start_factor": 1.0, "end_factor": 0.1, "total_iters": 9}, 20),
    ("torch.StepLR", {"lr": 0.3, "step_size": 4, "gamma": 0.5}, 20),
    ("torch.MultiStepLR", {"lr": 0.3, "milestones": [3, 8, 8, 12]}, 20),
    ("torch.ExponentialLR", {"lr": 0.3, "gamma": 0.9}, 20),
    ("torch.PolynomialLR", {"lr": 0.3, "total_iters": 11, "power": 2.0}, 20),
    ("torch.CosineAnnealingLR", {"lr": 0.3, "T_max": 12, "eta_min": 0.01}, 13),  # until T_max
    ("torch.CosineAnnealingWarmRestarts", {"lr": 0.3, "T_0": 3, "T_mult": 2, "eta_min": 0.01}, 30),
    ("torch.CosineAnnealingWarmRestarts", {"lr": 0.3, "T_0": 5}, 30),
    ("torch.OneCycleLR", {"max_lr": 0.3, "total_steps": 17, "cycle_momentum": False}, 17),
    ("torch.OneCycleLR", {"max_lr": 0.3, "epochs": 4, "steps_per_epoch": 5, "pct_start": 0.4, "div_factor": 10.0,
     "anneal_strategy": "linear", "cycle_momentum": False}, 20),
    ("transformers.get_constant_schedule_with_warmup", {"lr": 0.3, "num_warmup_steps": 5}, 20),
    ("transformers.get_linear_schedule_with_warmup",
     {"lr": 0.3, "num_warmup_steps": 5, "num_training_steps": 18}, 25),
    ("transformers.get_cosine_schedule_with_warmup",
     {"lr": 0.3, "num_warmup_steps": 5, "num_training_steps": 18}, 19),  # until its end, from where it rises again
    ("transformers.get_cosine_with_min_lr_schedule_with_warmup",
     {"lr": 0.3, "num_warmup_steps": 5, "num_training_steps": 18, "min_lr": 0.03}, 19),
    ("transformers.get_polynomial_decay_schedule_with_warmup",
     {"lr": 0.3, "num_warmup_steps": 5, "num_training_steps": 18, "power": 2.0}, 25),
    ("transformers.get_inverse_sqrt_schedule", {"lr": 0.3, "num_warmup_steps": 5}, 40),
    ("transformers.get_inverse_sqrt_schedule", {"lr": 0.3, "num_warmup_steps": 5, "timescale": 20}, 40),
    *[
        ("transformers.get_wsd_schedule", {"lr": 0.3, "num_warmup_steps": 4, "num_decay_steps": 6,
         "num_training_steps": 20, "decay_type": shape, "min_lr_ratio": 0.1}, 25)
        for shape in ("cosine", "linear", "1-sqrt")
    ],
]  # fmt: skip


def library_rates(name: str, arguments: dict[str, Any], updates: int) -> list[float]:
    """The rates that the library's scheduler gives an optimizer, one per update."""
    library, _, kind = name.partition(".")
    own = dict(arguments)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], own.pop("lr", 1.0))
    if library == "torch":
        scheduler = getattr(torch.optim.lr_scheduler, kind)(optimizer, **own)
    else:
        scheduler = getattr(optimization, kind)(optimizer, **own)
    found = []
    for _ in range(updates):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if len(found) < updates:
            scheduler.step()
    return found


@pytest.mark.parametrize(("name", "arguments", "updates"), CASES)
def test_s13_the_rates_are_the_librarys(name: str, arguments: dict[str, Any], updates: int) -> None:
    schedule = schedules.like(name, **arguments)
    rates = [schedule(count) for count in range(updates)]
    assert rates == pytest.approx(library_rates(name, arguments, updates), rel=1e-9, abs=1e-12)
    on_device = [schedule(torch.tensor(count, dtype=torch.int32), XP) for count in range(updates)]
    assert {rate.dtype for rate in on_device} == {torch.float32}
    assert [float(rate) for rate in on_device] == pytest.approx(rates, rel=2e-5, abs=1e-7)


def test_every_schedule_of_these_libraries_is_compared_with_its_arguments_and_defaults() -> None:
    names = {name for name in LIBRARY_SCHEDULES if name.startswith(("torch.", "transformers."))}
    assert {name for name, _, _ in CASES} == names
    for name in names:
        library, _, kind = name.partition(".")
        theirs = inspect.signature(getattr(torch.optim.lr_scheduler if library == "torch" else optimization, kind))
        for parameter in inspect.signature(LIBRARY_SCHEDULES[name]).parameters.values():
            if parameter.name != "lr":
                assert theirs.parameters[parameter.name].default == parameter.default, (name, parameter)
