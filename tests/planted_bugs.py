"""Plant bugs of the field in a copy of the program, one at a time, and see `wmse verify` name the group of each.

    python -m tests.planted_bugs

Each bug replaces a text of one file. A bug survives if every check passes, or if only checks of other groups fail.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import ROOT
from trainer.verify.cli import GROUPS


class Bug(NamedTuple):
    """A change of one file, and the group whose checks must fail."""

    group: str
    file: str
    before: str
    after: str


BUGS = {
    # --- loss ---
    "whiten both views jointly": Bug(
        "loss",
        "trainer/losses/wmse_fused.py",
        "            z, w, u, ok, min_pivot = torch.ops.wmse.whiten(x, eps, cholesky_float64, backend)\n",
        "            x = x.view(num_views, -1, slice_size, x.shape[-1]).transpose(0, 1).flatten(1, 2).contiguous()\n"
        "            z, w, u, ok, min_pivot = torch.ops.wmse.whiten(x, eps, cholesky_float64, backend)\n"
        "            z = z.unflatten(1, (num_views, slice_size)).transpose(0, 1).flatten(0, 1)\n"
        "            w, ok, min_pivot = (t.repeat(num_views, *[1] * (t.dim() - 1)) for t in (w, ok, min_pivot))\n"
        "            u = u.repeat(num_views, 1, 1) if u.numel() else u\n",
    ),
    "the second view has no gradient": Bug(
        "loss",
        "trainer/losses/wmse_fused.py",
        "        grad_v = _join_slices(grad_x, permutations, num_views)\n",
        "        grad_v = _join_slices(grad_x, permutations, num_views)\n"
        "        grad_v.view(num_views, -1, grad_v.shape[1])[1].zero_()\n",
    ),
    "the method detaches the second view": Bug(
        "loss",
        "trainer/methods/wmse/method.py",
        "        rows = outputs\n",
        "        parts = outputs.chunk(num_views)\n"
        "        rows = torch.cat([parts[0], parts[1].detach(), *parts[2:]])\n",
    ),
    "covariance divided by M": Bug(
        "loss",
        "kernels/whitening_torch.py",
        "mul_(1 / (num_rows - 1))",
        "mul_(1 / num_rows)",
    ),
    "covariance divided by M, in the reference": Bug(
        "kernels",
        "kernels/whitening_reference.py",
        "covariance = centred.T @ centred / (num_rows - 1)",
        "covariance = centred.T @ centred / num_rows",
    ),
    "eps left out": Bug("loss", "kernels/whitening_torch.py", "            variance.add_(eps * mean_variance)\n", ""),
    "standardise divides by the variance": Bug("loss", "kernels/whitening_standardise.py", ".rsqrt()", ".reciprocal()"),
    "the mean has no gradient": Bug(
        "loss",
        "kernels/whitening_torch.py",
        "        grad_x.sub_(grad_x.sum(1, keepdim=True), alpha=1 / num_rows)\n",
        "",
    ),
    "only neighbouring views are compared": Bug(
        "loss",
        "trainer/losses/wmse_fused.py",
        "    terms = (num_views - 1) / 2 * num_rows\n",
        "    terms = num_views / 2 * num_rows\n",
    ),
    "autocast reaches the covariance": Bug(
        "loss",
        "kernels/precision.py",
        "        return torch.autocast(device.type, enabled=False)\n",
        "        return nullcontext()\n",
    ),
    "fast products reach the covariance": Bug(
        "loss",
        "kernels/precision.py",
        '        if self._precision not in ("ieee", "none"):\n            self._flags.fp32_precision = "ieee"\n',
        "        self._precision = 'none'\n",
    ),
    "the contrastive loss keeps the row itself": Bug(
        "loss",
        "trainer/losses/contrastive.py",
        "is_itself[view_a, images, view_a, same_images] = True",
        "is_itself[view_a, images, view_a, same_images] = False",
    ),
    "VICReg's covariance is that of all views": Bug(
        "loss", "trainer/losses/vicreg.py", "(num_images - 1)  # (d, k, k)", "num_images  # (d, k, k)"
    ),
    "SwAV's targets have the temperature of the predictions": Bug(
        "loss", "trainer/losses/swapped.py", "q = (scores / epsilon).exp()", "q = (scores / 0.1).exp()"
    ),
    # --- ranks ---
    "gather without gradient": Bug(
        "ranks",
        "trainer/distributed/gather.py",
        "    return _GatherRows.apply(v, num_views, group)\n",
        "    return join_rows(v, num_views, group) + 0 * v.sum()\n",
    ),
    "gradient not multiplied by the ranks": Bug(
        "ranks", "trainer/distributed/gather.py", "by_rank[:, ctx.rank] * ctx.ranks", "by_rank[:, ctx.rank] * 1"
    ),
    "gradient of the own rows only": Bug(
        "ranks",
        "trainer/distributed/gather.py",
        "        _reduce_scatter(local, by_rank.reshape(-1, k), group=ctx.group)\n",
        "        local.copy_(by_rank[dist.get_rank(ctx.group)].reshape(-1, k))\n",
    ),
    "gradient of a sum counted once": Bug(
        "ranks",
        "trainer/distributed/gather.py",
        "        return gradient * ctx.ranks, None\n",
        "        return gradient, None\n",
    ),
    "BatchNorm of each rank alone": Bug(
        "ranks",
        "trainer/models/batch_norm.py",
        "        elif self.group_name is None:\n",
        "        elif self.group_name is not None:\n",
    ),
    "BatchNorm's backward stays on the rank": Bug(
        "ranks",
        "trainer/models/batch_norm.py",
        '        sums = funcol.all_reduce(gradients, "sum", ctx.group_name)\n',
        "        sums = gradients * ctx.world_size\n",
    ),
    "SwAV balances each rank alone": Bug(
        "ranks",
        "trainer/methods/swav/method.py",
        "            sum_over_ranks=partial(sum_of_group, group=self._loss_group),\n",
        "",
    ),
    "the ranks are joined rank by rank": Bug(
        "ranks",
        "trainer/distributed/gather.py",
        "    by_view = by_rank.transpose(0, 1)  # (d, R, N, k)\n",
        "    by_view = by_rank\n",
    ),
    # --- views ---
    "crop off by a pixel": Bug(
        "views",
        "trainer/data/dali_graph.py",
        "    start = np.stack([top, x[..., 0]], axis=-1)\n",
        "    start = np.stack([top + 1, x[..., 0]], axis=-1)\n",
    ),
    "flip never happens": Bug(
        "views", "trainer/data/dali_graph.py", "x = np.where(plan.flip[..., None], x[..., ::-1], x)", "x = x + 0"
    ),
    "mean and standard deviation swapped": Bug(
        "views",
        "trainer/models/encoder.py",
        "        mean = torch.tensor(views.mean).view(1, 3, 1, 1)\n        std = torch.tensor(views.std).view(1, 3, 1, 1)\n",
        "        std = torch.tensor(views.mean).view(1, 3, 1, 1)\n        mean = torch.tensor(views.std).view(1, 3, 1, 1)\n",
    ),
    "aspect ratio not in the logarithm": Bug(
        "views",
        "trainer/data/plan.py",
        "    ratio = np.exp(log_ratio)\n",
        "    low, high = recipe.crop_ratio\n    ratio = low + (high - low) * plan.crop_tries[:, :, 1]\n",
    ),
    "colours in a fixed order": Bug(
        "views",
        "trainer/data/color.py",
        "operation = plan.factor_order[:, :, position]",
        "operation = np.full_like(plan.factor_order[:, :, 0], position)",
    ),
    "hue turns the other way": Bug(
        "views",
        "trainer/data/color.py",
        "angle = 2 * np.pi * factors[:, :, 3]",
        "angle = -2 * np.pi * factors[:, :, 3]",
    ),
    "blur twice as wide": Bug(
        "views",
        "trainer/data/dali_graph.py",
        "sigma = np.maximum(plan.blur_sigma, 0.01)",
        "sigma = np.maximum(2 * plan.blur_sigma, 0.01)",
    ),
    "resize without antialiasing": Bug(
        "views", "trainer/data/dali_graph.py", "        antialias=True,\n", "        antialias=False,\n"
    ),
    "each rank draws its own views": Bug(
        "views",
        "trainer/data/plan.py",
        "first_block = rows.first * d * _WORDS // _BLOCK",
        "first_block = 0",
    ),
    # --- optimizer ---
    "trust ratio without weight decay": Bug(
        "optimizer",
        "trainer/optimizer.py",
        '    if decay and not group["larc"]:\n        g.add_(w, alpha=decay)\n    if group["adapt"]:\n'
        "        # A tensor of zeros, such as a bias at the start, has no ratio of norms.\n"
        "        norm_w, norm_g = w.norm().item(), g.norm().item()\n",
        "    norm_w, norm_g = w.norm().item(), g.norm().item()\n"
        '    if decay and not group["larc"]:\n        g.add_(w, alpha=decay)\n    if group["adapt"]:\n',
    ),
    "rate outside of the momentum": Bug(
        "optimizer",
        "trainer/optimizer.py",
        'return (group["lr"], 1.0) if group["rate_in_momentum"] else (1.0, group["lr"])',
        'return (1.0, group["lr"])',
    ),
    "biases decay and adapt": Bug(
        "optimizer",
        "trainer/optimizer.py",
        '"weight_decay": 0.0, "adapt": False}',
        '"weight_decay": weight_decay, "adapt": True}',
    ),
    "the target network follows the other way": Bug(
        "optimizer",
        "trainer/models/target.py",
        "lerp_(targets, sources, 1 - momentum)",
        "lerp_(targets, sources, momentum)",
    ),
    "the momentum of the target network stays": Bug(
        "optimizer",
        "trainer/models/target.py",
        "    return 1 - (1 - first) * (math.cos(angle) + 1) / 2\n",
        "    return first\n",
    ),
    "the queue takes keys that are not scaled": Bug(
        "optimizer",
        "trainer/methods/moco/queue_method.py",
        "self._new_keys.append(keys.unflatten",
        "self._new_keys.append(outputs.keys.unflatten",
    ),
    "warm-up off by one step": Bug(
        "optimizer",
        "trainer/schedule.py",
        'shares = step + 1 if self.warmup_from == "first_step" else step',
        "shares = step + 1",
    ),
    "cosine over the whole run": Bug(
        "optimizer",
        "trainer/schedule.py",
        "done = (step - self.warmup_steps) / steps_after_warmup",
        "done = step / self.total_steps",
    ),
    "drop one step late": Bug("optimizer", "trainer/schedule.py", "step >= drop for drop", "step > drop for drop"),
    "a skipped update moves the momentum": Bug(
        "optimizer",
        "trainer/optimizer.py",
        "        if not skip:\n            optimizer.step()\n",
        "        optimizer.step()\n",
    ),
    # --- evaluation ---
    "padded rows count": Bug("evaluation", "trainer/evaluate/features.py", "part[:count].cpu()", "part.cpu()"),
    "the last batch is dropped": Bug(
        "evaluation",
        "trainer/data/loader.py",
        "end_step=math.ceil(len(image_ids) / batch_size),",
        "end_step=len(image_ids) // batch_size,",
    ),
    "BatchNorm in training mode": Bug(
        "evaluation", "trainer/evaluate/features.py", "    model.eval()\n    return model\n", "    return model\n"
    ),
    "k-NN forgets a block": Bug(
        "evaluation",
        "trainer/evaluate/knn.py",
        "candidate_numbers = torch.cat([numbers, first + block_numbers], 1)",
        "candidate_numbers = torch.cat([numbers, block_numbers], 1)",
    ),
    "similarities without temperature": Bug(
        "evaluation", "trainer/evaluate/knn.py", "similarities[:, :1]) / temperature", "similarities[:, :1])"
    ),
    "test images scaled by themselves": Bug(
        "evaluation",
        "trainer/evaluate/linear.py",
        "scaled_test = replace(test, x=(test.x - mean) * scale)",
        "scaled_test = replace(test, x=(test.x - test.x.mean(0)) * scale)",
    ),
    "top-5 counts the first guess": Bug(
        "evaluation", "trainer/evaluate/scores.py", "percent[-1].item()", "percent[0].item()"
    ),
    # --- resume ---
    "resume forgets the optimizer": Bug(
        "resume",
        "trainer/run/resume.py",
        '    run.step.optimizer.load_state_dict({"state": moments, "param_groups": options})\n',
        "",
    ),
    "resume forgets the running statistics": Bug(
        "resume",
        "trainer/run/resume.py",
        'load_state_dict(content["model"], strict=False)',
        'load_state_dict({k: v for k, v in content["model"].items() if "running" not in k}, strict=False)',
    ),
    "resume repeats the last step": Bug(
        "resume",
        "trainer/run/resume.py",
        '    _log.info("continuing after step %d", step)\n    return step\n',
        "    return step - 1\n",
    ),
    "resume forgets the queue": Bug(
        "resume",
        "trainer/run/resume.py",
        'load_state_dict(content["model"], strict=False)',
        'load_state_dict({k: v for k, v in content["model"].items() if k != "queue"}, strict=False)',
    ),
    "resume draws the orders of the first steps": Bug(
        "resume",
        "trainer/step.py",
        "            result = self.method.loss(outputs, step, images)\n",
        "            self.calls = getattr(self, 'calls', -1) + 1\n"
        "            result = self.method.loss(outputs, self.calls, images)\n",
    ),
}


def plant(bug: Bug | None, copy: Path) -> None:
    """Copy the program to a new folder, with the bug. Raises ValueError if the text to replace is not there exactly once."""
    for name in ("kernels", "trainer"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("configs", "demo_data"):
        (copy / name).symlink_to(ROOT / name)
    if bug is None:
        return
    path = copy / bug.file
    text = path.read_text()
    if text.count(bug.before) != 1:
        raise ValueError(f"{bug.file} holds the text {text.count(bug.before)} times: {bug.before!r}")
    path.write_text(text.replace(bug.before, bug.after))


def failed_checks(bug: Bug | None, groups: list[str]) -> list[dict[str, Any]]:
    """Return the failed checks of these groups, after checking that the exit code agrees."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        plant(bug, copy)
        out = Path(folder) / "certificate.json"
        env = os.environ | {"PYTHONPATH": str(copy), "XDG_CACHE_HOME": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "trainer", "verify", "--out", str(out), "--only", *groups]
        done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=300)
        if not out.exists():
            raise RuntimeError(done.stdout + done.stderr)
        checks = json.loads(out.read_text())["checks"]
    failed = [check for check in checks if check["result"] == "failed"]
    assert done.returncode == bool(failed), done.returncode
    return failed


def main() -> int:
    """Plant the bugs, print what fails for each, and return the number of bugs that survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only bugs with one of these words in their names")
    parser.add_argument("--all_groups", action="store_true", help="run the checks of all groups for each bug")
    options = parser.parse_args()
    chosen = {name: bug for name, bug in BUGS.items() if not options.only or any(word in name for word in options.only)}
    if not options.only:
        assert failed_checks(None, list(GROUPS)) == [], "checks fail without a bug"
    survivors = 0
    for name, bug in chosen.items():
        failed = failed_checks(bug, list(GROUPS) if options.all_groups else [bug.group])
        of_group = [check["name"] for check in failed if check["group"] == bug.group]
        survivors += not of_group
        found = f"{len(of_group)} checks, first: {of_group[0]}" if of_group else "SURVIVES"
        others = sorted({check["group"] for check in failed} - {bug.group})
        print(f"{bug.group:<10} {name}: {found}" + (f" (also {', '.join(others)})" if others else ""), flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} planted bugs are found")
    return survivors


if __name__ == "__main__":
    sys.exit(main())
