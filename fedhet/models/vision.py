"""Networks for images, and multilayer perceptrons for samples of any shape.

The module contains small networks (CNNs, LeNet-5, ResNet-9), FedGEMS' bottleneck ResNets,
MobileNet-V1, and torchvision networks without pretrained weights. An extractor consists of all
layers before the last linear layer, including dropout. torchvision is imported lazily, because a
deployed run starts a process for every message.

Networks in torchvision downsample a 224-pixel image by 4 before the first stage and by 32 overall,
which is too much for an 8-pixel image. Here, small images (with a side below 64) are downsampled by
8 overall, because the first convolution and the next strided layer preserve the image size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations_with_replacement
from math import prod
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor, nn

from fedhet.base.errors import ModelError
from fedhet.base.seeding import numpy_rng
from fedhet.kinds import Shape
from fedhet.models.base import DrawnInfo, Dropout, ModelInfo, scale_channels

SMALL_SIDE = 64


def conv_bn(inputs: int, outputs: int, *, pool: bool = False, dropout: float = 0.0) -> nn.Module:
    """Build a 3x3 convolution with batch norm and ReLU: [N, I, H, W] -> [N, O, H', W'].

    Optional dropout follows the batch norm, and optional 2x2 max-pooling follows the ReLU.
    """
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)]
    layers += [*([Dropout(dropout)] if dropout else []), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


def cnn(
    shape: Shape,
    widths: Sequence[int],
    pools: Sequence[bool],
    features: int,
    dropout: float = 0.0,
    width: float = 1.0,
) -> nn.Module:
    """Build a CNN with a hidden linear layer: [N, C, H, W] -> [N, features].

    Args:
        shape: Image shape [C, H, W].
        widths: Number of channels of each convolution.
        pools: For each convolution, whether max-pooling follows.
        features: Width of the linear layer.
        dropout: Dropout rate after the last two batch norms and the linear layer, as in the
            ResNet-9 of UM-pFSSL (section VI-A).
        width: Factor for every channel count; the result is rounded up.
    """
    *widths, features = (scale_channels(channels, width) for channels in (*widths, features))
    inputs, divisor = (shape[0], *widths[:-1]), 2 ** sum(pools)
    drops = [0.0] * (len(widths) - 2) + [dropout] * 2
    layers = [
        conv_bn(i, o, pool=p, dropout=d)
        for i, o, p, d in zip(inputs, widths, pools, drops, strict=True)
    ]
    flat = widths[-1] * (shape[1] // divisor) * (shape[2] // divisor)
    head = [nn.Flatten(), nn.Linear(flat, features), nn.ReLU()]
    return nn.Sequential(*layers, *head, *([Dropout(dropout)] if dropout else []))


def mlp(shape: Shape, widths: Sequence[int], dropout: float = 0.0, width: float = 1.0) -> nn.Module:
    """Build a multilayer perceptron with ReLU: [N, *shape] -> [N, widths[-1]].

    Dropout follows each hidden layer. `width` scales every unit count; the result is rounded up.
    """
    widths = [scale_channels(units, width) for units in widths]
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in zip((prod(shape), *widths[:-1]), widths, strict=True):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        layers += [Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers)


def lenet5(shape: Shape) -> nn.Module:
    """Build LeNet-5 (LeCun et al. 1998) with ReLU and max-pooling: [N, C, H, W] -> [N, 84]."""
    height, width = ((side // 2 - 4) // 2 for side in shape[1:])
    return nn.Sequential(
        *(nn.Conv2d(shape[0], 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(16 * height * width, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()),
    )


def cofed_cnn(shape: Shape, widths: Sequence[int]) -> nn.Module:
    """Build a CoFED CNN: [N, C, H, W] -> [N, widths[-1]].

    The widths are from the paper. As in the authors' published code, each convolution has a batch
    norm, max-pooling follows the first two convolutions, and global average pooling comes last.
    """
    pairs = zip((shape[0], *widths[:-1]), widths, strict=True)
    layers = [conv_bn(i, o, pool=place < 2) for place, (i, o) in enumerate(pairs)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Residual(nn.Module):
    """Residual connection, x + body(x)."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, C, H, W] to the same shape."""
        branch: Tensor = self.body(x)
        return x + branch


