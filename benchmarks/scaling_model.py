"""Predicts training on many GPUs from what one does and from the network: docs/scaling.md has the formulas.

    python benchmarks/scaling_model.py [--compute RESULT.json] [--end2end RESULT.json] [--NAME VALUE ...] [--write]

--compute: of `wmse bench compute` on one GPU. --end2end: of `wmse bench end2end`. Without them published figures stand in.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tables import table, write_tables

ROOT = Path(__file__).parents[1]
RANKS = (1, 8, 16, 64, 256)
IMAGES, VIEWS, EPOCHS, SET_IMAGES = 4096, 4, 100, 1_281_167  # the ImageNet recipe
SLICE, EMBEDDING, FLOAT = 256, 128, 4
RANKS_A_NODE = 8


@dataclass(frozen=True)
class Inputs:
    """What the prediction stands on. Units stand in the names; SOURCES says where each comes from."""

    views_per_s: float = 4450.0
    fixed_ms: float = 0.8
    activation_gb: float = 60.0
    view_mb: float = 40.7
    view_mb_with_budget: float = 22.8
    budget_percent: float = 10.0
    backward_share: float = 2 / 3
    parameters: float = 32.17e6
    last_bucket_mb: float = 25.0
    node_gb_per_s: float = 300.0
    network_gb_per_s: float = 40.0
    node_latency_us: float = 12.0
    network_latency_us: float = 8.0
    shared_communicator: float = 0.0
    batch_norm_layers: float = 56.0
    batch_norm_channels: float = 30_784.0
    operators: float = 600.0
    launch_us: float = 8.0
    overhead_percent: float = 3.0
    spread_percent: float = 0.5


SOURCES = {
    "views_per_s": "published: NVIDIA's PyTorch ResNet-50 on an A100, 2,470 images/s, times 1.8 for an H100",
    "fixed_ms": "estimate: LARS 0.4 ms, loss of 4 slices 0.15 ms (targets), the rest clearing and agreeing",
    "activation_gb": "assumption: of 80 GB, what weights, moments, workspaces, DALI and the allocator's gaps leave",
    "view_mb": "counted: kept for backward a view, compiled, bf16, BatchNorm over all ranks (66.1 eager)",
    "view_mb_with_budget": "counted: the same with model.activation_memory_budget 0.9",
    "budget_percent": "estimate: its cost, the traffic of making BatchNorm and ReLU again in backward",
    "backward_share": "counted: two of three products are backward's",
    "parameters": "counted: ResNet-50 without its head, and the projector 2048-2048-2048-128",
    "last_bucket_mb": "DDP's default bucket; the last one has no backward left to hide under",
    "node_gb_per_s": "assumption: ring bandwidth of a GPU over NVLink 4 (450 GB/s a direction on paper)",
    "network_gb_per_s": "assumption: of a GPU with a 400 Gb/s adapter of its own (50 GB/s on paper)",
    "node_latency_us": "assumption: a small collective inside a node; 22 is another estimate",
    "network_latency_us": "assumption: what each doubling of the nodes adds to it",
    "shared_communicator": "0: BatchNorm has a communicator of its own, as in the code; 1: it shares the gradients'",
    "batch_norm_layers": "counted: 53 of ResNet-50, 3 of the projector",
    "batch_norm_channels": "counted: sum over these layers",
    "operators": "counted here: 541 in forward and backward of the model, and the rest of a step",
    "launch_us": "assumption: the host's time for one operator of an eager step",
    "overhead_percent": "target: loop, logging, host; loop_overhead_percent where measured",
    "spread_percent": "assumption: standard deviation of a rank's step; all wait for the slowest",
}


@dataclass(frozen=True)
class Prediction:
    """Milliseconds of one step, by cause, on `ranks` GPUs."""

    ranks: int
    compute: float
    all_reduce: float
    batch_norm: float
    gather: float
    slowest: float

    @property
    def step(self) -> float:
        """All of it."""
        return self.compute + self.all_reduce + self.batch_norm + self.gather + self.slowest

    @property
    def views_per_s(self) -> float:
        """Of all ranks."""
        return IMAGES * VIEWS / self.step * 1e3

    @property
    def hours(self) -> float:
        """Of EPOCHS epochs."""
        return EPOCHS * (SET_IMAGES // IMAGES) * self.step / 3.6e6


def predict(i: Inputs, ranks: int) -> Prediction:
    """One step of the recipe on so many GPUs, its images shared evenly."""
    views, num_parts = IMAGES * VIEWS / ranks, parts(i, ranks)
    device = views / i.views_per_s * 1e3 * (1 + i.budget_percent / 100 * needs_budget(i, ranks))
    compute = max(device + i.fixed_ms, i.operators * i.launch_us / 1e3 * num_parts)
    backward = i.backward_share * device / num_parts  # the last part's: gradients then go round
    batch_norm = batch_norm_ms(i, ranks) * num_parts
    busy = compute + batch_norm
    sigma = math.sqrt(2 * math.log(ranks)) if ranks > 1 else 0.0  # of the largest of so many normal numbers, about
    return Prediction(
        ranks,
        compute,
        exposed_all_reduce_ms(i, ranks, backward),
        batch_norm,
        gather_ms(i, ranks),
        busy * (i.overhead_percent + sigma * i.spread_percent) / 100,
    )


def needs_budget(i: Inputs, ranks: int) -> bool:
    """Whether a rank's images fit its memory at once by model.activation_memory_budget, and only by it."""
    views = IMAGES * VIEWS / ranks
    return views * i.view_mb_with_budget <= 1e3 * i.activation_gb < views * i.view_mb


