"""What the numbers of a log can show: L1 to L7. What its warnings name has the id of the check that
sees it live.

Each fault says also what a log cannot tell, and what does.

Footgun: `control.py` asks for these ids, so this file imports nothing that leads back to a report.
"""

from typing import NamedTuple

from loopdoctor.finding import ERROR, WARN

LIVE = "Run `loopdoctor train.py`"


class Fault(NamedTuple):
    """What the numbers of a log can show."""

    id: str
    name: str
    severity: str
    cause: str
    fix: str
    unseen: str  # what a log cannot tell


FAULTS = (
    Fault(
        "L1",
        "zero-loss-nan-norm",
        ERROR,
        "The loss is NaN and is printed as 0.0 (the Trainer's logging_nan_inf_filter), the "
        "gradients "
        "are NaN, and no step is made, or the weights are NaN by now.",
        "Set logging_nan_inf_filter=False to see the loss itself; in fp16 use bf16 instead; "
        "look for "
        "a batch whose labels are all -100.",
        "where the first NaN was made: an overflow in fp16, a batch without targets and "
        "weights that "
        "were NaN from the start leave the same lines. Nor can it tell whether gradient "
        "checkpointing cuts off the adapters as well: that makes no NaN, whatever the order of "
        "gradient_checkpointing_enable() and get_peft_model(); it ends in an error (element 0 of "
        f"tensors does not require grad) or in a gradient norm of 0. {LIVE}, which tells them "
        "apart: F5, F14 or N17 name the module or batch of the NaN, S10 the checkpointing.",
    ),
    Fault(
        "L2",
        "not-finite-from",
        ERROR,
        "From one step on the loss or the gradients are NaN or infinite; the weights are lost "
        "from there on.",
        "Go back to a checkpoint before that step, and watch the steps around it: "
        "doctor.watch(at=[step]).",
        "which batch or module made it, and whether the step itself or one that was not logged "
        "did.",
    ),
    Fault(
        "L3",
        "rate-zero",
        ERROR,
        "The learning rate is 0 in every entry, so nothing was learnt.",
        "Look at the schedule: warm-up longer than the run, a number of steps of 0, or steps "
        "that are all skipped.",
        "whether the rate that was logged is that of every group, and whether steps were "
        "skipped by a scaler.",
    ),
    Fault(
        "L4",
        "norm-exploding",
        WARN,
        "The gradient norm keeps growing, to a hundred times and more of what it was.",
        "Lower the rate or clip the gradients, and look for gradients that are not cleared (N1).",
        "which tensors grow, and whether the norm was taken before or after clipping.",
    ),
    Fault(
        "L5",
        "loss-never-falls",
        WARN,
        "The loss of the last quarter is not below that of the first by more than it wavers.",
        "Run the script under loopdoctor, and with --overfit: one batch must be learnt by heart.",
        "whether the model was trained before and has nothing left to learn, whether the rate was "
        "meant to be small, and which weights moved at all. Some losses need not fall (GANs, "
        "policy "
        "gradients).",
    ),
    Fault(
        "L6",
        "norm-zero",
        ERROR,
        "No gradient reaches the weights that the optimizer has.",
        'With gradient checkpointing use gradient_checkpointing_kwargs={"use_reentrant": '
        "False}, or "
        "model.enable_input_require_grads(); count the weights that may learn: "
        "sum(p.requires_grad for p in model.parameters()) must not be 0.",
        "which weights have no gradient and which have one of 0: reentrant checkpointing behind "
        "frozen inputs (S10), adapters that were frozen after they were attached (S1), both "
        "factors "
        "of the adapters at 0 (B3), an optimizer without parameters (S2) and rows without targets "
        f"(F14) leave the same lines. {LIVE}, which names one of them.",
    ),
    Fault(
        "L7",
        "out-of-memory",
        ERROR,
        "The memory of the device ended.",
        "Halve the batch and accumulate twice as often; use gradient checkpointing with "
        "use_reentrant=False; for a large vocabulary compute the loss in chunks.",
        "what filled it: weights, the optimizer's state, activations or logits. "
        f"{LIVE} with a smaller batch: N27 names graphs that are kept from step to step.",
    ),
)
