"""The settings of a run: strict, read-only dataclasses, one section for each part of the program.

`config.checks` checks ranges and combinations.

Units stand in the names: `..._steps`, `..._epochs`, `..._minutes`. Epochs become steps once, in `trainer.schedule`.
Derived numbers (images a rank, steps an epoch) are not settings; `trainer.tools.run_plan` computes them for the log.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class DataConfig:
    """Which images, and how they are read."""

    root: str = ""
    """Folder of the set: one made by `wmse prepare`, or an image folder in ImageNet's layout."""
    expected_images: int = 0
    """Training images that the recipe expects; a warning is logged if the set has another number. A dry run
    without data.root and `wmse launch --data_on_nodes` take this number. 0: any number."""
    train_split: str = "train"
    """Split that is trained on."""
    probe_split: str = ""
    """Labelled split that the linear probe and k-NN learn from; empty: train_split."""
    test_split: str = "val"
    """Split that the evaluation measures on."""
    images_per_step: int = 1024
    """Images of one optimizer step, all ranks together (each becomes num_views views)."""
    threads: int = 0
    """DALI threads and reader threads of a rank; 0: as many as the cores this rank may use, shared with its neighbours
    where torchrun started several, but on a GPU at most 8 for DALI."""
    read_ahead_steps: int = 3
    """Steps whose files are read ahead of need."""
    prefetch_batches: int = 2
    """Batches that DALI has under way or ready ahead of the one in use."""
    decode_cache_gib: float = 0.0
    """Memory of a node for decoded images, filled in the first epoch, GiB; a set that does not fit is refused. 0: none, every
    epoch decodes."""
    hw_decoder_load: float = 1.0
    """Share of the JPEGs that a GPU's hardware decoder takes, 0..1, where it has one; the rest takes the SMs and cores."""
    decoder_hint: tuple[int, int] = (0, 0)
    """Width and height of an image for which a GPU's hardware decoder makes room at the start, pixels; larger ones cost an
    allocation when they come. 0: the set's largest, at most what takes 2 GiB for a rank's images of a step."""
    max_image_pixels: int = 100_000_000
    """Largest number of pixels of an image, height x width: a small file may claim any size, and a decoded pixel takes 3 bytes.
    Larger images count as unusable and are replaced."""
    max_classes: int = 100_000
    """Largest number of classes in tar shards whose classes no dataset.json names."""
    max_bad_share: float = 0.01
    """Largest share of unusable images, 0..1, before the run stops: of the set (from 10 bad images on), or of those that
    this rank read (from 100 found on). 0: the tenth bad image stops the run; 1: only a set without usable images does."""


@dataclass(frozen=True)
class ViewsConfig:
    """The augmentation recipe: every random choice is drawn by `trainer.data.plan` from these."""

    num_views: int = 4
    """Views d of each image."""
    side: int = 224
    """Side of a view, pixels."""
    early_sides: tuple[int, ...] = ()
    """Sides of the views in the first epochs, as [128, 160]: the i-th until early_side_epochs[i] have gone by; then `side`.
    Empty: none."""
    early_side_epochs: tuple[int, ...] = ()
    """Epochs after which the next side begins, rising, as many as early_sides."""
    crop_area: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest share of the image's area in a crop."""
    crop_ratio: tuple[float, float] = (0.75, 4 / 3)
    """Smallest and largest width/height of a crop (uniform in the logarithm)."""
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """How a crop is resized; antialiased either way."""
    flip_probability: float = 0.5
    """Probability of a horizontal flip."""
    color_probability: float = 0.8
    """Probability that brightness, contrast, saturation and hue change (in random order)."""
    brightness: float = 0.8
    """The factor is uniform in [max(0, 1 - b), 1 + b]."""
    contrast: float = 0.8
    """The factor is uniform in [max(0, 1 - c), 1 + c]; the pivot is the mean grey."""
    saturation: float = 0.8
    """The factor is uniform in [max(0, 1 - s), 1 + s]."""
    hue: float = 0.2
    """The rotation is uniform in [-h, h], as a fraction of the full turn (0.1 is 36 degrees); at most 0.5."""
    gray_probability: float = 0.2
    """Probability that a view loses its colour, after the jitter."""
    blur_probability: float = 0.5
    """Probability of a Gaussian blur, last of all."""
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    """Smallest and largest standard deviation of the blur, pixels."""
    blur_window: int = 23
    """Largest number of taps of the blur, odd; windows are cut at 3 sigma."""
    order: Literal["crop_first", "color_first"] = "crop_first"
    """crop_first: SimCLR's order. color_first: colour acts on the whole image, so contrast pivots on its mean grey."""
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Subtracted from the pixels scaled to 0..1, a channel each."""
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Divides the pixels after the mean is subtracted."""
    test_resize: int = 256
    """Evaluation: the shorter edge is resized to this, then the centre of `side` x `side` is cut out."""


