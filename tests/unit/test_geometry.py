"""Division of a step among ranks and micro-batches."""

from dataclasses import replace

import pytest

from trainer.config.schema import Config, DataConfig, OptimizerConfig, WMSESettings
from trainer.distributed.geometry import batch_norm_images, check_ranks, micro_batches, usable_ranks
from trainer.errors import InputError


def config_of(images: int, slice_size: int = 256, **optimizer: int) -> Config:
    return replace(
        Config(),
        data=DataConfig(images_per_step=images),
        wmse=WMSESettings(slice_size=slice_size),
        optimizer=OptimizerConfig(**optimizer),
    )


@pytest.mark.parametrize(
    ("ranks", "parts"),
    [(64, 1), (16, 1), (8, 2), (4, 4), (2, 8), (1, 16)],
)
def test_micro_batches_keep_their_size_on_any_number_of_ranks(ranks: int, parts: int) -> None:
    config = config_of(4096, images_per_micro_batch=256)
    assert micro_batches(config, 4096 // ranks) == parts


def test_a_micro_batch_holds_whole_slices() -> None:
    # 1536 images: halves would fit the limit of 800, and hold whole slices; the limit of 700 needs thirds
    assert micro_batches(config_of(1536, images_per_micro_batch=800), 1536) == 2
    assert micro_batches(config_of(1536, images_per_micro_batch=700), 1536) == 3
    # quarters of 384 images would fit the limit of 400, but not hold whole slices
    assert micro_batches(config_of(1536, images_per_micro_batch=400), 1536) == 6
    with pytest.raises(InputError, match=r"images_per_micro_batch is 200: the 1536 images .* use 256 or more"):
        micro_batches(config_of(1536, images_per_micro_batch=200), 1536)


@pytest.mark.parametrize(("available", "used"), [(1, 1), (16, 16), (24, 16), (40, 32), (63, 32), (64, 64), (7, 4)])
def test_the_largest_number_of_ranks_that_can_share_a_step_is_used(available: int, used: int) -> None:
    config = config_of(4096, images_per_micro_batch=256)
    assert usable_ranks(config, available) == used
    check_ranks(config, used)


def test_a_step_that_no_number_of_ranks_can_run_is_refused() -> None:
    with pytest.raises(InputError, match="images_per_micro_batch is 100"):
        usable_ranks(config_of(4096, images_per_micro_batch=100), 2)


@pytest.mark.parametrize("method", ["moco", "align_uniform"])
def test_every_rank_holds_whole_blocks_of_shuffled_keys(method: str) -> None:
    """Without the check, the first step fails where the keys are shuffled."""
    config = replace(config_of(256), method=method)
    assert usable_ranks(config, 8) == 2
    message = f"each of 8 ranks holds 32 of the 256 images of a step, but {method} needs a multiple of 128"
    with pytest.raises(InputError, match=message):
        check_ranks(config, 8)


def test_batch_norm_uses_a_micro_batch_of_one_rank_of_a_group_or_of_all() -> None:
    config = config_of(4096, images_per_micro_batch=256)
    assert [batch_norm_images(config, ranks) for ranks in (64, 16, 4)] == [64, 256, 256]
    over_all = replace(config, model=replace(config.model, batch_norm_ranks="all"))
    assert [batch_norm_images(over_all, ranks) for ranks in (64, 16, 4)] == [4096, 4096, 1024]
    over_8 = replace(config, model=replace(config.model, batch_norm_ranks=8))
    assert [batch_norm_images(over_8, ranks) for ranks in (64, 16, 8)] == [512, 2048, 2048]
    with pytest.raises(InputError, match=r"batch_norm_ranks is 8, but 4 rank.* groups of 8: use 1, 2, 4, local or all"):
        check_ranks(over_8, 4)


def test_micro_batches_under_cuda_graphs_are_refused() -> None:
    """A replay overwrites the gradients of the previous micro-batch, which are in the memory of the graph."""
    graphs = replace(config_of(4096, images_per_micro_batch=256), cuda_graphs=True)
    assert micro_batches(graphs, 256) == 1
    with pytest.raises(InputError, match="are divided into 2 micro-batches"):
        micro_batches(graphs, 512)
    with pytest.raises(InputError, match="cuda_graphs is true"):
        check_ranks(replace(config_of(4096, accumulation_steps=2), cuda_graphs=True), 1)
