"""Faults in the convolutional autoencoder, and in ones that resize, that pool by the mean, and with leaky ReLUs."""

from __future__ import annotations

from typing import Final

from tests.porting.faults.changes import half
from tests.porting.faults.planting import Carried, Edit, Fault

_DECODER: Final = "nn.ConvTranspose2d(CODE[1], CODE[0], 4, stride=2, padding=1),\n            nn.ReLU(),"
_KERAS_DECODER: Final = 'layers.Conv2DTranspose(CODE[0], 4, strides=2, activation="relu", padding="same")'
_KERAS_POOL: Final = "encoded = layers.MaxPooling2D(2)(x)"
_TORCH_POOL: Final = "nn.MaxPool2d(2),\n        )"
_TORCH_RESIZE: Final[tuple[Edit, ...]] = (
    (_DECODER, 'nn.Conv2d(CODE[1], CODE[0], 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2, mode="bilinear"),'),
)
_KERAS_RESIZE: Final[tuple[Edit, ...]] = (
    (
        f"x = {_KERAS_DECODER}(encoded)",
        'x = layers.Conv2D(CODE[0], 3, activation="relu", padding="same")(encoded)\n    x = layers.UpSampling2D(2, interpolation="bilinear")(x)',
    ),
)
_RESIZE: Final = {"torch": _TORCH_RESIZE, "keras": _KERAS_RESIZE}
_TORCH_LEAKY: Final[tuple[Edit, ...]] = ((_DECODER, _DECODER.replace("nn.ReLU()", "nn.LeakyReLU(0.2)")),)
_KERAS_LEAKY: Final[tuple[Edit, ...]] = (
    (
        f"x = {_KERAS_DECODER}(encoded)",
        f"x = {_KERAS_DECODER}(encoded)\n    x = layers.LeakyReLU(0.2)(x)".replace('activation="relu", ', ""),
    ),
)
_LEAKY: Final = {"torch": _TORCH_LEAKY, "keras": _KERAS_LEAKY}
_TORCH_MEAN: Final[tuple[Edit, ...]] = ((_TORCH_POOL, "nn.AvgPool2d(3, 2, 1, count_include_pad=False),\n        )"),)
_KERAS_MEAN: Final[tuple[Edit, ...]] = ((_KERAS_POOL, 'encoded = layers.AveragePooling2D(3, 2, padding="same")(x)'),)
_MEAN: Final = {"torch": _TORCH_MEAN, "keras": _KERAS_MEAN}


def _torch(what: str, source: str, at: str, before: str, after: str) -> Fault:
    return Fault(what, "autoencoder", source, "torch", at, ((before, after),))


