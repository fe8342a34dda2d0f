"""The tables of an update: what a split by dimensions gets wrong, and the iteration beside the
decomposition.
"""

import torch

from experiments import muon_race
from lessons import muon_update
from nblib.methods import muon
from nblib.methods.muon import audit, groups

SHAPE = dict(family="qwen3_moe", hidden=32, layers=2, heads=2, width=32, experts=4, top_k=2)


def test_every_tensor_is_counted_once_and_the_misplaced_are_stacks_embeddings_and_routers():
    model = muon_race.backbone(64, **SHAPE)
    rows = audit.audit(model, groups.optimizers(model))
    table = muon_update.by_reason(rows)
    assert sum(line["tensors"] for line in table) == len(rows) == len(list(model.parameters()))
    assert sum(line["entries"] for line in table) == sum(p.numel() for p in model.parameters())
    wrong = {
        line["reason"].split(":")[0]: line["tensors"]
        for line in table
        if line["in"] != line["by ndim == 2"]
    }
    assert wrong == {"embedding": 1, "stacked experts": 4, "router": 2}
    assert muon_update.misplaced(rows) == sum(wrong.values())


def test_the_last_layer_s_gradients_and_their_spectra():
    model = muon_race.backbone(64, **SHAPE)
    ids = torch.randint(64, (2, 16))
    model(input_ids=ids, labels=ids).loss.backward()
    gradients = muon_update.last_layer(model, 2)
    assert len(gradients) == 6 and all(
        ".1." in name and g.dtype == torch.float64 for name, g in gradients.items()
    )
    measured = {}
    for name, G in gradients.items():
        U, S, Vh = torch.linalg.svd(G, full_matrices=False)
        s = S / G.norm(dim=(-2, -1), keepdim=True).squeeze(-1)
        exact = U * muon.response(s)[..., None, :] @ Vh
        measured[name] = s.flatten(), muon.orthogonalise(G, dtype=torch.float64), exact
    table = muon_update.spectra(measured)
    assert max(row["error of ours"] for row in table) < 1e-9 and all(
        row["largest"] <= 1 for row in table
    )
    values = [s for s, _, _ in measured.values()]
    assert muon_update.in_band(values)
    assert muon_update.left_behind(values, muon_update.CUBIC) > muon_update.left_behind(
        values, muon.QUINTIC
    )
    assert "quintic" in muon_update.response(values).summary


def test_out_of_the_band_is_seen():
    assert muon_update.in_band([torch.tensor([0.5, 0.01, 0.001])])  # the last may be anywhere
    assert not muon_update.in_band([torch.tensor([1.4])])


def test_a_line_of_rates_has_the_smallest_and_the_largest_step():
    row = muon_update.rates(
        "some", dict(lr=0.02, adamw_lr=3e-3), [dict(ratio=0.2), dict(ratio=0.1)], ["a doubt"]
    )
    assert row["one step, of the weights"] == "10.00% to 20.00%" and row["doubtful"] == 1
