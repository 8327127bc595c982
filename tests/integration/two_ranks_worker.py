"""Main function of a rank that makes one step of each case.

It saves the gradient of every parameter, the running statistics, and what the ranks agreed on.
"""

import importlib.util
from dataclasses import replace

import torch
from torch._dynamo.testing import CompileCounterWithBackend

from kernels.backends import WHITENINGS
from trainer.config.schema import (
    AlignUniformSettings,
    Config,
    DataConfig,
    MoCoSettings,
    ModelConfig,
    SimCLRSettings,
    SwAVSettings,
    ViewsConfig,
    WMSESettings,
)
from trainer.distributed.geometry import images_of_rank, indivisible_images, loss_group_size
from trainer.distributed.process_group import make_batch_norm_group, make_loss_group, process_group, wrap_model
from trainer.distributed.ranks import find_ranks
from trainer.methods.wmse.method import WMSE
from trainer.metrics import MetricSums
from trainer.models.compile import compile_networks
from trainer.run.health import measure_health
from trainer.step import RankFlags, StepResult, TrainStep

CPU = torch.device("cpu")
IMAGES, K = 32, 4
MODEL = ModelConfig("test_resnet", stem="half", zero_init_last=False, projector="mlp", projector_hidden=(12,),
                    embedding_size=K, batch_norm_ranks="all")  # fmt: skip
# name: method, views, slice, iterations, block, batch norm
CASES = {
    "2 views": ("wmse", 2, 8, 1, 32, "joint"),
    "3 views": ("wmse", 3, 16, 1, 32, "joint"),
    "4 views, per view": ("wmse", 4, 16, 1, 32, "per_view"),
    "2 views, slice group": ("wmse", 2, 32, 1, 32, "joint"),
    "4 views, slice group, 3 iterations": ("wmse", 4, 8, 3, 32, "per_view"),
    "2 views, 2 iterations inside a rank": ("wmse", 2, 8, 2, 16, "joint"),
    "a slice of the last rank fails": ("wmse", 2, 16, 1, 32, "joint"),
    "2 views, compiled": ("wmse", 2, 16, 1, 32, "joint"),
    "2 views, sent as fp16": ("wmse", 2, 8, 1, 32, "joint"),
    "2 views, 4 parts in all": ("wmse", 2, 8, 1, 32, "joint"),
    "simclr, 2 views": ("simclr", 2, 0, 1, 32, "joint"),
    "simclr, 4 views, per view": ("simclr", 4, 0, 1, 32, "per_view"),
    "byol, 2 views, per view": ("byol", 2, 0, 1, 32, "per_view"),
    "byol, 3 views": ("byol", 3, 0, 1, 32, "joint"),
    "simsiam, 2 views": ("simsiam", 2, 0, 1, 32, "per_view"),
    "moco": ("moco", 2, 0, 1, 32, "joint"),
    "moco, 4 parts in all": ("moco", 2, 0, 1, 32, "joint"),
    "moco, symmetric, 4 parts in all": ("moco", 2, 0, 1, 32, "joint"),
    "align_uniform": ("align_uniform", 2, 0, 1, 32, "joint"),
    "swav, 2 views": ("swav", 2, 0, 1, 32, "joint"),
    "swav, 3 views": ("swav", 3, 0, 1, 32, "per_view"),
    "barlow_twins, 2 views": ("barlow_twins", 2, 0, 1, 32, "joint"),
    "barlow_twins, 3 views": ("barlow_twins", 3, 0, 1, 32, "per_view"),
    "vicreg, 2 views": ("vicreg", 2, 0, 1, 32, "joint"),
    "vicreg, 3 views": ("vicreg", 3, 0, 1, 32, "per_view"),
    "zca, 3 views, 2 iterations": ("wmse", 3, 8, 2, 16, "joint"),
    "zca, slice group": ("wmse", 2, 32, 1, 32, "per_view"),
    "standardise, slice group": ("wmse", 2, 32, 1, 32, "joint"),
    "simclr whitened, slices inside a rank": ("simclr", 3, 8, 1, 32, "joint"),
    "simclr whitened, a slice over both ranks": ("simclr", 2, 32, 1, 32, "per_view"),
}

if importlib.util.find_spec("triton"):
    # Blocks without 1x1 convolutions use the kernels of "triton". Interpreting them takes long, so one case has both.
    CASES["2 views, per view, by triton_conv, compiled"] = ("wmse", 2, 16, 1, 32, "per_view")


PAIRS = ("wmse", 2, 8, 1, 32, "per_view")


