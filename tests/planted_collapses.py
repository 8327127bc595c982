"""Short demo runs that collapse, and healthy ones, to see when `CollapseWatch` warns.

    python -m tests.planted_collapses FOLDER [NAME@SEED ...]        NAME: a key of RUNS; default: all, seed 0

The runs end up in FOLDER/NAME@SEED. benchmarks/results/README.md, "Warnings of a collapse", has the results.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from trainer.config.loading import load_config
from trainer.distributed.ranks import ImageRange
from trainer.loop import pretrain
from trainer.methods.method import LossOutput, without_checks
from trainer.methods.simclr.method import SimCLR
from trainer.run.signals import StopRequest

ONSET = 40  # step at which a planted collapse of a contrastive run begins
TWO_VIEWS = "--data.images_per_step 128 --views.num_views 2 --optimizer.warmup_steps 30 --optimizer.epochs 4"
CONTRASTIVE = f"{TWO_VIEWS} --method simclr --model.projector mlp_norm"
PER_VIEW = "--model.encoder_batch_norm per_view --model.projector_batch_norm per_view"
STANDARDISE = f"{TWO_VIEWS} --wmse.whitening standardise --wmse.slice_size 128"
BARLOW = f"{TWO_VIEWS} --method barlow_twins --model.projector barlow_twins"
SIMSIAM = f"--method simsiam --model.projector simsiam --model.projector_hidden [256] --simsiam.predictor_hidden 64 {PER_VIEW}"
VICREG = f"{TWO_VIEWS} --method vicreg --model.projector byol"
MOCO = "--method moco --model.projector moco --moco.queue_size 4096 --moco.momentum 0.99"
ALIGN = "--method align_uniform --model.projector moco --align_uniform.queue_size 4096 --align_uniform.momentum 0.99"
RUNS = {
    # healthy
    "wmse4": "",
    "wmse2": TWO_VIEWS,
    "wmse2_zca": f"{TWO_VIEWS} --wmse.whitening zca",
    "contrastive": CONTRASTIVE,
    "byol": f"{TWO_VIEWS} --method byol --byol.momentum 0.95 {PER_VIEW}",
    "vicreg": VICREG,
    "barlow_twins": BARLOW,
    "simsiam": f"{TWO_VIEWS} {SIMSIAM}",
    "moco": f"{TWO_VIEWS} {MOCO}",
    "align_uniform": f"{TWO_VIEWS} {ALIGN}",
    "swav": f"{TWO_VIEWS} --method swav --swav.prototypes 100 --swav.freeze_prototypes_steps 12",
    # collapses by their settings
    "standardise": STANDARDISE,
    "vicreg_without_covariance": f"{VICREG} --vicreg.covariance_weight 0",
    "high_rate": f"{TWO_VIEWS} --optimizer.learning_rate 0.1 --optimizer.warmup_steps 1",
    "byol_without_momentum": f"{TWO_VIEWS} --method byol --byol.momentum 0 --optimizer.learning_rate 0.03",
    # collapses by a changed loss
    "only_align": f"{TWO_VIEWS} --method simclr",
    "growing_constant": CONTRASTIVE,
    "few_dimensions": CONTRASTIVE,
    "one_view_shrinks": CONTRASTIVE,
}
COMMON = "--log.every_steps 1 --max_steps 120 --data.threads 1 --log.tensorboard false --checkpoint.every_minutes 0"


def plant(name: str) -> None:
    """Change the contrastive loss of this process as the run of this name needs."""
    plain = SimCLR.loss

    def loss(self: SimCLR, outputs: Any, step: int, images: ImageRange) -> LossOutput:
        if name == "only_align":
            first, second = outputs.chunk(2)
            return without_checks(2 - 2 * cosine_similarity(first, second).mean(), outputs)
        steps = max(0, step - ONSET)
        return plain(self, _collapsed(name, outputs, steps), step, images)

    SimCLR.loss = loss  # type: ignore[method-assign]


def _collapsed(name: str, embeddings: Tensor, steps: int) -> Tensor:
    """Return the embeddings after some steps of a collapse."""
    shrink = torch.ones(embeddings.shape[1])
    if name == "growing_constant":
        return embeddings + (1.15**steps - 1)
    if name == "few_dimensions":
        shrink[4:] = 0.9**steps
        return embeddings * shrink
    if name == "one_view_shrinks":
        shrink[len(shrink) // 2 :] = 0.9**steps
        first, second = embeddings.chunk(2)
        return torch.cat([first, second * shrink])
    return embeddings


def run(folder: Path, run_name: str) -> int:
    """Train one run in this process. Returns its exit code."""
    name, _, seed = run_name.partition("@")
    words = f"{RUNS[name]} {COMMON} --seed {seed or 0} --run_dir {folder / run_name}".split()
    plant(name)
    config = load_config([Path("demo_fashion_mnist")], words)
    return pretrain(config, StopRequest())


def main() -> int:
    """Train the runs, each in its process, and print the step of the first warning of each."""
    folder = Path(sys.argv[1])
    if sys.argv[2:3] == ["--one"]:
        return run(folder, sys.argv[3])
    for name in sys.argv[2:] or RUNS:
        command = [sys.executable, "-m", "tests.planted_collapses", str(folder), "--one", name]
        subprocess.run(command, check=False, capture_output=True)
        log = (folder / name / "log.txt").read_text()
        warned = re.search(r"W step (\d+): .*they collapse", log)
        print(f"{name}: {'warning in step ' + warned[1] if warned else 'no warning'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
