"""Plain definitions in float64, from the papers, with loops: slow and obvious. Nothing here uses the checked code.

Shapes: d views, N images, M rows of a slice, k embedding size; v (d*N, k) is view-major.
"""

from __future__ import annotations

from itertools import combinations, permutations, product
from typing import Any

import torch
from torch import Tensor

from trainer.config.schema import OptimizerConfig

# --- the whitening and W-MSE: Ermolov et al., ICML 2021 ---


def whiten(rows: Tensor, whitening: str = "cholesky", eps: float = 0.0) -> Tensor:
    """Whiten the rows (M, k) of one slice by their own covariance, which has the divisor M - 1."""
    size = rows.shape[1]
    # torch.cov returns a 0-d tensor for one column.
    covariance = torch.cov(rows.T).reshape(size, size)
    identity = torch.eye(size, dtype=rows.dtype, device=rows.device)
    mean_variance = covariance.diagonal().mean()
    a = (1 - eps) * covariance + eps * mean_variance * identity
    if whitening == "cholesky":
        w = torch.linalg.inv(torch.linalg.cholesky(a))
    elif whitening == "zca":
        values, vectors = torch.linalg.eigh(a)
        w = vectors @ torch.diag(values**-0.5) @ vectors.T
    else:
        w = torch.diag(a.diagonal() ** -0.5)
    return (rows - rows.mean(0)) @ w.T


def wmse(
    v: Tensor,
    num_views: int,
    slice_size: int,
    orders: Tensor,
    *,
    whitening: str = "cholesky",
    eps: float = 0.0,
    normalize: bool = True,
) -> Tensor:
    """Compute the W-MSE loss. orders: (iterations, N), the order in which each iteration cuts the images into slices."""
    # Rows are view-major, so a chunk is a view.
    views = v.chunk(num_views)
    distances = []
    for order in orders:
        for images in order.split(slice_size):
            # Each view of the images is a slice of its own.
            whitened = [whiten(view[images], whitening, eps) for view in views]
            for z, other in combinations(whitened, 2):
                distances.append(_distance(z, other, normalize))
    return torch.stack(distances).mean()


def _distance(a: Tensor, b: Tensor, normalize: bool) -> Tensor:
    """Return the mean over rows of 2 - 2 cos, or the mean squared difference of all elements."""
    if normalize:
        cosine = (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))
        return (2 - 2 * cosine).mean()
    return ((a - b) ** 2).mean()


# --- the other methods ---


def contrastive(v: Tensor, num_views: int, temperature: float) -> Tensor:
    """Compute the contrastive loss (SimCLR): cross-entropy against all other rows of the two views of a pair."""
    unit = v / v.norm(dim=1, keepdim=True)
    views = unit.chunk(num_views)
    losses = []
    for a, b in permutations(views, 2):
        rows = torch.cat([a, b])  # (2*N, k)
        for image in range(len(a)):
            similarities = rows @ a[image] / temperature
            is_other = torch.arange(len(rows), device=v.device) != image
            positive = similarities[len(a) + image]
            losses.append(similarities[is_other].logsumexp(0) - positive)
    return torch.stack(losses).mean()


def regression(predictions: Tensor, targets: Tensor, num_views: int) -> Tensor:
    """Compute the loss of BYOL and SimSiam: over pairs of views, both distances 2 - 2 cos of a pair are added up."""
    p = predictions.chunk(num_views)
    t = targets.chunk(num_views)
    losses = []
    for a, b in combinations(range(num_views), 2):
        there = _distance(p[a], t[b], True)
        back = _distance(p[b], t[a], True)
        losses.append(there + back)
    return torch.stack(losses).mean()


def barlow_twins(v: Tensor, num_views: int, off_diagonal_weight: float, eps: float = 1e-5) -> Tensor:
    """Compute the loss of Barlow Twins. The columns are standardised as BatchNorm does it, with the divisor N."""
    standardised = []
    for view in v.chunk(num_views):
        variance = view.var(0, correction=0)
        deviation = (variance + eps).sqrt()
        standardised.append((view - view.mean(0)) / deviation)
    losses = []
    for a, b in combinations(standardised, 2):
        correlation = a.T @ b / len(a)
        # The sum of all elements of a matrix (k, k) is the loss of a pair of views.
        terms = []
        for i, row in enumerate(correlation):
            for j, value in enumerate(row):
                if i == j:
                    terms.append((1 - value) ** 2)
                else:
                    terms.append(off_diagonal_weight * value**2)
        losses.append(torch.stack(terms).sum())
    return torch.stack(losses).mean()


