"""The settings of a run: strict, read-only dataclasses, one section for each part of the program.

`config.checks` checks ranges and combinations.

Units stand in the names: `..._steps`, `..._epochs`, `..._minutes`. Epochs become steps once, in `trainer.schedule`.
Derived numbers (images a rank, steps an epoch) are not settings; `trainer.tools.run_plan` computes them for the log.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from trainer.config.setting import all_settings, setting
from trainer.methods.settings import MethodSettings
from trainer.methods.simclr.settings import SimCLRSettings
from trainer.methods.wmse.settings import WMSESettings


@dataclass(frozen=True)
class DataConfig:
    """Which images to read, and how."""

    root: str = setting("", shapes_result=False)
    """Folder of the data set: made by `wmse prepare`, or an image folder in ImageNet's layout."""
    expected_images: int = setting(0, between=(0, None), shapes_result=False)
    """Number of training images that the recipe expects; log a warning if the set has another number. A dry run without
    data.root and `wmse launch --data_on_nodes` use this number. 0: any number."""
    train_split: str = "train"
    """Split to train on."""
    probe_split: str = setting("", shapes_result=False)
    """Labelled split that the linear probe and k-NN learn from. Empty: train_split."""
    test_split: str = setting("val", shapes_result=False)
    """Split that the evaluation measures on."""
    images_per_step: int = setting(1024, between=(1, None))
    """Global batch size: images of one optimizer step over all ranks. Each becomes num_views views."""
    threads: int = setting(0, between=(0, 1024), shapes_result=False)
    """CPU threads of a rank for reading files and for DALI. 0: all cores that this rank may use (under torchrun its share
    of them), but at most 8 DALI threads on a GPU."""
    read_ahead_steps: int = setting(3, between=(1, None), shapes_result=False)
    """Number of steps whose files are read in advance."""
    prefetch_batches: int = setting(2, between=(1, 16), shapes_result=False)
    """Number of batches that DALI prepares in advance."""
    decode_cache_gib: float = setting(0.0, between=(0, None), shapes_result=False)
    """Shared memory of a node for decoded images, in GiB. The first epoch fills it; a set that does not fit is refused. 0:
    no cache, every epoch decodes."""
    hw_decoder_load: float = setting(1.0, between=(0, 1), shapes_result=False)
    """Share of the JPEGs that a GPU's hardware decoder takes, 0 to 1, if it has one. CUDA cores and CPU cores decode the
    rest."""
    decoder_hint: tuple[int, int] = setting((0, 0), between=(0, None), shapes_result=False)
    """Largest image width and height in pixels, for which a GPU's decoder allocates buffers at the start; a larger image
    costs an allocation when it comes. 0: the largest image of the set, but at most 2 GiB for a rank's images of a step."""
    max_image_pixels: int = setting(100_000_000, between=(1, 178_956_970))
    """Largest number of pixels (height x width) of an image. A decoded pixel takes 3 bytes, and a small file may claim any
    size. Larger images are skipped."""
    max_classes: int = setting(100_000, between=(1, 10_000_000), shapes_result=False)
    """Largest number of classes in tar shards without a dataset.json that names them."""
    max_skipped_share: float = setting(0.01, between=(0, 1), shapes_result=False)
    """Largest share of skipped images, 0 to 1, before the run stops: of the set (counted from 10 skipped images on), or of
    the images that this rank has read (from 100 on). 0: the tenth skipped image stops the run. 1: only a set without usable
    images does."""


