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
    """Which images, and how they are read."""

    root: str = setting("", shapes_result=False)
    """Folder of the set: one made by `wmse prepare`, or an image folder in ImageNet's layout."""
    expected_images: int = setting(0, between=(0, None), shapes_result=False)
    """Training images that the recipe expects; a warning is logged if the set has another number. A dry run
    without data.root and `wmse launch --data_on_nodes` take this number. 0: any number."""
    train_split: str = "train"
    """Split that is trained on."""
    probe_split: str = setting("", shapes_result=False)
    """Labelled split that the linear probe and k-NN learn from; empty: train_split."""
    test_split: str = setting("val", shapes_result=False)
    """Split that the evaluation measures on."""
    images_per_step: int = setting(1024, between=(1, None))
    """Images of one optimizer step, all ranks together (each becomes num_views views)."""
    threads: int = setting(0, between=(0, 1024), shapes_result=False)
    """DALI threads and reader threads of a rank; 0: as many as the cores this rank may use, shared with its neighbours
    where torchrun started several, but on a GPU at most 8 for DALI."""
    read_ahead_steps: int = setting(3, between=(1, None), shapes_result=False)
    """Steps whose files are read ahead of need."""
    prefetch_batches: int = setting(2, between=(1, 16), shapes_result=False)
    """Batches that DALI has under way or ready ahead of the one in use."""
    decode_cache_gib: float = setting(0.0, between=(0, None), shapes_result=False)
    """Memory of a node for decoded images, filled in the first epoch, GiB; a set that does not fit is refused. 0: none, every
    epoch decodes."""
    hw_decoder_load: float = setting(1.0, between=(0, 1), shapes_result=False)
    """Share of the JPEGs that a GPU's hardware decoder takes, 0..1, where it has one; the rest takes the SMs and cores."""
    decoder_hint: tuple[int, int] = setting((0, 0), between=(0, None), shapes_result=False)
    """Width and height of an image for which a GPU's hardware decoder makes room at the start, pixels; larger ones cost an
    allocation when they come. 0: the set's largest, at most what takes 2 GiB for a rank's images of a step."""
    max_image_pixels: int = setting(100_000_000, between=(1, 178_956_970))
    """Largest number of pixels of an image, height x width: a small file may claim any size, and a decoded pixel takes 3 bytes.
    Larger images count as unusable and are replaced."""
    max_classes: int = setting(100_000, between=(1, 10_000_000), shapes_result=False)
    """Largest number of classes in tar shards whose classes no dataset.json names."""
    max_skipped_share: float = setting(0.01, between=(0, 1), shapes_result=False)
    """Largest share of unusable images, 0..1, before the run stops: of the set (from 10 bad images on), or of those that
    this rank read (from 100 found on). 0: the tenth bad image stops the run; 1: only a set without usable images does."""


