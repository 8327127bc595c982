"""Evaluation: exact counts, frozen statistics, the input scaling of the run, and one message for each problem."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchvision.transforms.v2.functional as F
from PIL import Image
from torch import nn

from tests.conftest import TINY
from tests.faults import save_unchecked
from tests.processes import start_ranks
from trainer.cli import main
from trainer.config.loading import load_config
from trainer.config.schema import Config, DataConfig
from trainer.data.index import Index, open_images, open_index
from trainer.distributed import process_group as distributed
from trainer.distributed.ranks import Ranks, find_ranks
from trainer.errors import InputError
from trainer.evaluate.encoders import RunEvaluator
from trainer.evaluate.features import Place, extract, open_split, raw_pixels, trained_encoder, untrained_encoder
from trainer.evaluate.run import run_evaluation, run_foreign_evaluation
from trainer.loop import pretrain
from trainer.methods.method import MethodContext
from trainer.models.networks import EncoderNetwork, EncoderProjector, build_encoder_network, build_networks
from trainer.run.checkpoint import load_checkpoint
from trainer.run.signals import StopRequest

CPU = torch.device("cpu")
BOTH = ("linear", "knn")


def config_of(folder: Path, root: Path, *settings: str) -> Config:
    path = folder / "tiny.yaml"
    path.write_text(TINY)
    return load_config(path, ["--data.root", str(root), *settings])


@pytest.fixture(scope="module")
def run_dir(tiny_set, tmp_path_factory) -> Path:
    """Return the folder of a run of two steps."""
    folder = tmp_path_factory.mktemp("run")
    assert pretrain(config_of(folder, tiny_set, "--run_dir", str(folder), "--max_steps", "2"), StopRequest()) == 0
    return folder


@pytest.fixture
def place(tiny_set, tmp_path) -> Place:
    """Return the place of an evaluation: the tiny config, one rank, and the CPU."""
    return Place(config_of(tmp_path, tiny_set), Ranks(), CPU)


@pytest.fixture
def model(place) -> EncoderNetwork:
    """Return an encoder whose running statistics differ from the initial ones."""
    model = build_encoder_network(place.config)
    model(torch.randint(0, 256, (32, 3, 32, 32), dtype=torch.uint8))
    return model


def statistics(model: EncoderNetwork) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


# --- features ---


def test_pixels_are_centre_crops_in_the_order_of_the_index(place, tiny_set):
    """The images of 36 x 40 px are resized to 32 px and cropped to 32 px. The labels have the same order."""
    got = extract(raw_pixels, open_split("val", place), place)
    files = sorted((tiny_set / "val").glob("*/*"), key=lambda f: (f.parent.name, f.name))
    assert got.x.shape == (len(files), 3 * 32 * 32)
    assert got.labels.tolist() == [["cats", "dogs"].index(f.parent.name) for f in files]
    assert (got.class_names, got.skipped) == (["cats", "dogs"], 0)
    for x, file in zip(got.x, files, strict=True):
        small = F.center_crop(F.resize(Image.open(file), 32, F.InterpolationMode.BILINEAR), 32)
        assert (255 * x.view(3, 32, 32) - F.pil_to_tensor(small)).abs().mean() < 1


def test_features_are_the_output_of_the_encoder_whose_statistics_do_not_change(model, place):
    before = statistics(model)
    assert model.training
    got = extract(trained_encoder(model), open_split("val", place), place)
    assert got.x.shape == (16, model.encoder.num_features)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    pixels = (255 * extract(raw_pixels, open_split("val", place), place).x).round().to(torch.uint8).view(16, 3, 32, 32)
    with torch.no_grad():
        expected = model.eval()(pixels)
    torch.testing.assert_close(got.x, expected, atol=1e-4, rtol=1e-4)


def test_the_batch_size_changes_no_feature(model, place):
    encode = trained_encoder(model)
    small = replace(place, config=replace(place.config, evaluate=replace(place.config.evaluate, images_per_batch=5)))
    torch.testing.assert_close(
        extract(encode, open_split("train", small), small).x,
        extract(encode, open_split("train", place), place).x,
        atol=1e-4,
        rtol=1e-4,
    )


def test_an_untrained_encoder_estimates_its_statistics_first(model, place):
    """The mean of the first BatchNorm is that of its inputs over all training images."""
    first: nn.BatchNorm2d = next(m for m in model.encoder.modules() if isinstance(m, nn.BatchNorm2d))
    inputs: list[torch.Tensor] = []
    hook = first.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
    encode = untrained_encoder(model.eval(), place)
    hook.remove()
    seen = torch.cat(inputs)
    assert len(seen) == 48
    torch.testing.assert_close(first.running_mean, seen.mean((0, 2, 3)), atol=1e-4, rtol=1e-4)
    assert not model.training
    before = statistics(model)
    extract(encode, open_split("val", place), place)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_unusable_images_are_skipped_and_not_replaced(tiny_set, tmp_path):
    root = tmp_path / "set"
    shutil.copytree(tiny_set, root)
    place = Place(config_of(tmp_path, root), Ranks(), CPU)
    whole = extract(raw_pixels, open_split("val", place), place)
    names = [open_index(root, "val").name(i) for i in (3, 15)]
    for name in names:
        (root / "val" / name).write_bytes(b"no picture")
    rest = extract(raw_pixels, open_split("val", place), place)
    kept = [i for i in range(16) if i not in (3, 15)]
    assert rest.skipped == 2
    assert torch.equal(rest.x, whole.x[kept])
    assert torch.equal(rest.labels, whole.labels[kept])


def relabelled(monkeypatch, change) -> None:
    """Change the labels of the index that the evaluation opens."""

    def opened(data: DataConfig, split: str, **options: bool) -> Index:
        index = open_images(data, split, **options)
        index.labels = change(np.array(index.labels))
        return index

    monkeypatch.setattr(distributed, "open_images", opened)


def test_images_without_a_label_do_not_count(place, monkeypatch):
    whole = extract(raw_pixels, open_split("val", place), place)
    relabelled(monkeypatch, lambda labels: np.where(np.arange(16) % 3 == 0, -1, labels))
    rest = extract(raw_pixels, open_split("val", place), place)
    kept = [i for i in range(16) if i % 3]
    assert torch.equal(rest.x, whole.x[kept])
    assert rest.labels.tolist() == whole.labels[kept].tolist()
    assert rest.skipped == 0
    relabelled(monkeypatch, lambda labels: labels * 0 - 1)
    with pytest.raises(InputError, match=r"'val' in .* has no labelled images, which the linear probe and k-NN need"):
        extract(raw_pixels, open_split("val", place), place)


def rank_features(folder: Path, root: Path) -> None:
    """Extract the features on this rank and save them."""
    ranks = find_ranks()
    store = dist.FileStore(f"{folder}/store", ranks.world_size)
    dist.init_process_group("gloo", store=store, rank=ranks.rank, world_size=ranks.world_size)
    place = Place(config_of(folder / str(ranks.rank), root), ranks, CPU)
    got = extract(raw_pixels, open_split("val", place), place)
    own = extract(raw_pixels, open_split("val", place), place, to_all=False)
    torch.save((got.x, got.labels, got.skipped, own.x, own.ids), f"{folder}/{ranks.rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_have_the_same_features_as_one(tiny_set, tmp_path):
    """One image is unusable, so that the ranks hold different numbers of images."""
    root = tmp_path / "set"
    shutil.copytree(tiny_set, root)
    place = Place(config_of(tmp_path, root), Ranks(), CPU)
    (root / "val" / open_index(root, "val").name(2)).write_bytes(b"")
    one = extract(raw_pixels, open_split("val", place), place)
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    for process in start_ranks(rank_features, [tmp_path, root], tmp_path, ranks=2):
        assert process.wait() == 0, process.output()
    for rank in range(2):
        x, labels, skipped, own, ids = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        expected_ids = one.ids if rank == 0 else one.ids[one.ids >= 8]  # rank 1 encodes the second half
        assert torch.equal(ids, expected_ids)
        assert torch.equal(own, one.x[torch.isin(one.ids, ids)])
        assert torch.equal(x, one.x)
        assert torch.equal(labels, one.labels)
        assert skipped == one.skipped == 1


def test_more_ranks_than_images_are_refused(place, monkeypatch):
    monkeypatch.setattr(distributed, "one_rank_a_node_first", lambda ranks, work: work())
    with pytest.raises(InputError, match="16 labelled images"):
        open_split("val", replace(place, ranks=Ranks(0, 17, 1)))


# --- a whole evaluation ---


def test_results_are_complete_and_written_to_the_run_folder(run_dir, tiny_set, capsys):
    before = {file: file.read_bytes() for file in (run_dir / "checkpoints").iterdir()}
    results = run_evaluation(run_dir, "last", [], BOTH)
    assert json.loads(capsys.readouterr().out) == results
    checkpoint = run_dir / "checkpoints" / "step_00000002.pt"
    about = {
        "checkpoint": "2",
        "step": 2,
        "checkpoint_path": str(checkpoint),
        "checkpoint_sha256": load_checkpoint(checkpoint)["sha256"],
        "checkpoint_of_this_run": True,
        "data_root": str(tiny_set),
        "train_split": "train",
        "test_split": "val",
        "train_fingerprint": open_index(tiny_set, "train").fingerprint,
        "test_fingerprint": open_index(tiny_set, "val").fingerprint,
        "train_images": 48,
        "test_images": 16,
        "skipped": 0,
        "classes": 2,
        "classes_without_test_images": [],
        "precision": "float32",
    }
    for measure, keys in (("linear", {"top5", "standardised_top1", "protocol"}), ("knn", {"k", "metric", "vote"})):
        assert json.loads((run_dir / "eval" / f"{measure}_2.json").read_text()) == results[measure]
        assert {"top1", "features", "commit", "time"} | keys <= set(results[measure])
        assert {key: results[measure][key] for key in about} == about
        assert 0 <= results[measure]["top1"] <= 100
    assert results["linear"]["settings"]["linear.epochs"] == 5
    assert results["linear"]["top5"] == 100  # there are only two classes
    assert before == {file: file.read_bytes() for file in (run_dir / "checkpoints").iterdir()}
    again = run_evaluation(run_dir, "2", [], BOTH)
    assert without_time(again) == without_time(results)


def without_time(results):
    return {measure: {**result, "time": "", "seconds": 0} for measure, result in results.items()}


def test_a_checkpoint_the_untrained_encoder_and_pixels_have_separate_results(run_dir, tiny_set, tmp_path):
    """Random weights and pixels need no checkpoint."""
    model = build_networks(
        EncoderProjector, MethodContext(load_config(run_dir / "config.yaml", []), Ranks(), torch.device("cpu"))
    )
    state = load_checkpoint(run_dir / "checkpoints" / "step_00000002.pt")["model"]
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, state[name])]
    assert len(changed) > 10
    for which, count in (("random", model.encoder.num_features), ("pixels", 3 * 32 * 32)):
        results = run_evaluation(run_dir, which, [], ("knn",))
        assert results["knn"]["features"] == count
        assert (run_dir / "eval" / f"knn_{which}.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("which", ["last", "random"])
def test_batch_norm_per_view_equals_joint_batch_norm_in_evaluation(run_dir, place, which):
    """The same weights give the same features in both forms."""
    found = []
    for form in ("joint", "per_view"):
        settings = ["--model.encoder_batch_norm", form, "--model.projector_batch_norm", form]
        evaluator = RunEvaluator(run_dir, settings, Ranks())
        encode, _ = evaluator.encoder(which)
        found.append(extract(encode, open_split("val", place), place).x)
    assert torch.equal(*found)


@pytest.mark.parametrize("setting", [("--views.mean", "[0.5, 0.5, 0.5]"), ("--views.std", "[0.2, 0.2, 0.2]")])
def test_another_input_scaling_than_in_training_is_refused(run_dir, setting):
    with pytest.raises(InputError, match=f"{setting[0][2:]} is .* was trained with"):
        run_evaluation(run_dir, "last", setting, BOTH)


def test_missing_checkpoints_runs_and_splits_are_named(run_dir, tmp_path):
    for which, message in (
        ("7", "has no checkpoint of step 7; it has steps: 2"),
        (str(tmp_path / "none.pt"), "the checkpoint .*none.pt does not exist"),
    ):
        with pytest.raises(InputError, match=message):
            run_evaluation(run_dir, which, [], BOTH)
    with pytest.raises(InputError, match=r"is not a run folder, since it has no config.yaml"):
        run_evaluation(tmp_path / "nowhere", "last", [], BOTH)
    shutil.copy(run_dir / "config.yaml", tmp_path / "config.yaml")
    with pytest.raises(InputError, match=r"holds no checkpoint: wait until the run has saved one"):
        run_evaluation(tmp_path, "last", [], BOTH)
    with pytest.raises(InputError, match="no split 'nothing'"):
        run_evaluation(run_dir, "last", ["--data.test_split", "nothing"], BOTH)


def test_a_checkpoint_of_another_model_is_refused(run_dir):
    with pytest.raises(InputError) as error:
        run_evaluation(run_dir, "last", ["--model.stem", "small", "--model.backbone", "resnet18"], BOTH)
    assert "model.backbone is resnet18, but" in str(error.value)
    assert "was trained with test_resnet" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_with_their_names(run_dir, tmp_path, value):
    content = load_checkpoint(run_dir / "checkpoints" / "step_00000002.pt")
    content["model"]["encoder.bn1.running_var"][3] = value
    with pytest.raises(InputError, match=r"cannot use checkpoint .*encoder\.bn1\.running_var"):
        run_evaluation(run_dir, str(save_unchecked(tmp_path, content)), [], BOTH)


def test_features_that_are_not_finite_are_refused(place):
    def encode(pixels):
        features = raw_pixels(pixels)
        features[5] = float("inf")
        return features

    with pytest.raises(InputError, match=r"features of 1 of 16 images of the split 'val' hold NaN .*first: cats/"):
        extract(encode, open_split("val", place), place)


def test_features_are_float32_unless_evaluate_precision_is_set(place, model, tiny_set, tmp_path):
    """The precision of the training does not matter. On a GPU torch's default for convolutions would be TF32."""
    seen = []

    def encode(pixels):
        x = model.eval()(pixels)
        seen.append((x.dtype, torch.backends.cudnn.conv.fp32_precision))
        return x

    for setting, dtype in (("--precision", torch.float32), ("--evaluate.precision", torch.bfloat16)):
        other = replace(place, config=config_of(tmp_path, tiny_set, setting, "bf16"))
        extract(encode, open_split("val", other), other)
        assert seen.pop() == (dtype, "ieee")


