"""Suggest a known name for an unknown setting or option."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from trainer.config.schema import Config, flatten

KEYS = tuple(flatten(Config()))
# Short names that commands which train also take, on the command line only.
SHORT_NAMES = {
    "data": "data.root",
    "batch_size": "data.images_per_step",
    "views": "views.num_views",
    "backbone": "model.backbone",
    "lr": "optimizer.learning_rate",
    "weight_decay": "optimizer.weight_decay",
    "epochs": "optimizer.epochs",
}

# Names of our settings in other programs of this field.
_ELSEWHERE = {
    "optimizer.learning_rate": "lr base_lr max_lr learning_rate",
    "optimizer.start_learning_rate": "start_warmup warmup_lr warmup_start_lr",
    "optimizer.final_learning_rate": "final_lr min_lr lr_min eta_min",
    "data.images_per_step": "batch_size bs batchsize global_batch_size train_batch_size effective_batch_size",
    "optimizer.weight_decay": "wd weight_decay",
    "optimizer.name": "optimizer opt optim",
    "optimizer.epochs": "epochs num_epochs max_epochs n_epochs",
    "optimizer.warmup_epochs": "warmup warmup_epochs",
    "optimizer.accumulation_steps": "gradient_accumulation_steps accumulate_grad_batches grad_accum accum_iter",
    "data.root": "data data_dir data_path data_root dataset dataset_path imagenet root",
    "data.threads": "workers num_workers n_workers j",
    "run_dir": "output out output_dir out_dir save_dir log_dir logdir work_dir workdir checkpoint_dir exp_dir",
    "model.backbone": "arch a backbone model encoder model_name",
    "model.embedding_size": "emb embedding_dim emb_dim proj_dim output_dim out_dim_projector",
    "model.projector_hidden": "hidden head_size proj_hidden_dim",
    "model.batch_norm_ranks": "sync_bn syncbn sync_batchnorm",
    "views.num_views": "crops num_crops n_views num_samples views",
    "views.size": "image_size img_size crop_size input_size resolution size",
    "views.crop_area": "crop_scale min_scale crop_s0 crop_s1",
    "views.gray_probability": "grayscale gray_prob gp",
    "views.color_probability": "jitter_prob cj_p",
    "wmse.slice_size": "w_size whitening_size sub_batch w_slice",
    "wmse.iterations": "w_iter whitening_iter",
    "wmse.eps": "w_eps whitening_eps",
    "precision": "amp fp16 bf16 mixed_precision dtype",
    "checkpoint.every_steps": "save_every save_freq save_steps save_interval",
    "log.every_steps": "log_every log_freq log_interval print_freq log_steps",
    "knn.k": "knn_k k knn",
    "knn_cosine.temperature": "knn_t",
    "init_from": "pretrained weights init finetune",
    "seed": "random_seed manual_seed",
}
_MEANT = {name: key for key, names in _ELSEWHERE.items() for name in names.split()}


def with_full_names(words: Sequence[str]) -> list[str]:
    """Replace the short names of settings in command-line words by their full names."""
    full = []
    for word in words:
        name, equals, value = word.partition("=")
        key = SHORT_NAMES.get(name.removeprefix("--")) if name.startswith("--") else None
        full.append(f"--{key}{equals}{value}" if key else word)
    return full


def closest(name: str, names: Iterable[str]) -> str:
    """Return `: did you mean X?` for the most similar name, or an empty text if none is similar."""
    near = difflib.get_close_matches(name, list(names), 1, 0.6)
    return f": did you mean {near[0]}?" if near else ""


def unknown_setting(name: str) -> str:
    """Return a message that suggests a setting: of similar spelling, with the same ending, or with this name elsewhere."""
    plain = name.replace("-", "_").lower()
    section, _, last = plain.rpartition(".")
    # Settings with the same last part, in any section.
    same_end = [key for key in KEYS if key.rpartition(".")[2] == last]
    elsewhere = _MEANT.get(last, "")
    if plain in KEYS:
        hint = f": did you mean {plain}?"
    elif elsewhere and (not section or elsewhere.startswith(f"{section}.")):
        hint = f": did you mean {elsewhere}?"
    elif same_end:
        hint = f": did you mean {same_end[0]}?"
    else:
        hint = closest(plain, KEYS)
        if elsewhere and not hint:
            hint = f": did you mean {elsewhere}?"
    return f"unknown setting {name}{hint or '; `wmse pretrain --help` lists all settings'}"