@dataclass(frozen=True)
class ViewsConfig:
    """The augmentation recipe: every random choice is drawn by `trainer.data.plan` from these."""

    num_views: int = setting(4, between=(2, None))
    """Views d of each image."""
    size: int = setting(224, between=(8, None))
    """Side of a view, pixels."""
    early_sizes: tuple[int, ...] = setting((), between=(8, None))
    """Sides of the views in the first epochs, as [128, 160]: the i-th until early_size_epochs[i] have gone by; then `size`.
    Empty: none."""
    early_size_epochs: tuple[int, ...] = setting((), between=(1, None))
    """Epochs after which the next size begins, rising, as many as early_sizes."""
    crop_area: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest share of the image's area in a crop."""
    crop_ratio: tuple[float, float] = (0.75, 4 / 3)
    """Smallest and largest width/height of a crop (uniform in the logarithm)."""
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """How a crop is resized; antialiased either way."""
    flip_probability: float = setting(0.5, between=(0, 1))
    """Probability of a horizontal flip."""
    color_probability: float = setting(0.8, between=(0, 1))
    """Probability that brightness, contrast, saturation and hue change (in random order)."""
    brightness: float = setting(0.8, between=(0, None))
    """The factor is uniform in [max(0, 1 - b), 1 + b]."""
    contrast: float = setting(0.8, between=(0, None))
    """The factor is uniform in [max(0, 1 - c), 1 + c]; the pivot is the mean grey."""
    saturation: float = setting(0.8, between=(0, None))
    """The factor is uniform in [max(0, 1 - s), 1 + s]."""
    hue: float = setting(0.2, between=(0, 0.5))
    """The rotation is uniform in [-h, h], as a fraction of the full turn (0.1 is 36 degrees); at most 0.5."""
    gray_probability: float = setting(0.2, between=(0, 1))
    """Probability that a view loses its colour, after the jitter."""
    blur_probability: float = setting(0.5, between=(0, 1))
    """Probability of a Gaussian blur, last of all."""
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    """Smallest and largest standard deviation of the blur, pixels."""
    blur_window: int = setting(23, between=(1, None))
    """Largest number of taps of the blur, odd; windows are cut at 3 sigma."""
    order: Literal["crop_first", "color_first"] = "crop_first"
    """crop_first: SimCLR's order. color_first: colour acts on the whole image, so contrast pivots on its mean grey."""
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Subtracted from the pixels scaled to 0..1, a channel each."""
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Divides the pixels after the mean is subtracted."""
    eval_resize: int = setting(256, shapes_result=False)
    """Evaluation: the shorter edge is resized to this, then the centre of `size` x `size` is cut out."""


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
    projector: Literal["mlp", "mlp_norm", "simclr"] = "simclr"
    """mlp: Linear-BN-ReLU for each hidden size, then Linear, with biases. mlp_norm: the same and a BatchNorm at the end.
    simclr: no biases, BatchNorm after every Linear (the last without a shift), ReLU after all but the last."""
    projector_hidden: tuple[int, ...] = setting((2048, 2048), between=(1, None))
    """Hidden sizes of the projector."""
    embedding_size: int = setting(128, between=(1, None))
    """Size k of an embedding, the projector's output."""
    encoder_batch_norm: Literal["per_view", "joint"] = "joint"
    """Whether the encoder's BatchNorm takes its statistics from each view index alone or from all views together."""
    projector_batch_norm: Literal["per_view", "joint"] = "joint"
    """The same for the projector."""
    batch_norm_ranks: Literal["local", "all"] = "local"
    """Whether BatchNorm statistics come from the rank's own rows or from the rows of all ranks."""
    activation_checkpointing: bool = setting(False, shapes_result=False)
    """Compute the encoder's blocks again in backward instead of keeping their activations: less memory, more time."""
    activation_memory_budget: float = setting(1.0, between=(0, 1), shapes_result=False)
    """With compile: how much memory the activations kept for backward may take, as a share of what the compiler would keep,
    0..1; 1: no limit. With 0.9 a ResNet-50 keeps half, because BatchNorm and ReLU, but no convolution, are computed again in
    backward."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and the learning rate as a function of the step."""

    accumulation_steps: int = setting(1, between=(1, None))
    """Parts of a rank's images whose gradients are added up, one after the other, for less memory. A part holds whole slices,
    so the loss is the same; BatchNorm sees a part, as if there were so many times more ranks."""
    images_per_micro_batch: int = setting(0, between=(0, None))
    """Largest number of images that a rank puts through the model at once. The number of micro-batches then follows from the
    number of ranks, so that a run fits the memory on however many nodes it gets. 0: accumulation_steps says it."""
    name: Literal["adam", "lars"] = "lars"
    """adam: weight decay is coupled L2. lars: SimCLR's, with the rate inside the momentum buffer."""
    learning_rate: float = setting(0.1, between=(0, None))
    """Peak rate, before `learning_rate_rule`."""
    learning_rate_rule: Literal["fixed", "sqrt"] = "sqrt"
    """fixed: the rate as it is. sqrt: multiplied by the square root of images_per_step (SimCLR)."""
    weight_decay: float = setting(1e-4, between=(0, None))
    """L2 weight decay; BatchNorm parameters and biases are left out under lars."""
    momentum: float = setting(0.9, between=(0, 1))
    """Momentum of lars."""
    trust_coefficient: float = setting(1e-3, between=(0, None))
    """Eta of lars."""
    backend: Literal["auto", "torch", "triton"] = setting("auto", shapes_result=False)
    """How lars updates on a GPU: by torch's operations or by two Triton kernels, which pass over the memory 7 times instead of
    19; auto is torch until both are measured on a GPU."""
    epochs: int = setting(100, between=(1, None))
    """Length of the run."""
    warmup_epochs: float = setting(0.0, between=(0, None))
    """Length of the linear warm-up, in epochs (give this or warmup_steps)."""
    warmup_steps: int = setting(0, between=(0, None))
    """Length of the linear warm-up, in steps (give this or warmup_epochs)."""
    warmup_from: Literal["zero", "first_step"] = "zero"
    """Rate of the first update. zero: 0; the first update after the warm-up has the peak (SimCLR). first_step:
    peak/warmup_steps; the last update of the warm-up has the peak (the W-MSE authors' code)."""
    schedule: Literal["cosine", "drops"] = "cosine"
    """cosine: half a cosine from the peak to 0 after the warm-up. drops: constant, then multiplied by drop_factor at
    each of drop_epochs_before_end."""
    drop_epochs_before_end: tuple[int, ...] = (50, 25)
    """Epochs before the end at which the rate drops (schedule: drops)."""
    drop_factor: float = setting(0.2, between=(0, 1))
    """Factor of each drop (schedule: drops)."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When a run is saved; a run is always saved at its end."""

    every_steps: int = setting(0, between=(0, None), shapes_result=False)
    """Save each time the step is a multiple of this; 0: not by steps."""
    every_minutes: float = setting(10.0, between=(0, None), shapes_result=False)
    """Save when this many minutes have gone by; 0: not by time."""
    keep_last: int = setting(3, between=(1, None), shapes_result=False)
    """Newest checkpoints kept; older ones are deleted after a save."""
    keep_every_steps: int = setting(0, between=(0, None), shapes_result=False)
    """Checkpoints whose step is a multiple of this are never deleted; 0: none."""
    keep_every_epochs: int = setting(0, between=(0, None), shapes_result=False)
    """Save each time the epoch is a multiple of this, and never delete that checkpoint: a point of the curve that
    `wmse evaluate --follow` measures; 0: none."""
    keep_every_epochs_after_drop: int = setting(0, between=(0, None), shapes_result=False)
    """The same from the first drop of the rate on (schedule: drops); 0: keep_every_epochs there, too."""
    on_failure: Literal["go_on", "stop"] = setting("go_on", shapes_result=False)
    """What follows a checkpoint that could not be written (disk full): go on and try again when the next is due, or end the
    run. The last good one stays either way, and a run whose last one can't be written fails."""