@dataclass(frozen=True)
class ViewsConfig:
    """The augmentation recipe. `trainer.data.plan` draws every random choice from it."""

    num_views: int = setting(4, between=(2, None))
    """Number of views d of each image."""
    size: int = setting(224, between=(8, None))
    """Width and height of a view in pixels."""
    early_sizes: tuple[int, ...] = setting((), between=(8, None))
    """Sizes of the views in the first epochs, such as [128, 160]: the i-th is used until epoch early_size_epochs[i], then
    `size`. Empty: always `size`."""
    early_size_epochs: tuple[int, ...] = setting((), between=(1, None))
    """Epochs at which the next size begins, in increasing order, as many as early_sizes."""
    crop_area: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest area of a crop, as a share of the image's area."""
    crop_ratio: tuple[float, float] = (0.75, 4 / 3)
    """Smallest and largest ratio of width to height of a crop, drawn uniformly in the logarithm."""
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """Interpolation of the resized crop; both are antialiased."""
    flip_probability: float = setting(0.5, between=(0, 1))
    """Probability of a horizontal flip."""
    color_probability: float = setting(0.8, between=(0, 1))
    """Probability that brightness, contrast, saturation and hue are changed, in random order."""
    brightness: float = setting(0.8, between=(0, None))
    """Strength b: the factor is drawn uniformly from [max(0, 1 - b), 1 + b]."""
    contrast: float = setting(0.8, between=(0, None))
    """Strength c: the factor is drawn uniformly from [max(0, 1 - c), 1 + c]. The pivot is the mean grey value."""
    saturation: float = setting(0.8, between=(0, None))
    """Strength s: the factor is drawn uniformly from [max(0, 1 - s), 1 + s]."""
    hue: float = setting(0.2, between=(0, 0.5))
    """Strength h, at most 0.5: the rotation is drawn uniformly from [-h, h], in full turns (0.1 is 36 degrees)."""
    gray_probability: float = setting(0.2, between=(0, 1))
    """Probability that a view is converted to grey, after the colour changes."""
    blur_probability: float = setting(0.5, between=(0, 1))
    """Probability of a Gaussian blur, which comes last."""
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    """Smallest and largest standard deviation of the blur, in pixels."""
    blur_window: int = setting(23, between=(1, None))
    """Largest number of taps of the blur, odd. Taps beyond 3 sigma are left out."""
    order: Literal["crop_first", "color_first"] = "crop_first"
    """crop_first: SimCLR's order. color_first: colours change on the whole image, so that contrast uses the mean grey of
    the whole image as its pivot."""
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Mean of each channel, subtracted from pixels scaled to 0..1."""
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Standard deviation of each channel, by which pixels are divided after the mean is subtracted."""
    eval_resize: int = setting(256, shapes_result=False)
    """Evaluation: resize the shorter edge to this many pixels, then cut out the centre of `size` x `size`."""


