"""MobileNet-V1 (Howard et al. 2017), which torchvision does not have: FedType, Tables 3 and 6."""

from __future__ import annotations

from torch import nn

from fedhet.kinds import Shape
from fedhet.models.info import ModelInfo
from fedhet.models.stem import he_init, is_small

# Table 1 of the paper: the output channels and stride of each depthwise separable convolution.
LAYERS = (
    (64, 1),
    (128, 2),
    (128, 1),
    (256, 2),
    (256, 1),
    (512, 2),
    *((512, 1),) * 5,
    (1024, 2),
    (1024, 1),
)


def mobilenet_v1(shape: Shape) -> nn.Module:
    """Return MobileNet-V1 of width 1.0 without its head: [N, C, H, W] -> [N, 1024].

    For small images, the first convolution and the first strided layer keep the image's size.
    """
    small = is_small(shape)
    layers = [*_block(shape[0], 32, stride=1 if small else 2)]
    inputs, kept = 32, not small
    for outputs, stride in LAYERS:
        layers += _block(inputs, inputs, stride if kept else 1, groups=inputs)
        layers += _block(inputs, outputs, kernel=1)
        inputs, kept = outputs, kept or stride == 2
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    he_init(net)
    return net


def _block(
    inputs: int, outputs: int, stride: int = 1, *, kernel: int = 3, groups: int = 1
) -> list[nn.Module]:
    """Return a convolution with its batch norm and ReLU."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]


MODELS = (
    ModelInfo(
        "mobilenet-v1", "mobilenet", "width 1.0", "Howard et al. 2017, Table 1", 8, mobilenet_v1
    ),
)
