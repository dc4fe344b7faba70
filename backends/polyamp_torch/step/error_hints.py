"""Explanations of torch's errors in a step, in terms of the user's mistake.

Errors are recognised by their text in torch 2.7 to 2.13; unrecognised errors are unchanged.
"""

from __future__ import annotations

from polyamp.errors import LossError, PolyampError


def explain_error(error: Exception) -> PolyampError | None:
    """Return the error to raise instead of torch's; None if the mistake is not known."""
    if isinstance(error, RuntimeError) and "Can't call numpy() on Tensor that requires grad" in str(error):
        return LossError(
            "loss_fn gives a tensor to NumPy, through which no gradient flows. Compute with torch.* in the "
            "place of np.*; "
            "for what is only to be looked at, tensor.detach() goes into aux, (loss, aux)."
        )
    return None