@dataclass(frozen=True)
class LogConfig:
    """What is written while training."""

    every_steps: int = setting(20, between=(1, None), shapes_result=False)
    """Steps between two logged lines."""
    tensorboard: bool = setting(True, shapes_result=False)
    """Write TensorBoard event files to RUN_DIR/tensorboard."""
    stall_seconds: float = setting(60.0, between=(0.1, None), shapes_result=False)
    """Warn that the run stands still, and what it waits for, after this time without progress, seconds."""


@dataclass(frozen=True)
class EvaluateConfig:
    """The linear probe and k-NN of the paper, section 4."""

    images_per_batch: int = setting(256, between=(1, None), shapes_result=False)
    """Images a rank encodes at a time."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = setting("fp32", shapes_result=False)
    """Precision in which the encoder computes the features, whatever it was trained in; auto: bf16 if the device is fast in it,
    else fp32."""
    probe_epochs: int = setting(500, between=(1, None), shapes_result=False)
    """Epochs of the linear probe."""
    probe_batch_size: int = setting(1000, between=(1, None), shapes_result=False)
    """Rows of one step of the probe."""
    probe_rate_start: float = setting(1e-2, between=(1e-12, None), shapes_result=False)
    """Adam's rate in the first epoch."""
    probe_rate_end: float = setting(1e-6, between=(1e-12, None), shapes_result=False)
    """Adam's rate in the last epoch; exponential in between."""
    probe_weight_decay: float = setting(5e-6, between=(0, None), shapes_result=False)
    """L2 weight decay of the probe."""
    knn_k: int = setting(5, between=(1, None), shapes_result=False)
    """Number of neighbours that vote, at most the number of labelled training images; Euclidean distance on unscaled features,
    ties to the smallest label."""