def parts(i: Inputs, ranks: int) -> int:
    """Equal ones of a rank's images that go through one after the other (optimizer.accumulation_steps), where they do not fit
    its memory at once."""
    images = IMAGES // ranks
    most = 1e3 * i.activation_gb / i.view_mb / VIEWS
    if needs_budget(i, ranks):
        return 1
    return next(number for number in range(1, images + 1) if images % number == 0 and images / number <= most)


def bandwidth_gb_per_s(i: Inputs, ranks: int) -> float:
    """Of a ring: its slowest link."""
    return i.node_gb_per_s if ranks <= RANKS_A_NODE else min(i.node_gb_per_s, i.network_gb_per_s)


def latency_ms(i: Inputs, ranks: int) -> float:
    """Of a collective of a few bytes."""
    if ranks == 1:
        return 0.0
    nodes = math.ceil(ranks / RANKS_A_NODE)
    return (i.node_latency_us + i.network_latency_us * math.log2(nodes)) / 1e3


def all_reduce_ms(i: Inputs, ranks: int, num_bytes: float) -> float:
    """Of a ring: 2 (R-1)/R bytes pass each GPU's link."""
    return 2 * (ranks - 1) / ranks * num_bytes / bandwidth_gb_per_s(i, ranks) / 1e6 + latency_ms(i, ranks)


def all_gather_ms(i: Inputs, ranks: int, bytes_a_rank: float) -> float:
    """(R-1) other ranks' bytes pass each GPU's link."""
    return (ranks - 1) * bytes_a_rank / bandwidth_gb_per_s(i, ranks) / 1e6 + latency_ms(i, ranks)


def exposed_all_reduce_ms(i: Inputs, ranks: int, backward_ms: float) -> float:
    """What backward does not hide of the gradients' way: all but the last bucket goes beside it. But a communicator works
    through its collectives in order: where BatchNorm shares it, the next layer waits for the bucket, and nothing is hidden."""
    if i.shared_communicator:
        backward_ms = 0.0
    num_bytes = FLOAT * i.parameters
    last = min(i.last_bucket_mb * 1e6, num_bytes)
    hidden = all_reduce_ms(i, ranks, num_bytes - last)
    return max(0.0, hidden - backward_ms) + all_reduce_ms(i, ranks, last)


def batch_norm_ms(i: Inputs, ranks: int) -> float:
    """Each layer sums (2, C) over all ranks, in float64 forward and in float32 backward."""
    if ranks == 1:
        return 0.0
    numbers = 2 * i.batch_norm_channels / i.batch_norm_layers
    forward, backward = (all_reduce_ms(i, ranks, num_bytes * numbers) for num_bytes in (2 * FLOAT, FLOAT))
    return i.batch_norm_layers * (forward + backward)


def gather_ms(i: Inputs, ranks: int) -> float:
    """Embeddings of a slice group, where a rank's images fill no slice; groups are neighbours."""
    images = IMAGES // ranks
    group = SLICE // math.gcd(images, SLICE)
    return all_gather_ms(i, group, images * VIEWS * EMBEDDING * FLOAT) if group > 1 else 0.0