@dataclass(frozen=True)
class ModelConfig:
    """Encoder and projector."""

    backbone: str = "resnet50"
    """Name of a timm model; its classifier is left out."""
    stem: Literal["imagenet", "small", "small_pool", "half"] = "imagenet"
    """imagenet: as timm has it. small: first convolution 3x3 stride 1, no max-pool (CIFAR). small_pool: the same with
    max-pool (STL-10, Tiny ImageNet). half: 3x3 stride 2, no max-pool (28 px sets)."""
    zero_init_last: bool = True
    """Start the gamma of each residual block's last BatchNorm at 0."""
    projector: Literal["mlp", "simclr"] = "simclr"
    """mlp: Linear-BN-ReLU for each hidden size, then Linear, with biases. simclr: no biases, BatchNorm after every
    Linear (the last without a shift), ReLU after all but the last."""
    projector_hidden: tuple[int, ...] = (2048, 2048)
    """Hidden sizes of the projector."""
    embedding_size: int = 128
    """Size k of an embedding, the projector's output."""
    encoder_batch_norm: Literal["per_view", "joint"] = "joint"
    """Whether the encoder's BatchNorm takes its statistics from each view index alone or from all views together."""
    projector_batch_norm: Literal["per_view", "joint"] = "joint"
    """The same for the projector."""
    batch_norm_ranks: Literal["local", "all"] = "local"
    """Whether BatchNorm statistics come from the rank's own rows or from the rows of all ranks."""
    activation_checkpointing: bool = False
    """Compute the encoder's blocks again in backward instead of keeping their activations: less memory, more time."""
    activation_memory_budget: float = 1.0
    """With compile: how much memory the activations kept for backward may take, as a share of what the compiler would keep,
    0..1; 1: no limit. With 0.9 a ResNet-50 keeps half, because BatchNorm and ReLU, but no convolution, are computed again in
    backward."""


@dataclass(frozen=True)
class LossConfig:
    """W-MSE (Ermolov et al., ICML 2021, section 3)."""

    slice_size: int = 256
    """Rows M that are whitened together; the paper takes twice the embedding size."""
    iterations: int = 1
    """Slicings a step; each after the first permutes the images inside blocks of `permutation_block`."""
    permutation_block: int = 512
    """Images that are permuted among themselves for iterations after the first; a multiple of slice_size."""
    normalize: bool = True
    """True: squared distance of L2-normalised rows (0..4). False: mean squared Euclidean distance."""
    eps: float = 0.0
    """Shrinkage of the covariance towards the mean of its diagonal, 0..1; the paper takes 0."""
    max_failed_steps: int = 20
    """Steps in a row whose whitening or loss may fail (their update is left out on all ranks) before the run ends."""
    backend: Literal["auto", "reference", "torch", "triton"] = "auto"
    """Whitening backend, see kernels/README.md; auto takes the fastest one measured on such a device."""
    float64_factor: bool = False
    """Mean, covariance and factor of the whitening in float64, for embeddings of condition numbers above 1e5."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and the learning rate as a function of the step."""

    accumulation_steps: int = 1
    """Parts of a rank's images whose gradients are added up, one after the other, for less memory. A part holds whole slices,
    so the loss is the same; BatchNorm sees a part, as if there were so many times more ranks."""
    images_per_micro_batch: int = 0
    """Largest number of images that a rank puts through the model at once. The number of micro-batches then follows from the
    number of ranks, so that a run fits the memory on however many nodes it gets. 0: accumulation_steps says it."""
    name: Literal["adam", "lars"] = "lars"
    """adam: weight decay is coupled L2. lars: SimCLR's, with the rate inside the momentum buffer."""
    learning_rate: float = 0.1
    """Peak rate, before `learning_rate_rule`."""
    learning_rate_rule: Literal["fixed", "sqrt"] = "sqrt"
    """fixed: the rate as it is. sqrt: multiplied by the square root of images_per_step (SimCLR)."""
    weight_decay: float = 1e-4
    """L2 weight decay; BatchNorm parameters and biases are left out under lars."""
    momentum: float = 0.9
    """Momentum of lars."""
    trust_coefficient: float = 1e-3
    """Eta of lars."""
    backend: Literal["auto", "torch", "triton"] = "auto"
    """How lars updates on a GPU: by torch's operations or by two Triton kernels, which pass over the memory 7 times instead of
    19; auto is torch until both are measured on a GPU."""
    epochs: int = 100
    """Length of the run."""
    warmup_epochs: float = 0.0
    """Length of the linear warm-up, in epochs (give this or warmup_steps)."""
    warmup_steps: int = 0
    """Length of the linear warm-up, in steps (give this or warmup_epochs)."""
    warmup_from: Literal["zero", "first_step"] = "zero"
    """Rate of the first update. zero: 0; the first update after the warm-up has the peak (SimCLR). first_step:
    peak/warmup_steps; the last update of the warm-up has the peak (the W-MSE authors' code)."""
    schedule: Literal["cosine", "drops"] = "cosine"
    """cosine: half a cosine from the peak to 0 after the warm-up. drops: constant, then multiplied by drop_factor at
    each of drop_epochs_before_end."""
    drop_epochs_before_end: tuple[int, ...] = (50, 25)
    """Epochs before the end at which the rate drops (schedule: drops)."""
    drop_factor: float = 0.2
    """Factor of each drop (schedule: drops)."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When a run is saved; a run is always saved at its end."""

    every_steps: int = 0
    """Save each time the step is a multiple of this; 0: not by steps."""
    every_minutes: float = 10.0
    """Save when this many minutes have gone by; 0: not by time."""
    keep_last: int = 3
    """Newest checkpoints kept; older ones are deleted after a save."""
    keep_every_steps: int = 0
    """Checkpoints whose step is a multiple of this are never deleted; 0: none."""
    keep_every_epochs: int = 0
    """Save each time the epoch is a multiple of this, and never delete that checkpoint: a point of the curve that
    `wmse evaluate --follow` measures; 0: none."""
    keep_every_epochs_after_drop: int = 0
    """The same from the first drop of the rate on (schedule: drops); 0: keep_every_epochs there, too."""
    on_failure: Literal["go_on", "stop"] = "go_on"
    """What follows a checkpoint that could not be written (disk full): go on and try again when the next is due, or end the
    run. The last good one stays either way, and a run whose last one can't be written fails."""


