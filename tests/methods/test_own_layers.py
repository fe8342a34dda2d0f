"""Students made of a teacher: its layers, and its vocabulary without the padding."""

import pytest
import torch
from conftest import FP32

from nblib import models, text, train
from nblib.methods.distill import own_layers
from nblib.methods.distill.objective import from_teacher


@pytest.fixture(params=["qwen3", "gpt2"])
def teacher(request):
    return models.as_teacher(
        models.tiny(256, family=request.param, hidden=32, layers=4, heads=2, seed=3)
    )


def test_a_student_of_layers_is_the_teacher_without_the_others(teacher):
    ids = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))
    whole = own_layers.from_layers(teacher, keep=range(4))
    with torch.no_grad():
        assert torch.equal(whole.eval()(ids).logits, teacher(ids).logits)
    keep = own_layers.every_other(teacher)
    student = own_layers.from_layers(teacher, keep=keep)
    control = own_layers.with_new_weights(student, seed=1)
    assert (
        keep == [0, 2]
        and student.config.num_hidden_layers == 2
        and teacher.config.num_hidden_layers == 4
    )
    assert student.training and all(p.requires_grad for p in student.parameters())
    assert not {p.data_ptr() for p in student.parameters()} & {
        p.data_ptr() for p in teacher.parameters()
    }
    shapes = [{n: p.shape for n, p in m.state_dict().items()} for m in (student, control)]
    assert shapes[0] == shapes[1]
    student.eval()
    with torch.no_grad():  # the KV cache goes by the layers' numbers
        told = student.generate(
            ids[:, :4], max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        grown = ids[:, :4]
        for _ in range(4):
            grown = torch.cat([grown, student(grown).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(told, grown)
    for wrong in ([], [4], [1, 0], [0, 0]):
        with pytest.raises(ValueError, match="keep = .*from 0 to 3"):
            own_layers.from_layers(teacher, keep=wrong)


def test_a_padded_teacher_teaches_once_its_padding_is_cut(stream):
    """And what is cut and padded again says the same of the words."""
    padded = models.as_teacher(models.tiny(272, hidden=32, layers=2, heads=2, seed=3))
    ids = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))
    student, batches = (
        models.tiny(256, hidden=32, layers=1, heads=2),
        text.Batches(stream, rows=2, length=32),
    )
    with pytest.raises(ValueError, match="256 tokens, the teacher 272"):
        from_teacher(padded)(student, next(batches))
    with torch.no_grad():
        before = padded(ids).logits[..., :256]
    cut = models.as_teacher(own_layers.fit_vocabulary(padded, 256, words=256))
    with torch.no_grad():
        torch.testing.assert_close(cut(ids).logits, before)
    options = dict(total=2, loss=from_teacher(cut), machine=FP32)
    train.fit(student, batches, train.adamw(student, lr=1e-3), **options)
    with torch.no_grad():
        learned = student.eval()(ids).logits
        own_layers.fit_vocabulary(student, 272, words=256)
        again = student(ids).logits
    assert again.shape[-1] == 272
    torch.testing.assert_close(again[..., :256], learned)
    with pytest.raises(ValueError, match="size = 255: the tokenizer has 256"):
        own_layers.fit_vocabulary(student, 255, words=256)