def resnet9(shape: Shape, dropout: float = 0.5) -> nn.Module:
    """Build DAVIDNet's ResNet-9 with dropout, for MC dropout: [N, C, H, W] -> [N, 256].

    As in UM-pFSSL, section VI-A, dropout (0.5 in the paper) follows the last two batch norms and
    every fully connected layer except the output. The width of the hidden layer (256) is not in the
    paper.
    """
    return nn.Sequential(
        *(conv_bn(shape[0], 64), conv_bn(64, 128, pool=True)),
        Residual(conv_bn(128, 128), conv_bn(128, 128)),
        *(conv_bn(128, 256, pool=True), conv_bn(256, 512, pool=True)),
        Residual(conv_bn(512, 512, dropout=dropout), conv_bn(512, 512, dropout=dropout)),
        *(nn.MaxPool2d((shape[1] // 8, shape[2] // 8)), nn.Flatten()),
        *(nn.Linear(512, 256), nn.ReLU(), Dropout(dropout)),
    )


def is_small(shape: Shape) -> bool:
    """Return whether the smaller side of images [C, H, W] is below SMALL_SIDE."""
    return min(shape[1:]) < SMALL_SIDE


def he_init(module: nn.Module) -> None:
    """Initialize each convolution in `module` like torchvision (He et al. 2015, fan-out mode)."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
            if part.bias is not None:
                nn.init.zeros_(part.bias)


def first_conv(conv: nn.Conv2d, shape: Shape, *, small_stem: bool = True) -> nn.Conv2d:
    """Adapt the first convolution to images of `shape`, and return `conv` or a new convolution.

    If `small_stem` is set, the convolution for small images has a 3x3 kernel and stride 1.
    """
    small = small_stem and is_small(shape)
    if not small and conv.in_channels == shape[0]:
        return conv
    kernel, stride, padding = (3, 1, 1)
    if not small:
        kernel, stride, padding = conv.kernel_size[0], conv.stride[0], int(conv.padding[0])
    bias = conv.bias is not None
    fitted = nn.Conv2d(shape[0], conv.out_channels, kernel, stride, padding, bias=bias)
    he_init(fitted)
    return fitted


Block = Literal["basic", "bottleneck"]


def vision_resnet(
    shape: Shape, block: Block, layers: Sequence[int], width: float = 1.0
) -> nn.Module:
    """Build a torchvision ResNet without its head: [N, C, H, W] -> [N, 512 or 2048].

    For small images, the first convolution has a 3x3 kernel and stride 1, and no max-pooling
    follows. `width` scales every channel count; the result is rounded up.
    """
    from torchvision.models import resnet

    block_type: Any = resnet.BasicBlock if block == "basic" else resnet.Bottleneck
    net: Any = resnet.ResNet(block_type, list(layers), num_classes=1)
    if width != 1:
        net.inplanes = scale_channels(64, width)
        net.conv1 = nn.Conv2d(3, net.inplanes, 7, 2, 3, bias=False)
        net.bn1 = nn.BatchNorm2d(net.inplanes)
        for number, blocks in enumerate(layers):
            planes, stride = scale_channels(64 * 2**number, width), 1 if number == 0 else 2
            # Call a private method, because the constructor cannot change all widths.
            stage = net._make_layer(block_type, planes, blocks, stride)
            setattr(net, f"layer{number + 1}", stage)
        he_init(net)
    net.conv1 = first_conv(net.conv1, shape)
    if is_small(shape):
        net.maxpool = nn.Identity()
    net.fc = nn.Identity()
    module: nn.Module = net
    return module


def gems_stage(inputs: int, planes: int, blocks: int, stride: int) -> nn.Module:
    """Build bottleneck blocks: [N, inputs, H, W] -> [N, 4 * planes, H / stride, W / stride]."""
    from torchvision.models.resnet import Bottleneck

    outputs = 4 * planes
    shortcut = nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
    )
    first = Bottleneck(inputs, planes, stride, shortcut)
    return nn.Sequential(first, *(Bottleneck(outputs, planes) for _ in range(blocks - 1)))


def gems_resnet(shape: Shape, layers: Sequence[int]) -> nn.Module:
    """Build a FedGEMS ResNet, with stage widths 64, 128, 256: [N, C, H, W] -> [N, 256]."""
    net = nn.Sequential(
        *(nn.Conv2d(shape[0], 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        gems_stage(16, 16, layers[0], 1),
        gems_stage(64, 32, layers[1], 2),
        gems_stage(128, 64, layers[2], 2),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )
    he_init(net)
    return net


# Output channels and stride of each depthwise separable convolution (Howard et al. 2017, Table 1).
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
    """Build MobileNet-V1 of width 1.0 without its head: [N, C, H, W] -> [N, 1024].

    For small images, the first convolution and the first strided layer preserve the image size.
    """
    small = is_small(shape)
    layers = [*_conv_bn_relu(shape[0], 32, stride=1 if small else 2)]
    inputs, use_stride = 32, not small
    for outputs, stride in MOBILENET_LAYERS:
        layers += _conv_bn_relu(inputs, inputs, stride if use_stride else 1, groups=inputs)
        layers += _conv_bn_relu(inputs, outputs, kernel=1)
        inputs, use_stride = outputs, use_stride or stride == 2
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    he_init(net)
    return net


def _conv_bn_relu(
    inputs: int, outputs: int, stride: int = 1, *, kernel: int = 3, groups: int = 1
) -> list[nn.Module]:
    """Return a convolution, batch norm, and ReLU."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]


def shufflenet(shape: Shape, name: str) -> nn.Module:
    """Build a ShuffleNet-V2 without its head: [N, C, H, W] -> [N, 1024]."""
    from torchvision.models import get_model

    net: Any = get_model(name, weights=None, num_classes=1)
    net.conv1[0] = first_conv(net.conv1[0], shape)
    if is_small(shape):
        net.maxpool = nn.Identity()
    net.fc = nn.Identity()
    module: nn.Module = net
    return module


def inverted(shape: Shape, name: str) -> nn.Module:
    """Build a MobileNet or EfficientNet without its last linear layer: [N, C, H, W] -> [N, D].

    For small images, the first convolution and the first strided stage preserve the image size.
    """
    from torchvision.models import get_model

    net: Any = get_model(name, weights=None, num_classes=1)
    net.features[0][0] = first_conv(net.features[0][0], shape)
    if is_small(shape):
        convs = (part for part in net.features.modules() if isinstance(part, nn.Conv2d))
        next(conv for conv in convs if conv.stride != (1, 1)).stride = (1, 1)
    net.classifier = net.classifier[:-1]
    module: nn.Module = net
    return module


def vgg(shape: Shape, layout: str) -> nn.Module:
    """Build a VGG with batch norm, without its last linear layer: [N, C, H, W] -> [N, 4096].

    For small images, the network has no hidden linear layers, so the output is [N, 512].
    Max-pooling is omitted once the smaller side is 1 pixel long.
    """
    from torchvision.models import vgg as tv_vgg

    layers: Any = tv_vgg.make_layers(tv_vgg.cfgs[layout], batch_norm=True)
    layers[0] = first_conv(layers[0], shape, small_stem=False)
    if is_small(shape):
        features, side = nn.Sequential(), min(shape[1:])
        for layer in layers:
            if not isinstance(layer, nn.MaxPool2d):
                features.append(layer)
            elif side > 1:
                features.append(layer)
                side //= 2
        he_init(features)
        return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net: Any = tv_vgg.VGG(layers, num_classes=1)
    net.classifier = net.classifier[:-1]
    module: nn.Module = net
    return module


def fedavg_cnn(shape: Shape) -> nn.Module:
    """Build the CNN of McMahan et al. 2017 without padding: [N, C, H, W] -> [N, 512]."""
    height, width = (((side - 4) // 2 - 4) // 2 for side in shape[1:])
    return nn.Sequential(
        *(nn.Conv2d(shape[0], 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64 * height * width, 512), nn.ReLU()),
    )


def htfl_network(shape: Shape, name: str) -> nn.Module:
    """Build a network of HtFLlib without its head: [N, C, H, W] -> [N, D].

    The networks are torchvision's, without changes for small images. HtFLlib's own ResNet-4, 6, 8,
    and 10 have one to four stages with one basic block each.
    """
    from torchvision.models import get_model, resnet

    options: dict[str, Any] = {"googlenet": {"aux_logits": False, "init_weights": True}}
    if name.startswith("vit"):
        patch = int(name[-2:])
        if shape[1] != shape[2] or shape[1] % patch:
            raise ModelError(
                f"model '{htfl_name(name)}': expected square images whose side is a multiple of "
                f"{patch}, got shape {shape}"
            )
        options[name] = {"image_size": shape[1]}
    if name in HTFL_STAGES:
        net: Any = resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=1)
        for stage in range(HTFL_STAGES[name], 4):
            setattr(net, f"layer{stage + 1}", nn.Identity())
    else:
        net = get_model(name, weights=None, num_classes=1, **options.get(name, {}))
    path, conv = next((p, m) for p, m in net.named_modules() if isinstance(m, nn.Conv2d))
    net.set_submodule(path, first_conv(conv, shape, small_stem=False))
    head = next(each for each in ("heads", "fc", "classifier") if hasattr(net, each))
    setattr(net, head, net.classifier[:-1] if head == "classifier" else nn.Identity())
    module: nn.Module = net
    return module


def htfl_name(network: str) -> str:
    """Return the name of a network of HtFLlib, such as htfl-vit-b-16."""
    return f"htfl-{network.replace('_', '-')}"


# CoFED, Table 1: number of 3x3 filters in each layer.
COFED = (
    *((24, 40), (24, 32, 56), (20, 32), (24, 40, 56), (20, 32, 80)),
    *((24, 32, 80), (32, 32), (40, 56), (32, 48), (48, 56, 96)),
)
COFED_WIDTHS = (20, 24, 32, 40, 48, 56, 80, 96)
"""Widths used by the authors' architecture generator."""


def random_cofed(seed: int, client: int) -> str:
    """Draw the architecture of client `client`, and return its name.

    CoFED, Section 5.1: "randomly generated 2-layer or 3-layer CNNs". As in the authors' published
    generator, two and three layers are equally likely, and widths are drawn from COFED_WIDTHS with
    replacement, in ascending order. Two clients may draw the same architecture.
    """
    rng = numpy_rng(seed, "cofed-random", client)
    widths = sorted(rng.choice(COFED_WIDTHS, size=int(rng.integers(2, 4))).tolist())
    return f"cofed-{'-'.join(map(str, widths))}"


def _cofed(name: str, source: str, widths: Sequence[int]) -> ModelInfo:
    line = f"{len(widths)} conv layers, {'-'.join(map(str, widths))}"
    return ModelInfo(name, "cnn", line, source, 4, partial(cofed_cnn, widths=widths))


def _mlp(name: str, *widths: int, dropout: float = 0.0) -> ModelInfo:
    layers = "1 hidden layer" if len(widths) == 1 else f"{len(widths)} hidden layers"
    line = f"{layers}: {'-'.join(map(str, widths))}"
    line += f", with dropout {dropout}" if dropout else ""
    build = partial(mlp, widths=widths, dropout=dropout)
    return ModelInfo(name, "mlp", line, "fedhet", None, build, narrows=True)


def _cnn(name: str, line: str, side: int, build: Callable[..., nn.Module]) -> ModelInfo:
    return ModelInfo(name, "cnn", line, "fedhet", side, build, narrows=True)


def _resnet(depth: int, block: Block, layers: Sequence[int]) -> ModelInfo:
    line = f"{block} blocks {'-'.join(map(str, layers))}"
    name, build = f"resnet{depth}", partial(vision_resnet, block=block, layers=layers)
    source = "torchvision" if name in TORCHVISION else "Felo; layout by fedhet"
    return ModelInfo(name, "resnet", line, source, 8, build, narrows=True)


GENERATED_COFED = MappingProxyType(
    {
        name: _cofed(name, "CoFED, Section 5.1, generated", widths)
        for layers in (2, 3)
        for widths in combinations_with_replacement(COFED_WIDTHS, layers)
        for name in [f"cofed-{'-'.join(map(str, widths))}"]
    }
)
"""All architectures that `random_cofed` can draw, keyed by name, e.g. cofed-24-40."""
DRAWN = (
    DrawnInfo(
        "cofed-random",
        "cnn",
        "only in a pool: each client draws a CNN of 2 or 3 conv layers, such as cofed-24-40",
        "CoFED, Section 5.1",
        random_cofed,
        GENERATED_COFED,
    ),
)
# Blocks in each of the four stages. Felo uses ResNet-10, 14, 18, 22, and 26 "from the PyTorch
# source codes", but PyTorch has only ResNet-18. The other depths are 2 * blocks + 2.
BASIC = {
    10: (1, 1, 1, 1),
    14: (1, 1, 2, 2),
    18: (2, 2, 2, 2),
    22: (2, 2, 3, 3),
    26: (3, 3, 3, 3),
    34: (3, 4, 6, 3),
}
BOTTLENECK = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
# Blocks in each of the three stages (FedGEMS, Tables 10 to 12). The depth is 3 * blocks + 2. For
# the fourth "ResNet-17" (clients 8 and 16), Table 11 prints (1, 1, 2), which gives only 14 layers.
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
TORCHVISION: Mapping[str, str] = MappingProxyType(
    {
        **{f"resnet{depth}": f"resnet{depth}" for depth in (18, 34, 50, 101, 152)},
        **{f"vgg{layers}": f"vgg{layers}_bn" for layers in (11, 13, 16, 19)},
        "shufflenet-v2": "shufflenet_v2_x1_0",
        "shufflenet-v2-x0.5": "shufflenet_v2_x0_5",
        "mobilenet-v2": "mobilenet_v2",
        "mobilenet-v3-small": "mobilenet_v3_small",
        "efficientnet-b0": "efficientnet_b0",
    }
)
"""Names in torchvision of the networks that are also available with pretrained weights."""
HTFL_STAGES = {f"resnet{2 + 2 * stages}": stages for stages in (1, 2, 3, 4)}
HTFL = (
    *(*HTFL_STAGES, "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("googlenet", "mobilenet_v2", "vit_b_16", "vit_b_32"),
)
"""Networks of HtFLlib, with their names there and in torchvision."""
HTFL_FEATURES, HTFL_HIDDEN = 512, 768
"""HtFLlib's default feature width, and the hidden width of the head of its vision transformers."""
SMALL_DROPOUT = 0.25
"""Dropout rate of small networks; ResNet-9's rate of 0.5 is too high for 16 and 32 filters
(docs/results.md)."""
CNN2 = partial(cnn, widths=(16, 32), pools=(True, True), features=64)
CNN3 = partial(cnn, widths=(32, 64, 64), pools=(True, True, True), features=128)
CNN4 = partial(cnn, widths=(32, 32, 64, 64), pools=(False, True, False, True), features=128)
CNN2_DROPOUT, CNN3_DROPOUT = (partial(each, dropout=SMALL_DROPOUT) for each in (CNN2, CNN3))
MODELS = (
    _mlp("mlp", 128),
    _mlp("mlp2", 256, 128),
    _mlp("mlp3", 256, 128, 64),
    _mlp("mlp-dropout", 128, dropout=SMALL_DROPOUT),
    _cnn("cnn2", "2 conv layers, 16-32, and a linear layer of 64", 4, CNN2),
    _cnn("cnn3", "3 conv layers, 32-64-64, and a linear layer of 128", 8, CNN3),
    _cnn("cnn4", "VGG-like: 32-32, 64-64, and a linear layer of 128", 4, CNN4),
    _cnn("cnn2-dropout", f"cnn2 with dropout {SMALL_DROPOUT}", 4, CNN2_DROPOUT),
    _cnn("cnn3-dropout", f"cnn3 with dropout {SMALL_DROPOUT}", 8, CNN3_DROPOUT),
    ModelInfo("lenet5", "cnn", "conv 6-16 of 5x5, linear 120-84", "LeCun et al. 1998", 12, lenet5),
    ModelInfo(
        *("fedavg-cnn", "cnn", "conv 32-64 of 5x5 without padding, linear 512"),
        *("FedAvgCNN of PFLlib and HtFLlib", 16, fedavg_cnn),
        pooled=HTFL_FEATURES,
    ),
    ModelInfo(
        "resnet9", "resnet", "DAVIDNet with dropout 0.5", "UM-pFSSL, section VI-A", 8, resnet9
    ),
    *(
        _cofed(f"cofed-cnn{number}", f"CoFED, Table 1, model {number}", widths)
        for number, widths in enumerate(COFED, 1)
    ),
    *(_resnet(depth, "basic", layers) for depth, layers in BASIC.items()),
    *(_resnet(depth, "bottleneck", layers) for depth, layers in BOTTLENECK.items()),
    *(
        ModelInfo(
            f"gems-resnet{depth}",
            "gems-resnet",
            f"bottleneck blocks {'-'.join(map(str, layers))}, 256 features",
            f"FedGEMS, {where}",
            8,
            partial(gems_resnet, layers=layers),
        )
        for depth, (layers, where) in GEMS.items()
    ),
    ModelInfo(
        "mobilenet-v1", "mobilenet", "width 1.0", "Howard et al. 2017, Table 1", 8, mobilenet_v1
    ),
    *(
        ModelInfo(f"vgg{n}", "vgg", f"{n - 3} conv layers with batch norm", "torchvision", 8, build)
        for n, layout in ((11, "A"), (13, "B"), (16, "D"), (19, "E"))
        for build in [partial(vgg, layout=layout)]
    ),
    *(
        ModelInfo(name, name.split("-")[0], line, "torchvision", 8, extractor)
        for name, line, build in (
            ("shufflenet-v2", "ShuffleNet-V2, width 1.0", shufflenet),
            ("shufflenet-v2-x0.5", "ShuffleNet-V2, width 0.5", shufflenet),
            ("mobilenet-v2", "MobileNet-V2, width 1.0", inverted),
            ("mobilenet-v3-small", "MobileNet-V3 small", inverted),
            ("efficientnet-b0", "EfficientNet-B0", inverted),
        )
        for extractor in [partial(build, name=TORCHVISION[name])]
    ),
    *(
        ModelInfo(
            htfl_name(name),
            "htfl",
            f"HtFLlib's {name}, with an average pool to {HTFL_FEATURES} features",
            "HtFLlib, torchvision",
            32 if name == "vit_b_32" else 16,
            partial(htfl_network, name=name),
            pooled=HTFL_FEATURES,
            hidden=HTFL_HIDDEN if name.startswith("vit") else 0,
        )
        for name in HTFL
    ),
)
