"""`InputOrder`, the order of the values that a layer takes as a model's graph of modules proves it, and
`InputOrderRecorder`, which follows values through that graph.

Only modules that a container calls itself prove an order (`Sequential`, a functional model). What a user's function
does with its values is unknown, and `None` stands for such values.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

ChannelPosition = Literal["first", "last"]


class InputOrder(NamedTuple):
    """Order of the values that a layer takes.

    Attributes:
        layer: path of the layer whose features (of a convolution: channels) they are.
        channels: position of the channels in values that were flattened before the layer, or in the image that values
            were reshaped to; None if they are the features as that layer returns them.
    """

    layer: str
    channels: ChannelPosition | None = None


class ValueFlow(NamedTuple):
    """Values between two modules.

    Attributes:
        order: whose features they are, and in which order.
        is_image: whether they have spatial axes.
    """

    order: InputOrder
    is_image: bool


class InputOrderRecorder:
    """Follows values through the modules of a container, and records what each layer takes.

    Each method takes the values before a module and returns those after it; None is unknown values.

    Attributes:
        inputs: path of a layer -> the order of what it takes. Layers that are called with values of several orders
            have none.

    Example:
        >>> recorder = InputOrderRecorder()
        >>> flow = recorder.convolution(None, "0")
        >>> flow = recorder.flatten(flow, "first")
        >>> _ = recorder.dense(flow, "3")
        >>> recorder.inputs
        {'3': InputOrder(layer='0', channels='first')}
    """

    def __init__(self) -> None:
        self.inputs: dict[str, InputOrder] = {}
        self._unknown: set[str] = set()

    def convolution(self, flow: ValueFlow | None, path: str) -> ValueFlow:
        """Record a convolution, which takes an image and returns one."""
        self._record(path, flow if flow is not None and flow.is_image else None)
        return ValueFlow(InputOrder(path), True)

    def dense(self, flow: ValueFlow | None, path: str, *, takes_channels: bool = False) -> ValueFlow | None:
        """Record a dense layer. With `takes_channels` it takes the channels of an image at each position, as a dense
        layer of channels-last frameworks does."""
        is_image = flow is not None and flow.is_image
        self._record(path, None if is_image and not takes_channels else flow)
        return None if is_image else ValueFlow(InputOrder(path), False)

    def norm(self, flow: ValueFlow | None, path: str) -> ValueFlow | None:
        """Record a norm with arrays of its own. Those of channels keep the order of an image; those of a vector would
        have to be reordered with it, so that nothing is known behind it."""
        image = flow if flow is not None and flow.is_image else None
        self._record(path, image)
        return image

    def flatten(self, flow: ValueFlow | None, channels: ChannelPosition) -> ValueFlow | None:
        """Return the values behind a flatten that has the channels at this position."""
        if flow is None or not flow.is_image:
            return flow
        return None if flow.order.channels else ValueFlow(flow.order._replace(channels=channels), False)

    def reshape(self, flow: ValueFlow | None, channels: ChannelPosition) -> ValueFlow | None:
        """Return the values behind a reshape of features into an image that has the channels at this position."""
        if flow is None or flow.is_image or flow.order.channels:
            return None
        return ValueFlow(flow.order._replace(channels=channels), True)

    def global_pooling(self, flow: ValueFlow | None) -> ValueFlow | None:
        """Return the values behind a pooling over all positions."""
        return None if flow is None or not flow.is_image else flow._replace(is_image=False)

    def forget(self, path: str) -> None:
        """Record that a layer is also called where its values are unknown."""
        self._unknown.add(path)
        self.inputs.pop(path, None)

    def _record(self, path: str, flow: ValueFlow | None) -> None:
        if flow is None or self.inputs.get(path, flow.order) != flow.order:
            self.forget(path)
        elif path not in self._unknown:
            self.inputs[path] = flow.order
