"""Encoders elsewhere: exported files give the same features in other libraries, and weights of other programs load."""

import errno
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.conftest import write_images
from trainer.cli import main
from trainer.config.changes import plain_settings
from trainer.config.schema import Config, ModelConfig, ViewsConfig
from trainer.errors import InputError
from trainer.export import Encoder, Preprocess, features, load_encoder, plot_map
from trainer.export.folder import crop_share, export
from trainer.models.encoder import build_encoder
from trainer.models.networks import EncoderNetwork
from trainer.run.checkpoint import save_checkpoint

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def make_run(folder: Path, backbone: str = "test_resnet", stem: Any = "imagenet", **views: Any) -> EncoderNetwork:
    """Write the checkpoint of a run whose BatchNorm has seen images; return its network in evaluation mode."""
    recipe = ViewsConfig(**{"size": 32, "eval_resize": 40, "mean": MEAN, "std": STD, **views})
    model = ModelConfig(backbone=backbone, stem=stem, zero_init_last=False, encoder_batch_norm="per_view")
    config = Config(run_dir="/secret/place", views=recipe, model=model)
    torch.manual_seed(1)
    network = EncoderNetwork(config)
    with torch.no_grad():
        network(photos(recipe.size, 8))
    content = {
        "step": 7,
        "model": network.state_dict(),
        "optimizer": {},
        "config": plain_settings(config),
        "class_names": ["cats", "dogs"],
    }
    folder.mkdir()
    save_checkpoint(folder / "checkpoints", content, keep_last=1)
    return network.eval()


def photos(size: int, count: int = 4) -> Tensor:
    """Return pixels of the demo's kind: smooth images, not noise, (count, 3, size, size) uint8."""
    rng = np.random.default_rng(0)
    images = [
        Image.fromarray(rng.integers(0, 255, (5, 5, 3), dtype=np.uint8)).resize((size, size)) for _ in range(count)
    ]
    return torch.from_numpy(np.stack([np.array(image) for image in images])).permute(0, 3, 1, 2)


def assert_same(found: Any, wanted: Tensor) -> None:
    found = torch.as_tensor(found)
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def normalised(pixels: Tensor) -> Tensor:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (pixels / 255 - mean) / std


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, Tensor]:
    """Return a run folder and the features of its encoder."""
    network = make_run(tmp_path / "run")
    with torch.no_grad():
        return tmp_path / "run", network(photos(32))


def test_an_encoder_is_the_same_from_a_run_a_checkpoint_and_an_export(run: tuple[Path, Tensor], tmp_path: Path):
    run_dir, wanted = run
    assert main(["export", str(run_dir), str(tmp_path / "out"), "--checkpoint", "7", "--format", "timm"]) == 0
    sources = (run_dir, run_dir / "checkpoints" / "step_00000007.pt", tmp_path / "out")
    encoders = [load_encoder(source) for source in sources]
    for encoder in encoders:
        assert torch.equal(encoder.train()(photos(32)), wanted)  # stays in evaluation mode
        assert encoder.preprocess == Preprocess(32, 40, "bicubic", MEAN, STD)
        assert encoder.class_names == ["cats", "dogs"]
        assert encoder.num_features == wanted.shape[1]
        assert "step 7" in encoder.name
    assert len({encoder.sha256 for encoder in encoders}) == 1
    # The export says where it is from, but not in which folder that was.
    text = (tmp_path / "out" / "config.json").read_text()
    assert json.loads(text)["wmse"]["provenance"]["step"] == 7
    assert "/secret/place" not in text


def test_a_vision_transformer_is_exported_at_the_size_of_its_views(tmp_path: Path) -> None:
    """Its weights include the position embeddings of that size, 48 px."""
    model = ModelConfig(backbone="test_vit")
    views = ViewsConfig(size=48, eval_resize=56)
    preprocess = Preprocess(48, 56, "bicubic", MEAN, STD)
    encoder = Encoder(build_encoder(model, views), preprocess, "a ViT", model=model).freeze()
    wanted = encoder(photos(48))
    assert "model.safetensors" in export(encoder, tmp_path / "out", "timm")  # loads it by timm, and compares
    assert_same(load_encoder(tmp_path / "out")(photos(48)), wanted)


