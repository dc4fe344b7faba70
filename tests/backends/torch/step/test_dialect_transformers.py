"""`Recipe.from_dialect("transformers", ...)` with transformers' own `TrainingArguments`: every key, every schedule."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import TrainingArguments
from transformers.optimization import get_scheduler
from transformers.trainer_utils import SchedulerType

import polyamp
from polyamp.errors import RecipeError
from polyamp.recipe.dialects.dialect_report import DIALECTS, dialect_report

TABLE = DIALECTS["transformers"][0]
REFUSED = {"reduce_lr_on_plateau", "cosine_warmup_with_min_lr", "greedy"}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"power": 2.0},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 8},
}


def training_arguments(**options: Any) -> TrainingArguments:
    return TrainingArguments(output_dir="out", use_cpu=True, max_steps=40, **options)


def test_every_argument_of_transformers_is_in_the_table_with_its_default() -> None:
    fields = {field.name: field for field in dataclasses.fields(TrainingArguments)}
    assert set(fields) <= set(TABLE.keys)
    for key, default in TABLE.defaults.items():
        if key in fields and key not in ("optim", "max_steps"):
            assert fields[key].default == default, key
    assert str(getattr(fields["optim"].default, "value", fields["optim"].default)).startswith(TABLE.defaults["optim"])


def test_transformers_own_object_is_read_without_a_loss() -> None:
    report = dialect_report("transformers", training_arguments())
    assert report.unmapped == {}
    assert report.fields["optimizer"].learning_rate.total_steps == 40


@pytest.mark.parametrize("warmup", [0, 0.25])
@pytest.mark.parametrize("kind", [kind.value for kind in SchedulerType if kind.value not in REFUSED])
def test_rates_are_transformers_rates(kind: str, warmup: float) -> None:
    arguments = ARGUMENTS.get(kind, {})
    options = training_arguments(lr_scheduler_type=kind, lr_scheduler_kwargs=arguments, warmup_steps=warmup)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=options.learning_rate)
    scheduler = get_scheduler(kind, optimizer, options.get_warmup_steps(40), 40, dict(arguments))
    rate = polyamp.Recipe.from_dialect("transformers", options).optimizer.learning_rate
    for count in range(41):
        own = rate if isinstance(rate, float) else rate(count)
        assert own == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12), count
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_schedules_that_polyamp_does_not_have_are_refused(kind: str) -> None:
    with pytest.raises(RecipeError, match=f"lr_scheduler_type: '{kind}' is no schedule of polyamp's"):
        polyamp.Recipe.from_dialect("transformers", {"lr_scheduler_type": kind, "max_steps": 40})
