"""Distances of hidden states against plain definitions in float64, and alignment while training."""

import itertools

import pytest
import torch
from conftest import FP32
from toy_distillation import ragged

from nblib import compiling, losses, models, text, train
from nblib.methods import goose
from nblib.methods.distill import alignment, feature_dynamics, objective
from nblib.methods.distill.alignment import Hidden
from nblib.methods.distill.feature_dynamics import Dynamics
from nblib.methods.distill.objective import from_teacher


@pytest.fixture
def teacher():
    return models.as_teacher(models.tiny(256, hidden=48, layers=4, heads=2, seed=9))


def _one(kind: str, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The distance of two vectors, written out."""
    if kind == "mse":
        return ((s - t) ** 2).sum() / len(s)
    if kind == "relative":
        return ((s - t) ** 2).sum() / (t @ t)
    if kind == "normalised":
        return ((s / s.norm() - t / t.norm()) ** 2).sum() / len(s)
    return 1 - (s @ t) / (s.norm() * t.norm())


@pytest.mark.parametrize("kind", list(objective.DISTANCES))
@pytest.mark.parametrize("weights", ["uniform", "progressive", "exponential", [0.0, 2.0, 6.0]])
def test_hidden_distillation_equals_the_definition(kind, weights):
    labels = ragged(3, 10)["labels"]
    student = [torch.randn(3, 10, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    teacher = [torch.randn(3, 10, 8, dtype=torch.float64) for _ in range(3)]
    share = {"uniform": [1, 1, 1], "progressive": [1, 2, 3], "exponential": [2, 4, 8]}.get(
        str(weights), weights
    )
    plain = sum(
        share[k] / sum(share) * _one(kind, student[k][b, t], teacher[k][b, t])
        for k, b, t in itertools.product(range(3), range(3), range(9))
        if labels[b, t + 1] != losses.IGNORED
    )
    numbers = alignment.layer_weights(weights, 3) if isinstance(weights, str) else weights
    ours = objective.hidden_distillation(student, teacher, labels, kind=kind, weights=numbers)
    torch.testing.assert_close(ours, plain)
    last = torch.autograd.grad(ours, student[2], retain_graph=True)[0]
    torch.testing.assert_close(last, torch.autograd.grad(plain, student[2])[0])
    # the last position predicts nothing
    assert last[:, -1].abs().max() == 0 and last[:, 0].abs().max() > 0


def test_normalised_is_cosine_over_half_the_width():
    s, t = torch.randn(5, 8), torch.randn(5, 8)
    torch.testing.assert_close(
        objective.DISTANCES["normalised"](s, t) * 4, objective.DISTANCES["cosine"](s, t)
    )


def test_hidden_alignment_is_the_distance_after_the_map_over_supervised_positions(tiny, teacher):
    ids = torch.randint(256, (3, 12))
    labels = ids.masked_fill(torch.rand(3, 12) < 0.4, losses.IGNORED)
    module = Hidden([(1, 2), (2, 4)], tiny, teacher, weight=0.5)
    states, wanted = (m(ids, output_hidden_states=True).hidden_states for m in (tiny, teacher))
    plain = 0.0
    for b in range(3):
        for t in range(11):
            if labels[b, t + 1] != losses.IGNORED:
                for linear, (s, of) in zip(module.maps, module.pairs):
                    plain = (
                        plain
                        + 0.25
                        * (linear.weight @ states[s][b, t] - wanted[of][b, t]).square().mean()
                    )
    torch.testing.assert_close(module(states, wanted, labels), plain)


@pytest.mark.parametrize("kind", ["hidden", "dynamics"])
@pytest.mark.parametrize("student", ["transformer", "goose"])
def test_alignment_trains_with_the_student_and_resumes_to_the_bit(
    stream, teacher, tmp_path, kind, student
):
    make = {"hidden": Hidden, "dynamics": Dynamics}[kind]

    def run(total, folder=None):
        made = {"transformer": models.tiny, "goose": goose.tiny}[student]
        model = made(256, hidden=32, layers=2, seed=3)
        torch.manual_seed(4)
        model.alignment = make([(1, 2)], model, teacher, weight=0.1)
        optimizer, batches = train.adamw(model, lr=3e-3), text.Batches(stream, rows=4, length=32)
        loss = from_teacher(teacher, 2.0, alignment=model.alignment)
        return model, train.fit(
            model,
            batches,
            optimizer,
            total=total,
            machine=FP32,
            loss=loss,
            checkpoints=train.Checkpoints(folder),
        )

    straight, records = run(12)
    # the goose begins without spikes to speak of, and its states are tiny
    if student == "transformer":
        assert records[-1]["alignment"] < records[0]["alignment"]
    run(9, tmp_path)
    resumed, again = run(12, tmp_path)
    assert [r["loss"] for r in again] == [r["loss"] for r in records]
    for a, b in zip(straight.parameters(), resumed.parameters()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_blocks_stay_one_graph_when_their_states_are_asked_for(
    tiny, teacher, batches, checkpointed
):
    ran = []

    def backend(graph, inputs):
        ran.append(0)

        def run(*args):
            ran[-1] += 1
            return graph(*args)

        return run

    torch._dynamo.reset()
    tiny.alignment = Hidden([(0, 1), (2, 4)], tiny, teacher)
    loss, batch = from_teacher(teacher, alignment=tiny.alignment), next(batches)
    plain = loss(tiny, batch)
    compiling.compile_blocks(tiny, backend=backend)
    if checkpointed:
        compiling.checkpoint_blocks(tiny)
    for _ in range(2):
        terms = loss(tiny, batch)
        sum(terms.values()).backward()
        torch.testing.assert_close(terms, plain)
    torch._dynamo.reset()
    assert ran == [2 * 2]  # two passes through two blocks, one graph for both


def test_what_cannot_be_aligned_is_refused(tiny, teacher, batches):
    with pytest.raises(ValueError, match="student layers from 0 to 2, teacher layers from 0 to 4"):
        Hidden([(3, 1)], tiny, teacher)
    with pytest.raises(ValueError, match="student layers from 0 to 1, teacher layers from 0 to 3"):
        # the write-up's third pair, which it skipped without a word
        Dynamics([(2, 1)], tiny, teacher)
    with pytest.raises(ValueError, match="kind = 'l1'"):
        Hidden([(1, 1)], tiny, teacher, kind="l1")
    with pytest.raises(ValueError, match="weight = 0"):
        Dynamics([(1, 1)], tiny, teacher, weight=0)
    with pytest.raises(ValueError, match="at least 4: got 3 and 3"):
        feature_dynamics.cka(torch.randn(3, 2), torch.randn(3, 2))
    with pytest.raises(ValueError, match="alignment: the Hidden is not attached"):
        from_teacher(teacher, alignment=Hidden([(1, 1)], tiny, teacher))(tiny, next(batches))
    states, labels = [torch.zeros(2, 32, 8)] * 3, torch.zeros(2, 32, dtype=torch.long)
    with pytest.raises(ValueError, match="kind = 'l1': allowed are mse, relative"):
        objective.hidden_distillation(states, states, labels, kind="l1")
    with pytest.raises(ValueError, match="student 3 of .*, teacher 2 of"):
        objective.hidden_distillation(states, states[:2], labels)
    with pytest.raises(ValueError, match="weights = 'linear': allowed are uniform"):
        alignment.layer_weights("linear", 2)
    with pytest.raises(ValueError, match=r"weights = \[1.0\]: allowed are 3 numbers"):
        objective.hidden_distillation(states, states, labels, weights=[1.0])
