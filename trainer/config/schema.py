"""Settings of a run: read-only dataclasses, with a section for each part of the program.

`trainer.config.checks` checks ranges and combinations. The docstrings are also the help texts of the command line.

Names include the unit: `..._steps`, `..._epochs`, `..._minutes`. `trainer.schedule` alone converts epochs to steps.
Derived numbers (images per rank, steps per epoch) are not settings; `trainer.tools.run_plan` computes them for the log.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from trainer.config.cost import CostConfig
from trainer.config.evaluation import (
    DiagnosticsConfig,
    EvaluateConfig,
    FewLabelsConfig,
    FinetuneConfig,
    KNNConfig,
    KNNCosineConfig,
    LinearConfig,
    LinearSGDConfig,
    OnlineProbeConfig,
)
from trainer.config.setting import all_settings, setting
from trainer.methods.align_uniform.settings import AlignUniformSettings
from trainer.methods.barlow_twins.settings import BarlowTwinsSettings
from trainer.methods.byol.settings import BYOLSettings
from trainer.methods.moco.settings import MoCoSettings
from trainer.methods.settings import MethodSettings
from trainer.methods.simclr.settings import SimCLRSettings
from trainer.methods.simsiam.settings import SimSiamSettings
from trainer.methods.swav.settings import SwAVSettings
from trainer.methods.vicreg.settings import VICRegSettings
from trainer.methods.wmse.settings import WMSESettings


@dataclass(frozen=True)
class DataConfig:
    """Images, and how they are read."""

    root: str = setting("", shapes_result=False)
    """Folder of the data set: written by `wmse prepare`, or an image folder in the layout of ImageNet (SPLIT/CLASS/IMAGE)."""
    expected_images: int = setting(0, between=(0, None), shapes_result=False)
    """Number of training images that the recipe expects. A different number logs a warning. A dry run without data.root and
    `wmse launch --data_on_nodes` use this number. 0: any number."""
    train_split: str = "train"
    """Split to train on."""
    probe_split: str = setting("", shapes_result=False)
    """Labelled split that the linear probe and k-NN learn from. Empty: train_split."""
    test_split: str = setting("val", shapes_result=False)
    """Split that the evaluation measures on."""
    images_per_step: int = setting(1024, between=(1, None))
    """Global batch size: images of one optimizer step over all ranks. Each becomes num_views views."""
    threads: int = setting(0, between=(0, 1024), shapes_result=False)
    """CPU threads of a rank for reading files and for DALI. 0: one for each core that this rank may use (under torchrun, its
    share of the cores), but at most 8 DALI threads on a GPU."""
    read_ahead_steps: int = setting(3, between=(1, None), shapes_result=False)
    """Number of steps whose files are read in advance."""
    prefetch_batches: int = setting(2, between=(1, 16), shapes_result=False)
    """Number of batches that DALI prepares in advance."""
    decode_cache_gib: float = setting(0.0, between=(0, None), shapes_result=False)
    """Size of a cache of decoded images in the shared memory of a node, in GiB. The first epoch fills it. A data set that
    does not fit is refused. 0: no cache."""
    decoder: Literal["dali", "torchcodec"] = setting("dali", shapes_result=False)
    """Library that decodes the images. torchcodec is an experiment: it decodes JPEG without EXIF data, in the reader threads on
    a CPU and a batch at a time on a GPU, and DALI decodes the other images. Needs the package torchcodec."""
    hw_decoder_load: float = setting(1.0, between=(0, 1), shapes_result=False)
    """Share of the JPEG images that the hardware decoder of a GPU decodes, 0 to 1, if the GPU has one. CUDA cores and CPU
    cores decode the others."""
    decoder_hint: tuple[int, int] = setting((0, 0), between=(0, None), shapes_result=False)
    """Image width and height in pixels for which the decoder of a GPU allocates buffers at the start. A larger image costs
    another allocation. 0: the largest image of the data set, but at most 2 GiB for the local batch."""
    augment_backend: Literal["dali", "triton"] = setting("dali", shapes_result=False)
    """What computes colour, blur and solarisation of the training's views. dali: DALI. triton: Triton kernels on the stream of
    the training, which also normalise and write the data type of the precision; views differ by at most one level, from
    rounding. They need an NVIDIA GPU, and have not run on one yet."""
    max_image_pixels: int = setting(100_000_000, between=(1, 178_956_970))
    """Largest number of pixels (height x width) of an image; larger images are skipped. A decoded pixel takes 3 bytes, and
    even a small file may declare any size."""
    max_classes: int = setting(100_000, between=(1, 10_000_000), shapes_result=False)
    """Largest number of classes in tar shards without a dataset.json that lists them."""
    max_skipped_share: float = setting(0.01, between=(0, 1), shapes_result=False)
    """Share of skipped images, 0 to 1, above which the run stops. It refers to the data set (once 10 images are skipped), and
    to the images that a rank has read (once 100 are skipped). 0: stop at the tenth skipped image. 1: stop only if no image
    is usable."""


@dataclass(frozen=True)
class ViewsConfig:
    """The augmentation recipe. `trainer.data.plan` draws every random choice from it."""

    num_views: int = setting(4, between=(2, None))
    """Number of views d of each image."""
    size: int = setting(224, between=(8, None))
    """Width and height of a view in pixels."""
    early_sizes: tuple[int, ...] = setting((), between=(8, None))
    """Sizes of the views in the first epochs in pixels, such as [128, 160]. The i-th size is used until epoch
    early_size_epochs[i], and views.size after the last. Empty: always views.size."""
    early_size_epochs: tuple[int, ...] = setting((), between=(1, None))
    """Epochs at which the next size begins, in increasing order, one for each of early_sizes."""
    crop_area: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest area of a crop, as a share of the image's area."""
    crop_ratio: tuple[float, float] = (0.75, 4 / 3)
    """Smallest and largest ratio of width to height of a crop, drawn uniformly in the logarithm."""
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """Interpolation that resizes a crop. Both are antialiased."""
    flip_probability: float = setting(0.5, between=(0, 1))
    """Probability of a horizontal flip."""
    color_probability: float = setting(0.8, between=(0, 1))
    """Probability of changing brightness, contrast, saturation and hue, in random order."""
    brightness: float = setting(0.8, between=(0, None))
    """Strength b: the factor is drawn uniformly from [max(0, 1 - b), 1 + b]."""
    contrast: float = setting(0.8, between=(0, None))
    """Strength c: the factor is drawn uniformly from [max(0, 1 - c), 1 + c]."""
    contrast_pivot: Literal["gray", "channel"] = "gray"
    """Value that a change of the contrast keeps. gray: the mean grey value (torchvision). channel: the mean of each channel
    (TensorFlow, in which SimCLR and BYOL were published)."""
    saturation: float = setting(0.8, between=(0, None))
    """Strength s: the factor is drawn uniformly from [max(0, 1 - s), 1 + s]."""
    hue: float = setting(0.2, between=(0, 0.5))
    """Strength h, at most 0.5: the rotation is drawn uniformly from [-h, h], in full turns (0.1 is 36 degrees)."""
    gray_probability: float = setting(0.2, between=(0, 1))
    """Probability that a view is converted to grey, after the colour changes."""
    blur_probability: float | tuple[float, ...] = setting(0.5, between=(0, 1))
    """Probability of a Gaussian blur, after the colour changes: one number, or one for each view, such as [1.0, 0.1]."""
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    """Smallest and largest standard deviation of the blur, in pixels."""
    blur_window: int = setting(23, between=(1, None))
    """Largest number of taps of the blur, an odd number. Taps beyond 3 sigma are not used."""
    solarize_probability: float | tuple[float, ...] = setting(0.0, between=(0, 1))
    """Probability of a solarisation, which inverts the values of 128 to 255 and is the last augmentation: one number, or one
    for each view."""
    order: Literal["crop_first", "color_first"] = "crop_first"
    """crop_first: crop before changing colours (SimCLR). color_first: change colours of the whole image before cropping, so
    that contrast uses the mean of the whole image as its pivot."""
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Mean of each channel, subtracted from pixels scaled to 0..1."""
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Standard deviation of each channel, by which pixels are divided after the mean is subtracted."""
    eval_resize: int = setting(256, shapes_result=False)
    """Size of the shorter edge in an evaluation, in pixels, before the centre of views.size is cut out."""


