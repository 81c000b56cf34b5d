"""The models in PyTorch, layer for layer those of benchmarks/keras_models.py."""

from __future__ import annotations

# PyTorch is in an environment of its own (benchmarks/environments.py), not in the project's.
import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]

from benchmarks import workloads

# Keras's epsilon and (one minus) its momentum, which differ from PyTorch's.
_BATCH_NORM = {"eps": 1e-3, "momentum": 0.01}
_LAYER_NORM_EPSILON = 1e-3


def mlp() -> nn.Module:
    units = workloads.MLP_UNITS
    return nn.Sequential(
        nn.Linear(784, units), nn.ReLU(), nn.Linear(units, units), nn.ReLU(), nn.Linear(units, workloads.CLASSES)
    )


def cnn() -> nn.Module:
    first, second = workloads.CNN_FILTERS
    return nn.Sequential(
        nn.Conv2d(1, first, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * 5 * 5, workloads.CNN_UNITS),
        nn.ReLU(),
        nn.Linear(workloads.CNN_UNITS, workloads.CLASSES),
    )


def _convolution(inputs: int, filters: int, size: int, stride: int = 1) -> nn.Module:
    return nn.Conv2d(inputs, filters, size, stride, padding=size // 2, bias=False)


class Residual(nn.Module):
    """Two convolutions around which their input passes."""

    def __init__(self, inputs: int, filters: int, stride: int):
        super().__init__()
        self.around = _convolution(inputs, filters, 1, stride) if stride > 1 else nn.Identity()
        self.through = nn.Sequential(
            _convolution(inputs, filters, 3, stride),
            nn.BatchNorm2d(filters, **_BATCH_NORM),
            nn.ReLU(),
            _convolution(filters, filters, 3),
            nn.BatchNorm2d(filters, **_BATCH_NORM),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.around(x) + self.through(x))


def resnet20() -> nn.Module:
    filters = workloads.RESNET_FILTERS[0]
    parts = [_convolution(3, filters, 3), nn.BatchNorm2d(filters, **_BATCH_NORM), nn.ReLU()]
    inputs = filters
    for group, filters in enumerate(workloads.RESNET_FILTERS):
        for block in range(workloads.RESNET_BLOCKS):
            parts.append(Residual(inputs, filters, 2 if group and not block else 1))
            inputs = filters
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, workloads.CLASSES))


class Block(nn.Module):
    """Attention and a feed-forward net, each followed by layer normalisation of the residual."""

    def __init__(self) -> None:
        super().__init__()
        width, hidden = workloads.WIDTH, workloads.FEED_FORWARD
        self.attention = nn.MultiheadAttention(width, workloads.HEADS, batch_first=True)
        self.feed_forward = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=_LAYER_NORM_EPSILON) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norms[0](x + self.attention(x, x, x, need_weights=False)[0])
        return self.norms[1](x + self.feed_forward(x))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(workloads.VOCABULARY, workloads.WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(workloads.ENCODER_BLOCKS)))
        self.head = nn.Linear(workloads.WIDTH, workloads.CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)).mean(1))


MODELS = {"mlp": mlp, "cnn": cnn, "resnet20": resnet20, "encoder": Encoder}