FAULTS: Final = (
    _torch("average pooling for maximum", "keras", "encoder/5|decoder/0", _TORCH_POOL, _TORCH_POOL.replace("Max", "Avg")),
    _torch("sigmoid for ReLU", "keras", "decoder/[12]", _DECODER, _DECODER.replace("ReLU", "Sigmoid")),
    _torch("leaky ReLU for ReLU", "nnx", "decoder/[12]", _DECODER, _DECODER.replace("ReLU", "LeakyReLU")),
    _torch("other padding of the transposed convolution", "keras", "decoder/0", _DECODER, _DECODER.replace("padding=1", "padding=0, output_padding=0").replace("nn.ReLU()", "nn.ReLU(), nn.ZeroPad2d(-1), nn.ConstantPad2d((-1, 1, -1, 1), 0.0)").replace("nn.ReLU(), ", "nn.ReLU(), ")),
    _torch("kernel of 3 for 4", "keras", "decoder/0", _DECODER, _DECODER.replace("CODE[0], 4, stride=2, padding=1", "CODE[0], 3, stride=2, padding=1, output_padding=1")),
    _torch("sigmoid behind the last layer", "keras", "behind decoder/2|decoder/2", "return self.decoder(self.encoder(x))", "return self.decoder(self.encoder(x)).sigmoid()"),
    _torch("code detached", "keras", "encoder/0", "return self.decoder(self.encoder(x))", "return self.decoder(self.encoder(x).detach())"),
    Fault("transposed kernel not turned round", "autoencoder", "torch", "nnx", "deconv1", carried=(Carried("deconv1/kernel", lambda x: x[::-1, ::-1]),)),
    Fault("transposed kernel turned round", "autoencoder", "keras", "torch", "decoder/0", carried=(Carried("decoder/0/weight", lambda x: x[..., ::-1, ::-1]),)),
    Fault("transposed kernel not turned round", "autoencoder", "torch", "linen", "decoder/ConvTranspose_1", carried=(Carried("ConvTranspose_1/kernel", lambda x: x[::-1, ::-1]),)),
    Fault("transposed kernel not turned round", "autoencoder", "torch", "equinox", "decoder/layers/0", carried=(Carried("decoder/layers/0/weight", lambda x: x[..., ::-1, ::-1]),)),
    Fault("kernel rounded to float16", "autoencoder", "keras", "torch", "encoder/3", carried=(Carried("encoder/3/weight", half),)),
    Fault("transposed kernel read as flax's", "autoencoder", "torch", "nnx", "deconv1", (("self.deconv1 = nnx.ConvTranspose(CODE[1], CODE[0], (4, 4), strides=2, rngs=rngs)", "self.deconv1 = nnx.ConvTranspose(CODE[1], CODE[0], (4, 4), strides=2, padding=((1, 3), (1, 3)), rngs=rngs)"),)),
    Fault("valid for same padding", "autoencoder", "torch", "nnx", "conv1", (("self.conv1 = nnx.Conv(IMAGE[-1], CODE[0], (3, 3), rngs=rngs)", 'self.conv1 = nnx.Conv(IMAGE[-1], CODE[0], (3, 3), padding=((2, 0), (1, 1)), rngs=rngs)'),)),
    Fault("one ReLU forgotten", "autoencoder", "torch", "nnx", "conv2", (("x = pool(nnx.relu(self.conv1(x)))", "x = pool(self.conv1(x))"),)),
    Fault("ReLU behind the pooling's mean", "autoencoder", "torch", "nnx", "deconv1", (("return pool(nnx.relu(self.conv2(x)))", "return nnx.relu(nnx.avg_pool(self.conv2(x), (2, 2), (2, 2)))"),)),
    Fault("activation left out", "autoencoder", "torch", "keras", "conv2d_transpose(_1)?", ((_KERAS_DECODER, _KERAS_DECODER.replace('activation="relu", ', "")),)),
    Fault("other pooling", "autoencoder", "torch", "keras", "average_pooling2d|conv2d_transpose", ((_KERAS_POOL, _KERAS_POOL.replace("Max", "Average")),)),
    Fault("dilated instead of strided", "autoencoder", "torch", "keras", "conv2d", (('layers.Conv2D(CODE[0], 3, activation="relu", padding="same")(images)', 'layers.Conv2D(CODE[0], 3, activation="relu", padding="same", dilation_rate=2)(images)'),)),
    Fault("corners aligned", "autoencoder", "keras", "torch", "decoder/2|decoder/3", (('mode="bilinear")', 'mode="bilinear", align_corners=True)'),), both=_RESIZE),
    Fault("nearest for bilinear", "autoencoder", "torch", "keras", "up_sampling2d|conv2d_transpose", (('interpolation="bilinear")', 'interpolation="nearest")'),), both=_RESIZE),
    Fault("other slope of the leaky ReLU", "autoencoder", "keras", "torch", "decoder/[12]", (("nn.LeakyReLU(0.2)", "nn.LeakyReLU(0.01)"),), both=_LEAKY),
    Fault("Keras's own slope", "autoencoder", "torch", "keras", "leaky_re_lu|conv2d_transpose_1", (("layers.LeakyReLU(0.2)", "layers.LeakyReLU()"),), both=_LEAKY),
)  # fmt: skip
