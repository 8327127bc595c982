"""What the help of each command shows below its options: common settings and examples."""

from __future__ import annotations

from dataclasses import dataclass

_DEMO = "--config demo_fashion_mnist"
# In the order in which a new user needs them.
_TRAINING = (
    "data.root",
    "data.images_per_step",
    "views.num_views",
    "views.size",
    "model.backbone",
    "method",
    "optimizer.learning_rate",
    "optimizer.epochs",
    "run_dir",
    "seed",
    "precision",
    "checkpoint.every_minutes",
)
_EVALUATION = (
    "data.root",
    "data.probe_split",
    "data.test_split",
    "evaluate.protocols",
    "evaluate.images_per_batch",
    "linear.epochs",
    "knn.k",
    "evaluate.precision",
)


@dataclass(frozen=True)
class Usage:
    """Help of a command that takes settings."""

    examples: tuple[str, ...]
    """Words of example commands, after `wmse COMMAND`."""
    settings: tuple[str, ...] = _TRAINING
    """The settings that most users of this command change."""
    trains: bool = True
    """Whether the settings are those of a training, so that the command also takes their short names."""

    def text(self, command: str, settings: str) -> str:
        """Format the end of the help. settings: their description."""
        # Each example can be copied as it is.
        examples = "\n".join(f"  wmse {command} {example}" for example in self.examples)
        return (
            f"common settings (`wmse settings` lists the sections, `wmse settings SECTION` explains one):\n{settings}\n\n"
            f"examples:\n{examples}"
        )


USAGE = {
    "pretrain": Usage(
        (
            f"{_DEMO} --dry_run",
            "--config imagenet_rn50_wmse4_100ep --data /data/imagenet --dry_run --ranks 16",
            "--config photos_rn18 --data photos --data.train_split . --epochs 100 --run_dir runs/mine",
        )
    ),
    "launch": Usage(
        (
            f"{_DEMO} --cluster local --ranks_per_node 2 --run_dir runs/two",
            "--config FILE --cluster slurm --nodes 8 --ranks_per_node 8 --site slurm/cluster.yaml --dry_run",
            "--config FILE --cluster slurm --array seed=0,1,2 --with_evaluator",
        )
    ),
    "sweep": Usage(
        (
            "demo_methods --out runs/methods --jobs 2",
            "--config cifar10_rn18_wmse2_1000ep --config cifar10_rn18_byol_1000ep --seeds 0,1,2 --out runs/cifar10",
            "demo_methods --out runs/methods --table",
        )
    ),
    "reproduce": Usage(
        (
            "demo_fashion_mnist --run_dir runs/reproduced",
            "cifar10_rn18_wmse4_1000ep --data.root /data/cifar10 --run_dir runs/cifar10",
            "cifar10_rn18_wmse4_1000ep --run_dir runs/cifar10 --check",
        ),
        # Other settings are refused, because they would not be the recipe's.
        ("data.root", "run_dir", "seed", "allow_changes", "data.threads", "checkpoint.every_minutes"),
    ),
    "preview": Usage((_DEMO, f"{_DEMO} --images 4 --out views.png", "--config cifar10_rn18_byol_1000ep --data DIR")),
    "plan": Usage(
        (
            f"{_DEMO} --step 100",
            f"{_DEMO} --step 100 --rank 1 --ranks 2 --rows 0:4",
            "--config imagenet_rn50_wmse4_100ep --images 1281167 --step 0 --json",
        )
    ),
    "probe": Usage(
        ("--run_dir runs/mine", "--run_dir runs/mine --checkpoint random", "--follow runs/mine"), _EVALUATION, False
    ),
    "knn": Usage(
        ("--run_dir runs/mine --knn.k 20", "--run_dir runs/mine --checkpoint pixels", "--follow runs/mine"),
        _EVALUATION,
        False,
    ),
    "evaluate": Usage(
        (
            "--run_dir runs/mine --evaluate.protocols linear,knn",
            "--run_dir runs/mine --evaluate.protocols all --out all.json",
            "--encoder timm:resnet50 --data.root /data/imagenet",
        ),
        _EVALUATION,
        False,
    ),
    "bench": Usage(
        (
            f"end2end {_DEMO}",
            "loader --config imagenet_rn50_wmse4_100ep --data.root /data/imagenet --sweep",
            "compute --config imagenet_rn50_wmse4_100ep --profile trace.json",
        )
    ),
    "tune": Usage(
        (
            "--config imagenet_rn50_wmse4_100ep --data.root /data/imagenet --ranks 8",
            "--config recipe.yaml --minutes 20 --out h100.yaml",
            f"{_DEMO} --minutes 2",
        )
    ),
    "demo": Usage(("", "--seed 1", "--run_dir runs/short --epochs 2")),
}
