"""One run of the HF Trainer on a small model: short, silent, without files, the caller's generators untouched.

The Trainer prints its log, its logger warns, it seeds the process. All three are kept from the page here; what was
said is returned with the trainer, because what a library says while it does the wrong thing belongs to the facts.
"""

import contextlib
import io
import logging
import tempfile
from collections.abc import Iterator

import transformers as tf

from lessons.pitfalls import bench


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """What would be printed or logged, kept for the facts."""
    heard, logger = io.StringIO(), logging.getLogger("transformers.trainer")
    handler, level = logging.StreamHandler(heard), tf.utils.logging.get_verbosity()
    root = logging.getLogger("transformers")
    kept, root.handlers = root.handlers, []
    tf.utils.logging.set_verbosity_warning()
    logger.addHandler(handler)
    try:
        with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
            yield heard
    finally:
        logger.removeHandler(handler)
        root.handlers = kept
        tf.utils.logging.set_verbosity(level)


def arguments(folder: str, **options) -> tf.TrainingArguments:
    plain = dict(
        output_dir=folder, use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, save_strategy="no", seed=0,
        per_device_train_batch_size=2, max_steps=1, learning_rate=1e-3, lr_scheduler_type="constant", max_grad_norm=1.0,
    )  # fmt: skip
    return tf.TrainingArguments(**(plain | options))


def train(kind: type, model, data, *, resume: str | None = None, folder: str | None = None, **options):
    """Train and return the trainer and its log lines, one per optimizer step. `trainer.heard` is what was said."""
    trainer_options = {k: options.pop(k) for k in ("make_optimizer", "callbacks") if k in options}
    with tempfile.TemporaryDirectory() as temporary, bench.seeded(), quiet() as heard:
        made = arguments(folder or temporary, **options)
        trainer = kind(model=model, args=made, train_dataset=data, **trainer_options)
        trainer.train(resume_from_checkpoint=resume)
    trainer.heard = heard.getvalue()
    return trainer, [line for line in trainer.state.log_history if "grad_norm" in line]
