"""Random states: export and import of those of torch's generators (S22), and their restoration after a trial pass."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from polyamp_torch.arrays import as_tensor, to_numpy

Array = np.ndarray[Any, Any]


def generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of torch's generators on the host and on `device`, by their names in a checkpoint."""
    states = {"rng/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["rng/cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_generator_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore the result of `generator_states`, or its arrays from a checkpoint."""
    torch.set_rng_state(as_tensor(states["rng/cpu"]))
    if "rng/cuda" in states:
        torch.cuda.set_rng_state(as_tensor(states["rng/cuda"]), device)


def random_state_arrays(device: torch.device) -> dict[str, Array]:
    """Return the states of torch's generators as arrays, so that dropout resumes exactly."""
    return {name: to_numpy(state) for name, state in generator_states(device).items()}


def new_random_state_array(name: str, seed: int, device: torch.device) -> Array:
    """Return the state of a new generator with this seed, for the generator of a name in a checkpoint."""
    return to_numpy(torch.Generator("cpu" if name == "rng/cpu" else device).manual_seed(seed).get_state())


def list_random_state_problems(arrays: Mapping[str, Array], device: torch.device) -> list[str]:
    """Return messages about the arrays that `restore_generator_states` cannot restore."""
    found = []
    for name, place in (("rng/cpu", torch.device("cpu")), ("rng/cuda", device)):
        if name in arrays:
            try:
                torch.Generator(place).set_state(as_tensor(arrays[name]))
            except (RuntimeError, TypeError) as error:
                found.append(f"{name} is no state of torch's random numbers ({error})")
    return found


@contextlib.contextmanager
def preserve_random_states(model: nn.Module, device: torch.device | None = None) -> Iterator[None]:
    """Context manager that restores the random states of torch, NumPy and Python, and of modules' generators, on
    exit; torch's on the host and on `device`, None for every device."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  # the stream that a program may use
    own = [each for part in model.modules() for each in vars(part).values() if isinstance(each, torch.Generator)]
    states = [each.get_state() for each in own]
    try:
        with torch.random.fork_rng(None if device is None else [device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002  # the same stream
        for each, state in zip(own, states, strict=True):
            each.set_state(state)
