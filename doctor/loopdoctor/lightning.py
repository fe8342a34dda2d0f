"""The doctor for Lightning: a callback that watches the first steps of `Trainer.fit`.

    trainer = lightning.Trainer(..., callbacks=[doctor.LightningCallback()])

Footgun: Lightning evaluates a little before it trains (`num_sanity_val_steps`); that is not
watched.
"""

import contextlib
import importlib
import sys
from typing import Any

from loopdoctor.report import Report
from loopdoctor.watching import begin, end


def _base() -> type:
    """Lightning's own Callback, of the package that the program has imported, else of one that is
    there.
    """
    packages = sorted(
        ("lightning.pytorch", "pytorch_lightning"), key=lambda name: name not in sys.modules
    )
    for name in packages:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name).Callback
    return object


class LightningCallback(_base()):
    """Watches the first `steps` steps of a fit; the findings are in `report` (see `doctor.watch`
    for the rest).
    """

    def __init__(self, *, steps: int = 10, teacher=None, say: bool = True, **declared):
        super().__init__()
        self.report, self.steps, self.say, self.declared = Report(), steps, say, declared
        self.teachers = (
            []
            if teacher is None
            else list(teacher)
            if isinstance(teacher, (list, tuple))
            else [teacher]
        )
        self.observer = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.close()
        self.report = self.report if not self.report.done else Report()
        self.observer = begin(
            self.report,
            pl_module,
            optimizers=[getattr(o, "optimizer", o) for o in trainer.optimizers],
            teachers=self.teachers,
            steps=self.steps,
            say=self.say,
            **self.declared,
        )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.close(exception)

    def close(self, error: BaseException | None = None) -> Report:
        """End the watch."""
        if self.observer is not None:
            observer, self.observer = self.observer, None
            end(self.report, observer, error, say=self.say)
        return self.report
