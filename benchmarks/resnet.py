"""ResNet-50 as He et al. (2016) describe it, with the stride in the 3 x 3 convolution: untrained, to be timed only."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["ResNet", "resnet50"]

EXPANSION = 4


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions around which the input is added."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.body = nn.Sequential(
            *convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, outputs, 1),
        )
        changes = stride > 1 or inputs != outputs
        self.around = nn.Sequential(*convolution(inputs, outputs, 1, stride)) if changes else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.around(x))


class ResNet(nn.Module):
    """A stem, stages of bottlenecks each half as large as the one before and twice as wide, and one linear layer."""

    def __init__(self, blocks: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [*convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        channels = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                layers.append(Bottleneck(channels, width * 2**stage, 2 if stage and not block else 1))
                channels = EXPANSION * width * 2**stage
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.width = channels
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x))


def resnet50(classes: int = 1000) -> ResNet:
    return ResNet((3, 4, 6, 3), 64, classes)


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)