def run_case(name: str) -> dict[str, torch.Tensor]:
    """Make one SGD step with learning rate 1 from fixed weights and pixels, in float64. The last rank asks to stop."""
    method_name, views, slice_size, iterations, block, norm = CASES.get(name, PAIRS)
    ranks = find_ranks()
    parts = 4 // ranks.world_size if "parts" in name else 1
    has_queue = method_name in ("moco", "align_uniform")
    whitening = next((kind for kind in WHITENINGS if kind in name), "cholesky")
    statistics_of = "local" if "parts" in name or has_queue else "all"
    backend = "triton_conv" if "triton" in name else "torch"
    if name == "pairs":  # four ranks in pairs, or two ranks that each hold as much as a pair
        statistics_of = ranks.world_size // 2
    config = Config(
        method=method_name,
        data=DataConfig(images_per_step=IMAGES),
        views=ViewsConfig(num_views=views),
        model=replace(
            MODEL,
            encoder_batch_norm=norm,
            projector_batch_norm=norm,
            batch_norm_ranks=statistics_of,
            batch_norm_backend=backend,  # type: ignore[arg-type]
        ),
        wmse=WMSESettings(slice_size=slice_size, iterations=iterations, permutation_block=block, whitening=whitening),
        simclr=SimCLRSettings(temperature=0.5, whiten="whitened" in name, slice_size=slice_size),
        moco=MoCoSettings(queue_size=192, batch_norm_rows=4, shuffle_images=8, symmetric="symmetric" in name),
        align_uniform=AlignUniformSettings(queue_size=96, batch_norm_rows=4, shuffle_images=8),
        swav=SwAVSettings(prototypes=6, freeze_prototypes_steps=0),
    )
    unit = indivisible_images(config)
    images = images_of_rank(ranks, IMAGES, unit)
    group_size = loss_group_size(images.count, ranks.world_size, unit)
    method = config.method_settings.build(
        config,
        ranks,
        CPU,
        total_steps=10,
        loss_group=make_loss_group(group_size, config, ranks, CPU),
        batch_norm_group=make_batch_norm_group(config, ranks, CPU),
    )
    networks = method.networks.double()
    if "triton" in name:
        from kernels import batch_norm_triton

        batch_norm_triton.TILE = 2**16  # fewer programs to interpret
    graphs = CompileCounterWithBackend("aot_eager")
    if "compiled" in name:
        compile_networks(networks, Config(), CPU, backend=graphs)  # raises if the graph breaks
    before = {n: p.detach().clone() for n, p in networks.named_parameters()}
    compression = "fp16" if "fp16" in name else "none"
    step = TrainStep(
        method,
        torch.optim.SGD([p for p in networks.parameters() if p.requires_grad], lr=1.0),
        num_views=views,
        images=images,
        ranks=ranks,
        wrapped=wrap_model(networks, ranks, CPU, compression=compression, accumulates=parts > 1),
        micro_batches=parts,
    )
    pixels = torch.randint(
        0, 256, (views, IMAGES, 3, 16, 16), generator=torch.Generator().manual_seed(1), dtype=torch.uint8
    )
    if "fails" in name:
        pixels[:, IMAGES // 2 :] = pixels[:, -1:]  # equal images, which cannot be whitened
    own = pixels[:, images.first : images.first + images.count]
    own = own.flatten(0, 1).contiguous(memory_format=torch.channels_last)
    result = step(own, 0, 1.0, stop=ranks.rank == ranks.world_size - 1)
    assert result.skipped == ("fails" in name)
    loss = result.loss.clone()
    if ranks.world_size > 1:
        torch.distributed.all_reduce(loss)
    gradients = {n: before[n] - p.detach() for n, p in networks.named_parameters()}
    statistics = {n: b.clone() for n, b in networks.named_buffers() if "running" in n and statistics_of != "local"}
    if has_queue:
        statistics["queue"] = networks.queue
    agreed = {
        "agreed": torch.stack(list(result.flags)),
        "group_size": torch.tensor(group_size),
        "graphs": torch.tensor(graphs.frame_count),
    }
    return {"loss": loss / ranks.world_size, **agreed, **gradients, **statistics}


def run_sums() -> dict[str, torch.Tensor]:
    """Return the metrics of two steps, of which the second update is skipped, and this rank's share of the sums.

    Rank 0 has loss 1, smallest pivot 1/2 and 10 J, rank 1 has loss 2, smallest pivot 1/3 and 20 J. The embeddings are those of
    8 images, which the ranks divide.
    """
    ranks, sums = find_ranks(), MetricSums(WMSE.metrics, CPU)
    own = torch.tensor(ranks.rank + 1.0)
    for skipped in (False, True):
        flags = RankFlags(*torch.tensor([3 * skipped, 0, 0]).unbind())
        sums.add(StepResult(own, {"min_pivot": 1 / (own + 1)}, torch.empty(0), flags.fault > 0, flags))
    share = sums.state(ranks)["sums"]
    images = images_of_rank(ranks, 8, 1)
    embeddings = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0)) + 1
    own = embeddings[:, images.first : images.first + images.count].flatten(0, 1)
    line = sums.take(own, ranks, 2, spent=(10.0 * (ranks.rank + 1), ranks.rank))
    found = measure_health(line["products"].numpy()) if ranks.is_first else {}
    health = {name: torch.tensor(value) for name, value in found.items()}
    names = ("loss", "skipped_steps", "min_pivot", "joules", "unmeasured_seconds")
    return {"share": share, "line": torch.stack([line[name] for name in names]), **health}


def main(path: str) -> None:
    ranks = find_ranks()
    with process_group(replace(Config(), timeout_minutes=1.0), ranks, CPU):
        results = {name: run_case(name) for name in CASES}
        results["sums"] = run_sums()
        if ranks.is_first:
            torch.save(results, path)


def main_of_pairs(path: str) -> None:
    ranks = find_ranks()
    with process_group(replace(Config(), timeout_minutes=1.0), ranks, CPU):
        result = run_case("pairs")
        torch.save(result, f"{path}.{ranks.rank}")
