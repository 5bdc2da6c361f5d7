"""Networks for images in the sizes of the literature: ResNets, VGG, ShuffleNet, MobileNets, …

They are torchvision's, without pretrained weights, FedGEMS' bottleneck ResNets, and MobileNet-V1,
which torchvision does not have. The extractor is the network without its last linear layer, dropout
included. torchvision is imported only when a model is built: every message of a deployed run starts
a process.

Stems of torchvision reduce a 224-pixel image by 4 before the first stage and by 32 overall, which
is too much for an 8-pixel image. Small images (smaller side below 64) are reduced by 8 overall: the
first convolution and the next strided layer keep their size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from torch import nn

from fedhet.kinds import Shape
from fedhet.models.info import ModelInfo, share_of

SMALL_SIDE = 64


def is_small(shape: Shape) -> bool:
    """Return whether an image [C, H, W] needs the stem for small images."""
    return min(shape[1:]) < SMALL_SIDE


def he_init(module: nn.Module) -> None:
    """Initialise every convolution in `module` as torchvision does (He et al. 2015, fan out)."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
            if part.bias is not None:
                nn.init.zeros_(part.bias)


def first_conv(conv: nn.Conv2d, shape: Shape, *, small_stem: bool = True) -> nn.Conv2d:
    """Return `conv` adapted to images `shape`: itself, or a new one with the same output channels.

    With `small_stem`, small images get a 3x3 kernel and stride 1.
    """
    small = small_stem and is_small(shape)
    if not small and conv.in_channels == shape[0]:
        return conv
    kernel, stride = (3, 1) if small else (conv.kernel_size[0], conv.stride[0])
    bias, padding = conv.bias is not None, kernel // 2
    fitted = nn.Conv2d(shape[0], conv.out_channels, kernel, stride, padding, bias=bias)
    he_init(fitted)
    return fitted


def unstride(module: nn.Module) -> None:
    """Set the first strided convolution in `module` to stride 1."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d) and part.stride != (1, 1):
            part.stride = (1, 1)
            return


# Blocks in each of the four stages. Felo names ResNet-10, 14, 18, 22 and 26 "from the PyTorch
# source codes", which has only 18: the layouts of 10, 14, 22 and 26 are ours, n = 2 * blocks + 2.
BASIC = {
    10: (1, 1, 1, 1),
    14: (1, 1, 2, 2),
    18: (2, 2, 2, 2),
    22: (2, 2, 3, 3),
    26: (3, 3, 3, 3),
    34: (3, 4, 6, 3),
}
BOTTLENECK = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
TORCHVISION_DEPTHS = (18, 34, 50, 101, 152)

# FedGEMS, Tables 10 to 12: blocks in each of the three stages, n = 3 * blocks + 2. Table 11 prints
# (1, 1, 2) for the fourth "ResNet-17" (clients 8 and 16), which makes 14 layers: kept as printed.
GEMS = {
    "11": ((1, 1, 1), "Table 10; Table 11, clients 1, 9"),
    "14-a": ((1, 1, 2), "Table 11, clients 2, 10"),
    "14-b": ((1, 2, 1), "Table 11, clients 3, 11"),
    "14-c": ((2, 1, 1), "Table 11, clients 4, 12"),
    "17-a": ((1, 2, 2), "Table 11, clients 5, 13"),
    "17-b": ((2, 1, 2), "Table 11, clients 6, 14"),
    "17-c": ((2, 2, 1), "Table 11, clients 7, 15"),
    "17-d": ((1, 1, 2), "Table 11, clients 8, 16 (as printed: 14 layers)"),
    "20": ((2, 2, 2), "Tables 10, 12, server"),
    "38": ((4, 4, 4), "Table 12, server"),
    "56": ((6, 6, 6), "Tables 10, 12, server"),
    "110": ((12, 12, 12), "Table 12, server"),
}


Block = Literal["basic", "bottleneck"]


def vision_resnet(
    shape: Shape, block: Block, layers: Sequence[int], width: float = 1.0
) -> nn.Module:
    """Return torchvision's ResNet of `block`s without its head: [N, C, H, W] -> [N, 512 or 2048].

    For small images, the first conv is 3x3 with stride 1, and there is no max-pool. `width` is the
    share of all channels, rounded up.
    """
    from torchvision.models import resnet

    block_type: Any = resnet.BasicBlock if block == "basic" else resnet.Bottleneck
    net: nn.Module = resnet.ResNet(block_type, list(layers), num_classes=1)
    if width != 1:
        _narrow(net, block_type, layers, width)
    net.conv1 = first_conv(net.conv1, shape)  # type: ignore[arg-type]
    if is_small(shape):
        net.maxpool = nn.Identity()
    net.fc = nn.Identity()
    return net


def _narrow(net: Any, block_type: Any, layers: Sequence[int], width: float) -> None:
    """Replace the layers of a torchvision ResNet by narrower ones, initialised as torchvision's."""
    net.inplanes = share_of(64, width)
    net.conv1 = nn.Conv2d(3, net.inplanes, 7, 2, 3, bias=False)
    net.bn1 = nn.BatchNorm2d(net.inplanes)
    for number, blocks in enumerate(layers):
        planes, stride = share_of(64 * 2**number, width), 1 if number == 0 else 2
        # torchvision's own method; its constructor has no choice of all widths.
        stage = net._make_layer(block_type, planes, blocks, stride)
        setattr(net, f"layer{number + 1}", stage)
    he_init(net)


