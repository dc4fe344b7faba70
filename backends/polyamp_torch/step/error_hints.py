"""Explanations of torch's errors in a step, in terms of the user's mistake.

Errors are recognised by their text in torch 2.7 to 2.13; unrecognised errors are unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyamp.errors import LossError, PolyampError, UnsupportedError


def explain_error(error: Exception) -> PolyampError | None:
    """Return the error to raise instead of torch's; None if the mistake is not known."""
    if isinstance(error, RuntimeError) and "Can't call numpy() on Tensor that requires grad" in str(error):
        return LossError(
            "loss_fn gives a tensor to NumPy, through which no gradient flows. Compute with torch.* in the "
            "place of np.*; "
            "for what is only to be looked at, tensor.detach() goes into aux, (loss, aux)."
        )
    return None


def compile_error(error: Exception, changing: Sequence[str]) -> UnsupportedError:
    """Return the error for a failure of torch.compile: the start of torch's message, and the remedy."""
    if changing and "RecompileLimit" in type(error).__name__:
        return UnsupportedError(
            f"train_step(compile=...): every pass of loss_fn changes {', '.join(changing[:3])}. Python state is a "
            f"constant of the graph, so each step is compiled anew, and torch gives up: {type(error).__name__}. Keep a "
            "counter in a buffer (self.register_buffer, self.n += 1) or outside of loss_fn, or use compile=False."
        )
    lines: Sequence[str] = [line.strip() for line in str(error).splitlines() if line.strip()]
    return UnsupportedError(
        f"train_step(compile=...) could not compile the step into one graph. torch says: {type(error).__name__}: "
        f"{' '.join(lines[:3])[:400]}. Keep Python side effects, data-dependent branches, backward(), NumPy arrays "
        "that are not the batch's and autograd functions without setup_context out of loss_fn and the model, or use "
        "compile=False. (Without a C++ compiler: compile={'backend': 'aot_eager'}.)"
    )
