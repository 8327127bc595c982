"""Protocols: SGD on a frozen encoder, many classifiers at once, few labels, fine-tuning, diagnostics."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.distributed as dist
from PIL import Image
from torch.nn import functional as F

from tests.conftest import TINY
from tests.processes import start_ranks
from trainer.config.evaluation import PROTOCOLS as NAMES
from trainer.config.loading import load_config
from trainer.data.plan import epoch_order
from trainer.distributed.ranks import Ranks, find_ranks
from trainer.errors import InputError
from trainer.evaluate import classifiers, finetune, linear_sgd
from trainer.evaluate.classifiers import Classifiers, plan_training, stored_batches, train_classifiers
from trainer.evaluate.diagnostics import collapse_warnings, spectrum, uniformity
from trainer.evaluate.evaluator import PROTOCOLS
from trainer.evaluate.features import Features, Place, Split, raw_pixels, trained_encoder
from trainer.evaluate.protocol import Subject
from trainer.evaluate.splits import open_splits
from trainer.evaluate.subsets import stratified_share
from trainer.export import features, load_classifier
from trainer.models.networks import build_encoder_network

CPU = torch.device("cpu")
SETTINGS = """
linear_sgd: {epochs: 3, images_per_step: 16}
knn_cosine: {k: [1, 5]}
few_labels: {shares: [0.1, 0.5]}
finetune: {shares: [0.25, 0.5], epochs: [2, 2], images_per_step: 8}
"""


def place_of(folder: Path, root: Path, *settings: str, ranks: Ranks | None = None) -> Place:
    path = folder / "tiny.yaml"
    path.write_text(TINY + SETTINGS)
    return Place(load_config(path, ["--data.root", str(root), *settings]), ranks or Ranks(), CPU)


def subject_of(place: Place, **options: Any) -> Subject:
    model = build_encoder_network(place.config)
    return Subject(trained_encoder(model), place, *open_splits(place), **options)


@pytest.fixture(scope="module")
def simple_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an image folder of dark and bright images, which every encoder tells apart."""
    root = tmp_path_factory.mktemp("simple_set")
    for split, count in (("train", 24), ("val", 8)):
        for name, level in (("dark", 40), ("bright", 200)):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (40, 36), (level, level + number, level)).save(root / split / name / f"{number}.png")
    return root


def brightness(pixels: torch.Tensor) -> torch.Tensor:
    """Return the mean brightness of each image as its only feature, from -1 to 1."""
    return pixels.float().mean((1, 2, 3))[:, None] / 128 - 1


def check_and_measure(name: str, subject: Subject) -> dict[str, Any]:
    PROTOCOLS[name].check(subject.place.config, subject.train_split, subject.test_split)
    return PROTOCOLS[name].measure(subject)


