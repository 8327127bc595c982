"""Run by torchrun (and once alone): for each case, the gradient of every parameter, the running statistics and what the ranks
agreed on after a step.

two_ranks_worker.py OUT.pt
"""

import sys
from dataclasses import replace

import torch
from torch._dynamo.testing import CompileCounterWithBackend

from trainer.config.schema import Config, ModelConfig, ViewsConfig, WMSESettings
from trainer.data.plan import slice_permutations
from trainer.distributed.geometry import images_of_rank, loss_group_size
from trainer.distributed.process_group import make_batch_norm_group, make_loss_group, process_group, wrap_model
from trainer.distributed.ranks import ImageRange, find_ranks
from trainer.metrics import MetricSums
from trainer.models.compile import compile_networks
from trainer.models.networks import Model
from trainer.step import StepResult, TrainStep

IMAGES, K = 32, 4
MODEL = ModelConfig("test_resnet", stem="half", zero_init_last=False, projector="mlp", projector_hidden=(12,),
                    embedding_size=K, batch_norm_ranks="all")  # fmt: skip
# name: views, slice, iterations, block, batch norm
CASES = {
    "2 views": (2, 8, 1, 32, "joint"),
    "3 views": (3, 16, 1, 32, "joint"),
    "4 views, per view": (4, 16, 1, 32, "per_view"),
    "2 views, slice group": (2, 32, 1, 32, "joint"),
    "4 views, slice group, 3 iterations": (4, 8, 3, 32, "per_view"),
    "2 views, 2 iterations inside a rank": (2, 8, 2, 16, "joint"),
    "a slice of the last rank fails": (2, 16, 1, 32, "joint"),
    "2 views, compiled": (2, 16, 1, 32, "joint"),
    "2 views, sent as fp16": (2, 8, 1, 32, "joint"),
    "2 views, 4 parts in all": (2, 8, 1, 32, "joint"),
}


def run_case(name: str) -> dict[str, torch.Tensor]:
    """One step of SGD with rate 1 from fixed weights and pixels, in float64; the last rank wishes to stop."""
    views, slice_size, iterations, block, norm = CASES[name]
    ranks = find_ranks()
    rows = images_of_rank(ranks, IMAGES)
    group_size = loss_group_size(rows.count, ranks.world_size, block if iterations > 1 else slice_size)
    torch.manual_seed(0)
    parts = 4 // ranks.world_size if "parts" in name else 1
    statistics_of = "local" if "parts" in name else "all"
    config = replace(MODEL, encoder_batch_norm=norm, projector_batch_norm=norm, batch_norm_ranks=statistics_of)
    group = make_batch_norm_group(replace(Config(), model=config), ranks, torch.device("cpu"))
    model = Model(config, ViewsConfig(num_views=views), group, ranks.world_size).double()
    graphs = CompileCounterWithBackend("aot_eager")
    if "compiled" in name:
        compile_networks(model, Config(), torch.device("cpu"), backend=graphs)  # raises where the graph breaks
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    step = TrainStep(
        wrap_model(
            model,
            ranks,
            torch.device("cpu"),
            compression="fp16" if "fp16" in name else "none",
            accumulates=parts > 1,
        ),
        torch.optim.SGD(model.parameters(), lr=1.0),
        WMSESettings(slice_size=slice_size, iterations=iterations),
        num_views=views,
        autocast_dtype=None,
        ranks=ranks,
        slice_group=make_loss_group(group_size, Config(), ranks, torch.device("cpu")),
        accumulation_steps=parts,
    )
    pixels = torch.randint(
        0, 256, (views, IMAGES, 3, 16, 16), generator=torch.Generator().manual_seed(1), dtype=torch.uint8
    )
    if "fails" in name:
        pixels[:, IMAGES // 2 :] = pixels[:, -1:]  # all the same: nothing to whiten
    own = pixels[:, rows.first : rows.first + rows.count].flatten(0, 1).contiguous(memory_format=torch.channels_last)
    together = ImageRange(ranks.rank // group_size * group_size * rows.count, group_size * rows.count)
    orders = slice_permutations(0, 0, IMAGES, iterations, block)
    orders = orders[:, together.first : together.first + together.count] - together.first
    result = step(own, torch.from_numpy(orders), 1.0, stop=ranks.rank == ranks.world_size - 1)
    assert result.failed == ("fails" in name)
    loss = result.loss.clone()
    if ranks.world_size > 1:
        torch.distributed.all_reduce(loss)
    gradients = {n: before[n] - p.detach() for n, p in model.named_parameters()}
    statistics = {n: b.clone() for n, b in model.named_buffers() if "running" in n and statistics_of == "all"}
    agreed = {
        "agreed": result.agreed,
        "group_size": torch.tensor(group_size),
        "graphs": torch.tensor(graphs.frame_count),
    }
    return {"loss": loss / ranks.world_size, **agreed, **gradients, **statistics}


def run_sums() -> dict[str, torch.Tensor]:
    """What is logged of a step with loss 1 on the first rank, 2 on the second, and smallest pivot 1/2, 1/3; then one failed."""
    ranks, sums = find_ranks(), MetricSums(torch.device("cpu"))
    own = torch.tensor(ranks.rank + 1.0)
    for failed in (False, True):
        agreed = torch.tensor([3 * failed, 0, 0])
        sums.add(StepResult(own, torch.empty(0), 1 / (own + 1), agreed[0] > 0, agreed))
    share = sums.state(ranks)["sums"]
    line = sums.take(torch.randn(8, 3), ranks)
    return {"share": share, "line": torch.stack([line[name] for name in ("loss", "skipped_steps", "min_pivot")])}


def main() -> None:
    ranks = find_ranks()
    with process_group(replace(Config(), timeout_minutes=1.0), ranks, torch.device("cpu")):
        results = {name: run_case(name) for name in CASES}
        results["sums"] = run_sums()
        if ranks.is_first:
            torch.save(results, sys.argv[1])


if __name__ == "__main__":
    main()