@dataclass(frozen=True)
class ModelConfig:
    """Encoder and projector."""

    backbone: str = "resnet50"
    """Name of a timm model; its classifier is removed."""
    stem: Literal["imagenet", "small", "small_pool", "half"] = "imagenet"
    """imagenet: the stem of timm. small: a 3x3 first convolution of stride 1, without max-pooling (CIFAR). small_pool: the
    same with max-pooling (STL-10, Tiny ImageNet). half: a 3x3 first convolution of stride 2, without max-pooling (28 px
    sets)."""
    zero_init_last: bool = True
    """Start the weight of each residual block's last BatchNorm at 0."""
    projector: Literal["mlp", "mlp_norm", "simclr"] = "simclr"
    """mlp: Linear-BN-ReLU for each hidden size, then Linear, with biases. mlp_norm: the same and a BatchNorm at the end.
    simclr: no biases, BatchNorm after every Linear (the last without a shift), ReLU after all but the last."""
    projector_hidden: tuple[int, ...] = setting((2048, 2048), between=(1, None))
    """Hidden sizes of the projector."""
    embedding_size: int = setting(128, between=(1, None))
    """Size k of an embedding, the projector's output."""
    encoder_batch_norm: Literal["per_view", "joint"] = "joint"
    """Whether the encoder's BatchNorm takes its statistics from each view separately or from all views together."""
    projector_batch_norm: Literal["per_view", "joint"] = "joint"
    """The same for the projector."""
    batch_norm_ranks: Literal["local", "all"] = "local"
    """Whether BatchNorm takes its statistics from the images of its rank (local) or of all ranks (all)."""
    activation_checkpointing: bool = setting(False, shapes_result=False)
    """Recompute the encoder's blocks in backward instead of keeping their activations: less memory, more time."""
    activation_memory_budget: float = setting(1.0, between=(0, 1), shapes_result=False)
    """With compile: the memory that activations kept for backward may take, 0 to 1, as a share of what the compiler would
    keep. 1: no limit. At 0.9 a ResNet-50 keeps half as much, because backward recomputes BatchNorm and ReLU, but no
    convolution."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    accumulation_steps: int = setting(1, between=(1, None))
    """Number of micro-batches of a rank, whose gradients are added up one after the other to save memory. Images that the
    loss needs together stay together, so the loss is the same; BatchNorm sees one micro-batch at a time."""
    images_per_micro_batch: int = setting(0, between=(0, None))
    """Largest number of images that a rank puts through the networks at once. The number of micro-batches then follows from
    the number of ranks, so that a run fits into memory on any number of nodes. 0: accumulation_steps decides."""
    name: Literal["adam", "lars"] = "lars"
    """adam: weight decay is coupled L2. lars: as in SimCLR, with the learning rate inside the momentum buffer."""
    learning_rate: float = setting(0.1, between=(0, None))
    """Peak learning rate, before learning_rate_rule."""
    learning_rate_rule: Literal["fixed", "sqrt"] = "sqrt"
    """fixed: use learning_rate as it is. sqrt: multiply it by the square root of images_per_step (SimCLR)."""
    weight_decay: float = setting(1e-4, between=(0, None))
    """L2 weight decay. LARS leaves out BatchNorm parameters and biases."""
    momentum: float = setting(0.9, between=(0, 1))
    """Momentum of LARS."""
    trust_coefficient: float = setting(1e-3, between=(0, None))
    """Trust coefficient (eta) of LARS."""
    backend: Literal["auto", "torch", "triton"] = setting("auto", shapes_result=False)
    """How LARS updates on a GPU: with torch's operations, or with two Triton kernels that pass over memory 7 times instead
    of 19. auto: torch, until both have been measured on a GPU."""
    epochs: int = setting(100, between=(1, None))
    """Length of the run in epochs."""
    warmup_epochs: float = setting(0.0, between=(0, None))
    """Length of the linear warm-up in epochs. Give this or warmup_steps."""
    warmup_steps: int = setting(0, between=(0, None))
    """Length of the linear warm-up in steps. Give this or warmup_epochs."""
    warmup_from: Literal["zero", "first_step"] = "zero"
    """Learning rate of the first update. zero: 0, and the first update after the warm-up has the peak (SimCLR). first_step:
    peak/warmup_steps, and the last update of the warm-up has the peak (the W-MSE authors' code)."""
    schedule: Literal["cosine", "drops"] = "cosine"
    """cosine: half a cosine from the peak to 0 after the warm-up. drops: constant, then multiplied by drop_factor at each
    of drop_epochs_before_end."""
    drop_epochs_before_end: tuple[int, ...] = (50, 25)
    """Number of epochs before the end at which the learning rate drops (schedule: drops)."""
    drop_factor: float = setting(0.2, between=(0, 1))
    """Factor of each drop (schedule: drops)."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When a checkpoint is saved. A run always saves one at its end."""

    every_steps: int = setting(0, between=(0, None), shapes_result=False)
    """Save at each multiple of this number of steps. 0: never by steps."""
    every_minutes: float = setting(10.0, between=(0, None), shapes_result=False)
    """Save after this many minutes. 0: never by time."""
    keep_last: int = setting(3, between=(1, None), shapes_result=False)
    """Number of newest checkpoints to keep; older ones are deleted after a save."""
    keep_every_steps: int = setting(0, between=(0, None), shapes_result=False)
    """Never delete checkpoints at multiples of this number of steps. 0: none."""
    keep_every_epochs: int = setting(0, between=(0, None), shapes_result=False)
    """Save at each multiple of this number of epochs and never delete that checkpoint; `wmse evaluate --follow` measures it
    as a point of the curve. 0: none."""
    keep_every_epochs_after_drop: int = setting(0, between=(0, None), shapes_result=False)
    """The same after the first drop of the learning rate (schedule: drops). 0: keep_every_epochs there as well."""
    on_failure: Literal["continue", "stop"] = setting("continue", shapes_result=False)
    """What to do if a checkpoint can't be written, for example because the disk is full. continue: try again
    when the next one is due. stop: end the run. Older checkpoints stay in both cases, and a run whose last checkpoint can't
    be written fails."""


@dataclass(frozen=True)
class LogConfig:
    """What a run writes while it trains."""

    every_steps: int = setting(20, between=(1, None), shapes_result=False)
    """Number of steps between two logged lines."""
    tensorboard: bool = setting(True, shapes_result=False)
    """Write TensorBoard event files to RUN_DIR/tensorboard."""
    stall_seconds: float = setting(60.0, between=(0.1, None), shapes_result=False)
    """Warn after this many seconds without progress, and say what the run waits for."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Linear probe and k-NN, as in section 4 of the W-MSE paper."""

    images_per_batch: int = setting(256, between=(1, None), shapes_result=False)
    """Number of images that a rank encodes at once."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = setting("fp32", shapes_result=False)
    """Precision in which the encoder computes features, whatever the training used. auto: bf16 if the device is fast in it,
    else fp32."""
    probe_epochs: int = setting(500, between=(1, None), shapes_result=False)
    """Epochs of the linear probe."""
    probe_batch_size: int = setting(1000, between=(1, None), shapes_result=False)
    """Batch size of the linear probe."""
    probe_rate_start: float = setting(1e-2, between=(1e-12, None), shapes_result=False)
    """Learning rate of Adam in the first epoch of the linear probe."""
    probe_rate_end: float = setting(1e-6, between=(1e-12, None), shapes_result=False)
    """Learning rate of Adam in the last epoch; it decays exponentially in between."""
    probe_weight_decay: float = setting(5e-6, between=(0, None), shapes_result=False)
    """L2 weight decay of the linear probe."""
    knn_k: int = setting(5, between=(1, None), shapes_result=False)
    """Number of neighbours that vote, at most the number of labelled training images. Distances are Euclidean on unscaled
    features; ties go to the smallest label."""


@dataclass(frozen=True)
class Config:
    """One experiment."""

    run_dir: str = setting("", shapes_result=False)
    """Folder of the run, for checkpoints, metrics and the log. If it holds a checkpoint, the run resumes from it."""
    seed: int = setting(0, between=(0, 2**63 - 1))
    """Seed of the initial weights and of every random choice."""
    max_steps: int = setting(0, between=(0, None), shapes_result=False)
    """Stop after this many steps; the learning-rate schedule stays that of the whole run. 0: run to the end."""
    method: str = "wmse"
    """The method of self-supervised learning: wmse or simclr. Its settings are in the section of the same name."""
    init_from: str = setting("", shapes_result=False)
    """Checkpoint of another run whose encoder this run starts from. Everything else starts fresh."""
    allow_changes: bool = setting(False, shapes_result=False)
    """Resume although settings that change what is learnt differ from the checkpoint's."""
    device: Literal["auto", "cuda", "cpu"] = setting("auto", shapes_result=False)
    """auto: a GPU if there is one, else the CPU."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Precision of the networks (autocast). auto: bf16 if the device is fast in it, else fp32. fp16 scales the loss."""
    compile: Literal["auto", "true", "false"] = setting("auto", shapes_result=False)
    """Compile the networks with torch.compile. auto: on a GPU only, because it is no faster on a CPU."""
    autotune: bool = setting(False, shapes_result=False)
    """With compile on a GPU: time several kernels for each convolution and matrix product and keep the fastest. The first
    step takes 5 to 10 minutes longer."""
    cuda_graphs: bool = setting(False, shapes_result=False)
    """With compile on a GPU: replay forward and backward as CUDA graphs, which helps if launching kernels takes most of the
    time."""
    gradient_compression: Literal["none", "bf16", "fp16"] = "none"
    """Data type in which ranks send gradients to each other. none: float32."""
    max_skipped_steps: int = setting(20, between=(0, None), shapes_result=False)
    """Consecutive steps whose update may be skipped, because the loss, a gradient or a check of the method failed, before the
    run ends."""
    stop_timeout_seconds: float = setting(60.0, between=(0.1, None), shapes_result=False)
    """Time in which a run must save and end after a signal. A run that hangs for longer ends with exit code 75 and without
    another checkpoint. Set it to more than two steps, and to less than the scheduler leaves between the signal and the
    kill."""
    allow_idle_ranks: bool = setting(False, shapes_result=False)
    """If the global batch size can't be divided evenly among all ranks, train on as many ranks as possible and leave the
    others idle, instead of refusing to start. `wmse launch --nodes N-M` sets this."""
    max_idle_restarts: int = setting(3, between=(1, None), shapes_result=False)
    """Fail a requeued job if this many starts before it, in a row, made no new checkpoint."""
    timeout_minutes: float = setting(10.0, between=(0.01, None), shapes_result=False)
    """End a run that waits this long for files, or four fifths of it for another rank. Over NCCL, where waiting can't be
    told from a slow step, a step that takes 1.1 times as long also ends the run; steps that compile have 30 minutes
    more."""
    data: DataConfig = field(default_factory=DataConfig)
    views: ViewsConfig = field(default_factory=ViewsConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    wmse: WMSESettings = field(default_factory=WMSESettings)
    simclr: SimCLRSettings = field(default_factory=SimCLRSettings)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)

    @property
    def method_settings(self) -> MethodSettings:
        """The section of the chosen method."""
        return getattr(self, self.method)


METHODS = tuple(f.name for f in dataclasses.fields(Config) if isinstance(getattr(Config(), f.name), MethodSettings))


def flatten(config: object, prefix: str = "") -> dict[str, object]:
    """Return all settings of a (section of a) config by dotted name."""
    return {name: value for name, _, value in all_settings(config, prefix)}