@dataclass(frozen=True)
class Config:
    """One experiment."""

    run_dir: str = setting("", shapes_result=False)
    """Folder of the run: checkpoints, metrics, log. A run whose folder holds a checkpoint goes on from it."""
    seed: int = setting(0, between=(0, 2**63 - 1))
    """Decides the initial weights and every plan."""
    max_steps: int = setting(0, between=(0, None), shapes_result=False)
    """Stop after this many steps (the schedule stays that of the whole run); 0: run to the end."""
    method: str = "wmse"
    """The method of self-supervised learning: wmse or simclr. Its settings are in the section of the same name."""
    init_from: str = setting("", shapes_result=False)
    """Checkpoint of another run whose encoder this one starts from (the projector starts fresh)."""
    allow_changes: bool = setting(False, shapes_result=False)
    """Go on from a checkpoint although settings that shape the result have changed since."""
    device: Literal["auto", "cuda", "cpu"] = setting("auto", shapes_result=False)
    """auto: a GPU where there is one, else the CPU."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Of the encoder and projector (autocast); auto: bf16 where the device multiplies it fast, else fp32. fp16
    scales the loss."""
    compile: Literal["auto", "true", "false"] = setting("auto", shapes_result=False)
    """Compile the model with torch.compile. auto: on a GPU; on a CPU it is no faster."""
    autotune: bool = setting(False, shapes_result=False)
    """With compile on a GPU: time several kernels for each convolution and matrix product in the first step, which takes 5 to
    10 minutes more, and keep the fastest."""
    cuda_graphs: bool = setting(False, shapes_result=False)
    """With compile on a GPU: replay forward and backward as CUDA graphs, where launching is what takes the time."""
    gradient_compression: Literal["none", "bf16", "fp16"] = "none"
    """Type in which several ranks send their gradients to each other; none: float32."""
    max_skipped_steps: int = setting(20, between=(0, None), shapes_result=False)
    """Consecutive steps whose update may be skipped, because the loss, a gradient or a check of the method failed, before the
    run ends."""
    stop_timeout_seconds: float = setting(60.0, between=(0.1, None), shapes_result=False)
    """After a signal the run saves and ends. If it hangs, so that it can't, it ends with exit code 75 after this long, without
    another checkpoint. Longer than two steps, and shorter than what the scheduler leaves between signal and kill."""
    allow_idle_ranks: bool = setting(False, shapes_result=False)
    """If the global batch size can't be divided evenly among all ranks, train on as many of them as it can be and leave the
    others idle, instead of refusing to start. `wmse launch --nodes N-M` sets this."""
    max_idle_restarts: int = setting(3, between=(1, None), shapes_result=False)
    """A requeued job fails if this many starts before it, in a row, made no new checkpoint: another start would not either."""
    timeout_minutes: float = setting(10.0, between=(0.01, None), shapes_result=False)
    """A run that waits for this long ends: for files, or for another rank (four fifths of it). Over NCCL, where a wait can't be
    told from a long step, a step that takes 1.1 times as long ends the run, too; steps that compile have 30 minutes more."""
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
