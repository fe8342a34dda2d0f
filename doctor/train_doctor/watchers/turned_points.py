"""Clouds of points that were turned, and directions at each point that were not: normals.

    points = points @ rotation.transpose(1, 2)              (B, N, 3)
    loss = (1 - (model(points) * normals).sum(-1)).mean()           of the cloud as it was

A product with a matrix whose rows are of length 1 and at right angles turns a cloud. It is followed to a first layer,
and targets with a direction for each of its points must have gone through such a product as well.

Footgun: three numbers of a point may be its colour, or its place in the upright object, which no turn changes.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, TIMES

PRODUCTS = {"matmul", "__matmul__", "bmm", "einsum", "mm", "linear"}
LAYERS = {"linear", "conv1d", "conv2d"}
LOSSES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "cosine_similarity"}
POINTS, NEAR = 8, 1e-3  # least of a cloud; of a right angle


class TurnedPoints(Watcher):
    """What is known of a tensor that was turned, or made of such: the cloud before it was."""

    begins = PRODUCTS | LOSSES | MINUS | TIMES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.clouds: list[tuple[tuple, Tensor]] = []  # shape of turned ones that a layer was given, and before

    def saw(self, op: Op) -> None:
        before = next((f for f in map(self.known.get, op.given) if f is not None), None)
        if before is None and op.name in PRODUCTS:
            before = _turned(op)
        if before is not None:
            if op.name in LAYERS and op.given[0].shape[:2] == before.shape[:2] or op.name == "conv1d":
                self.clouds.append((tuple(before.shape), before))
            for r in op.results:
                if not r.requires_grad:
                    self.known.put(r, before)
            return
        if self.clouds and len(op.given) == 2 and (op.name in LOSSES or op.name in MINUS | TIMES):
            one, two = op.given
            if one.requires_grad != two.requires_grad and one.shape == two.shape:
                target = two if one.requires_grad else one
                for shape, cloud in self.clouds:
                    if tuple(target.shape) == shape and not torch.equal(target, cloud) and _directions(target):
                        self.note("D43", shape)

    def backward(self, loss: Tensor) -> None:
        self.clouds = []

    def close(self) -> None:
        self.known.by_id.clear()
        self.clouds = []


def _directions(target: Tensor) -> bool:
    """Whether all are of length 1, as directions are; colours and places are not."""
    return bool(((target.detach().float().norm(dim=-1) - 1).abs() < NEAR).all())


def _turned(op: Op) -> Tensor | None:
    """A cloud that a rotation is multiplied with."""
    if len(op.given) != 2 or any(t.requires_grad or not t.is_floating_point() for t in op.given):
        return None
    one, two = op.given
    for cloud, by in ((one, two), (two, one)):
        if by.shape[-2:] == (3, 3) and cloud.dim() == 3 and cloud.shape[2] == 3 and cloud.shape[1] >= POINTS:
            square = by.float() @ by.float().transpose(-1, -2)
            eye = torch.eye(3, device=by.device)
            if bool(((square - eye).abs() < NEAR).all()) and not bool(((by - eye).abs() < NEAR).all()):
                return cloud
    return None