def vicreg(v: Tensor, num_views: int, eps: float = 1e-4) -> tuple[Tensor, Tensor, Tensor]:
    """Compute invariance, variance and covariance of VICReg before they are weighted."""
    views = v.chunk(num_views)
    distances = [((a - b) ** 2).mean() for a, b in combinations(views, 2)]
    spreads = []
    off_diagonals = []
    for view in views:
        deviation = (view.var(0) + eps).sqrt()
        spreads.append(torch.relu(1 - deviation).mean())
        covariance = torch.cov(view.T)
        off_diagonal = covariance - torch.diag(covariance.diagonal())
        off_diagonals.append((off_diagonal**2).sum() / view.shape[1])
    invariance = torch.stack(distances).mean()
    variance = torch.stack(spreads).mean()
    # The paper adds the terms of two views; the mean of several views is taken twice.
    return invariance, variance, 2 * torch.stack(off_diagonals).mean()


def swav(scores: Tensor, num_views: int, temperature: float, epsilon: float, iterations: int) -> Tensor:
    """Compute the swapped prediction of SwAV, with the Sinkhorn steps in the form that the authors published.

    scores: (d*N, P), similarities of the embeddings to P prototypes."""
    views = scores.chunk(num_views)
    targets = []
    for view in views:
        q = (view.detach() / epsilon).exp().T  # (P, N)
        num_prototypes, num_images = q.shape
        q = q / q.sum()
        # Every prototype and every image gets the same total weight.
        for _ in range(iterations):
            q = q / q.sum(1, keepdim=True) / num_prototypes
            q = q / q.sum(0, keepdim=True) / num_images
        targets.append((q * num_images).T)
    losses = []
    # Each view predicts the targets of every other one.
    for a, b in permutations(range(num_views), 2):
        log_prediction = torch.log_softmax(views[b] / temperature, dim=1)
        cross_entropy = -(targets[a] * log_prediction).sum(1)
        losses.append(cross_entropy.mean())
    return torch.stack(losses).mean()


def queue_contrast(queries: Tensor, keys: Tensor, queue: Tensor, temperature: float) -> Tensor:
    """Compute the loss of MoCo: cross-entropy of each query's key against the queue."""
    losses = []
    for query, key in zip(queries, keys, strict=True):
        # The key of the same image comes first.
        candidates = torch.cat([key[None], queue])
        similarities = candidates @ query / temperature
        losses.append(similarities.logsumexp(0) - similarities[0])
    return torch.stack(losses).mean()


def alignment(x: Tensor, y: Tensor) -> Tensor:
    """Compute the mean squared distance of the rows of x and y."""
    distances = [((a - b) ** 2).sum() for a, b in zip(x, y, strict=True)]
    return torch.stack(distances).mean()


def uniformity(x: Tensor, queue: Tensor, t: float) -> Tensor:
    """Compute the log of the mean of exp(-t distance^2), over all pairs of rows of x, and over x times the queue."""
    terms = []
    for a, b in (*combinations(x, 2), *product(x, queue)):
        squared_distance = ((a - b) ** 2).sum()
        terms.append((-t * squared_distance).exp())
    return torch.stack(terms).mean().log()


# --- optimizers ---


def updated(config: OptimizerConfig, w: Tensor, g: Tensor, state: dict[str, Any], rate: float) -> Tensor:
    """Return a tensor after one update by the definition of the optimizer. state: empty before the first update; changed."""
    if config.name in ("adam", "adamw"):
        return _updated_by_adam(config, w, g, state, rate)
    trust: Tensor | float = 1.0
    # LARC scales the gradient and the decay together, and every tensor.
    if config.name == "larc":
        norm_w = w.norm()
        norm_g = g.norm()
        if norm_w > 0 and norm_g > 0:
            trust = config.trust_coefficient * norm_w / (norm_g + config.weight_decay * norm_w + 1e-8)
            g = g + config.weight_decay * w
    elif config.name == "sgd" or w.ndim > 1:
        # LARS leaves biases and the weights of BatchNorm without decay and without trust ratio.
        g = g + config.weight_decay * w
        if config.name == "lars" and w.norm() > 0 and g.norm() > 0:
            trust = config.trust_coefficient * w.norm() / g.norm()
    # SimCLR's LARS applies the rate to what enters the buffer, the others apply it to the buffer.
    if config.name == "lars" and config.rate_in_momentum:
        state["v"] = config.momentum * state.get("v", 0) + rate * trust * g
        return w - state["v"]
    state["v"] = config.momentum * state.get("v", 0) + trust * g
    return w - rate * state["v"]


def _updated_by_adam(
    config: OptimizerConfig,
    w: Tensor,
    g: Tensor,
    state: dict[str, Any],
    rate: float,
) -> Tensor:
    """Return a tensor after one update of Adam, or of AdamW, whose weight decay does not enter the moments."""
    if config.name == "adam":
        g = g + config.weight_decay * w
    elif w.ndim > 1:
        w = w - rate * config.weight_decay * w
    t = state.get("t", 0) + 1
    m = 0.9 * state.get("m", 0) + 0.1 * g
    v = 0.999 * state.get("v", 0) + 0.001 * g**2
    state.update(t=t, m=m, v=v)
    # The moments begin at 0, which the divisions correct.
    mean = m / (1 - 0.9**t)
    root = (v / (1 - 0.999**t)).sqrt()
    return w - rate * mean / (root + 1e-8)
