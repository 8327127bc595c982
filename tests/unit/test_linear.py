"""Linear probe: schedule, accuracy, and standardised features."""

from dataclasses import replace

import pytest
import torch

from trainer.config.evaluation import LinearConfig
from trainer.evaluate.features import Features
from trainer.evaluate.linear import linear_probe, probe_rate, standardise
from trainer.evaluate.scores import accuracy

CPU = torch.device("cpu")
CONFIG = LinearConfig(epochs=100, batch_size=10)


def split(num_classes: int, seed: int, scale: float = 10.0, per_class: int = 30) -> Features:
    """Return features of well separated classes, around the corners of a simplex."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(num_classes).repeat(per_class)
    x = torch.eye(num_classes)[labels] + 0.05 * torch.randn(len(labels), num_classes, generator=generator)
    return Features(x * scale, labels, [str(c) for c in range(num_classes)], 0)


def test_the_learning_rate_falls_exponentially():
    config = LinearConfig()
    assert probe_rate(config, 0) == pytest.approx(1e-2)
    assert probe_rate(config, 499) == pytest.approx(1e-6)
    ratios = {round(probe_rate(config, e + 1) / probe_rate(config, e), 9) for e in range(499)}
    assert len(ratios) == 1
    assert probe_rate(replace(config, epochs=1), 0) == pytest.approx(1e-2)


@pytest.mark.parametrize("num_classes", [2, 4, 10])
def test_separable_classes_are_learnt(num_classes):
    """With fewer than five classes, top-5 is 100."""
    test = split(num_classes, 1)
    guesses = linear_probe(split(num_classes, 0), test, CONFIG, CPU, seed=0)
    assert accuracy(guesses, test.labels) == (100.0, 100.0)


def test_the_accuracy_is_that_of_the_test_images():
    test = split(10, 1)
    wrong = replace(test, labels=(test.labels + (torch.arange(300) < 60)) % 10)  # a fifth has a wrong label
    guesses = linear_probe(split(10, 0), wrong, CONFIG, CPU, seed=0)
    assert accuracy(guesses, wrong.labels).top1 == pytest.approx(80)


def test_only_the_seed_decides_the_result():
    train, test = split(10, 0), split(10, 1, scale=0.2)
    short = replace(CONFIG, epochs=2)
    torch.manual_seed(5)
    first = linear_probe(train, test, short, CPU, seed=3)
    torch.manual_seed(6)
    assert torch.equal(linear_probe(train, test, short, CPU, seed=3), first)


def test_features_are_standardised_by_the_training_features():
    generator = torch.Generator().manual_seed(0)
    train, test = (
        Features(torch.randn(200, 5, generator=generator) * 10.0 ** torch.arange(-6, 4, 2) + 3, torch.zeros(200), [], 2)
        for _ in range(2)
    )
    a, b = standardise(train, test)
    torch.testing.assert_close(a.x[:, 1:].mean(0), torch.zeros(4), atol=5e-3, rtol=0)  # float32 rounds 3 + 1e-4 x
    torch.testing.assert_close(a.x[:, 1:].std(0), torch.ones(4), atol=1e-3, rtol=0)
    torch.testing.assert_close(b.x[:, 2:], ((test.x - train.x.mean(0)) / train.x.std(0))[:, 2:])
    assert b.skipped == 2


@pytest.mark.parametrize("value", [0.0, 1e-20, 0.1, 1234.5])
def test_constant_features_of_any_value_become_0(value):
    """This includes features that differ only by rounding, which standardising would make large."""
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    x[:, 0] = value
    x[::2, 0] *= 1 + 1e-7
    a, b = standardise(Features(x, torch.zeros(50), [], 0), Features(x[:5], torch.zeros(5), [], 0))
    assert a.x[:, 0].abs().max() < 1e-3
    assert b.x[:, 0].abs().max() < 1e-3
    assert a.x[:, 1].std().item() == pytest.approx(1, abs=1e-4)


def test_a_small_feature_is_standardised_like_any_other():
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-8, 1e3])
    a, _ = standardise(Features(x, torch.zeros(50), [], 0), Features(x, torch.zeros(50), [], 0))
    torch.testing.assert_close(a.x.std(0), torch.ones(2), atol=1e-4, rtol=0)
