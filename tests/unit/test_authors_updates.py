"""The first updates equal those of the published definition, which is written here in plain torch.

The encoder runs once for each view and the head on all views. Each slice is whitened with a Cholesky factor. The loss is
2 - 2 cos over all pairs of views, and Adam has the learning rate 3e-3 * (i + 1) / 500 in update i.
"""

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.config.schema import Config, DataConfig, ModelConfig, OptimizerConfig, ViewsConfig, WMSESettings
from trainer.distributed.ranks import ImageRange, Ranks
from trainer.optimizer import build_optimizer
from trainer.schedule import build_schedule
from trainer.step import TrainStep

IMAGES, VIEWS, SLICE, SIZE, UPDATES = 32, 3, 16, 16, 10
CONFIG = Config(
    data=DataConfig(images_per_step=IMAGES),
    views=ViewsConfig(num_views=VIEWS),
    model=ModelConfig("test_resnet", zero_init_last=False, projector="mlp", projector_hidden=(12,), embedding_size=8,
                      encoder_batch_norm="per_view", projector_batch_norm="joint"),
    wmse=WMSESettings(slice_size=SLICE),
    optimizer=OptimizerConfig(name="adam", learning_rate=3e-3, learning_rate_rule="fixed", weight_decay=1e-6, epochs=1000,
                              warmup_steps=500, warmup_from="first_step", schedule="drops"),
)  # fmt: skip


def whiten(rows: Tensor) -> Tensor:
    """Whiten a slice, (M, k)."""
    centred = rows - rows.mean(0)
    covariance = centred.T @ centred / (len(rows) - 1)
    return torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), centred.T, upper=False).T


def published_loss(encoder: nn.Module, head: nn.Module, views: Tensor) -> Tensor:
    """Return the mean distance over all pairs of views. views: (d, N, 3, S, S)."""
    rows = head(torch.cat([encoder(view) for view in views])).unflatten(0, (VIEWS, IMAGES))
    whitened = [F.normalize(torch.cat([whiten(part) for part in view.split(SLICE)])) for view in rows]
    pairs = [(a, b) for a in range(VIEWS) for b in range(a)]
    return sum((2 - 2 * (whitened[a] * whitened[b]).sum(1)).mean() for a, b in pairs) / len(pairs)


def test_ten_updates_equal_the_published_ones() -> None:
    method = CONFIG.method_settings.build(CONFIG, Ranks(), torch.device("cpu"))
    model = method.networks.double()
    encoder = timm.create_model("test_resnet", num_classes=0).double().train()
    encoder.load_state_dict(model.encoder.state_dict())
    head = nn.Sequential(nn.Linear(encoder.num_features, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 8)).double()
    ours = [p for name, p in model.projector.state_dict().items() if "num_batches" not in name]
    theirs = [p for name, p in head.state_dict().items() if "num_batches" not in name]
    for target, source in zip(theirs, ours, strict=True):
        target.copy_(source)

    optimizer = build_optimizer(model, CONFIG.optimizer, torch.device("cpu"))
    step = TrainStep(method, optimizer, num_views=VIEWS, images=ImageRange(0, IMAGES), ranks=Ranks())
    schedule = build_schedule(CONFIG, steps_per_epoch=97)
    adam = torch.optim.Adam([*encoder.parameters(), *head.parameters()], weight_decay=1e-6)
    generator = torch.Generator().manual_seed(0)
    for i in range(UPDATES):
        pixels = torch.randint(0, 256, (VIEWS * IMAGES, 3, SIZE, SIZE), generator=generator, dtype=torch.uint8)
        step(pixels, i, schedule.learning_rate(i))
        adam.param_groups[0]["lr"] = 3e-3 * (i + 1) / 500
        adam.zero_grad()
        published_loss(encoder, head, model.normalize(pixels).unflatten(0, (VIEWS, IMAGES))).backward()
        adam.step()

    expected = dict([*encoder.named_parameters(prefix="encoder"), *head.named_parameters(prefix="projector")])
    named = dict(zip(expected, (p for _, p in model.named_parameters()), strict=True))
    errors = {name: (value - named[name]).abs().max().item() for name, value in expected.items()}
    assert max(errors.values()) < 1e-12, max(errors, key=lambda name: errors[name])
    torch.testing.assert_close(model.encoder.bn1.running_var, encoder.bn1.running_var, rtol=1e-10, atol=0)
