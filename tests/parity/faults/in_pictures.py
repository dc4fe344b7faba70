"""Faults in the code of the ResNet and of the autoencoder, and in arrays that came wrongly."""

from __future__ import annotations

from typing import Final

from tests.parity.faults.planted import Fault, backward, forward, update
from tests.parity.faults.planted import carried as wrong
from tests.porting.faults.planting import Carried, Edit

_END: Final = "return self.relu(out + identity)"
_STRIDED: Final = "nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)"
_DECODER: Final = "nn.ConvTranspose2d(CODE[1], CODE[0], 4, stride=2, padding=1),\n            nn.ReLU(),"
_KERAS_DECODER: Final = 'layers.Conv2DTranspose(CODE[0], 4, strides=2, activation="relu", padding="same")'
_KERAS_POOL: Final = "encoded = layers.MaxPooling2D(2)(x)"
_KERAS_NORM: Final = "momentum=0.9, epsilon=1e-5"
_NNX_STEM: Final = "self.stem_norm = nnx.BatchNorm(width, momentum=0.9, epsilon=1e-5, rngs=rngs)"


def _resnet(
    kind: str, what: str, first: str, second: str, places: tuple[str, ...], *edits: Edit, stage: str = "forward"
) -> Fault:
    at = {"forward": forward, "backward": backward, "update": update}[stage]("resnet", *places)
    return Fault(kind, what, "resnet", first, second, at, edits)


def _autoencoder(
    kind: str, what: str, first: str, second: str, places: tuple[str, ...], *edits: Edit, grad: bool = False
) -> Fault:
    at = (backward if grad else forward)("autoencoder", *places)
    return Fault(kind, what, "autoencoder", first, second, at, edits)


