"""Orders of the values that layers take, as the `Sequential`s of flax and equinox models prove them.

JAX's libraries have few classes for what stands between layers: a flatten is a function. So the functions of a
Sequential are called on two small images that show what they do with channels and with positions. What else a model's
`__call__` does with its values is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from polyamp.porting.layouts.input_order import ChannelPosition, InputOrder, InputOrderRecorder, ValueFlow
from polyamp_jax.arrays import join_path
from polyamp_jax.porting.layers.activations import activation_form

_SIZES: Final = ((), (24,), (16, 12), (8, 6, 4))
"""Sizes of the images by their number of spatial axes; poolings may divide them."""
_CHANNELS: Final = 5
_BATCH: Final = 2


ChainRole = Literal["convolution", "dense", "norm", "elementwise", "channelwise", "function", "unknown"]


class ChainItem(NamedTuple):
    """One item of a Sequential.

    Attributes:
        role: what it is: "elementwise" changes each value for itself, "channelwise" each channel of an image, and
            "function" is called to see it.
        path: path of the layer in the inventory.
        function: the function.
        spatial: number of spatial axes of a convolution.
    """

    role: ChainRole
    path: str = ""
    function: Callable[[Any], Any] | None = None
    spatial: int = 0


def input_orders(
    chains: Iterable[Sequence[ChainItem]], channels: ChannelPosition, *, is_batched: bool = True
) -> dict[str, InputOrder]:
    """Return path of a layer -> the order of what it takes.

    Args:
        chains: items of each Sequential, with those of inner Sequentials in their place.
        channels: position of the channels of images.
        is_batched: whether values have a batch axis.
    """
    recorder = InputOrderRecorder()
    for chain in chains:
        flow: ValueFlow | None = None
        spatial = 0
        for item in chain:
            if item.role == "convolution":
                flow, spatial = recorder.convolution(flow, item.path), item.spatial
            elif item.role == "dense":
                flow = recorder.dense(flow, item.path, takes_channels=channels == "last")
            elif item.role == "norm":
                flow = recorder.norm(flow, item.path)
            elif item.role == "function" and flow is not None and item.function is not None:
                flow = _follow_function(flow, recorder, item.function, spatial, channels, is_batched)
            elif item.role != "elementwise" and not (item.role == "channelwise" and flow is not None and flow.is_image):
                flow = None
    return recorder.inputs


def sequential_chains(
    modules: Iterable[tuple[str, Any]],
    kind: type,
    make_item: Callable[[Any, str], ChainItem],
    is_shared: Callable[[Any], bool] = lambda part: False,
) -> Iterator[list[ChainItem]]:
    """Yield the items of every Sequential.

    Args:
        modules: path and module of all modules of a model, the outer ones first.
        kind: the library's Sequential, whose subclasses may do something else.
        make_item: function from a part of a Sequential and its path to the item.
        is_shared: whether a part may be called elsewhere too, so that nothing is known of it.
    """
    inside: set[int] = set()

    def items(path: str, chain: Any) -> Iterator[ChainItem]:
        inside.add(id(chain))
        for number, part in enumerate(chain.layers):
            own = join_path(path, f"layers/{number}")
            if is_shared(part):
                yield ChainItem("unknown")
            elif type(part) is kind:
                yield from items(own, part)
            else:
                yield make_item(part, own)

    for path, module in modules:
        if type(module) is kind and id(module) not in inside:
            yield list(items(path, module))


def function_item(function: Any) -> ChainItem:
    """Return the item of a function in a Sequential."""
    form = activation_form(function)
    if form is not None and "axis" not in form.attributes:
        return ChainItem("elementwise")
    return ChainItem("function", function=function)


def _follow_function(
    flow: ValueFlow,
    recorder: InputOrderRecorder,
    function: Callable[[Any], Any],
    spatial: int,
    channels: ChannelPosition,
    is_batched: bool,
) -> ValueFlow | None:
    """Return the values behind a function; unknown values if it does anything but change them one by one, pool images,
    or flatten them."""
    batch = (_BATCH,) if is_batched else ()
    if not flow.is_image:
        rising = np.broadcast_to(np.linspace(0.5, 1.5, 24, dtype=np.float32), (*batch, 24))
        made = _call(function, rising)
        return flow if made is not None and made.shape == rising.shape and _rises(made, -1) else None
    if not 0 < spatial < len(_SIZES):
        return None
    sizes = _SIZES[spatial]
    rows = np.linspace(0.5, 1.5, int(np.prod(sizes))).reshape(*sizes, 1)
    of_channels = _image(np.linspace(0.5, 1.5, _CHANNELS), sizes, channels, batch)
    of_positions = _image(rows, sizes, channels, batch)
    made, placed = _call(function, of_channels), _call(function, of_positions)
    if made is None or placed is None or made.shape != placed.shape:
        return None
    if made.ndim == len(batch) + spatial + 1:
        same = _as_matrix(made, batch, channels, is_image=True), _as_matrix(placed, batch, channels, is_image=True)
        return flow if _keeps_order(*same) else None
    if made.ndim != len(batch) + 1 or made.shape[:-1] != batch:
        return None
    if made.shape[-1] == _CHANNELS:
        return recorder.global_pooling(flow) if _rises(made, -1) else None
    positions: tuple[ChannelPosition, ...] = ("first", "last")
    for position in positions:
        flat = _as_matrix(made, batch, position, is_image=False), _as_matrix(placed, batch, position, is_image=False)
        if _keeps_order(*flat):
            return recorder.flatten(flow, position)
    return None


def _image(values: Any, sizes: tuple[int, ...], channels: ChannelPosition, batch: tuple[int, ...]) -> Any:
    """Return an image with the values of its channels, the same at every position, or of its positions."""
    full = np.broadcast_to(values, (*sizes, _CHANNELS))
    full = np.moveaxis(full, -1, 0) if channels == "first" else full
    return np.ascontiguousarray(np.broadcast_to(full, (*batch, *full.shape)), np.float32)


def _call(function: Callable[[Any], Any], values: Any) -> Any:
    """Return a function's result as an array; None if it fails or returns something else."""
    try:
        made = function(jnp.asarray(values))
    except Exception:  # noqa: BLE001  # a user's function may raise anything for another shape than the model's
        return None
    return np.asarray(made) if hasattr(made, "shape") else None


def _as_matrix(array: Any, batch: tuple[int, ...], channels: ChannelPosition, *, is_image: bool) -> Any:
    """Return values as (samples, positions, channels); None if their number is no multiple of the channels."""
    if array.shape[: len(batch)] != batch:
        return None
    samples = int(np.prod(batch))
    if not array.size or array.size % (samples * _CHANNELS):
        return None
    if is_image and array.shape[len(batch) if channels == "first" else -1] != _CHANNELS:
        return None
    sides = (_CHANNELS, -1) if channels == "first" else (-1, _CHANNELS)
    matrix = array.reshape(samples, *sides)
    return matrix.swapaxes(1, 2) if channels == "first" else matrix


def _keeps_order(of_channels: Any, of_positions: Any) -> bool:
    """Return whether channels and positions are apart and in their order."""
    if of_channels is None or of_positions is None:
        return False
    return (
        _rises(of_channels, 2)
        and bool(np.all(of_channels == of_channels[:, :1]))
        and _rises(of_positions, 1)
        and bool(np.all(of_positions == of_positions[:, :, :1]))
    )


def _rises(array: Any, axis: int) -> bool:
    return bool(np.all(np.diff(array, axis=axis) > 0))
