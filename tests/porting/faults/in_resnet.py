"""Faults in the ResNet, and in ones of other norms, of depthwise convolutions and with a flatten."""

from __future__ import annotations

from typing import Final

from tests.porting.faults.changes import rows_swapped
from tests.porting.faults.planting import Carried, Edit, Fault

_NORMS: Final = r"(layer\d/\d/)?bn[12]|layer2/0/downsample/1"
_SECOND: Final = "out = self.bn2(self.conv2(out))"
_END: Final = "return self.relu(out + identity)"
_STRIDED: Final = "nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)"
_TORCH_FLAT: Final[tuple[Edit, ...]] = (
    ("self.fc = nn.Linear(STAGES[1][0], CLASSES)", "self.fc = nn.Linear(STAGES[1][0] * 24, CLASSES)"),
    ("torch.flatten(self.avgpool(x), 1)", "torch.flatten(x, 1)"),
)
_KERAS_FLAT: Final[tuple[Edit, ...]] = (
    ('layers.GlobalAveragePooling2D(name="avg_pool")', 'layers.Flatten(name="avg_pool")'),
)
_FLAT: Final = {"torch": _TORCH_FLAT, "keras": _KERAS_FLAT}
_KERAS_GROUP: Final = (
    (
        "return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=name)",
        "return layers.GroupNormalization(4, epsilon=1e-5, name=name)",
    ),
)
_TORCH_GROUP: Final = (
    ("self.bn2 = nn.BatchNorm2d(planes)", "self.bn2 = nn.GroupNorm(4, planes)"),
    ("self.bn1 = nn.BatchNorm2d(planes)", "self.bn1 = nn.GroupNorm(4, planes)"),
    ("self.bn1 = nn.BatchNorm2d(width)", "self.bn1 = nn.GroupNorm(4, width)"),
    ("(projection, nn.BatchNorm2d(planes))", "(projection, nn.GroupNorm(4, planes))"),
)
_GROUP: Final = {"torch": _TORCH_GROUP, "keras": _KERAS_GROUP}
_TORCH_DEPTH: Final = (
    (
        "self.conv1 = conv3x3(IMAGE[-1], width)",
        "self.conv1 = nn.Conv2d(3, 6, 3, padding=1, bias=False, groups=3)\n        self.point = nn.Conv2d(6, width, 1, bias=False)",
    ),
    ("self.bn1(self.conv1(x)))\n        x = self", "self.bn1(self.point(self.conv1(x))))\n        x = self"),
)
_KERAS_DEPTH: Final = (
    (
        'x = layers.Conv2D(STAGES[0][0], 3, padding="same", use_bias=False, name="conv1_conv")(images)',
        'x = layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2, use_bias=False, name="conv1_conv")(images)\n    x = layers.Conv2D(STAGES[0][0], 1, use_bias=False, name="point")(x)',
    ),
)
_DEPTH: Final = {"torch": _TORCH_DEPTH, "keras": _KERAS_DEPTH}


def _torch(what: str, source: str, at: str, before: str, after: str) -> Fault:
    return Fault(what, "resnet", source, "torch", at, ((before, after),))


def _keras(what: str, at: str, before: str, after: str) -> Fault:
    return Fault(what, "resnet", "torch", "keras", at, ((before, after),))


TORCH: Final = (
    _torch("epsilon 1e-3", "keras", r"layer\d/\d/bn2", "self.bn2 = nn.BatchNorm2d(planes)", "self.bn2 = nn.BatchNorm2d(planes, 1e-3)"),
    _torch("momentum reversed", "keras", r"layer\d/\d/bn1", "self.bn1 = nn.BatchNorm2d(planes)", "self.bn1 = nn.BatchNorm2d(planes, momentum=0.9)"),
    _torch("no running statistics", "keras", "bn1", "self.bn1 = nn.BatchNorm2d(width)", "self.bn1 = nn.BatchNorm2d(width, track_running_stats=False)"),
    _torch("norm without scale and bias", "nnx", "bn1", "self.bn1 = nn.BatchNorm2d(width)", "self.bn1 = nn.BatchNorm2d(width, affine=False)"),
    _torch("residual missing", "keras", "layer2/0/.*conv1|layer2/0/downsample/0", _END, "return self.relu(out)"),
    _torch("ReLU before the sum", "keras", "layer2/0/.*conv1|layer2/0/downsample/0", _END, "return self.relu(out) + identity"),
    _torch("projection left out of its norm", "keras", r"layer2/0/downsample/1|layer2/1/conv1", "else self.downsample(x)", "else self.downsample[0](x)"),
    _torch("wrong one of two norms", "nnx", r"layer1/0/(bn[12]|conv2)|layer2/0/(downsample/0|conv1)", _SECOND, "out = self.bn1(self.conv2(out))"),
    _torch("circular padding", "keras", r"(layer\d/\d/)?conv[12]", _STRIDED, _STRIDED.replace("bias=False", 'bias=False, padding_mode="circular"')),
    _torch("leaky ReLU for ReLU", "keras", "relu|layer1/0/conv1", "self.relu = nn.ReLU(inplace=True)\n        self.layer1", "self.relu = nn.LeakyReLU(0.01)\n        self.layer1"),
    _torch("maximum for the mean", "keras", "avgpool|fc", "nn.AdaptiveAvgPool2d((1, 1))", "nn.AdaptiveMaxPool2d((1, 1))"),
    _torch("sum for the mean", "nnx", "fc", "self.avgpool(x)", "24 * self.avgpool(x)"),
    _torch("rows and columns swapped in the picture", "nnx", "conv1", "x = self.relu(self.bn1(self.conv1(x)))", "x = self.relu(self.bn1(self.conv1(x.mT).mT))"),
)  # fmt: skip