# --- encoders that belong to no run ---


@pytest.mark.slow
def test_an_exported_encoder_has_the_figures_of_its_checkpoint(run_dir, tiny_set, tmp_path, capsys):
    """Size and scaling of the images come with the encoder, so that its data set is enough."""
    assert main(["export", str(run_dir), str(tmp_path / "exported"), "--format", "timm"]) != 0  # a stem that timm lacks
    assert main(["export", str(run_dir), str(tmp_path / "exported"), "--format", "all"]) == 0
    protocols = ("linear", "knn", "finetune")
    settings = ["--finetune.shares", "[1.0]", "--finetune.epochs", "[1]", "--device", "cpu"]
    own = run_evaluation(run_dir, "last", settings, protocols)
    data = ["--data.root", str(tiny_set), "--linear.epochs", "5", "--linear.batch_size", "16"]
    data += ["--evaluate.images_per_batch", "16"]
    for source in (tmp_path / "exported", run_dir / "checkpoints" / "step_00000002.pt"):
        out = tmp_path / f"{source.name}.json"
        found = run_foreign_evaluation(str(source), [], [*data, *settings], protocols, out)
        assert json.loads(out.read_text()) == found
        for protocol in protocols:
            figures = {figure: own[protocol][figure] for figure in own[protocol]["figures"]}
            assert {figure: found[protocol][figure] for figure in figures} == pytest.approx(figures), protocol
        assert found["knn"]["checkpoint_sha256"]
    capsys.readouterr()


