"""Muon against torch's, against float64 singular vectors, against mutants; in batches, in shards,
in the loop.
"""

import copy
import os
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from nblib import models, runtime, text, train
from nblib.methods import muon
from nblib.methods.muon import groups

SHAPES = ((64, 64), (64, 64), (128, 64), (32, 96), (5, 48, 32))


@pytest.fixture
def mixture():
    return models.tiny(256, family="qwen3_moe", hidden=32, layers=2, heads=2)


def with_gradients(shapes=SHAPES, seed=0):
    make = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape, generator=make)) for shape in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=make)
    return params


def slices(params):
    """Each matrix as a parameter of its own, gradients copied."""
    flat = []
    for p in params:
        for part, grad in zip([p] if p.ndim == 2 else p, [p.grad] if p.ndim == 2 else p.grad):
            flat.append(nn.Parameter(part.detach().clone()))
            flat[-1].grad = grad.clone()
    return flat


# ------------------------------------------------------------------------------------ the iteration


@pytest.mark.parametrize("shape", [(40, 40), (64, 24), (24, 64), (6, 40, 24)])
def test_singular_vectors_stay_and_singular_values_follow_the_curve(shape):
    G = torch.randn(shape, dtype=torch.float64)
    U, S, Vh = torch.linalg.svd(G, full_matrices=False)
    expected = (
        U * muon.response(S / G.norm(dim=(-2, -1), keepdim=True).squeeze(-1))[..., None, :] @ Vh
    )
    torch.testing.assert_close(
        muon.orthogonalise(G, dtype=torch.float64), expected, rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("dtype, slack", [(torch.float32, 1e-3), (torch.bfloat16, 0.06)])
@pytest.mark.parametrize("shape", [(64, 48), (5, 48, 96)])
def test_the_update_is_the_orthogonal_matrix_within_the_band(shape, dtype, slack):
    G = torch.randn(shape, dtype=torch.float64)
    U, _, Vh = torch.linalg.svd(G, full_matrices=False)
    inside = U.mT @ muon.orthogonalise(G, dtype=dtype).double() @ Vh.mT  # diagonal, in the band
    values = inside.diagonal(dim1=-2, dim2=-1)
    assert values.min() > muon.BAND[0] - slack and values.max() < muon.BAND[1] + slack
    assert (inside - torch.diag_embed(values)).abs().max() < slack


def test_the_band_is_that_of_the_curve():
    values = muon.response(torch.linspace(0.005, 1, 100_000, dtype=torch.float64))
    low, high = muon.BAND
    assert low < values.min() < low + 0.01 and high - 0.01 < values.max() < high


def test_one_matrix_and_a_stack_in_several_calls_are_the_same_products():
    G = torch.randn(3, 240, 500)
    together = muon.orthogonalise(G)
    assert muon.BATCH_ENTRIES["cpu"] // G[0].numel() == 2  # two calls, the second of one matrix
    for g, o in zip(G, together):
        torch.testing.assert_close(muon.orthogonalise(g), o, rtol=0, atol=0.02)


# ------------------------------------------------------------------------------------ the optimizer


@pytest.mark.parametrize("adjust", muon.ADJUST)
@pytest.mark.parametrize("nesterov", [True, False])
def test_matrices_and_each_expert_move_as_torch_moves_them(adjust, nesterov):
    params = with_gradients()
    flat = slices(params)
    options = dict(lr=0.02, weight_decay=0.1, nesterov=nesterov)
    ours = muon.Muon(params, adjust=adjust, compute="bf16", **options)
    theirs = torch.optim.Muon(flat, adjust_lr_fn=adjust, **options)
    for seed in range(4):
        for p, g in zip(params, with_gradients(seed=seed)):
            p.grad = g.grad
        for p, g in zip(flat, slices(params)):
            p.grad = g.grad
        ours.step(), theirs.step()
    for ours_now, theirs_now in zip(slices(params), flat):
        torch.testing.assert_close(ours_now.detach(), theirs_now.detach(), rtol=0, atol=1e-6)


def canonical(momentum, gradient):
    """m <- beta m + g and u = NS5(g + beta m) in float64, as it stands in the paper."""
    momentum = 0.95 * momentum + gradient
    return momentum, _newton_schulz(gradient + 0.95 * momentum)


def overwritten(momentum, gradient):
    """The mutant that keeps the orthogonalised matrix as its momentum."""
    momentum = _newton_schulz(0.95 * momentum + gradient)
    return momentum, momentum


def cubic(momentum, gradient):
    """The mutant with the cubic iteration, which five times is too few for."""
    momentum = 0.95 * momentum + gradient
    return momentum, _newton_schulz(gradient + 0.95 * momentum, (1.5, -0.5, 0.0))


def mistyped(momentum, gradient):
    momentum = 0.95 * momentum + gradient
    return momentum, _newton_schulz(gradient + 0.95 * momentum, (3.4445, -4.7750, 2.3015))


def added_after(momentum, gradient):
    """The mutant that adds the raw gradient to the orthogonal matrix."""
    momentum = 0.95 * momentum + gradient
    return momentum, gradient + 0.95 * _newton_schulz(momentum)


def flattened(momentum, gradient):
    """The mutant that takes a stack for one tall matrix."""
    momentum = 0.95 * momentum + gradient
    return momentum, _newton_schulz((gradient + 0.95 * momentum).flatten(0, -2)).view_as(gradient)


def _newton_schulz(G, coefficients=(3.4445, -4.7750, 2.0315)):
    a, b, c = coefficients
    X = G / G.norm(dim=(-2, -1), keepdim=True)
    for _ in range(5):
        A = X @ X.mT
        X = a * X + b * A @ X + c * A @ A @ X
    return X


def distance_from(rule, shape=(3, 24, 40), steps=6):
    """How far our weights are from a rule's after some steps, in units of the way they went."""
    p = nn.Parameter(torch.zeros(shape))
    optimizer = muon.Muon([p], lr=0.02, compute="fp32")
    momentum, expected = (
        torch.zeros(shape, dtype=torch.float64),
        torch.zeros(shape, dtype=torch.float64),
    )
    trend = torch.randn(shape)  # gradients that agree, of sizes that do not
    for step in range(steps):
        p.grad = (trend + 0.5 * torch.randn(shape)) * 10.0 ** -(step % 3)
        momentum, update = rule(momentum, p.grad.double())
        expected -= 0.02 * update
        optimizer.step()
    return float((p.detach() - expected).norm() / expected.norm())


def test_canonical_and_no_mutant():
    assert distance_from(canonical) < 1e-4
    for mutant in (overwritten, cubic, mistyped, added_after, flattened):
        assert distance_from(mutant) > 1e-2, mutant.__name__


def test_halves_are_two_maps():
    (p,) = with_gradients([(3, 64, 32)])
    two = slices([p])
    apart = [nn.Parameter(half.detach().clone()) for q in two for half in q.split(32)]
    for half, grad in zip(apart, [g for q in two for g in q.grad.split(32)]):
        half.grad = grad.clone()
    muon.Muon([p], lr=0.02, halves=True, compute="bf16").step()
    torch.optim.Muon(apart, lr=0.02, weight_decay=0.0).step()
    torch.testing.assert_close(
        p.detach().view(6, 32, 32), torch.stack([q.detach() for q in apart]), rtol=0, atol=1e-6
    )


def test_stored_the_other_way_round_the_scale_is_that_of_the_map():
    (p,) = with_gradients([(96, 32)])
    q = nn.Parameter(p.detach().T.clone())
    q.grad = p.grad.T.clone()
    before = p.detach().clone()
    muon.Muon([p], lr=0.02).step()
    muon.Muon([q], lr=0.02, transposed=True).step()
    assert torch.allclose(p.detach(), q.detach().T, atol=1e-6) and not torch.equal(
        p.detach(), before
    )


def test_an_expert_without_a_token_rests_and_the_others_move_as_ever():
    params, twin = with_gradients([(4, 32, 32)]), with_gradients([(4, 32, 32)])
    ours = [muon.Muon(each, lr=0.02, weight_decay=0.1) for each in (params, twin)]
    for optimizer in ours:
        optimizer.step()
    before, buffer = params[0].detach().clone(), ours[0].state[params[0]]["momentum_buffer"].clone()
    params[0].grad[2] = 0
    for optimizer in ours:
        optimizer.step()
    moved = (params[0].detach() != before).flatten(1).any(1)
    assert moved.tolist() == [True, True, False, True]
    assert torch.equal(ours[0].state[params[0]]["momentum_buffer"][2], buffer[2])
    others = [0, 1, 3]
    assert torch.equal(params[0].detach()[others], twin[0].detach()[others])


def test_torch_walks_on_at_full_size_where_the_gradient_is_zero():
    """The reason for the rule above."""
    (p,) = with_gradients([(32, 32)])
    optimizer, sizes = torch.optim.Muon([p], lr=0.02, weight_decay=0.0), []
    for _ in range(50):
        before = p.detach().clone()
        optimizer.step()
        sizes.append(float((p.detach() - before).norm()))
        p.grad = torch.zeros_like(p)
    assert sizes[-1] > 0.9 * sizes[0]


@pytest.mark.parametrize(
    "wrong", [dict(lr=-1.0), dict(momentum=1.0), dict(adjust="rms"), dict(compute="fp16")]
)
def test_options_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        muon.Muon(with_gradients(), **wrong)


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"shape \(4,\)"):
        muon.Muon([nn.Parameter(torch.zeros(4))])
    with pytest.raises(ValueError, match="only matrices"):
        muon.orthogonalise(torch.zeros(4))