@dataclass(frozen=True)
class ModelConfig:
    """Encoder and projector, with BatchNorm and memory options."""

    backbone: str = "resnet50"
    """Name of a timm model, which is used without its classifier."""
    stem: Literal["imagenet", "small", "small_pool", "half"] = "imagenet"
    """imagenet: the stem of timm. small: a 3x3 first convolution of stride 1, without max-pooling (CIFAR). small_pool: the
    same with max-pooling (STL-10, Tiny ImageNet). half: a 3x3 first convolution of stride 2, without max-pooling (images
    of 28 px)."""
    zero_init_last: bool = True
    """Start the weight of each residual block's last BatchNorm at 0."""
    projector: Literal["mlp", "mlp_norm", "simclr", "byol", "simsiam", "moco", "barlow_twins"] = "simclr"
    """mlp: Linear-BN-ReLU for each hidden size, then Linear, with biases. mlp_norm: the same and a BatchNorm at the end.
    byol: as mlp, but the last Linear has no bias (BYOL on ImageNet, VICReg). moco: as mlp, but without BatchNorm (MoCo v2).
    barlow_twins: as mlp, but without biases. simclr: the same and a BatchNorm without a shift at the end. simsiam: the same
    and a BatchNorm without scale and shift at the end."""
    projector_hidden: tuple[int, ...] = setting((2048, 2048), between=(1, None))
    """Hidden sizes of the projector."""
    embedding_size: int = setting(128, between=(1, None))
    """Size k of an embedding, the projector's output."""
    encoder_batch_norm: Literal["per_view", "joint"] = "joint"
    """Statistics of BatchNorm in the encoder. per_view: of each view separately. joint: of all views together."""
    projector_batch_norm: Literal["per_view", "joint"] = "joint"
    """Statistics of BatchNorm in the projector, with the same choices."""
    batch_norm_ranks: Literal["local", "all"] | int = setting("local", between=(1, None))
    """Ranks over which BatchNorm computes its statistics. local: each rank alone. all: all ranks together. A number: groups of
    this many neighbouring ranks, for example the GPUs of a node, so that the statistics stay off the network."""
    batch_norm_backend: Literal["torch", "triton", "triton_conv"] = setting("torch", shapes_result=False)
    """How BatchNorm computes on a GPU. torch: with torch's operations. triton: with kernels that also add the residual and
    apply ReLU, and read and write less. triton_conv: the same, and kernels for the 1x1 convolutions of ResNets with bottleneck
    blocks, such as resnet50, that include the BatchNorms around them. The kernels have not run on a GPU yet. An evaluation
    always uses torch."""
    activation_checkpointing: bool = setting(False, shapes_result=False)
    """Recompute the blocks of the encoder in backward instead of keeping their activations. Saves memory, costs time."""
    activation_memory_budget: float = setting(1.0, between=(0, 1), shapes_result=False)
    """With compile: memory for activations that are kept for backward, 0 to 1, as a share of the memory that the compiler
    would use. 1: no limit. At 0.9 a ResNet-50 keeps half as much, because backward recomputes BatchNorm and ReLU, but not
    convolutions."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    accumulation_steps: int = setting(1, between=(1, None))
    """Number of micro-batches of a local batch. They are computed one after the other to save memory, and their gradients
    are added up. Images that the loss needs together stay together, so the loss is the same. BatchNorm sees one micro-batch
    at a time."""
    images_per_micro_batch: int = setting(0, between=(0, None))
    """Largest number of images in a micro-batch. The number of micro-batches then follows from the number of ranks, so that
    a run fits into memory on any number of nodes. 0: accumulation_steps sets the number of micro-batches."""
    name: Literal["adam", "lars", "sgd", "adamw", "larc"] = "lars"
    """adam: Adam with coupled L2 weight decay. lars: LARS as in SimCLR. sgd: SGD with momentum and coupled weight decay
    (SimSiam, MoCo). adamw: Adam with decoupled weight decay (vision transformers). larc: LARC of apex without clipping (SwAV),
    with the learning rate outside the momentum buffer."""
    learning_rate: float = setting(0.1, between=(0, None))
    """Peak learning rate, before learning_rate_rule scales it."""
    start_learning_rate: float = setting(0.0, between=(0, None))
    """Learning rate from which the warm-up starts, before learning_rate_rule scales it."""
    final_learning_rate: float = setting(0.0, between=(0, None))
    """Learning rate at which the cosine ends, before learning_rate_rule scales it (schedule: cosine)."""
    learning_rate_rule: Literal["fixed", "sqrt", "linear"] = "sqrt"
    """fixed: do not scale the learning rates. sqrt: multiply them by the square root of data.images_per_step (SimCLR).
    linear: multiply them by data.images_per_step / 256 (BYOL, SimSiam, MoCo)."""
    weight_decay: float = setting(1e-4, between=(0, None))
    """Weight decay. lars and adamw do not apply it to biases and to parameters of normalisation layers; the others apply it
    to all parameters."""
    momentum: float = setting(0.9, between=(0, 1))
    """Momentum of lars, larc and sgd."""
    trust_coefficient: float = setting(1e-3, between=(0, None))
    """Trust coefficient (eta) of lars and larc."""
    rate_in_momentum: bool = True
    """Place where lars applies the learning rate. true: to what enters the momentum buffer (SimCLR). false: to the buffer, when
    the weights are updated (BYOL). They differ when the learning rate changes."""
    backend: Literal["auto", "torch", "triton"] = setting("auto", shapes_result=False)
    """How lars, larc and sgd update on a GPU: with torch's operations, or with two Triton kernels that also check the
    gradients, and pass over memory 7 times instead of 20 (lars). auto: torch. `wmse tune` measures both."""
    epochs: int = setting(100, between=(1, None))
    """Length of the run in epochs."""
    warmup_epochs: float = setting(0.0, between=(0, None))
    """Length of the linear warm-up in epochs. Set this or warmup_steps."""
    warmup_steps: int = setting(0, between=(0, None))
    """Length of the linear warm-up in steps. Set this or warmup_epochs."""
    warmup_from: Literal["zero", "first_step"] = "zero"
    """Learning rate of the first update. zero: start_learning_rate, and the first update after the warm-up has the peak
    (SimCLR). first_step: one of warmup_steps equal steps above start_learning_rate, and the last update of the warm-up has
    the peak (the W-MSE authors' code)."""
    schedule: Literal["cosine", "drops"] = "cosine"
    """cosine: half a cosine from the peak to final_learning_rate after the warm-up. drops: constant, then multiplied by
    drop_factor at each of drop_epochs_before_end."""
    drop_epochs_before_end: tuple[int, ...] = (50, 25)
    """Number of epochs before the end at which the learning rate drops (schedule: drops)."""
    drop_factor: float = setting(0.2, between=(0, 1))
    """Factor of each drop (schedule: drops)."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Times at which checkpoints are saved. A run always saves one at its end."""

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
    """keep_every_epochs after the first drop of the learning rate (schedule: drops). 0: the same as keep_every_epochs."""
    on_failure: Literal["continue", "stop"] = setting("continue", shapes_result=False)
    """Reaction to a checkpoint that cannot be written, for example because the disk is full. continue: train on, and save
    again when the next checkpoint is due. stop: end the run. Older checkpoints stay in both cases. A run fails if its last
    checkpoint cannot be written."""


@dataclass(frozen=True)
class LogConfig:
    """Output of a run while it trains."""

    every_steps: int = setting(20, between=(1, None), shapes_result=False)
    """Number of steps between two logged lines."""
    tensorboard: bool = setting(True, shapes_result=False)
    """Write TensorBoard event files to RUN_DIR/tensorboard."""
    wandb: Literal["off", "offline", "online"] = setting("off", shapes_result=False)
    """Curves in Weights & Biases. offline: write files to RUN_DIR/wandb, which `wandb sync` sends later. Needs the package
    wandb."""
    mlflow: str = setting("", shapes_result=False)
    """Address of an MLflow server for the curves, or sqlite:///FILE. Empty: none. Needs the package mlflow-skinny or mlflow."""
    project: str = setting("wmse", shapes_result=False)
    """Name of the project in Weights & Biases, and of the experiment in MLflow."""
    stall_seconds: float = setting(60.0, between=(0.1, None), shapes_result=False)
    """Seconds without progress after which the log warns, and names what the run waits for."""


@dataclass(frozen=True)
class Config:
    """Settings of one run, with a section for each part of the program."""

    run_dir: str = setting("", shapes_result=False)
    """Folder of the run, for checkpoints, metrics and the log. If it holds a checkpoint, the run resumes from it."""
    seed: int = setting(0, between=(0, 2**63 - 1))
    """Seed of the initial weights and of every random choice."""
    max_steps: int = setting(0, between=(0, None), shapes_result=False)
    """Stop after this many steps. The learning-rate schedule stays the one of the whole run. 0: run to the end."""
    method: str = "wmse"
    """Method of self-supervised learning: wmse, simclr, byol, simsiam, moco, swav, align_uniform, barlow_twins or vicreg. Its
    settings are in the section of the same name."""
    init_from: str = setting("", shapes_result=False)
    """Checkpoint of another run whose encoder this run starts from. Everything else starts fresh."""
    allow_changes: bool = setting(False, shapes_result=False)
    """Resume a run even if settings that change the result differ from those of the checkpoint."""
    device: Literal["auto", "cuda", "cpu"] = setting("auto", shapes_result=False)
    """Device of each rank. auto: a GPU if the machine has one, else the CPU."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Precision of the networks (autocast). auto: bf16 if the device is fast in it, else fp32. fp16 scales the loss."""
    compile: Literal["auto", "true", "false"] = setting("auto", shapes_result=False)
    """Compile the networks with torch.compile. auto: on a GPU only, because it is no faster on a CPU."""
    autotune: bool = setting(False, shapes_result=False)
    """With compile on a GPU: time several kernels for each convolution and matrix product, and use the fastest. The first
    step takes 5 to 10 minutes longer."""
    deterministic: bool = setting(False, shapes_result=False)
    """Compute only with algorithms that give the same bits each time, on the same hardware, number of ranks and versions. An
    operation without such an algorithm ends the run and is named. Costs time on a GPU."""
    cuda_graphs: bool = setting(False, shapes_result=False)
    """With compile on a GPU: replay forward and backward as CUDA graphs, which helps if launching kernels takes most of the
    time."""
    gradient_compression: Literal["none", "bf16", "fp16"] = "none"
    """Data type in which ranks send gradients to each other. none: float32."""
    max_skipped_steps: int = setting(20, between=(0, None), shapes_result=False)
    """Largest number of consecutive skipped updates; one more ends the run. An update is skipped if the loss or a gradient is
    not finite, or if a check of the method fails."""
    stop_timeout_seconds: float = setting(60.0, between=(0.1, None), shapes_result=False)
    """Time in which a run must save and end after a signal, in seconds. A run that takes longer ends with exit code 75 and
    without another checkpoint. Set it above the time of three steps, and below the time that the scheduler leaves between the
    signal and the kill."""
    tuned_for: str = setting("", shapes_result=False)
    """Device and versions for which `wmse tune` wrote some of the settings. A run on others logs a warning. Empty: none."""
    allow_idle_ranks: bool = setting(False, shapes_result=False)
    """If the ranks do not divide the global batch evenly, train on as many ranks as possible and leave the others idle,
    instead of refusing to start. `wmse launch --nodes N-M` sets this."""
    max_idle_restarts: int = setting(3, between=(1, None), shapes_result=False)
    """Number of consecutive starts without a new checkpoint after which a requeued job fails."""
    timeout_minutes: float = setting(10.0, between=(0.01, None), shapes_result=False)
    """Minutes of waiting for files after which the run ends. Waiting for another rank ends it after four fifths of this time.
    NCCL cannot tell waiting from a slow step: with it, a step that takes 1.1 times this time also ends the run, and steps
    that compile have 30 minutes more."""
    data: DataConfig = field(default_factory=DataConfig)
    views: ViewsConfig = field(default_factory=ViewsConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    wmse: WMSESettings = field(default_factory=WMSESettings)
    simclr: SimCLRSettings = field(default_factory=SimCLRSettings)
    byol: BYOLSettings = field(default_factory=BYOLSettings)
    simsiam: SimSiamSettings = field(default_factory=SimSiamSettings)
    moco: MoCoSettings = field(default_factory=MoCoSettings)
    swav: SwAVSettings = field(default_factory=SwAVSettings)
    align_uniform: AlignUniformSettings = field(default_factory=AlignUniformSettings)
    barlow_twins: BarlowTwinsSettings = field(default_factory=BarlowTwinsSettings)
    vicreg: VICRegSettings = field(default_factory=VICRegSettings)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    online_probe: OnlineProbeConfig = field(default_factory=OnlineProbeConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    linear: LinearConfig = field(default_factory=LinearConfig)
    linear_sgd: LinearSGDConfig = field(default_factory=LinearSGDConfig)
    knn: KNNConfig = field(default_factory=KNNConfig)
    knn_cosine: KNNCosineConfig = field(default_factory=KNNCosineConfig)
    few_labels: FewLabelsConfig = field(default_factory=FewLabelsConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    diagnostics: DiagnosticsConfig = field(default_factory=DiagnosticsConfig)

    @property
    def method_settings(self) -> MethodSettings:
        """Settings of the chosen method."""
        return getattr(self, self.method)


# The sections of methods in `Config` are the list of methods, so that a new method needs no second entry.
METHODS = tuple(f.name for f in dataclasses.fields(Config) if isinstance(getattr(Config(), f.name), MethodSettings))


def flatten(config: object, prefix: str = "") -> dict[str, object]:
    """Return all settings of a config, or of a section of it, by dotted name."""
    return {name: value for name, _, value in all_settings(config, prefix)}
