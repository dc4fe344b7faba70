"""S4: the op list has what torch's own modules and the semantics name; written out here, so that a row cannot go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from polyamp_torch.precision.op_list import RULE_BY_FUNCTION

NO_SUMS = {
    *("common_notes", "LinAlgError", "matmul", "multi_dot", "vecdot"),  # products, classified by their shapes
    *("cross", "diagonal", "vander"),  # elementwise, a view, powers of small integers
}
NAMED = (
    *(functional.softmax, functional.log_softmax, torch.logsumexp, torch.exp, torch.log),
    *(torch.pow, torch.rsqrt, torch.reciprocal, torch.sum, torch.mean, torch.prod, torch.var, torch.std, torch.cumsum),
    *(functional.layer_norm, functional.rms_norm, functional.group_norm, functional.batch_norm, torch.norm),
    *(functional.instance_norm, functional.normalize),
    *(functional.cross_entropy, functional.mse_loss, functional.l1_loss, functional.huber_loss, functional.kl_div),
    *(functional.nll_loss, functional.smooth_l1_loss, functional.binary_cross_entropy, functional.ctc_loss),
    *(functional.binary_cross_entropy_with_logits, torch.cdist, functional.cosine_similarity),
    *(torch.sigmoid, torch.special.expit, torch.erf, torch.erfc, torch.special.ndtr),
    *(torch.Tensor.softmax, torch.Tensor.exp, torch.Tensor.sum, torch.Tensor.sigmoid, torch.Tensor.mean),
)


def public(module: Any) -> dict[str, Any]:
    return {name: getattr(module, name) for name in dir(module) if name[0] != "_" and callable(getattr(module, name))}


@pytest.mark.parametrize("function", NAMED, ids=lambda function: getattr(function, "__qualname__", str(function)))
def test_s04_what_the_semantics_name_is_on_the_list(function: Any) -> None:
    assert function in RULE_BY_FUNCTION


def test_s04_every_function_of_torchs_linear_algebra_is_on_the_list() -> None:
    missing = {name for name, function in public(torch.linalg).items() if function not in RULE_BY_FUNCTION}
    assert missing - NO_SUMS - {"Tensor"} == set()


def test_s04_every_transform_of_torchs_fft_is_on_the_list() -> None:
    missing = {name for name, function in public(torch.fft).items() if function not in RULE_BY_FUNCTION}
    transforming_nothing = {"fftfreq", "rfftfreq", "fftshift", "ifftshift"}
    assert missing - {"Tensor"} == transforming_nothing