def one_after_another_over_batched(shape=(100, 64, 64), rounds=5, device="cpu"):
    """Time of torch's Muon on equal matrices over that of one batched call, in the same
    precision.
    """
    flat = [
        [nn.Parameter(p.detach().to(device)) for p in slices(with_gradients([shape]))]
        for _ in range(2)
    ]
    for p in (p for params in flat for p in params):
        p.grad = torch.randn_like(p)
    ours, theirs = muon.Muon(flat[0], compute="bf16"), torch.optim.Muon(flat[1], weight_decay=0.0)
    spent = {}
    for optimizer in (theirs, ours) * rounds:
        started = time.perf_counter()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        spent.setdefault(optimizer is ours, []).append(time.perf_counter() - started)
    return min(spent[False]) / min(spent[True])


def one_by_one_over_batched(shape=(100, 64, 64), rounds=5):
    """The same with ours in both places and in fp32, where a chip has no bf16 and torch's would
    emulate it.
    """
    flat = [slices(with_gradients([shape])) for _ in range(2)]
    sides = [[muon.Muon([p]) for p in flat[0]], [muon.Muon(flat[1])]]
    spent = [[], []]
    for side in (0, 1) * rounds:
        started = time.perf_counter()
        for optimizer in sides[side]:
            optimizer.step()
        spent[side].append(time.perf_counter() - started)
    return min(spent[0]) / min(spent[1])