def random_features(count: int, num_classes: int, seed: int, noise: float = 1.0) -> Features:
    """Return features around one corner of a simplex for each class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, num_classes, (count,), generator=generator)
    x = torch.eye(8)[labels] * 3 + noise * torch.randn(count, 8, generator=generator)
    return Features(x, labels, [str(number) for number in range(num_classes)], 0)


def test_every_protocol_of_the_settings_exists() -> None:
    assert tuple(PROTOCOLS) == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_protocol_gives_the_figures_that_it_names(name: str, tiny_set: Path, tmp_path: Path) -> None:
    result = PROTOCOLS[name].measure(subject_of(place_of(tmp_path, tiny_set)))
    assert result["figures"]
    assert all(math.isfinite(result[figure]) for figure in result["figures"])
    assert all(0 <= result[figure] <= 100 for figure in result["figures"] if "top" in figure)
    assert result["label"]
    json.dumps(result)


# --- SGD ---


def expected_logits(x: Any, y: Any, training: Any, seed: int, at: torch.Tensor) -> torch.Tensor:
    """Train softmax regression with Nesterov momentum, written as formulas, in float64. Returns the logits of `at`."""
    (rate, decay), num_classes = training.rates[0], int(y.max()) + 1
    x1 = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], dim=1)
    weight = torch.zeros(num_classes, x1.shape[1], dtype=torch.float64)
    velocity = torch.zeros_like(weight)
    total = training.epochs * training.steps_per_epoch
    for step in range(total):
        epoch, number = divmod(step, training.steps_per_epoch)
        order = epoch_order(seed, epoch, len(x))
        rows = torch.from_numpy(order)[number * training.images_per_step :][: training.images_per_step]
        residual = torch.softmax(x1[rows] @ weight.T, 1) - F.one_hot(y[rows], num_classes)
        gradient = residual.T @ x1[rows] / len(rows) + decay * weight
        velocity = training.momentum * velocity + gradient
        now = rate * (1 + math.cos(math.pi * step / total)) / 2
        weight = weight - now * (gradient + training.momentum * velocity)
    return torch.cat([at.double(), torch.ones(len(at), 1, dtype=torch.float64)], dim=1) @ weight.T


def trained(place: Place, rates: list[tuple[float, float]], **options: Any) -> tuple[Classifiers, Any]:
    """Train classifiers on 50 stored features for 4 epochs."""
    train = random_features(50, 3, seed=1)
    training = plan_training(50, place, epochs=4, images_per_step=16, rates=rates, momentum=0.9)
    found = Classifiers(8, 3, len(rates))
    train_classifiers(found, training, stored_batches(train, training, place), place, **options)
    return found, training


def test_sgd_equals_its_formulas(tiny_set: Path, tmp_path: Path) -> None:
    place = place_of(tmp_path, tiny_set, "--evaluate.images_per_batch", "5")
    found, training = trained(place, [(0.5, 1e-3)])
    assert (training.images_per_step, training.steps_per_epoch, training.rates) == (16, 3, ((0.5 * 16 / 256, 1e-3),))
    train = random_features(50, 3, seed=1)
    expected = expected_logits(train.x, train.labels, training, place.config.seed, train.x)
    torch.testing.assert_close(found(train.x)[0].double(), expected, atol=1e-5, rtol=1e-5)


def test_classifiers_side_by_side_equal_each_alone(tiny_set: Path, tmp_path: Path) -> None:
    place = place_of(tmp_path, tiny_set)
    rates = [(0.1, 0.0), (1.0, 0.0), (1.0, 0.1)]
    together, _ = trained(place, rates)
    for number, rate in enumerate(rates):
        alone, _ = trained(place, [rate])
        torch.testing.assert_close(together.weights[number], alone.weights[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("augment", ["true", "false"])
def test_the_classifier_is_chosen_on_images_that_none_was_trained_on(
    augment: str, simple_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the two rates one learns nothing."""
    settings = ["--linear_sgd.learning_rates", "[0.0, 1.0]", "--linear_sgd.held_back_share", "0.25"]
    place = place_of(tmp_path, simple_set, *settings, "--linear_sgd.augment", augment)
    subject = Subject(brightness, place, *open_splits(place))
    held_back = stratified_share(subject.train_split, 0.25, place.config.seed)
    learnt: list[int] = []
    original = linear_sgd.augmented_batches if augment == "true" else linear_sgd.extract

    def seen(*arguments: Any) -> Any:
        split = next(argument for argument in arguments if isinstance(argument, Split))
        learnt.extend(split.labelled.tolist())
        return original(*arguments)

    monkeypatch.setattr(linear_sgd, original.__name__, seen)
    result = PROTOCOLS["linear_sgd"].measure(subject)
    # The first extraction of features is for the training, the second for the choice.
    assert learnt[:36] == sorted(set(range(48)) - set(held_back))
    assert result["trained_on"] == 36
    assert "12 training images that no classifier was trained on" in result["choice"]
    assert result["chosen"] == 1
    assert result["classifiers"][1]["top1"] == result["top1"] == 100


def test_classifiers_that_diverge_are_never_chosen(simple_set: Path, tmp_path: Path) -> None:
    lost = ["--linear_sgd.epochs", "20", "--linear_sgd.learning_rates", "[1e6]", "--linear_sgd.augment", "false"]
    rates = [*lost, "--linear_sgd.weight_decays", "[1e6, 0.0]"]
    place = place_of(tmp_path, simple_set, *rates)
    result = PROTOCOLS["linear_sgd"].measure(Subject(brightness, place, *open_splits(place)))
    assert [row["diverged"] for row in result["classifiers"]] == [True, False]
    assert result["chosen"] == 1
    alone = place_of(tmp_path, simple_set, *lost, "--linear_sgd.weight_decays", "[1e6]")
    with pytest.raises(InputError, match=r"linear_sgd diverged with learning rate 1e\+06"):
        PROTOCOLS["linear_sgd"].measure(Subject(brightness, alone, *open_splits(alone)))