def efficiency(i: Inputs, prediction: Prediction) -> float:
    """Views a second of a GPU, against one GPU's own compute."""
    return prediction.views_per_s / prediction.ranks / i.views_per_s


def read_inputs(compute: dict[str, Any] | None, end2end: dict[str, Any] | None, given: dict[str, float]) -> Any:
    """-> Inputs and their sources: measured where a result is at hand, else as above; `given` goes over both."""
    found: dict[str, float] = {}
    sources = dict(SOURCES)
    if compute is not None:
        host = f"measured: {compute['device']}, commit {compute['commit']}"
        step = compute["step_ms"]
        found["views_per_s"] = compute["views_per_s_a_rank"]
        found["fixed_ms"] = 0.0  # is in the measured rate
        found["parameters"] = compute["parameters"]
        found["spread_percent"] = 100 * (step["quartile_3"] - step["quartile_1"]) / 1.35 / step["median"]
        sources |= dict.fromkeys(found, host)
    if end2end is not None:
        found["overhead_percent"] = end2end["step"]["loop_overhead_percent"]
        sources["overhead_percent"] = f"measured: {end2end['device']}, commit {end2end['commit']}"
    found |= given
    sources |= dict.fromkeys(given, "given on the command line")
    return Inputs(**found), sources


def prediction_table(i: Inputs) -> list[str]:
    """A row a number of GPUs."""
    head = ["GPUs", "images a GPU", "ms a step", "compute", "all-reduce", "BatchNorm", "gather", "slowest, host"]
    rows = []
    for ranks in RANKS:
        p = predict(i, ranks)
        times = [p.step, p.compute, p.all_reduce, p.batch_norm, p.gather, p.slowest]
        rows.append(
            [
                str(ranks),
                _images(i, ranks),
                *(f"{ms:,.1f}" if ms == 0 or ms >= 0.1 else f"{ms:.2f}" for ms in times),
                f"{p.views_per_s:,.0f}",
                f"{efficiency(i, p):.0%}",
                f"{p.hours:,.2f}",
            ]
        )
    return table([*head, "views/s", "efficiency", f"hours, {EPOCHS} epochs"], rows)


def _images(i: Inputs, ranks: int) -> str:
    in_parts = f" in {parts(i, ranks)} parts" if parts(i, ranks) > 1 else ""
    return f"{IMAGES // ranks}{in_parts}{', budget' if needs_budget(i, ranks) else ''}"


def communicator_table(i: Inputs) -> list[str]:
    """A row a number of GPUs: what the all-reduce costs with a communicator of its own and with BatchNorm's."""
    rows = []
    for ranks in RANKS[1:]:
        own, shared = (predict(dataclasses.replace(i, shared_communicator=float(s)), ranks) for s in (False, True))
        longer = 100 * (shared.step / own.step - 1)
        rows.append([str(ranks), f"{own.all_reduce:.1f}", f"{shared.all_reduce:.1f}", f"{longer:.1f} %"])
    return table(["GPUs", "all-reduce, own, ms", "shared, ms", "a step is longer by"], rows)


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compute", type=Path, metavar="JSON")
    parser.add_argument("--end2end", type=Path, metavar="JSON")
    parser.add_argument("--write", action="store_true", help="put the tables into the document")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "scaling.md", metavar="FILE")
    names = [field.name for field in dataclasses.fields(Inputs)]
    for name in names:
        parser.add_argument(f"--{name}", type=float, metavar="X", help=SOURCES[name])
    own = parser.parse_args()
    results = [json.loads(path.read_text()) if path else None for path in (own.compute, own.end2end)]
    given = {name: getattr(own, name) for name in names if getattr(own, name) is not None}
    inputs, sources = read_inputs(results[0], results[1], given)
    rows = [[name, f"{getattr(inputs, name):,.4g}", sources[name]] for name in names]
    tables = {"inputs": table(["input", "value", "where from"], rows), "prediction": prediction_table(inputs)}
    tables["communicator"] = communicator_table(inputs)
    if own.write:
        write_tables(own.document, tables)
        return
    print("\n\n".join("\n".join(lines) for lines in tables.values()))


if __name__ == "__main__":
    main()
