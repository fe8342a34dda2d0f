"""The doctor for the Hugging Face Trainer: a callback that watches its first steps.

    trainer = Trainer(..., callbacks=[doctor.TrainerCallback()])

Footgun: the Trainer prints 0.0 for a loss that is NaN (`logging_nan_inf_filter`). The callback sees the loss itself.
"""

from nblib.doctor.finding import Report
from nblib.doctor.watching import begin, end

try:
    from transformers import TrainerCallback as _Base
except ImportError:  # the package works without transformers; only this callback needs it
    _Base = object


class TrainerCallback(_Base):
    """Watches the first `steps` steps of a Trainer; the findings are in `report` (see `doctor.watch` for the rest)."""

    def __init__(self, *, steps: int = 10, teacher=None, say: bool = True, **declared):
        self.report, self.steps, self.say, self.declared = Report(), steps, say, declared
        self.teachers = [] if teacher is None else list(teacher) if isinstance(teacher, (list, tuple)) else [teacher]
        self.observer = None

    def on_train_begin(self, args, state, control, model=None, optimizer=None, processing_class=None, **kwargs):
        optimizer = getattr(optimizer, "optimizer", optimizer)
        declared = {"tokenizer": processing_class, "untied": False, "from_scratch": False, "orig_vocab": None}
        self.observer = begin(
            self.report,
            model,
            optimizers=[] if optimizer is None else [optimizer],
            teachers=self.teachers,
            steps=self.steps,
            say=self.say,
            **(declared | self.declared),
        )

    def on_train_end(self, args, state, control, **kwargs):
        self.close()

    def close(self, error: BaseException | None = None) -> Report:
        """End the watch; for a Trainer that raised, because it does not call `on_train_end` then."""
        if self.observer is not None:
            end(self.report, self.observer, error, say=self.say)
        return self.report