def test_settings_that_contradict_an_encoder_are_refused(run_dir, tiny_set):
    checkpoint = str(run_dir / "checkpoints" / "step_00000002.pt")
    data = ["--data.root", str(tiny_set)]
    with pytest.raises(InputError, match=r"views\.size is 24, but .* needs 32: remove views\.size"):
        run_foreign_evaluation(checkpoint, [], [*data, "--views.size", "24"], ("knn",))
    with pytest.raises(InputError, match="there is no encoder 'nothing'"):
        run_foreign_evaluation("nothing", [], data, ("knn",))


def test_an_evaluation_on_other_classes_or_sizes_is_refused_unless_allowed(run_dir, tiny_set, tmp_path):
    for split in ("train", "val"):
        shutil.copytree(tiny_set / split / "cats", tmp_path / "set" / split / "ants")
        shutil.copytree(tiny_set / split / "dogs", tmp_path / "set" / split / "bees")
    other = ["--data.root", str(tmp_path / "set")]
    with pytest.raises(InputError, match=r"trained on other classes \(cats, dogs\) than those .* \(ants, bees\)"):
        run_evaluation(run_dir, "last", other, ("knn",))
    with pytest.raises(InputError, match=r"views\.eval_resize is 40, but .* was trained with 32"):
        run_evaluation(run_dir, "last", ["--views.eval_resize", "40"], ("knn",))
    allowed = [*other, "--views.eval_resize", "40", "--evaluate.allow_differences", "true"]
    assert run_evaluation(run_dir, "last", allowed, ("knn",))["knn"]["test_images"] == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run_dir", "x", "--config", "y"], "--config only applies to --encoder"),
        (["--encoder", "x", "--checkpoint", "3"], "--checkpoint only applies to --run_dir"),
    ],
)
def test_options_that_belong_to_another_source_are_refused(arguments, message, capsys):
    assert main(["evaluate", *arguments]) == 2
    assert message in capsys.readouterr().err
