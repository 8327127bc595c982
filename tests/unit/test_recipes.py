"""Every config equals its row of the table of recipes, and its model runs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT
from trainer.config.loading import load_config
from trainer.config.schema import Config, flatten
from trainer.data.class_list import read_class_list
from trainer.distributed.ranks import Ranks
from trainer.methods.method import MethodContext
from trainer.models.networks import EncoderProjector, build_networks
from trainer.schedule import peak_learning_rate
from trainer.tools.run_plan import plan_lines


def scale(mean: tuple[float, ...], std: tuple[float, ...]) -> dict[str, Any]:
    return {"views.mean": mean, "views.std": std}


CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SMALL = {  # common settings of CIFAR, STL-10 and Tiny ImageNet
    "model.backbone": "resnet18", "model.zero_init_last": False, "model.projector": "mlp", "model.projector_hidden": (1024,),
    "model.encoder_batch_norm": "per_view", "model.projector_batch_norm": "joint",
    "optimizer.name": "adam", "optimizer.weight_decay": 1e-6, "optimizer.warmup_steps": 500,
    "optimizer.warmup_from": "first_step", "views.order": "color_first",
    "optimizer.schedule": "drops", "optimizer.drop_epochs_before_end": (50, 25), "optimizer.drop_factor": 0.2,
    "checkpoint.keep_every_epochs": 20, "checkpoint.keep_every_epochs_after_drop": 5,
    "views.interpolation": "bicubic", "views.flip_probability": 0.5, "views.color_probability": 0.8,
    "views.crop_ratio": (0.75, 4 / 3), "wmse.normalize": True, "wmse.eps": 0.0,
}  # fmt: skip
WEAK = {
    "views.crop_area": (0.2, 1.0), "views.brightness": 0.4, "views.contrast": 0.4, "views.saturation": 0.4,
    "views.hue": 0.1, "views.gray_probability": 0.1, "views.blur_probability": 0.0,
}  # fmt: skip
STRONG = {
    "views.crop_area": (0.08, 1.0), "views.brightness": 0.8, "views.contrast": 0.8, "views.saturation": 0.8,
    "views.hue": 0.2, "views.gray_probability": 0.2, "views.blur_probability": 0.5, "views.blur_sigma": (0.1, 2.0),
    "views.blur_window": 23, "views.size": 224, "views.eval_resize": 256,
}  # fmt: skip
CIFAR = {**SMALL, **WEAK, "model.stem": "small", "views.size": 32, "optimizer.epochs": 1000,
         "model.embedding_size": 64, "wmse.slice_size": 128}  # fmt: skip
STL = {
    **SMALL,
    **WEAK,
    "model.stem": "small_pool",
    "views.size": 64,
    "model.embedding_size": 128,
    "wmse.slice_size": 256,
}
IN100 = {**SMALL, **STRONG, "model.stem": "imagenet", "model.embedding_size": 128, "wmse.slice_size": 256,
         "wmse.iterations": 1, **scale((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}  # fmt: skip
IMAGENET = {**STRONG, "views.order": "crop_first", "model.backbone": "resnet50",
            "model.stem": "imagenet", "model.zero_init_last": True,
            "model.projector": "simclr", "model.projector_hidden": (2048, 2048), "model.embedding_size": 128,
            "model.encoder_batch_norm": "joint", "model.projector_batch_norm": "joint", "model.batch_norm_ranks": "all",
            "wmse.slice_size": 256, "wmse.iterations": 1, "data.images_per_step": 4096, "optimizer.name": "lars",
            "optimizer.momentum": 0.9, "optimizer.trust_coefficient": 1e-3, "optimizer.weight_decay": 1e-4,
            "optimizer.warmup_epochs": 10, "optimizer.warmup_from": "zero", "optimizer.schedule": "cosine",
            "views.num_views": 4, "views.mean": (0.0, 0.0, 0.0), "views.std": (1.0, 1.0, 1.0)}  # fmt: skip
RECIPES: dict[str, tuple[float, dict[str, Any]]] = {  # config: peak learning rate, settings
    "cifar10_rn18": (3e-3, {**CIFAR, **scale((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))}),
    "cifar100_rn18": (3e-3, {**CIFAR, **scale((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))}),
    "stl10_rn18": (2e-3, {**STL, "optimizer.epochs": 2000, **scale((0.43, 0.42, 0.39), (0.27, 0.26, 0.27))}),
    "tiny_imagenet_rn18": (2e-3, {**STL, "optimizer.epochs": 1000, **scale((0.480, 0.448, 0.398), (0.277, 0.269, 0.282))}),
    "imagenet100_rn18": (2e-3, {**IN100, "optimizer.epochs": 240, "data.expected_images": 126689}),
    "imagenet_rn50": (6.4, IMAGENET),
    "imagenette_rn18": (2e-3, {**IN100, "optimizer.epochs": 800, "data.expected_images": 9469}),
    "imagenette_vits16": (5e-4, {
        **{key: value for key, value in IN100.items() if key.startswith(("views.", "wmse.")) or "projector" in key},
        "model.backbone": "vit_small_patch16_224", "model.embedding_size": 128, "data.expected_images": 9469,
        "optimizer.name": "adamw", "optimizer.weight_decay": 0.1, "optimizer.warmup_epochs": 40,
        "optimizer.schedule": "cosine", "optimizer.final_learning_rate": 0.0, "optimizer.epochs": 800}),
}  # fmt: skip

DOT = {"simclr.temperature": 1.0, "simclr.normalize": False}  # the paper's temperature without normalisation
WHITENED = {"simclr.whiten": True, "simclr.slice_size": 128}
SHORT = {"optimizer.epochs": 200}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # config: the recipe that it varies, all settings that differ
    "cifar10_rn18_simclr_200ep": ("cifar10_rn18_simclr_1000ep", SHORT),
    "cifar10_rn18_simclr_whitened_200ep": ("cifar10_rn18_simclr_1000ep", {**SHORT, **WHITENED}),
    "cifar10_rn18_simclr_dot_200ep": ("cifar10_rn18_simclr_1000ep", {**SHORT, **DOT}),
    "cifar10_rn18_simclr_whitened_dot_200ep": ("cifar10_rn18_simclr_1000ep", {**SHORT, **DOT, **WHITENED}),
    "cifar10_rn18_wmse2_standardised_1000ep": (
        "cifar10_rn18_wmse2_1000ep",
        {"wmse.whitening": "standardise", "wmse.slice_size": 512},
    ),
    "cifar10_rn18_wmse4_zca_1000ep": ("cifar10_rn18_wmse4_1000ep", {"wmse.whitening": "zca"}),
    "stl10_rn18_wmse2_euclidean_2000ep": ("stl10_rn18_wmse2_2000ep", {"wmse.normalize": False}),
    "stl10_rn18_wmse4_euclidean_2000ep": ("stl10_rn18_wmse4_2000ep", {"wmse.normalize": False}),
    "stl10_rn18_simclr_euclidean_2000ep": ("stl10_rn18_simclr_2000ep", DOT),
}
SMALL_BYOL = {"method": "byol", "model.projector": "mlp", "model.projector_batch_norm": "per_view"}
for _name in (
    "cifar10_rn18_{}_1000ep",
    "cifar100_rn18_{}_1000ep",
    "stl10_rn18_{}_2000ep",
    "tiny_imagenet_rn18_{}_1000ep",
):
    VARIANTS[_name.format("byol")] = _name.format("simclr"), SMALL_BYOL
VARIANTS["stl10_rn18_byol_euclidean_2000ep"] = "stl10_rn18_byol_2000ep", {"byol.normalize": False}
VARIANTS["photos_rn18"] = (
    "imagenet100_rn18_wmse4_240ep",
    {
        "data.expected_images": 0,
        "optimizer.epochs": 200,
        "optimizer.warmup_epochs": 2.0,
        "optimizer.warmup_steps": 0,
        "optimizer.warmup_from": "zero",
        "optimizer.schedule": "cosine",
        "checkpoint.keep_every_epochs_after_drop": 0,
    },
)
WIDE = {"model.projector_hidden": (1024, 1024), "model.embedding_size": 1024}
VARIANTS["cifar10_rn18_barlow_twins_1000ep"] = (
    "cifar10_rn18_simclr_1000ep",
    {"method": "barlow_twins", "model.projector": "barlow_twins", **WIDE},
)
VARIANTS["cifar10_rn18_vicreg_1000ep"] = (
    "cifar10_rn18_simclr_1000ep",
    {"method": "vicreg", "model.projector": "byol", **WIDE},
)

# The other methods on ImageNet, with the settings of their published code. METHODS_ON_IMAGENET lists what differs from SimCLR.
VARIANTS["imagenet_rn50_simclr_100ep"] = "imagenet_rn50_wmse4_100ep", {
    "method": "simclr", "views.num_views": 2, "model.activation_memory_budget": 1.0, "optimizer.learning_rate": 0.075,
    "simclr.temperature": 0.1, "simclr.scale": 2.0}  # fmt: skip
IMAGENET_SCALE = scale((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
MOCO_VIEWS = {
    "views.crop_area": (0.2, 1.0), "views.interpolation": "bilinear", "views.brightness": 0.4, "views.contrast": 0.4,
    "views.contrast_pivot": "gray", "views.saturation": 0.4, "views.hue": 0.1, **IMAGENET_SCALE}  # fmt: skip
SGD = {"optimizer.name": "sgd", "optimizer.learning_rate_rule": "linear", "optimizer.warmup_epochs": 0.0}
OF_SIMCLR = {"simclr.temperature": 0.5, "simclr.scale": 1.0}  # the defaults, which other methods do not use
METHODS_ON_IMAGENET = {
    "byol": {
        "method": "byol", "views.brightness": 0.4, "views.contrast": 0.4, "views.saturation": 0.2, "views.hue": 0.1,
        "views.blur_probability": (1.0, 0.1), "views.solarize_probability": (0.0, 0.2), **IMAGENET_SCALE,
        "model.projector": "byol", "model.projector_hidden": (4096,), "model.embedding_size": 256,
        "model.encoder_batch_norm": "per_view", "model.projector_batch_norm": "per_view", "byol.predictor_hidden": 4096,
        "optimizer.rate_in_momentum": False, "optimizer.learning_rate": 0.45, "optimizer.learning_rate_rule": "linear",
        "optimizer.weight_decay": 1e-6},
    "moco": {
        "method": "moco", "data.images_per_step": 256, **MOCO_VIEWS, "model.zero_init_last": False,
        "model.projector": "moco", "model.projector_hidden": (2048,), "model.batch_norm_ranks": "local", **SGD,
        "optimizer.learning_rate": 0.03},
    "simsiam": {
        "method": "simsiam", "data.images_per_step": 512, **MOCO_VIEWS, "model.projector": "simsiam",
        "model.embedding_size": 2048, "model.encoder_batch_norm": "per_view", "model.projector_batch_norm": "per_view",
        **SGD, "optimizer.learning_rate": 0.05},
    "swav": {
        "method": "swav", "views.interpolation": "bilinear", "views.contrast_pivot": "gray",
        **scale((0.485, 0.456, 0.406), (0.228, 0.224, 0.225)), "model.zero_init_last": False, "model.projector": "mlp",
        "model.projector_hidden": (2048,), "optimizer.name": "larc", "optimizer.learning_rate": 4.8,
        "optimizer.start_learning_rate": 0.3, "optimizer.final_learning_rate": 0.0048,
        "optimizer.learning_rate_rule": "fixed", "optimizer.weight_decay": 1e-6},
}  # fmt: skip
for _name, _changes in METHODS_ON_IMAGENET.items():
    VARIANTS[f"imagenet_rn50_{_name}_100ep"] = "imagenet_rn50_simclr_100ep", {**_changes, **OF_SIMCLR}
for _name in ("simclr", *METHODS_ON_IMAGENET):
    VARIANTS[f"imagenet_rn50_{_name}_400ep"] = f"imagenet_rn50_{_name}_100ep", {"optimizer.epochs": 400}
VARIANTS["imagenet_rn50_byol_400ep"][1]["optimizer.learning_rate"] = 0.3

VARIANTS["imagenet100_rn50_moco_240ep"] = "imagenet_rn50_moco_100ep", {
    "data.images_per_step": 128, "data.expected_images": 126689, "views.color_probability": 1.0, "views.hue": 0.4,
    "views.blur_probability": 0.0, "model.projector_hidden": (), "moco.temperature": 0.07, "moco.queue_size": 16384,
    "moco.batch_norm_rows": 16, "optimizer.learning_rate_rule": "fixed", "optimizer.epochs": 240,
    "optimizer.schedule": "drops", "optimizer.drop_epochs_before_end": (120, 80, 40), "optimizer.drop_factor": 0.1,
    "checkpoint.keep_every_epochs": 20}  # fmt: skip
VARIANTS["imagenet100_rn50_align_uniform_200ep"] = "imagenet100_rn50_moco_240ep", {
    "method": "align_uniform", "moco.temperature": 0.2, "moco.queue_size": 65536, "moco.batch_norm_rows": 32,
    "align_uniform.batch_norm_rows": 16, "optimizer.epochs": 200,
    "optimizer.drop_epochs_before_end": (80, 40)}  # fmt: skip
PLAIN = [path for path in CONFIGS if not path.stem.startswith("demo_") and path.stem not in VARIANTS]


def load(path: Path) -> Config:
    return load_config(path, [])


def test_each_row_of_the_table_has_one_config() -> None:
    names = {f"{key}_wmse4" for key in RECIPES}
    names |= {f"{key}_wmse2" for key in RECIPES if not key.startswith(("imagenet_", "imagenette_"))}
    names |= {f"{key}_rn18_simclr" for key in ("cifar10", "cifar100", "stl10", "tiny_imagenet")}
    found = [path.stem for path in PLAIN]
    assert {name.rsplit("_", 1)[0] for name in found} == names
    assert [n for n in found if n.startswith("imagenet_")] == ["imagenet_rn50_wmse4_100ep", "imagenet_rn50_wmse4_400ep"]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_differs_from_its_recipe_in_the_listed_settings_only(name: str) -> None:
    recipe, changes = VARIANTS[name]
    flat, base = (flatten(load(ROOT / "configs" / f"{stem}.yaml")) for stem in (name, recipe))
    assert {key: value for key, value in flat.items() if value != base[key]} == changes


@pytest.mark.parametrize("path", PLAIN, ids=lambda p: p.stem)
def test_a_config_has_the_settings_of_its_recipe(path: Path) -> None:
    config = load(path)
    recipe, views, epochs = path.stem.rsplit("_", 2)
    peak, settings = RECIPES[recipe]
    if views == "simclr":
        settings = {key: value for key, value in settings.items() if not key.startswith("wmse.")}
        settings |= {"model.projector": "mlp_norm", "simclr.temperature": 0.5, "simclr.normalize": True}
    flat = flatten(config)
    assert config.method == views.rstrip("24")
    assert {key: flat[key] for key in settings} == settings
    assert peak_learning_rate(config) == pytest.approx(peak)
    assert config.optimizer.epochs == int(epochs.removesuffix("ep"))
    assert config.views.num_views == (2 if views == "simclr" else int(views.removeprefix("wmse")))
    if recipe != "imagenet_rn50":
        assert config.data.images_per_step * config.views.num_views == 1024
        four = views != "simclr" and recipe in ("stl10_rn18", "tiny_imagenet_rn18") and config.views.num_views == 2
        assert config.wmse.iterations == (4 if four else 1)


def test_imagenet_100_has_a_hundred_classes() -> None:
    lines = (ROOT / "configs" / "imagenet100_classes.txt").read_text().splitlines()
    names = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"n\d{8}", name) for name in names)
    assert len(set(names)) == len(names) == 100
    assert read_class_list(ROOT / "configs" / "imagenet100_classes.txt", sorted(names)) == sorted(names)


# The networks of other recipes are those of the recipe that they vary.
OWN_NETWORKS = [p for p in CONFIGS if p.stem not in VARIANTS or any(key[:6] == "model." for key in VARIANTS[p.stem][1])]


@pytest.mark.slow
@pytest.mark.parametrize("path", OWN_NETWORKS, ids=lambda p: p.stem)
def test_a_config_gives_a_plan_and_a_model(path: Path) -> None:
    """The model maps the views of two images to embeddings, and the plan of the run is described."""
    config = load(path)
    assert plan_lines(config, max(config.data.expected_images, 10_000), 1)
    model = build_networks(EncoderProjector, MethodContext(config, Ranks(), torch.device("cpu")))
    is_vit = config.model.backbone.startswith("vit_")  # which takes no images of another size
    size = config.views.size if config.views.size < 100 or is_vit else 64
    pixels = torch.randint(0, 255, (2 * config.views.num_views, 3, size, size), dtype=torch.uint8)
    assert model(pixels).shape == (2 * config.views.num_views, config.model.embedding_size)
    if config.model.stem != "imagenet":
        first = model.encoder.conv1[0] if config.model.backbone == "test_resnet" else model.encoder.conv1
        assert (first.kernel_size, first.stride[0]) == ((3, 3), 2 if config.model.stem == "half" else 1)
        assert isinstance(model.encoder.maxpool, torch.nn.MaxPool2d) == (config.model.stem == "small_pool")
    for part, form in (
        (model.encoder, config.model.encoder_batch_norm),
        (model.projector, config.model.projector_batch_norm),
    ):
        views = config.views.num_views if form == "per_view" else 1
        apart = getattr(part, "views_apart", 1)  # on a CPU the encoder gets one view after the other
        found = {apart * getattr(m, "num_views", 1) for m in part.modules() if hasattr(m, "running_mean")}
        has_no_norm = is_vit if part is model.encoder else config.model.projector == "moco"
        assert found == (set() if has_no_norm else {views})
    if is_vit:
        return
    last = model.encoder.layer4[-1]
    gamma = (last.bn3 if hasattr(last, "bn3") else last.bn2).weight
    assert bool((gamma == 0).all()) == config.model.zero_init_last