KERAS: Final = (
    _keras("Keras's own epsilon", r"conv\w+_bn", "momentum=0.9, epsilon=1e-5", "momentum=0.9"),
    _keras("Keras's own momentum", r"conv\w+_bn", "momentum=0.9, epsilon=1e-5", "epsilon=1e-5"),
    _keras("momentum reversed", r"conv\w+_bn", "momentum=0.9, epsilon=1e-5", "momentum=0.1, epsilon=1e-5"),
    _keras("same padding of a strided convolution", r"conv\d_block\d_[12]_conv", 'padding = "valid" if stride > 1 else "same"', 'padding = "same"\n    x = x if stride == 1 else x[:, 1:-1, 1:-1]'),
    _keras("norm over another axis", "conv1_bn", 'x = batch_norm("conv1_bn")(x)', 'x = ops.swapaxes(batch_norm("conv1_bn")(ops.swapaxes(x[:, :, :8], 2, 3)), 2, 3)'),
    _keras("tanh for ReLU", r"conv\d_block\d_1_relu|conv\d_block\d_2_conv", 'layers.Activation("relu", name=f"{name}_1_relu")', 'layers.Activation("tanh", name=f"{name}_1_relu")'),
    _keras("pictures scaled to [-1, 1] once more", "conv1_conv", '(images)\n    x = batch_norm("conv1_bn")', '(images / 127.5 - 1)\n    x = batch_norm("conv1_bn")'),
    _keras("bias missing in the head", "predictions", "layers.Dense(CLASSES, name=\"predictions\")", "layers.Dense(CLASSES, use_bias=False, name=\"predictions\")"),
)  # fmt: skip

ARRAYS: Final = (
    Fault("running mean and variance swapped", "resnet", "keras", "torch", "layer1/0/bn1", carried=(Carried(r"layer1/0/bn1/running_", lambda mean, variance: (variance, abs(mean) + 1e-3)),)),
    Fault("running variance corrected by n / (n - 1)", "resnet", "keras", "torch", "layer2/1/bn2", carried=(Carried("layer2/1/bn2/running_var", lambda x: x * 128 / 127),)),
    Fault("deviation for the variance", "resnet", "torch", "nnx", "stem_norm", carried=(Carried("stem_norm.*var", lambda x: x**0.5),)),
    Fault("kernel turned round", "resnet", "keras", "torch", "layer1/0/conv2", carried=(Carried("layer1/0/conv2/weight", lambda x: x[..., ::-1, ::-1]),)),
    Fault("square channels of a kernel transposed", "resnet", "torch", "keras", "conv2_block1_1_conv", carried=(Carried("^conv2_block1_1_conv/kernel", lambda x: x.swapaxes(2, 3)),)),
    Fault("two channels of a norm swapped", "resnet", "linen", "torch", "layer2/0/downsample/1", carried=(Carried("layer2/0/downsample/1/weight", rows_swapped),)),
    Fault("height and width of a kernel swapped", "resnet", "torch", "equinox", "layers/0/conv1", carried=(Carried("layers/0/conv1/weight", lambda x: x.swapaxes(2, 3)),)),
)  # fmt: skip

VARIANTS: Final = (
    Fault("channel order behind a flatten", "resnet", "torch", "keras", "predictions", carried=(Carried("predictions/kernel", lambda x: x.reshape(24, 16, 5).swapaxes(0, 1).reshape(384, 5)),), both=_FLAT),
    Fault("channel order behind a flatten in the code", "resnet", "keras", "torch", "fc", (("torch.flatten(x, 1)", "torch.flatten(x.permute(0, 2, 3, 1), 1)"),), both=_FLAT),
    Fault("rows and columns behind a flatten", "resnet", "keras", "torch", "fc", (("torch.flatten(x, 1)", "torch.flatten(x.mT, 1)"),), both=_FLAT),
    Fault("other number of groups", "resnet", "keras", "torch", "bn1", (("nn.GroupNorm(4, width)", "nn.GroupNorm(2, width)"),), both=_GROUP),
    Fault("instance norm for group norm", "resnet", "keras", "torch", r"layer\d/\d/bn2", (("self.bn2 = nn.GroupNorm(4, planes)", "self.bn2 = nn.InstanceNorm2d(planes, affine=True)"),), both=_GROUP),
    Fault("depth multiplier's order", "resnet", "keras", "torch", "conv1", carried=(Carried("^conv1/weight", lambda x: x.reshape(3, 2, 1, 3, 3).swapaxes(0, 1).reshape(6, 1, 3, 3)),), both=_DEPTH),
    Fault("Keras's own epsilon of a group norm", "resnet", "torch", "keras", r"conv\w+_bn", (("layers.GroupNormalization(4, epsilon=1e-5", "layers.GroupNormalization(4, epsilon=1e-3"),), both=_GROUP),
)  # fmt: skip

FAULTS: Final = (*TORCH, *KERAS, *ARRAYS, *VARIANTS)