@dataclass(frozen=True)
class LogConfig:
    """What is written while training."""

    every_steps: int = 20
    """Steps between two logged lines."""
    tensorboard: bool = True
    """Write TensorBoard event files to RUN_DIR/tensorboard."""
    stall_seconds: float = 60.0
    """Warn that the run stands still, and what it waits for, after this time without progress, seconds."""


@dataclass(frozen=True)
class EvaluateConfig:
    """The linear probe and k-NN of the paper, section 4."""

    images_per_batch: int = 256
    """Images a rank encodes at a time."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "fp32"
    """Precision in which the encoder computes the features, whatever it was trained in; auto: bf16 if the device is fast in it,
    else fp32."""
    probe_epochs: int = 500
    """Epochs of the linear probe."""
    probe_batch_size: int = 1000
    """Rows of one step of the probe."""
    probe_rate_start: float = 1e-2
    """Adam's rate in the first epoch."""
    probe_rate_end: float = 1e-6
    """Adam's rate in the last epoch; exponential in between."""
    probe_weight_decay: float = 5e-6
    """L2 weight decay of the probe."""
    knn_k: int = 5
    """Number of neighbours that vote, at most the number of labelled training images; Euclidean distance on unscaled features,
    ties to the smallest label."""


@dataclass(frozen=True)
class Config:
    """One experiment."""

    run_dir: str = ""
    """Folder of the run: checkpoints, metrics, log. A run whose folder holds a checkpoint goes on from it."""
    seed: int = 0
    """Decides the initial weights and every plan."""
    max_steps: int = 0
    """Stop after this many steps (the schedule stays that of the whole run); 0: run to the end."""
    init_from: str = ""
    """Checkpoint of another run whose encoder this one starts from (the projector starts fresh)."""
    allow_changes: bool = False
    """Go on from a checkpoint although settings that shape the result have changed since."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: a GPU where there is one, else the CPU."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Of the encoder and projector (autocast); auto: bf16 where the device multiplies it fast, else fp32. fp16
    scales the loss."""
    compile: Literal["auto", "true", "false"] = "auto"
    """Compile the model with torch.compile. auto: on a GPU; on a CPU it is no faster."""
    autotune: bool = False
    """With compile on a GPU: time several kernels for each convolution and matrix product in the first step, which takes 5 to
    10 minutes more, and keep the fastest."""
    cuda_graphs: bool = False
    """With compile on a GPU: replay forward and backward as CUDA graphs, where launching is what takes the time."""
    gradient_compression: Literal["none", "bf16", "fp16"] = "none"
    """Type in which several ranks send their gradients to each other; none: float32."""
    stop_timeout_seconds: float = 60.0
    """After a signal the run saves and ends. If it hangs, so that it can't, it ends with exit code 75 after this long, without
    another checkpoint. Longer than two steps, and shorter than what the scheduler leaves between signal and kill."""
    allow_idle_ranks: bool = False
    """If the global batch size can't be divided evenly among all ranks, train on as many of them as it can be and leave the
    others idle, instead of refusing to start. `wmse launch --nodes N-M` sets this."""
    max_idle_restarts: int = 3
    """A requeued job fails if this many starts before it, in a row, made no new checkpoint: another start would not either."""
    timeout_minutes: float = 10.0
    """A run that waits for this long ends: for files, or for another rank (four fifths of it). Over NCCL, where a wait can't be
    told from a long step, a step that takes 1.1 times as long ends the run, too; steps that compile have 30 minutes more."""
    data: DataConfig = field(default_factory=DataConfig)
    views: ViewsConfig = field(default_factory=ViewsConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)


def flatten(config: object, prefix: str = "") -> dict[str, object]:
    """All settings of a (section of a) config by dotted name."""
    flat: dict[str, object] = {}
    for f in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, f.name)
        flat |= flatten(value, f"{prefix}{f.name}.") if dataclasses.is_dataclass(value) else {prefix + f.name: value}
    return flat