def test_timm_loads_an_export_with_its_preprocessing(run: tuple[Path, Tensor], tmp_path: Path):
    run_dir, wanted = run
    dest = tmp_path / "out"
    main(["export", str(run_dir), str(dest), "--format", "timm"])
    for options in ({}, {"num_classes": 0}):
        network = timm.create_model(f"local-dir:{dest}", pretrained=True, **options).eval()
        assert_same(network(normalised(photos(32))).detach(), wanted)
    facts = timm.data.resolve_model_data_config(network)
    assert [*facts["mean"], *facts["std"], *facts["input_size"]] == [*MEAN, *STD, 3, 32, 32]
    # timm's own transform of a photograph gives the pixels that ours gives.
    image = Image.fromarray(photos(57, 1)[0].permute(1, 2, 0).numpy()).crop((0, 0, 57, 49))
    ours = load_encoder(dest).features([image]).features
    theirs = network(timm.data.create_transform(**facts, is_training=False)(image)[None]).detach()
    assert (theirs - ours).abs().max() < 0.01 * theirs.abs().max()
    # A classifier on top starts fresh.
    assert timm.create_model(f"local-dir:{dest}", pretrained=True, num_classes=3)(normalised(photos(32))).shape == (
        4,
        3,
    )


def test_the_resize_of_timm_is_exact_for_every_size():
    for resize in range(32, 600):
        share = crop_share(Preprocess(32, resize, "bicubic", MEAN, STD))
        assert int(32 / share) == resize


def test_torchvision_loads_a_resnet(tmp_path: Path):
    network = make_run(tmp_path / "run", "resnet18")
    main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--format", "torchvision"])
    theirs = torchvision.models.resnet18()
    state = torch.load(tmp_path / "out" / "torchvision_resnet18.pth", weights_only=True)
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    # BatchNorm counts batches anew; the classifier is not part of an encoder.
    assert {name for name in missing if not name.endswith("num_batches_tracked")} == {"fc.weight", "fc.bias"}
    assert unexpected == []
    theirs.fc = nn.Identity()
    theirs.load_state_dict(state)
    with torch.no_grad():
        assert_same(theirs.eval()(normalised(photos(32))), network(photos(32)))
    # The same file is a source, as weights of other programs are.
    again = load_encoder(
        f"torchvision:resnet18={tmp_path / 'out' / 'torchvision_resnet18.pth'}",
        preprocess=Preprocess(32, 40, "bicubic", MEAN, STD),
    )
    with torch.no_grad():
        assert_same(again(photos(32)), network(photos(32)))