def test_a_hundred_matrices_at_once_are_not_slower():
    native = runtime.native_precision("cpu")[0] == "bf16"
    ratio = one_after_another_over_batched() if native else one_by_one_over_batched()
    print(f"torch.optim.Muon over one batched call: {ratio:.1f}")
    assert ratio > 1.2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_hundred_matrices_at_once_are_three_times_as_fast_on_a_card():
    assert one_after_another_over_batched((100, 256, 256), device="cuda") > 3


# -------------------------------------------------------------------------------------- in the loop


def trained(model, stream, machine, *, rows=4, accumulate=1, total=6, folder=None, **options):
    batches = text.Batches(stream, rows=rows, length=32)
    made = groups.optimizers(model, weight_decay=0.1)
    options |= dict(
        total=total, accumulate=accumulate, machine=machine, schedule=train.cosine(6, warmup=2)
    )
    return train.fit(model, batches, made, checkpoints=train.Checkpoints(folder), **options)


def test_resume_is_the_straight_run(mixture, stream, machine, tmp_path):
    resumed = copy.deepcopy(mixture)
    straight = trained(mixture, stream, machine)
    trained(resumed, stream, machine, total=3, folder=tmp_path)
    with torch.no_grad():
        for p in resumed.parameters():
            p.zero_()  # all of it comes from the checkpoint
    second = trained(resumed, stream, machine, folder=tmp_path)
    assert [r["loss"] for r in straight] == [r["loss"] for r in second]
    for (name, p), q in zip(mixture.named_parameters(), resumed.parameters()):
        assert torch.equal(p, q), name


def test_two_micro_batches_are_one_batch(mixture, stream, machine):
    other = copy.deepcopy(mixture)
    whole = trained(mixture, stream, machine, rows=8, accumulate=1, total=3)
    halves = trained(other, stream, machine, rows=4, accumulate=2, total=3)
    assert [r["loss"] for r in whole] == pytest.approx([r["loss"] for r in halves], rel=2e-4)


def test_with_a_loss_scaler_too(mixture, stream):
    fp16 = runtime.Machine(torch.device("cpu"), "fp16", "with a scaler")
    records = trained(mixture, stream, fp16, total=6)
    assert records[-1]["loss"] < records[0]["loss"] and "loss_scale" in records[0]


SHARDS = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from nblib.methods import muon

class Maps(nn.Module):
    def __init__(self):
        super().__init__()
        make = torch.Generator().manual_seed(0)
        shapes = {"matrix": (33, 24), "other": (33, 24), "stack": (3, 24, 16), "one": (1, 16, 24), "four": (4, 16, 24)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=make)))
    def forward(self, x):
        return x

def step(model, gradients, sharded):
    optimizer = muon.Muon(model.parameters(), lr=0.02, weight_decay=0.1)
    for given in gradients:
        for p, g in zip(model.parameters(), given):
            p.grad = distribute_tensor(g, p.device_mesh, p.placements) if sharded else g.clone()
        optimizer.step()
    return optimizer

def work(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    alone, shared = Maps(), Maps()
    fully_shard(shared, mesh=init_device_mesh("cpu", (2,)))
    make = torch.Generator().manual_seed(1)
    gradients = [[torch.randn(p.shape, generator=make) for p in alone.parameters()] for _ in range(3)]
    gradients[1][2][0] = 0  # an expert without tokens
    step(alone, gradients, False)
    optimizer = step(shared, gradients, True)
    for (name, p), q in zip(shared.named_parameters(), alone.parameters()):
        assert torch.equal(p.full_tensor(), q), (name, (p.full_tensor() - q).abs().max())
        assert optimizer.state[p]["momentum_buffer"].placements == p.placements
    per_shard = torch.cat([muon.orthogonalise(part) for part in gradients[0][0].chunk(2)])
    assert (per_shard - muon.orthogonalise(gradients[0][0])).norm() > 0.1 * per_shard.norm()
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), nprocs=2)
"""


@pytest.mark.slow
def test_sharded_over_two_processes_it_is_the_update_of_the_whole_matrix(tmp_path):
    script = tmp_path / "work.py"
    script.write_text(SHARDS)
    done = subprocess.run(
        [sys.executable, script, tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