RESNET: Final = (
    _resnet("formula", "leaky ReLU for ReLU", "keras", "torch", ("relu", "conv 1@0"), ("self.relu = nn.ReLU(inplace=True)\n        self.layer1", "self.relu = nn.LeakyReLU(0.01)\n        self.layer1")),
    _resnet("formula", "ReLU before the sum", "nnx", "torch", ("out@0", "relu 1@0", "block@0", "conv 1@1", "project@1"), (_END, "return self.relu(out) + identity")),
    _resnet("formula", "tanh for ReLU", "torch", "keras", ("relu 1@0", "conv 2@0"), ('layers.Activation("relu", name=f"{name}_1_relu")', 'layers.Activation("tanh", name=f"{name}_1_relu")')),
    _resnet("formula", "same padding of a strided convolution", "torch", "keras", ("conv 1@1",), ('padding = "valid" if stride > 1 else "same"', 'padding = "same"\n    x = x if stride == 1 else x[:, 1:-1, 1:-1]')),
    _resnet("formula", "circular padding", "linen", "torch", ("conv",), (_STRIDED, _STRIDED.replace("bias=False", 'bias=False, padding_mode="circular"'))),
    _resnet("formula", "maximum for the mean", "keras", "torch", ("pool", "head"), ("nn.AdaptiveAvgPool2d((1, 1))", "nn.AdaptiveMaxPool2d((1, 1))")),
    _resnet("formula", "pictures scaled once more", "torch", "keras", ("conv",), ('(images)\n    x = batch_norm("conv1_bn")', '(images / 127.5 - 1)\n    x = batch_norm("conv1_bn")')),
    _resnet("epsilon", "1e-3 for 1e-5", "keras", "torch", ("norm 2@0",), ("self.bn2 = nn.BatchNorm2d(planes)", "self.bn2 = nn.BatchNorm2d(planes, 1e-3)")),
    _resnet("epsilon", "Keras's own", "torch", "keras", ("norm",), (_KERAS_NORM, "momentum=0.9")),
    _resnet("epsilon", "1e-4 for 1e-5", "torch", "nnx", ("norm",), (_NNX_STEM, _NNX_STEM.replace("1e-5", "1e-4"))),
    _resnet("statistics", "momentum the other way round", "keras", "torch", ("norm 1@0",), ("self.bn1 = nn.BatchNorm2d(planes)", "self.bn1 = nn.BatchNorm2d(planes, momentum=0.9)"), stage="update"),
    _resnet("statistics", "Keras's own momentum", "torch", "keras", ("norm",), (_KERAS_NORM, "epsilon=1e-5"), stage="update"),
    _resnet("statistics", "momentum of 0.99", "torch", "nnx", ("norm",), (_NNX_STEM, _NNX_STEM.replace("0.9,", "0.99,")), stage="update"),
    _resnet("statistics", "momentum of 0.8", "torch", "torch", ("norm",), ("self.bn1 = nn.BatchNorm2d(width)", "self.bn1 = nn.BatchNorm2d(width, momentum=0.2)"), stage="update"),
    _resnet("statistics", "running for the batch's", "keras", "torch", ("norm", "relu", "conv 1@0"), ("x = self.relu(self.bn1(self.conv1(x)))\n        x = self.layer2", "x = self.relu(functional.batch_norm(self.conv1(x), self.bn1.running_mean, self.bn1.running_var, self.bn1.weight, self.bn1.bias, False))\n        x = self.layer2")),
    _resnet("statistics", "running for the batch's", "torch", "nnx", ("norm",), ("self.stem_norm(self.stem(x))", "self.stem_norm(self.stem(x), use_running_average=True)")),
    _resnet("statistics", "variance of the sample for the batch's", "nnx", "torch", ("relu", "conv 1@0"), ("x = self.relu(self.bn1(self.conv1(x)))\n        x = self.layer2", "x = self.bn1(self.conv1(x)) * (1 - 1 / (len(x) * 96)) ** 0.5\n        x = self.relu(x)\n        x = self.layer2")),
    _resnet("dtype", "norm's input rounded to bfloat16", "torch", "linen", ("norm",), ('x = nn.relu(norm(name="bn_init")(x))', 'x = nn.relu(norm(name="bn_init")(x.astype(jnp.bfloat16).astype(jnp.float32)))')),
    _resnet("gradient", "stopped at the shortcut", "keras", "torch", ("block@1", "out@1", "norm 2@1", "project norm@1", "project@1"), ("identity = x if self.downsample is None else self.downsample(x)", "identity = x.detach() if self.downsample is None else self.downsample(x)"), stage="backward"),
    Fault("layout", "kernel turned round", "resnet", "keras", "torch", wrong("resnet", "conv 2@0"), carried=(Carried("layer1/0/conv2/weight", lambda x: x[..., ::-1, ::-1]),)),
    Fault("layout", "square channels of a kernel transposed", "resnet", "torch", "keras", wrong("resnet", "conv 1@0"), carried=(Carried("^conv2_block1_1_conv/kernel", lambda x: x.swapaxes(2, 3)),)),
    Fault("layout", "height and width of a kernel swapped", "resnet", "torch", "equinox", wrong("resnet", "conv 1@0"), carried=(Carried("layers/0/conv1/weight", lambda x: x.swapaxes(2, 3)),)),
)  # fmt: skip
AUTOENCODER: Final = (
    _autoencoder("formula", "leaky ReLU for ReLU", "nnx", "torch", ("relu 2", "deconv 0", "deconv 1"), (_DECODER, _DECODER.replace("ReLU", "LeakyReLU"))),
    _autoencoder("formula", "one ReLU forgotten", "torch", "nnx", ("relu 0", "pool 0", "conv 1"), ("x = pool(nnx.relu(self.conv1(x)))", "x = pool(self.conv1(x))")),
    _autoencoder("formula", "average pooling for maximum", "torch", "keras", ("pool 1", "deconv 0", "encoder"), (_KERAS_POOL, _KERAS_POOL.replace("Max", "Average"))),
    _autoencoder("formula", "activation left out", "torch", "keras", ("deconv 0", "relu 2", "deconv 1"), (_KERAS_DECODER, _KERAS_DECODER.replace('activation="relu", ', ""))),
    _autoencoder("formula", "other padding", "torch", "nnx", ("conv 0",), ("self.conv1 = nnx.Conv(IMAGE[-1], CODE[0], (3, 3), rngs=rngs)", "self.conv1 = nnx.Conv(IMAGE[-1], CODE[0], (3, 3), padding=((2, 0), (1, 1)), rngs=rngs)")),
    _autoencoder("formula", "other padding of the transposed convolution", "torch", "linen", ("deconv 0",), ("nn.ConvTranspose(CODE[0], (4, 4), strides=(2, 2))", "nn.ConvTranspose(CODE[0], (4, 4), strides=(2, 2), padding=((1, 3), (1, 3)))")),
    _autoencoder("formula", "sigmoid behind the last layer", "keras", "torch", ("deconv 1", "whole"), ("return self.decoder(self.encoder(x))", "return self.decoder(self.encoder(x)).sigmoid()")),
    _autoencoder("dtype", "code rounded to float16", "haiku", "torch", ("deconv 0",), ("return self.decoder(self.encoder(x))", "return self.decoder(self.encoder(x).half().float())")),
    _autoencoder("gradient", "stopped at the code", "keras", "torch", ("conv 1", "pool 1", "encoder", "relu 1", "pool 0", "relu 0", "conv 0"), ("return self.decoder(self.encoder(x))", "return self.decoder(self.encoder(x).detach())"), grad=True),
    Fault("layout", "transposed kernel not turned round", "autoencoder", "torch", "nnx", wrong("autoencoder", "deconv 0"), carried=(Carried("deconv1/kernel", lambda x: x[::-1, ::-1]),)),
    Fault("layout", "transposed kernel not turned round", "autoencoder", "torch", "equinox", wrong("autoencoder", "deconv 0"), carried=(Carried("decoder/layers/0/weight", lambda x: x[..., ::-1, ::-1]),)),
)  # fmt: skip
FAULTS: Final = (*RESNET, *AUTOENCODER)
"""All faults of both models' code."""
