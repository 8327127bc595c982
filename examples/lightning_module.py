"""Train an encoder by W-MSE with Lightning: pip install lightning; python examples/lightning_module.py DIR"""

import argparse
import os
from typing import Any

import lightning
import timm
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import datasets
from torchvision.transforms import v2

from trainer.parts import WMSELoss


class TwoViews:
    """Transform of torchvision that returns two views of an image."""

    def __init__(self, size: int) -> None:
        self.view = v2.Compose(
            [
                v2.RandomResizedCrop(size, scale=(0.2, 1.0)),
                v2.RandomHorizontalFlip(),
                v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
                v2.RandomGrayscale(0.1),
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            ]
        )

    def __call__(self, image: Any) -> tuple[Tensor, Tensor]:
        return self.view(image), self.view(image)


class ClassFolders(datasets.ImageFolder):
    """ImageFolder that leaves out hidden folders, such as the index that `train_views` and `wmse` write."""

    def find_classes(self, directory: Any) -> tuple[list[str], dict[str, int]]:
        names = sorted(entry.name for entry in os.scandir(directory) if entry.is_dir() and entry.name[0] != ".")
        return names, {name: number for number, name in enumerate(names)}


class WMSE(lightning.LightningModule):
    """Encoder and projector, trained by the W-MSE loss. Embeddings have size 64, slices 128 images."""

    def __init__(self, backbone: str = "resnet18", learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.encoder = timm.create_model(backbone, num_classes=0)
        features = self.encoder.num_features
        self.projector = nn.Sequential(
            nn.Linear(features, features), nn.BatchNorm1d(features), nn.ReLU(), nn.Linear(features, 64)
        )
        self.loss = WMSELoss(slice_size=128)
        self.learning_rate = learning_rate

    def training_step(self, batch: Any, _: int) -> Tensor:
        views, _labels = batch
        embeddings = self.projector(self.encoder(torch.cat(views)))
        loss = self.loss(*embeddings.chunk(len(views)))
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate, weight_decay=1e-6)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("folder", help="with a folder of images for each class, as torchvision's ImageFolder reads it")
    options.add_argument("--size", type=int, default=64)
    options.add_argument("--epochs", type=int, default=10)
    options.add_argument("--images", type=int, default=256, help="batch size, a multiple of 128")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--precision", default="32-true", help="on a GPU: bf16-mixed")
    options.add_argument("--out", default="lightning_runs", help="folder of the logs and checkpoints")
    args = options.parse_args()
    images = ClassFolders(args.folder, TwoViews(args.size))
    loader = DataLoader(images, args.images, shuffle=True, drop_last=True, num_workers=args.workers)
    trainer = lightning.Trainer(
        default_root_dir=args.out, max_epochs=args.epochs, precision=args.precision, log_every_n_steps=1
    )
    trainer.fit(WMSE(), loader)


if __name__ == "__main__":
    main()