@pytest.mark.slow
def test_onnxruntime_computes_the_same_for_any_number_of_images(tmp_path: Path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    network = make_run(tmp_path / "run", "resnet18", "small")
    main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--format", "onnx"])
    session = runtime.InferenceSession(tmp_path / "out" / "encoder.onnx")
    for count in (1, 5):
        pixels = photos(32, count)
        with torch.no_grad():
            assert_same(session.run(None, {"pixels": pixels.numpy()})[0], network(pixels))


def test_onnx_without_its_packages_names_the_command(
    run: tuple[Path, Tensor], tmp_path: Path, monkeypatch: Any, capsys: Any
):
    monkeypatch.setattr("trainer.export.formats.find_spec", lambda name: None)
    assert main(["export", str(run[0]), str(tmp_path / "out"), "--format", "onnx"]) == 2
    assert "pip install onnx onnxscript" in capsys.readouterr().err
    assert list(tmp_path.glob("*out*")) == []  # nothing half done


@pytest.mark.slow
@pytest.mark.parametrize("stem", ["small_pool", "half"])
def test_a_stem_that_timm_lacks_is_refused_but_loads_here(tmp_path: Path, stem: str, capsys: Any, monkeypatch: Any):
    monkeypatch.setattr("trainer.export.formats.find_spec", lambda name: None)  # without the slow ONNX export
    network = make_run(tmp_path / "run", "resnet18", stem)
    run_dir, dest = str(tmp_path / "run"), tmp_path / "out"
    for library in ("timm", "torchvision"):
        assert main(["export", run_dir, str(dest), "--format", library]) == 2
        assert "load_encoder" in capsys.readouterr().err
    assert main(["export", run_dir, str(dest)]) == 0
    assert sorted(path.name for path in dest.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    with torch.no_grad():
        wanted = network(photos(32))
    assert torch.equal(load_encoder(dest)(photos(32)), wanted)
    with pytest.raises(RuntimeError, match="README"):  # instead of a network with another stem
        timm.create_model(f"local-dir:{dest}", pretrained=True)
    # The lines of docs/export.md for a program without this one.
    plain = timm.create_model("resnet18", num_classes=0)
    plain.conv1 = nn.Conv2d(3, 64, 3, stride=2 if stem == "half" else 1, padding=1, bias=False)
    if stem != "small_pool":
        plain.maxpool = nn.Identity()
    plain.load_state_dict(load_file(dest / "model.safetensors"))
    with torch.no_grad():
        assert_same(plain.eval()(normalised(photos(32))), wanted)


def test_an_export_overwrites_nothing_and_notices_other_weights(run: tuple[Path, Tensor], tmp_path: Path, capsys: Any):
    dest = tmp_path / "out"
    main(["export", str(run[0]), str(dest), "--format", "timm"])
    assert main(["export", str(run[0]), str(dest), "--format", "timm"]) == 2
    assert "give the name of a new folder" in capsys.readouterr().err
    data = bytearray((dest / "model.safetensors").read_bytes())
    data[-2] ^= 1
    (dest / "model.safetensors").write_bytes(data)
    with pytest.raises(InputError, match="not those that"):
        load_encoder(dest)


@pytest.mark.parametrize(
    ("key", "value"), [("size", "wide"), ("size", -1), ("mean", [1]), ("std", [0, 0, 0]), ("interpolation", "nearest")]
)
def test_a_changed_config_of_an_export_is_refused(run: tuple[Path, Tensor], tmp_path: Path, key: str, value: Any):
    dest = tmp_path / "out"
    main(["export", str(run[0]), str(dest), "--format", "timm"])
    config = json.loads((dest / "config.json").read_text())
    config["wmse"]["preprocess"][key] = value
    (dest / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=rf"config\.json.*\s.*views\.{key}"):
        load_encoder(dest)


def test_a_full_disk_names_the_destination_and_leaves_nothing(
    run: tuple[Path, Tensor], tmp_path: Path, monkeypatch: Any, capsys: Any
):
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trainer.export.folder.write_text", fail)
    assert main(["export", str(run[0]), str(tmp_path / "out"), "--format", "timm"]) == 2
    error = capsys.readouterr().err
    assert f"cannot write {tmp_path / 'out'}: No space left" in error
    assert "MiB are free" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def wrapped(state: dict[str, Tensor], kind: str) -> Any:
    """Return a state dict as the checkpoints of other programs hold it."""
    head = {"fc.weight": torch.zeros(10, 96), "fc.bias": torch.zeros(10)}
    others = {name: tensor + 1 for name, tensor in state.items()}

    def named(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {prefix + name: tensor for name, tensor in tensors.items()}

    return {
        "plain": {**state, **head},
        "ddp": {"epoch": 3, "model": named("module.", state)},
        "moco": {"state_dict": {**named("module.encoder_q.", state), **named("module.encoder_k.", others)}},
        "dino": {"student": named("module.backbone.", others), "teacher": named("backbone.", state)},
        "byol": {"state_dict": {**named("online_network.encoder.", state), **named("target_network.encoder.", others)}},
        "lightning": {"state_dict": {**named("encoder.", state), "projector.0.weight": torch.zeros(3, 3)}, "epoch": 1},
    }[kind]


@pytest.mark.parametrize("kind", ["plain", "ddp", "moco", "dino", "byol", "lightning"])
def test_weights_of_other_programs_are_found(tmp_path: Path, kind: str):
    network = timm.create_model("test_resnet", num_classes=0).eval()
    torch.save(wrapped(network.state_dict(), kind), tmp_path / "weights.pth")
    encoder = load_encoder(
        f"timm:test_resnet={tmp_path / 'weights.pth'}", preprocess=Preprocess(32, 32, "bicubic", MEAN, STD)
    )
    with torch.no_grad():
        assert_same(encoder(photos(32)), network(normalised(photos(32))))


def test_weights_that_do_not_fit_are_named(tmp_path: Path):
    state = timm.create_model("test_resnet", num_classes=0).state_dict()
    path = tmp_path / "weights.pth"

    def problem(content: Any) -> str:
        torch.save(content, path)
        with pytest.raises(InputError) as error:
            load_encoder(f"timm:test_resnet={path}")
        return str(error.value)

    lacking = {name: tensor for name, tensor in state.items() if name != "bn1.weight"}
    assert "1 tensors missing: bn1.weight" in problem({"model": lacking})
    # A deeper network has all of these tensors.
    assert "1 tensors unexpected: layer1.1.conv1.weight" in problem({**state, "layer1.1.conv1.weight": torch.zeros(1)})
    assert "of another shape: bn1.bias" in problem({**state, "bn1.bias": torch.zeros(2)})
    assert "several encoders" in problem({"model": state, "model_ema": {f"module.{n}": t for n, t in state.items()}})
    assert "not finite" in problem({**state, "bn1.bias": state["bn1.bias"] + torch.nan})
    assert "holds no tensor of this architecture" in problem({"other": torch.zeros(2)})
    quantised = {name: tensor.to(torch.int8) for name, tensor in state.items()}
    assert "not of plain floating-point numbers" in problem(quantised)
    assert "plain values only" in problem({"model": state, "arguments": Path})
    path.write_text("<html>")
    with pytest.raises(InputError, match="not a file of torch") as error:
        load_encoder(f"timm:test_resnet={path}")
    assert "weights_only=True" not in str(error.value)


def test_weights_are_read_by_content_not_by_the_name_of_the_file(tmp_path: Path):
    state = timm.create_model("test_resnet", num_classes=0).state_dict()
    path = tmp_path / "weights.pth"
    save_file({name: tensor.contiguous().bfloat16() for name, tensor in state.items()}, path)
    weights = load_encoder(f"timm:test_resnet={path}").plain_state()["bn1.weight"]
    assert torch.equal(weights, state["bn1.weight"].bfloat16().float())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match="cannot read the weights in"):
        load_encoder(f"timm:test_resnet={path}")


@pytest.mark.parametrize(
    ("key", "value"),
    [("views.size", "wide"), ("views.mean", 0.5), ("model.backbone", 7), ("model.stem", "wide"), ("views.size", -3)],
)
def test_a_checkpoint_with_odd_settings_is_refused(tmp_path: Path, key: str, value: Any):
    network = make_run(tmp_path / "run")
    settings = plain_settings(Config(model=ModelConfig(backbone="test_resnet"))) | {key: value}
    content = {"step": 8, "model": network.state_dict(), "optimizer": {}, "config": settings}
    save_checkpoint(tmp_path / "run" / "checkpoints", content, keep_last=1)
    with pytest.raises(InputError, match="backbone" if value == 7 else key):
        load_encoder(tmp_path / "run")
    del content["config"]
    save_checkpoint(tmp_path / "run" / "checkpoints", content, keep_last=1)
    with pytest.raises(InputError, match="no settings"):
        load_encoder(tmp_path / "run")


def test_a_folder_does_not_hide_a_model_of_the_same_name(tmp_path: Path, monkeypatch: Any):
    torch.save(timm.create_model("test_resnet", num_classes=0).state_dict(), tmp_path / "weights.pth")
    (tmp_path / "test_resnet").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_encoder("timm:test_resnet=weights.pth").name == "timm:test_resnet=weights.pth"
    for source in ("timm:=weights.pth", "torchvision:fcn_resnet50=weights.pth"):
        with pytest.raises(InputError, match="has no"):
            load_encoder(source)


def test_sources_that_do_not_exist_are_refused(tmp_path: Path):
    for source in (
        tmp_path / "missing",
        "timm:resnet9999",
        "torchvision:resnet9999",
        f"timm:test_resnet={tmp_path}/missing",
    ):
        with pytest.raises(InputError):
            load_encoder(source)
    torch.save({"a": torch.zeros(1)}, tmp_path / "a.pt")
    with pytest.raises(InputError, match="timm:resnet50="):  # says how weights of other programs are given
        load_encoder(tmp_path / "a.pt")


def test_a_folder_that_timm_saved_is_a_source(tmp_path: Path):
    facts = {"mean": MEAN, "std": STD}
    network = timm.create_model("test_resnet", num_classes=0, pretrained_cfg_overlay=facts).eval()
    timm.models.save_for_hf(network, tmp_path / "theirs", safe_serialization=True)
    with torch.no_grad():
        for source in (tmp_path / "theirs", f"timm:{tmp_path / 'theirs'}"):
            encoder = load_encoder(source)
            assert (encoder.preprocess.mean, encoder.preprocess.std) == (MEAN, STD)
            pixels = photos(32)
            assert_same(encoder(pixels), network(encoder.normalize(pixels)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of images at several depths, two of which cannot be decoded."""
    write_images(tmp_path / "images" / "a" / "deep", 3, seed=1)
    write_images(tmp_path / "images" / "b", 2, seed=2, size=(70, 50))
    (tmp_path / "images" / "a" / "text.jpg").write_text("no image")
    good = (tmp_path / "images" / "b" / "2_0.JPEG").read_bytes()
    (tmp_path / "images" / "b" / "cut.jpg").write_bytes(good[: len(good) // 2])
    return tmp_path / "images"


def test_features_of_a_folder_leave_out_unreadable_images(
    run: tuple[Path, Tensor], folder: Path, tmp_path: Path, capsys: Any
):
    out = tmp_path / "f.npz"
    command = ["features", str(run[0]), str(folder), "--out", str(out), "--batch", "2", "--device", "cpu"]
    assert main(command) == 0
    found = np.load(out)
    assert list(found["names"]) == [*(f"a/deep/1_{i}.JPEG" for i in range(3)), "b/2_0.JPEG", "b/2_1.JPEG"]
    assert found["features"].dtype == np.float32
    assert "b/cut.jpg" in capsys.readouterr().err
    # A batch does not change an image's features, and Pillow's pixels are close to DALI's.
    encoder = load_encoder(run[0])
    by_pillow = features(encoder, [folder / name for name in [*found["names"], "b/cut.jpg"]])
    assert by_pillow.skipped == [str(folder / "b" / "cut.jpg")]
    assert np.abs(by_pillow.features - found["features"]).max() < 0.02 * np.abs(found["features"]).max()
    assert main(command) == 2
    assert "--overwrite" in capsys.readouterr().err
    # An image that is damaged after it was indexed: the loader replaces it, which must not count as its features.
    (folder / "b" / "2_0.JPEG").write_bytes(b"no image")
    assert main([*command, "--overwrite"]) == 0
    assert "b/2_0.JPEG" not in np.load(out)["names"]
    assert np.array_equal(np.load(out)["features"], np.delete(found["features"], 3, axis=0))


def test_features_of_a_split_have_labels(run: tuple[Path, Tensor], tiny_set: Path, tmp_path: Path):
    parquet = pytest.importorskip("pyarrow.parquet")
    command = ["features", str(run[0]), str(tiny_set), "--split", "val", "--out"]
    assert main([*command, str(tmp_path / "f.npz")]) == 0
    assert main([*command, str(tmp_path / "f.parquet")]) == 0
    found = np.load(tmp_path / "f.npz")
    assert list(found["class_names"]) == ["cats", "dogs"]
    assert [name.partition("/")[0] for name in found["names"]] == [found["class_names"][i] for i in found["labels"]]
    table = parquet.read_table(tmp_path / "f.parquet")
    assert np.array_equal(np.stack(table["features"].to_numpy()), found["features"])
    assert table["name"].to_pylist() == list(found["names"])
    assert table["label"].to_pylist() == list(found["labels"])
    assert json.loads(table.schema.metadata[b"class_names"]) == ["cats", "dogs"]


def test_outputs_that_cannot_be_written_are_refused_before_the_work(tmp_path: Path, monkeypatch: Any, capsys: Any):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "d.npz").mkdir()
    assert main(["features", "missing", "missing", "--overwrite", "--out", str(tmp_path / "d.npz")]) == 2
    assert "d.npz exists" in capsys.readouterr().err
    cases = {"f.txt": ".npz or .parquet", "missing/f.npz": "does not exist", "f.parquet": "pip install pyarrow"}
    for name, message in cases.items():
        assert main(["features", "missing", "missing", "--out", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err


def test_no_readable_image_and_bad_features_are_errors(run: tuple[Path, Tensor], tmp_path: Path):
    encoder = load_encoder(run[0])
    (tmp_path / "no.jpg").write_text("no image")
    with pytest.raises(InputError, match="none of the images"):
        encoder.features([tmp_path / "no.jpg"])
    encoder.encoder.bn1.weight.data[0] = torch.nan
    with pytest.raises(InputError, match="NaN"):
        encoder.features([Image.new("RGB", (40, 40))])


def test_a_map_spreads_groups_that_differ(tmp_path: Path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 6))
    x[:, 3] += np.repeat([0, 30], 20)
    figure = plot_map(x, ["a"] * 20 + ["b"] * 20, tmp_path / "map.png")
    left, right = (dots.get_offsets()[:, 0] for dots in figure.axes[0].collections)
    assert left.max() < right.min() or right.max() < left.min()
    assert Image.open(tmp_path / "map.png").width > 500
    names = [f"$image_{i}^$" for i in range(40)]  # not a formula, which would be an invalid one
    assert len(plot_map(x, names, tmp_path / "names.png").axes[0].texts) == 40
    with pytest.raises(InputError, match="labels"):
        plot_map(x, ["a"])
    with pytest.raises(InputError, match="finite"):
        plot_map(np.where(x > 1, np.nan, x))
