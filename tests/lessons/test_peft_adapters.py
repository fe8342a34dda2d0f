"""AdaLoRA and MonteCLoRA in our loop: what peft does in its own way, and that they train."""

import pytest
import torch
from conftest import FP32

from lessons import peft_adapters, resume
from nblib import losses, models, text, train, wiring
from nblib.methods.ard import uncertainty

SHAPE = dict(rank=4, alpha=8, kinds=("q_proj", "v_proj"))


def _model():
    torch.manual_seed(0)
    return models.tiny(256, hidden=64, layers=2)


def _batch(rows: int = 4, length: int = 16) -> dict:
    ids = torch.randint(3, 256, (rows, length), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids}


def test_the_loss_of_adalora_is_the_one_peft_computes_for_itself():
    model, batch = peft_adapters.adalora(_model(), keep=2, steps=12, **SHAPE), _batch()
    for p in wiring.trainable(model).values():
        torch.nn.init.normal_(p, std=0.3)
    theirs = model(**batch, use_cache=False).loss  # a mean over tokens, with its penalty
    ours = peft_adapters.adalora_loss(model, batch)
    assert float(sum(ours.values()) / losses.supervised(batch["labels"])) == pytest.approx(
        float(theirs), rel=1e-5
    )
    assert float(ours["orthogonality"]) > 0.01 * float(ours["ce"])


def test_adalora_ends_with_the_ranks_it_may_keep_and_learns():
    model, batch = peft_adapters.adalora(_model(), keep=2, steps=18, **SHAPE), _batch()
    optimizer = peft_adapters.allocate(model, train.adamw(model, lr=3e-2, weight_decay=0.0))
    left = []

    def loss(model, batch):
        left.append(peft_adapters.ranks_left(model))
        return peft_adapters.adalora_loss(model, batch)

    records = train.fit(
        model, iter([batch] * 18), optimizer, total=18, loss=loss, machine=FP32, clip=0
    )
    assert left[1] == 16 and peft_adapters.ranks_left(model) == left[-1] == 8
    assert records[-1]["ce"] < records[0]["ce"] - 0.1


def test_adalora_resumes_while_it_chooses_its_ranks_and_after(tmp_path):
    def trained(name: str, *stops: int):
        for steps in (*stops, 0):  # stopped after so many, and at last not
            model = peft_adapters.adalora(_model(), keep=2, steps=18, **SHAPE)
            optimizer = peft_adapters.allocate(model, train.adamw(model, lr=3e-2, weight_decay=0.0))
            batches = text.Batches(torch.arange(4000) ** 2 % 251, rows=2, length=16)
            options = dict(
                checkpoints=train.Checkpoints(tmp_path / name),
                watch=train.Watch(controls=resume.StopAfter(steps) if steps else None),
                clip=0,
            )
            train.fit(
                model,
                batches,
                optimizer,
                total=18,
                loss=peft_adapters.adalora_loss,
                machine=FP32,
                **options,
            )
        return model.state_dict()

    straight, resumed = trained("straight"), trained("resumed", 5, 7)  # ranks go from step 4 to 9
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_monteclora_trains_its_noise_and_draws_only_when_asked():
    model, batch = peft_adapters.monteclora(_model(), sample_scaler=1.0, **SHAPE), _batch()
    expected = {name for name, _ in model.named_parameters() if "lora_" in name}
    found = wiring.canary(
        model,
        lambda: sum(peft_adapters.monteclora_loss(model, batch).values()) / 60,
        expect=expected,
    )
    assert found.alive, found.sentence
    adamw = train.adamw(model, lr=1e-2, weight_decay=0.0)
    train.fit(
        model, iter([batch] * 4), adamw, total=4, loss=peft_adapters.monteclora_loss, machine=FP32
    )
    model.eval()
    ids = batch["input_ids"]
    with torch.no_grad():
        still = torch.equal(model(ids).logits, model(ids).logits)
        with peft_adapters.drawing(model):
            moving = not torch.equal(model(ids).logits, model(ids).logits)
    assert still and moving and not model.training
    point = uncertainty.measure(model, [batch])
    assert (
        uncertainty.measure(model, [batch], samples=2, sampling=peft_adapters.drawing)["nll"]
        != point["nll"]
    )


def test_misuse_is_named():
    with pytest.raises(ValueError, match="keep = 5: allowed are 1 to 4"):
        peft_adapters.adalora(_model(), keep=5, steps=12, **SHAPE)
    with pytest.raises(ValueError, match="steps = 3: at least 6"):
        peft_adapters.adalora(_model(), keep=2, steps=3, **SHAPE)