def test_fine_tuning_that_diverges_or_has_one_image_is_refused(tiny_set: Path, tmp_path: Path) -> None:
    for settings, message in (
        (
            ("--finetune.learning_rate", "1e6", "--finetune.epochs", "[9, 2]"),
            "fine-tuning on 25pct of the labels diverged",
        ),
        (("--finetune.images_per_step", "1"), "needs two images at a time"),
        (("--evaluate.images_per_batch", "1"), "needs two images at a time"),
        (("--evaluate.precision", "fp16"), "does not scale the loss"),
    ):
        subject = subject_of(place_of(tmp_path, tiny_set, *settings))
        with pytest.raises(InputError, match=message):
            check_and_measure("finetune", subject)


def test_parts_of_a_batch_never_have_a_single_image(tiny_set: Path, tmp_path: Path) -> None:
    """BatchNorm raises an error for a single image. 24 images in parts of at most 23, then 3 of at most 2."""
    for images_per_batch, images_per_step in (("23", 24), ("2", 3)):
        place = place_of(tmp_path, tiny_set, "--evaluate.images_per_batch", images_per_batch)
        train = random_features(24, 3, seed=1)
        training = plan_training(24, place, epochs=1, images_per_step=images_per_step, rates=[(0.1, 0.0)], momentum=0.9)
        encoder = torch.nn.Sequential(torch.nn.BatchNorm1d(8))
        sizes: list[int] = []
        encoder.register_forward_pre_hook(lambda module, inputs, sizes=sizes: sizes.append(len(inputs[0])))
        batches = stored_batches(train, training, place)
        train_classifiers(Classifiers(8, 3, 1), training, batches, place, encoder=encoder)
        assert min(sizes) >= 2
        assert sum(sizes) == 24