def gems_stage(inputs: int, planes: int, blocks: int, stride: int) -> nn.Module:
    """Return bottleneck blocks: [N, inputs, H, W] -> [N, 4 * planes, H / stride, W / stride]."""
    from torchvision.models.resnet import Bottleneck

    outputs = 4 * planes
    shortcut = nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
    )
    rest = [Bottleneck(outputs, planes) for _ in range(blocks - 1)]
    return nn.Sequential(Bottleneck(inputs, planes, stride, shortcut), *rest)


def gems_resnet(shape: Shape, layers: Sequence[int]) -> nn.Module:
    """Return FedGEMS' ResNet of three stages, of widths 64, 128, 256: [N, C, H, W] -> [N, 256]."""
    net = nn.Sequential(
        *(nn.Conv2d(shape[0], 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        gems_stage(16, 16, layers[0], 1),
        gems_stage(64, 32, layers[1], 2),
        gems_stage(128, 64, layers[2], 2),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )
    he_init(net)
    return net


def _resnet(depth: int, block: Block, layers: Sequence[int]) -> ModelInfo:
    line = f"{block} blocks {'-'.join(map(str, layers))}"
    source = "torchvision" if depth in TORCHVISION_DEPTHS else "Felo; layout ours"
    build = partial(vision_resnet, block=block, layers=layers)
    return ModelInfo(f"resnet{depth}", "resnet", line, source, 8, build, narrows=True)


def _gems(depth: str, layers: Sequence[int], where: str) -> ModelInfo:
    line = f"bottleneck blocks {'-'.join(map(str, layers))}, 256 features"
    build = partial(gems_resnet, layers=layers)
    return ModelInfo(f"gems-resnet{depth}", "gems-resnet", line, f"FedGEMS, {where}", 8, build)


# Table 1 of the paper: the output channels and stride of each depthwise separable convolution.
MOBILENET_LAYERS = (
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
    layers = [*_conv_bn_relu(shape[0], 32, stride=1 if small else 2)]
    inputs, kept = 32, not small
    for outputs, stride in MOBILENET_LAYERS:
        layers += _conv_bn_relu(inputs, inputs, stride if kept else 1, groups=inputs)
        layers += _conv_bn_relu(inputs, outputs, kernel=1)
        inputs, kept = outputs, kept or stride == 2
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    he_init(net)
    return net


def _conv_bn_relu(
    inputs: int, outputs: int, stride: int = 1, *, kernel: int = 3, groups: int = 1
) -> list[nn.Module]:
    """Return a convolution with its batch norm and ReLU."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]


def shufflenet(shape: Shape, name: str) -> nn.Module:
    """Return a ShuffleNet-V2 without its head: [N, C, H, W] -> [N, 1024]."""
    net: nn.Module = _torchvision(name)
    stem: Any = net.conv1
    stem[0] = first_conv(stem[0], shape)
    if is_small(shape):
        net.maxpool = nn.Identity()
    net.fc = nn.Identity()
    return net


def inverted(shape: Shape, name: str) -> nn.Module:
    """Return a MobileNet or EfficientNet without its last linear layer: [N, C, H, W] -> [N, D].

    For small images, the first conv and the first strided stage keep the size.
    """
    net: Any = _torchvision(name)
    net.features[0][0] = first_conv(net.features[0][0], shape)
    if is_small(shape):
        unstride(net.features)
    net.classifier = net.classifier[:-1]
    module: nn.Module = net
    return module


def vgg(shape: Shape, layout: str) -> nn.Module:
    """Return a VGG with batch norm, without its last linear layer: [N, C, H, W] -> [N, 4096].

    For small images, without hidden linear layers ([N, 512]) or max-pools of a 1-pixel side.
    """
    from torchvision.models import vgg as tv_vgg

    layers: Any = tv_vgg.make_layers(tv_vgg.cfgs[layout], batch_norm=True)
    layers[0] = first_conv(layers[0], shape, small_stem=False)
    if is_small(shape):
        kept = _without_late_pools(layers, min(shape[1:]))
        he_init(kept)
        return nn.Sequential(kept, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net: Any = tv_vgg.VGG(layers, num_classes=1)
    net.classifier = net.classifier[:-1]
    module: nn.Module = net
    return module


def _torchvision(name: str) -> Any:
    """Return torchvision's model of that name, untrained."""
    from torchvision.models import get_model

    return get_model(name, weights=None, num_classes=1)


def _without_late_pools(layers: nn.Sequential, side: int) -> nn.Sequential:
    """Return `layers` without the max-pools that would halve an image of `side` 1."""
    kept = []
    for layer in layers:
        if isinstance(layer, nn.MaxPool2d):
            if side == 1:
                continue
            side //= 2
        kept.append(layer)
    return nn.Sequential(*kept)


def _other(name: str, family: str, line: str, extractor: Callable[[Shape], nn.Module]) -> ModelInfo:
    return ModelInfo(name, family, line, "torchvision", 8, extractor)


MODELS = (
    *(_resnet(depth, "basic", layers) for depth, layers in BASIC.items()),
    *(_resnet(depth, "bottleneck", layers) for depth, layers in BOTTLENECK.items()),
    *(_gems(depth, layers, where) for depth, (layers, where) in GEMS.items()),
    ModelInfo(
        "mobilenet-v1", "mobilenet", "width 1.0", "Howard et al. 2017, Table 1", 8, mobilenet_v1
    ),
    *(
        _other(
            f"vgg{n}", "vgg", f"{n - 3} conv layers with batch norm", partial(vgg, layout=layout)
        )
        for n, layout in ((11, "A"), (13, "B"), (16, "D"), (19, "E"))
    ),
    *(
        _other(name, name.split("-")[0], line, partial(build, name=theirs))
        for name, line, build, theirs in (
            ("shufflenet-v2", "ShuffleNet-V2, width 1.0", shufflenet, "shufflenet_v2_x1_0"),
            ("shufflenet-v2-x0.5", "ShuffleNet-V2, width 0.5", shufflenet, "shufflenet_v2_x0_5"),
            ("mobilenet-v2", "MobileNet-V2, width 1.0", inverted, "mobilenet_v2"),
            ("mobilenet-v3-small", "MobileNet-V3 small", inverted, "mobilenet_v3_small"),
            ("efficientnet-b0", "EfficientNet-B0", inverted, "efficientnet_b0"),
        )
    ),
)
