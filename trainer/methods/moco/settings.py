"""Settings of MoCo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.setting import setting
from trainer.methods.settings import MethodSettings

if TYPE_CHECKING:
    from trainer.config.schema import Config
    from trainer.methods.method import Method


@dataclass(frozen=True)
class QueueSettings(MethodSettings):
    """Settings of methods with a key network, a queue of keys, and shuffled BatchNorm (He et al., CVPR 2020)."""

    momentum: float = setting(0.999, between=(0, 1))
    """Momentum of the key network: the share of its weights that an update keeps."""
    queue_size: int = setting(65536, between=(1, None))
    """Number of keys in the queue, a multiple of the keys of a step."""
    batch_norm_rows: int = setting(32, between=(2, None))
    """Number of rows for which BatchNorm takes its statistics separately, so that keys and queries have different ones.
    model.encoder_batch_norm and model.projector_batch_norm have no effect."""
    shuffle_images: int = setting(128, between=(2, None))
    """Number of neighbouring images of a step whose keys are shuffled among their BatchNorm groups. With 128 images and 32
    rows a key shares its statistics with a quarter of its query's group. A rank must hold a multiple of it."""

    def problems(self, config: Config) -> list[str]:
        """Check the number of views, the queue and the BatchNorm groups."""
        name = config.method
        images = config.data.images_per_step
        problems = []
        if config.views.num_views != 2:
            problems.append(
                f"views.num_views is {config.views.num_views}, but {name} has a query and a key: set it to 2"
            )
        keys = self.keys_per_step(config)
        if self.queue_size % keys:
            nearest = max(round(self.queue_size / keys), 1) * keys
            problems.append(
                f"{name}.queue_size is {self.queue_size}, not a multiple of the {keys} keys of a step: set it to {nearest}"
            )
        # Each group gives the same number of rows to each group of its block.
        num_groups = self.shuffle_images // self.batch_norm_rows
        if self.shuffle_images % self.batch_norm_rows or num_groups < 2 or self.batch_norm_rows % num_groups:
            problems.append(
                f"{name}.shuffle_images is {self.shuffle_images} with {name}.batch_norm_rows {self.batch_norm_rows}: set it to "
                "2, 4 or 8 times the rows; the rows must be a multiple of that number"
            )
        if images % self.shuffle_images:
            problems.append(
                f"data.images_per_step is {images}, not a multiple of {name}.shuffle_images {self.shuffle_images}: change one "
                "of them"
            )
        if config.model.batch_norm_ranks != "local":
            problems.append(
                f"model.batch_norm_ranks is {config.model.batch_norm_ranks}, but {name} takes statistics of "
                f"{name}.batch_norm_rows rows: set it to local"
            )
        return problems

    def warnings(self, config: Config, total_steps: int) -> list[str]:
        """Warn if the run has fewer keys than the queue."""
        keys = self.keys_per_step(config) * total_steps
        if self.queue_size <= keys:
            return []
        return [
            f"{config.method}.queue_size is {self.queue_size}, more than the {keys} keys of the whole run: the rest of the "
            f"queue stays random; set it to {keys} or less (configs/sweeps/demo_methods.yaml has 4096)"
        ]

    def keys_per_step(self, config: Config) -> int:
        """Return the number of keys that enter the queue in a step."""
        return config.data.images_per_step

    def indivisible_images(self, config: Config) -> int:
        """Return the number of images that are shuffled together."""
        return self.shuffle_images

    def images_of_block(self) -> int:
        """Return the number of images that are shuffled together, which a rank does without the others."""
        return self.shuffle_images

    def rows_of_statistics(self) -> int:
        """Return the size of a BatchNorm group."""
        return self.batch_norm_rows

    def plan_lines(self, config: Config) -> list[str]:
        """Describe the queue."""
        steps = self.queue_size / self.keys_per_step(config)
        return [f"queue: {self.queue_size} keys of the last {steps:g} steps"]


@dataclass(frozen=True)
class MoCoSettings(QueueSettings):
    """MoCo v2 (Chen et al., "Improved Baselines with Momentum Contrastive Learning", 2020)."""

    temperature: float = setting(0.2, between=(1e-3, None))
    """Temperature by which similarities are divided."""
    symmetric: bool = False
    """False: view 0 gives the queries and view 1 the keys. True: each view gives both, and all keys enter the queue."""

    def keys_per_step(self, config: Config) -> int:
        """Return the number of keys that enter the queue in a step."""
        return config.data.images_per_step * (2 if self.symmetric else 1)

    def method_class(self) -> Callable[..., Method]:
        """Import and return `MoCo`."""
        from trainer.methods.moco.method import MoCo

        return MoCo
