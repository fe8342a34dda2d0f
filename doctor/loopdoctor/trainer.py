"""The doctor for the Hugging Face Trainer: a callback that watches its first steps.

    trainer = Trainer(..., callbacks=[doctor.TrainerCallback()])

Footgun: the Trainer prints 0.0 for a loss that is NaN (`logging_nan_inf_filter`). The callback sees
the loss itself.
"""

import inspect

from loopdoctor.report import Report
from loopdoctor.watching import begin, end

# imported when somebody asks for the callback, see __init__.py: the rest of the package needs torch
# alone
try:
    from transformers import TrainerCallback as _Base
except ImportError:
    _Base = object


class TrainerCallback(_Base):
    """Watches the first `steps` steps of a Trainer; the findings are in `report` (see
    `doctor.watch` for the rest).
    """

    def __init__(self, *, steps: int = 10, teacher=None, say: bool = True, **declared):
        self.report, self.steps, self.say, self.declared = Report(), steps, say, declared
        self.teachers = (
            []
            if teacher is None
            else list(teacher)
            if isinstance(teacher, (list, tuple))
            else [teacher]
        )
        self.observer, self.undo = None, dict

    def on_train_begin(
        self, args, state, control, model=None, optimizer=None, processing_class=None, **kwargs
    ):
        self.close()
        self.report = self.report if not self.report.done else Report()
        optimizer = getattr(optimizer, "optimizer", optimizer)
        self.observer = begin(
            self.report,
            model,
            optimizers=[] if optimizer is None else [optimizer],
            teachers=self.teachers,
            steps=self.steps,
            say=self.say,
            **({"tokenizer": processing_class} | self.declared),
        )
        self._see_exceptions()

    def _see_exceptions(self) -> None:
        """Watch the Trainer's loop from the frame that called us, as one that raises ends no
        callback.
        """
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_name != "_inner_training_loop":
            frame = frame.f_back
        trainer = frame.f_locals.get("self") if frame is not None else None
        original = getattr(trainer, "training_step", None)
        if original is None:
            return
        mine = vars(trainer).get("training_step")

        def step(*args, **kwargs):
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                self.close(error)
                raise

        def back() -> None:
            if vars(trainer).get("training_step") is not step:
                return  # put back before
            if mine is not None:
                trainer.training_step = mine
            else:
                vars(trainer).pop("training_step", None)

        trainer.training_step = step
        # a watch that stays on has it until the end, any other until its steps are over
        self.undo = back
        if hasattr(self.observer, "at"):
            self.observer.at.undo.append(back)

    def on_train_end(self, args, state, control, **kwargs):
        self.close()

    def close(self, error: BaseException | None = None) -> Report:
        """End the watch; for a Trainer that raised, because it does not call `on_train_end`
        then.
        """
        self.undo()
        self.undo = dict
        if self.observer is not None:
            observer, self.observer = self.observer, None
            end(self.report, observer, error, say=self.say)
        return self.report