class KilledError(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("augment", ["true", "false"])
def test_an_interrupted_training_continues_bit_for_bit(
    augment: str, tiny_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is interrupted after its second epoch. Progress of another measurement, or damaged progress, is not used."""
    place = place_of(tmp_path, tiny_set, "--linear_sgd.augment", augment)
    whole = PROTOCOLS["linear_sgd"].measure(subject_of(place))
    state = tmp_path / "state"
    original, epochs = classifiers._keep, []

    def interrupted(path: Path, identity: str, epoch: int, *rest: Any) -> None:
        original(path, identity, epoch, *rest)
        epochs.append(epoch)
        if epoch == 2 and len(epochs) == 2:
            raise KilledError

    monkeypatch.setattr(classifiers, "_keep", interrupted)
    with pytest.raises(KilledError):
        PROTOCOLS["linear_sgd"].measure(subject_of(place, state_path=state, identity="a"))
    again = PROTOCOLS["linear_sgd"].measure(subject_of(place, state_path=state, identity="a"))
    assert epochs == [1, 2, 3]
    assert again == whole
    PROTOCOLS["linear_sgd"].measure(subject_of(place, state_path=state, identity="b"))
    assert epochs == [1, 2, 3, 1, 2, 3]
    state.write_bytes(state.read_bytes()[:100])
    PROTOCOLS["linear_sgd"].measure(subject_of(place, state_path=state, identity="b"))
    assert epochs == [1, 2, 3] * 3


def measure_on_ranks(folder: Path, root: Path) -> None:
    """Run the protocols that use all ranks, and save the results of this rank."""
    ranks = find_ranks()
    store = dist.FileStore(f"{folder}/store", ranks.world_size)
    dist.init_process_group("gloo", store=store, rank=ranks.rank, world_size=ranks.world_size)
    place = place_of(folder / str(ranks.rank), root, ranks=ranks)
    found = {}
    for name in ("linear_sgd", "finetune", "diagnostics"):
        found[name] = PROTOCOLS[name].measure(subject_of(place))
    (folder / f"{ranks.rank}.json").write_text(json.dumps(found))
    encoder = torch.nn.Sequential(torch.nn.BatchNorm1d(8))
    trained(place, [(0.1, 0.0)], encoder=encoder)
    torch.save(encoder.state_dict(), folder / f"{ranks.rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_measure_what_one_does(tiny_set: Path, tmp_path: Path) -> None:
    """BatchNorm sees other images together when the encoder is fine-tuned on two ranks, so its figures may differ."""
    alone = place_of(tmp_path, tiny_set)
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    for process in start_ranks(measure_on_ranks, [tmp_path, tiny_set], tmp_path, ranks=2):
        assert process.wait() == 0, process.output()
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    # Both ranks fine-tune the same encoder, including the statistics of its BatchNorm.
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert first["0.weight"].sub(1).abs().max() > 1e-4
    assert found[0]["diagnostics"]["alignment"] > 0.01
    for name in ("linear_sgd", "diagnostics"):
        one = PROTOCOLS[name].measure(subject_of(alone))
        for figure in one["figures"]:
            assert found[0][name][figure] == pytest.approx(one[figure], abs=1e-3), figure


def test_an_epoch_of_crops_has_each_labelled_image_once(tiny_set: Path, tmp_path: Path) -> None:
    place = place_of(tmp_path, tiny_set)
    train, _ = open_splits(place)
    kept = stratified_share(train, 0.5, seed=0)
    # A label for each image, to see which images come.
    split = replace(train, labels=np.arange(48)).only(kept)
    training = plan_training(24, place, epochs=2, images_per_step=8, rates=[(0.1, 0.0)], momentum=0.9)
    batches = classifiers.augmented_batches(split, training, (0.5, 1.0), place)
    for first_step in (0, 3):
        shown = torch.cat([labels for _, labels in batches(first_step, first_step + 3)])
        assert sorted(shown.tolist()) == kept.tolist()


def test_a_frozen_encoder_is_fine_tuned_as_well_and_measured_in_evaluation_mode(
    tiny_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subject_of(place_of(tmp_path, tiny_set))
    assert isinstance(subject.encode, torch.nn.Module)
    subject.encode.requires_grad_(False)
    measured: list[Any] = []
    original = finetune.extract

    def extract(encoder: Any, *rest: Any) -> Features:
        assert not encoder.training
        measured.append(encoder)
        return original(encoder, *rest)

    monkeypatch.setattr(finetune, "extract", extract)
    PROTOCOLS["finetune"].measure(subject)
    assert len(measured) == 2
    for encoder in measured:
        pairs = zip(encoder.parameters(), subject.encode.parameters(), strict=True)
        assert all(not torch.equal(after, before) for after, before in pairs if before.ndim > 1)


def test_fine_tuning_learns_and_leaves_the_encoder_as_it_was(simple_set: Path, tmp_path: Path) -> None:
    settings = ["--finetune.shares", "[1.0]", "--finetune.epochs", "[12]", "--finetune.learning_rate", "1.0"]
    place = place_of(tmp_path, simple_set, *settings)
    subject = subject_of(place)
    assert isinstance(subject.encode, torch.nn.Module)
    before = {name: value.clone() for name, value in subject.encode.state_dict().items()}
    result = PROTOCOLS["finetune"].measure(subject)
    assert result["100pct_top1"] > 90
    assert not subject.encode.training
    assert all(torch.equal(value, before[name]) for name, value in subject.encode.state_dict().items())


@pytest.mark.parametrize("stem", ["imagenet", "half"])
def test_a_fine_tuned_classifier_is_kept_and_loads_here_and_in_timm(
    stem: str, simple_set: Path, tmp_path: Path
) -> None:
    settings = ["--finetune.shares", "[1.0]", "--finetune.epochs", "[12]", "--finetune.learning_rate", "1.0"]
    settings += ["--finetune.save_to", str(tmp_path / "kept"), "--model.stem", stem]
    subject = subject_of(place_of(tmp_path, simple_set, *settings))
    result = check_and_measure("finetune", subject)
    folder = tmp_path / "kept" / "100pct"
    classifier = load_classifier(folder)
    assert classifier.class_names == ["bright", "dark"]

    # The loaded classifier guesses as the result says.
    found = features(classifier.encoder, simple_set, split="val")
    assert found.labels is not None
    guesses = classifier.head(torch.from_numpy(found.features)).argmax(1).numpy()
    assert 100 * (guesses == found.labels).mean() == pytest.approx(result["100pct_top1"])
    if stem == "imagenet":
        network = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
        logits = network(classifier.encoder.normalize(pixels))
        torch.testing.assert_close(logits, classifier(pixels), rtol=1e-4, atol=1e-4)
    # A second training does not replace the first one, and is refused before it starts.
    with pytest.raises(InputError, match=r"100pct exists: set finetune\.save_to to another folder"):
        PROTOCOLS["finetune"].check(subject.place.config, subject.train_split, subject.test_split)


def test_an_encoder_without_a_classifier_is_refused_as_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError):
        load_classifier(tmp_path)


# --- shares of the labels ---


def test_a_share_takes_as_many_images_of_each_class_and_grows_with_it(tiny_set: Path, tmp_path: Path) -> None:
    train, _ = open_splits(place_of(tmp_path, tiny_set))
    labels = np.array([0] * 100 + [1] * 40 + [-1] * 10 + [2] * 3)
    split = replace(train, labels=labels, class_names=["a", "b", "c"])
    small = stratified_share(split, 0.1, seed=3)
    large = stratified_share(split, 0.5, seed=3)
    assert np.bincount(labels[small]).tolist() == [10, 4, 1]
    assert np.bincount(labels[large]).tolist() == [50, 20, 2]
    assert np.bincount(labels[stratified_share(split, 0.1, seed=3, at_least=0)]).tolist() == [10, 4]
    assert set(small) < set(large)
    assert set(small) != set(stratified_share(split, 0.1, seed=4))


def test_few_labels_use_only_their_share(tiny_set: Path, tmp_path: Path) -> None:
    """All features of the other training images have wrong labels, which would lower the accuracy."""
    place = place_of(
        tmp_path, tiny_set, "--linear.rate_start", "1", "--linear.epochs", "50", "--few_labels.shares", "[0.25]"
    )
    train_split, test_split = open_splits(place)
    kept = stratified_share(train_split, 0.25, place.config.seed)
    truth = torch.from_numpy(train_split.labels)
    wrong = 1 - truth
    wrong[kept] = truth[kept]
    ids = torch.arange(len(truth))
    x = F.one_hot(truth, 2).float() * 5
    train = Features(x, wrong, ["cats", "dogs"], 0, ids)
    subject = Subject(raw_pixels, place, train_split, test_split, encoded_train=train)
    subject.test = Features(x, truth, ["cats", "dogs"], 0, ids)
    result = PROTOCOLS["few_labels"].measure(subject)
    assert result["25pct_top1"] == 100
    assert result["shares"]["25pct"]["images"] == 12


# --- diagnostics ---


def test_the_spectrum_and_uniformity_equal_their_definitions() -> None:
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0)) * torch.tensor([4.0, 1.0, 0.5, 2.0, 0.1])
    expected = np.sort(np.linalg.eigvalsh(np.cov(x.double().numpy().T, bias=True)))[::-1]
    np.testing.assert_allclose(spectrum(x).numpy(), expected, rtol=1e-6)
    unit = F.normalize(x.double(), dim=1)
    pairs = torch.pdist(unit).square()  # of the condensed form, each pair once
    assert uniformity(x) == pytest.approx(pairs.mul(-2).exp().mean().log().item(), abs=1e-5)


def test_a_collapsed_encoder_is_named(tiny_set: Path, tmp_path: Path) -> None:
    place = place_of(tmp_path, tiny_set)

    def one_direction(pixels: torch.Tensor) -> torch.Tensor:
        return 1 + 1e-3 * pixels.float().mean((1, 2, 3))[:, None] * torch.ones(4)

    result = PROTOCOLS["diagnostics"].measure(Subject(one_direction, place, *open_splits(place)))
    assert result["effective_rank"] == pytest.approx(1, abs=1e-3)
    assert len(result["warnings"]) == 2
    assert result["alignment"] == pytest.approx(0, abs=1e-6)
    assert result["rankme"] == pytest.approx(1, abs=1e-2)
    assert 0 <= result["lidar"] < 2
    assert collapse_warnings(30.0, -2.5) == []


def test_raw_pixels_cannot_be_fine_tuned(tiny_set: Path, tmp_path: Path) -> None:
    from trainer.evaluate.encoders import RunEvaluator

    (tmp_path / "config.yaml").write_text(TINY)
    evaluator = RunEvaluator(tmp_path, ["--data.root", str(tiny_set)], Ranks())
    with pytest.raises(InputError, match="finetune trains the encoder, but raw pixels have none"):
        evaluator.protocols(["linear", "finetune"], "pixels")
    assert "finetune" not in evaluator.protocols(["all"], "pixels")
    assert "finetune" in evaluator.protocols(["all"], "last")
