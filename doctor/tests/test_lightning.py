"""The callback for Lightning, called as its Trainer calls callbacks; the real one is tried where it
is installed.
"""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import loopdoctor as doctor


def fit(callback, model, optimizer, fails: bool = False):
    """The loop of `Trainer.fit`, with the calls that it makes of a callback."""
    trainer = SimpleNamespace(optimizers=[SimpleNamespace(optimizer=optimizer)])
    try:
        callback.on_train_start(trainer, model)
        for number in range(6):
            if fails and number == 3:
                raise RuntimeError("on purpose")
            x = torch.randn(16, 8)

            def closure(x=x):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), x)
                loss.backward()
                return loss

            optimizer.step(closure)
        callback.on_train_end(trainer, model)
    except BaseException as error:
        callback.on_exception(trainer, model, error)
        raise


def test_a_fit_is_seen():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    callback = doctor.LightningCallback(say=False, steps=4, severity={"N5": "note"})
    fit(callback, model, torch.optim.Adam(model.parameters(), 1e-3))
    assert callback.report.done and callback.report.rounds == 4 and not callback.report.faults
    assert not callback.report.errors and callback.observer is None
    first = callback.report
    fit(callback, model, torch.optim.SGD(model.parameters(), 0.0))
    assert callback.report is not first and callback.report.root.check == "N11"


def test_a_fit_that_raises_leaves_nothing_behind():
    backward, model = torch.autograd.backward, torch.nn.Linear(8, 8)
    callback = doctor.LightningCallback(say=False)
    with pytest.raises(RuntimeError):
        fit(callback, model, torch.optim.Adam(model.parameters(), 1e-3), fails=True)
    assert callback.report.done and "on purpose" in str(callback.report.exception)
    assert torch.autograd.backward is backward


@pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="Lightning is not installed"
)
def test_lightning_itself():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Linear(8, 8)

        def training_step(self, batch):
            return F.mse_loss(self.body(batch[0]), batch[0])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.0)

    callback = doctor.LightningCallback(say=False, steps=4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 8)), 8)
    options = dict(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    lightning.Trainer(
        accelerator="cpu", callbacks=[callback], enable_model_summary=False, **options
    ).fit(Module(), loader)
    assert callback.report.rounds == 4 and callback.report.root.check == "N11", str(callback.report)
