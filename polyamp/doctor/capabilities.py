"""`polyamp.capabilities`: what each dtype is on one device, measured in one framework."""

from __future__ import annotations

from polyamp.contract import registry
from polyamp.doctor.device_capabilities import Capabilities
from polyamp.doctor.examination import examine
from polyamp.errors import ArgumentError, BackendError, UnsupportedError, did_you_mean


def capabilities(backend: str, device: str | None = None) -> Capabilities:
    """Measure what float32, TF32, bfloat16, float16 and the float8 formats are on a device.

    A process of its own imports the framework and runs a matrix product, a 3x3 convolution and attention, forward and
    backward, in each dtype; this process keeps its settings. It takes 5 to 15 seconds. CPUs are measured on one core.

    Args:
        backend: name of a framework: "torch", "tensorflow" or "jax".
        device: a device as the framework names it ("cuda:0", "cpu:0"), or a kind of device ("cuda", "cpu"); None for
            the framework's default device.

    Returns:
        Per dtype a verdict ("native", "emulated", "float32 in disguise", "fails", "missing"), speeds relative to
        float32 and the accumulation error; a recommended policy; known traps of this version. `print` shows a table.

    Raises:
        BackendError: there is no such backend, or its framework is missing, too old or broken.
        ArgumentError: the framework has no such device.
        UnsupportedError: the backend cannot be measured.

    Example:
        `polyamp.capabilities("jax").dtypes["bfloat16"].verdict` is "float32 in disguise" on a CPU.

        >>> import polyamp
        >>> polyamp.capabilities("jaxx")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        polyamp.errors.BackendError: backend must be one of ... Received: 'jaxx'. Did you mean 'jax'?
    """
    known = registry.names()
    if backend not in known:
        raise BackendError(
            f"backend must be one of {', '.join(sorted(known))}. Received: {backend!r}.{did_you_mean(backend, known)}"
        )
    if device is not None and not isinstance(device, str):
        raise ArgumentError(
            f"device must be a name, such as 'cuda:0' or 'cpu', or None. Received: {type(device).__name__}."
        )
    status = registry.status(backend)
    if not status.usable:
        raise BackendError(f"backend {backend!r} cannot be measured: {status.problem}")
    found = examine([backend], device=device)[backend]
    if found.problem is not None:
        kind = ArgumentError if found.problem_kind == "argument" else BackendError
        raise kind(found.problem if kind is ArgumentError else f"backend {backend!r}: {found.problem}")
    if not found.capabilities:
        raise UnsupportedError(
            f"the {backend} backend has nothing to measure its devices with (`capability_probe`: "
            "polyamp.doctor.probe.HasCapabilityProbe)."
        )
    return found.capabilities[0]
