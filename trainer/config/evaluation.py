"""Settings of the evaluation: a section for what all protocols share, and one for each protocol (docs/evaluation.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.setting import setting

# The protocols themselves are in trainer.evaluate.evaluator, whose import takes seconds.
PROTOCOLS = ("linear", "linear_sgd", "knn", "knn_cosine", "few_labels", "finetune", "diagnostics")


@dataclass(frozen=True)
class EvaluateConfig:
    """Settings that all protocols share."""

    protocols: tuple[str, ...] = setting(("linear", "knn"), shapes_result=False)
    """Protocols of `wmse evaluate`: linear, linear_sgd, knn, knn_cosine, few_labels, finetune, diagnostics, or all."""
    images_per_batch: int = setting(256, between=(1, None), shapes_result=False)
    """Number of images that a rank encodes at once."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = setting("fp32", shapes_result=False)
    """Precision in which the encoder computes features, independent of the precision of training. auto: bf16 if the device
    is fast in it, else fp32."""
    allow_differences: bool = setting(False, shapes_result=False)
    """Measure although a class is missing from one split, or although the size of the images or the names of the classes
    differ from those of the training. The log and the result name the differences."""


@dataclass(frozen=True)
class OnlineProbeConfig:
    """Linear classifier that learns from the features of the pre-training, to show its progress. Needs labels."""

    enabled: bool = setting(False, shapes_result=False)
    """Train it in each step, on detached features, and log its accuracy. The encoder does not change by a single bit."""
    learning_rate: float = setting(1e-3, between=(0, None), shapes_result=False)
    """Learning rate of Adam, constant."""


# The defaults below are those of the paper or of the field's practice, so that figures are comparable without options.


@dataclass(frozen=True)
class LinearConfig:
    """Linear probe on frozen features, as in section 4 of the W-MSE paper: Adam, no augmentation."""

    epochs: int = setting(500, between=(1, None), shapes_result=False)
    """Epochs."""
    batch_size: int = setting(1000, between=(1, None), shapes_result=False)
    """Batch size."""
    rate_start: float = setting(1e-2, between=(1e-12, 1e6), shapes_result=False)
    """Learning rate of Adam in the first epoch."""
    rate_end: float = setting(1e-6, between=(1e-12, 1e6), shapes_result=False)
    """Learning rate of Adam in the last epoch; it decays exponentially in between."""
    weight_decay: float = setting(5e-6, between=(0, 1e6), shapes_result=False)
    """L2 weight decay."""


@dataclass(frozen=True)
class LinearSGDConfig:
    """Linear classifier on a frozen encoder, as is usual for ImageNet: SGD, random crops and flips, all ranks."""

    epochs: int = setting(90, between=(1, None), shapes_result=False)
    """Epochs."""
    images_per_step: int = setting(4096, between=(1, None), shapes_result=False)
    """Global batch size. A smaller training set is one batch."""
    learning_rates: tuple[float, ...] = setting((0.1,), between=(0, 1e6), shapes_result=False)
    """Learning rates at the start of the cosine schedule, for 256 images a step: each is multiplied by images_per_step/256.
    One classifier is trained for each pair of a rate and a weight decay, all in the same pass."""
    weight_decays: tuple[float, ...] = setting((0.0,), between=(0, 1e6), shapes_result=False)
    """L2 weight decays. ImageNet practice: none or 1e-6."""
    momentum: float = setting(0.9, between=(0, 0.9999), shapes_result=False)
    """Nesterov momentum."""
    crop_area: tuple[float, float] = setting((0.08, 1.0), shapes_result=False)
    """Smallest and largest area of a random crop, as a share of the image's area."""
    augment: bool = setting(True, shapes_result=False)
    """Train on random crops and flips. false: train on the features of the centre crops, which are computed once; this is
    much faster."""
    held_back_share: float = setting(0.1, between=(0.01, 0.5), shapes_result=False)
    """With several classifiers: share of the training images of each class that none of them sees, and by which one of them
    is chosen."""


@dataclass(frozen=True)
class KNNConfig:
    """k nearest neighbours as in section 4 of the W-MSE paper: Euclidean distance, majority vote."""

    k: int = setting(5, between=(1, None), shapes_result=False)
    """Number of neighbours that vote, at most the number of labelled training images. Ties go to the smallest label."""


@dataclass(frozen=True)
class KNNCosineConfig:
    """k nearest neighbours by cosine similarity, with votes weighted by exp(similarity / temperature)."""

    k: tuple[int, ...] = setting((10, 20, 200), between=(1, None), shapes_result=False)
    """Numbers of neighbours. Each gives a figure, from one search."""
    temperature: float = setting(0.07, between=(1e-4, None), shapes_result=False)
    """Temperature of the weights."""


@dataclass(frozen=True)
class FewLabelsConfig:
    """Linear probe (section `linear`) on the features of a share of the training images."""

    shares: tuple[float, ...] = setting((0.01, 0.1), between=(1e-6, 1), shapes_result=False)
    """Shares of the labelled training images of each class; at least one image of each class is used."""


@dataclass(frozen=True)
class FinetuneConfig:
    """Fine-tuning of the whole encoder on a share of the labels, as in SimCLR (section 4.3, appendix B.5)."""

    shares: tuple[float, ...] = setting((0.01, 0.1), between=(1e-6, 1), shapes_result=False)
    """Shares of the labelled training images of each class; at least one image of each class is used."""
    epochs: tuple[int, ...] = setting((60, 30), between=(1, None), shapes_result=False)
    """Epochs for each of the shares."""
    save_to: str = setting("", shapes_result=False)
    """Folder for the fine-tuned classifiers, one folder in it for each share, such as 10pct. Empty: keep none."""
    images_per_step: int = setting(1024, between=(1, None), shapes_result=False)
    """Global batch size. A smaller share is one batch."""
    learning_rate: float = setting(0.05, between=(0, 1e6), shapes_result=False)
    """Learning rate at the start of the cosine schedule, for 256 images a step: multiplied by images_per_step/256."""
    momentum: float = setting(0.9, between=(0, 0.9999), shapes_result=False)
    """Nesterov momentum."""
    weight_decay: float = setting(0.0, between=(0, 1e6), shapes_result=False)
    """L2 weight decay."""
    crop_area: tuple[float, float] = setting((0.08, 1.0), shapes_result=False)
    """Smallest and largest area of a random crop, as a share of the image's area."""


@dataclass(frozen=True)
class DiagnosticsConfig:
    """Properties of the features that need no labels."""

    images: int = setting(10_000, between=(2, None), shapes_result=False)
    """Largest number of test images, spread over the split."""
