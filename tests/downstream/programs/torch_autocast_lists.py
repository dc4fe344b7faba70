"""torch: its own test of autocast on the CPU, `TestAutocast._run_autocast_outofplace`, over its own lists.

The calls are those of torch's `test_autocast.py`, which is in no distribution: which list is run as which type.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, TestAutocast

torch.manual_seed(0)
LISTS = AutocastCPUTestLists("cpu")
HALVES = (torch.bfloat16, torch.float16)


def _calls() -> list[Any]:
    calls = []

    def add(listed: str, half: torch.dtype, op: str, args: Any, run: Any, **options: Any) -> None:
        name = f"{listed}-{op}-{str(half).removeprefix('torch.')}"
        calls.append(pytest.param(op, args, run, {"amp_dtype": half, **options}, id=name))

    for index, half in enumerate(HALVES):
        for listed, module in (("torch_16", torch), ("nn_16", torch._C._nn)):
            for op, args, *kwargs in getattr(LISTS, listed):
                extra = kwargs[0] if kwargs else None
                add(listed, half, op, args, half, module=module, add_kwargs=extra)
        for listed, module in (("torch_fp32", torch), ("nn_fp32", torch._C._nn)):
            for op, args, *kwargs in getattr(LISTS, listed):
                extra = kwargs[0] if kwargs else None
                add(listed, half, op, args, torch.float32, module=module, add_kwargs=extra)
        for op, *both in LISTS.torch_need_autocast_promote:
            add("torch_need_autocast_promote", half, op, both[index], torch.float32)
        for op, *both, out in LISTS.torch_expect_builtin_promote:
            add("torch_expect_builtin_promote", half, op, both[index], torch.float32, out_type=out)
        for op, *both, out in LISTS.methods_expect_builtin_promote:
            add("methods_expect_builtin_promote", half, op, both[index], torch.float32, module=None, out_type=out)
    return calls


@pytest.mark.parametrize(("op", "args", "run", "options"), _calls())
def test_autocast(op: str, args: Any, run: torch.dtype, options: dict[str, Any]) -> None:
    TestAutocast()._run_autocast_outofplace(op, args, run, "cpu", **options)
