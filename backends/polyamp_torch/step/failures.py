"""What was mistaken when a step ends in one of torch's errors. Called by the backend, after the failure.

They are recognised by their words, in torch 2.7 to 2.13; one that is not recognised stays as it is.
"""

from __future__ import annotations

from polyamp.errors import LossError, PolyampError


def explained(error: Exception) -> PolyampError | None:
    """The error to raise in place of torch's; None if it is not known what was mistaken."""
    if isinstance(error, RuntimeError) and "Can't call numpy() on Tensor that requires grad" in str(error):
        return LossError(
            "loss_fn gives a tensor to NumPy, through which no gradient flows. Compute with torch.* in the "
            "place of np.*; "
            "for what is only to be looked at, tensor.detach() goes into aux, (loss, aux)."
        )
    return None
