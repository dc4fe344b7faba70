"""Items of flax's Sequentials, linen's and nnx's, for the orders of values that they prove (`input_orders`)."""

from __future__ import annotations

from typing import Any

from polyamp_jax.porting.input_orders import ChainItem, function_item


def flax_chain_item(part: Any, path: str) -> ChainItem:
    """Return the item of a module, or of a function, in a Sequential of flax's.

    Args:
        part: the module or function.
        path: its path in the inventory.
    """
    kind = type(part)
    if kind.__module__.startswith(("flax.nnx", "flax.linen")):
        name = kind.__name__
        if name in ("Conv", "ConvTranspose"):
            size = part.kernel_size
            return ChainItem("convolution", path, spatial=1 if isinstance(size, int) else len(size))
        if name in ("Dense", "Linear"):
            return ChainItem("dense", path)
        if name in ("BatchNorm", "GroupNorm", "InstanceNorm") or (
            name in ("LayerNorm", "RMSNorm") and getattr(part, "reduction_axes", -1) in (-1, (-1,))
        ):
            return ChainItem("norm", path)
        return ChainItem("elementwise" if name == "Dropout" else "unknown")
    is_module = any(each.__module__.startswith("flax.") for each in kind.__mro__)
    return ChainItem("unknown") if is_module or not callable(part) else function_item(part)
