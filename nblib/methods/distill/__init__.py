"""Knowledge distillation: a student learns from a teacher's probabilities. README.md has formula
and use.

objective        the loss: labels, teacher, hidden states, masked tokens, by weights
divergences      forward and reverse KL, Jensen-Shannon, from whole answers or from a cache
teacher_cache    a teacher's answers on disk: the largest, a sample of the rest, the mass of the
                 tail
temperature      a temperature that is learned, with the prior that it needs
on_policy        the student's own texts as training data
own_layers, pruned_width    students made of the teacher's layers, or of its widest units
alignment, feature_dynamics, loss_weights, uld, chat
"""

from nblib.methods.distill import (
    alignment,
    chat,
    divergences,
    feature_dynamics,
    loss_weights,
    objective,
    on_policy,
    own_layers,
    pruned_width,
    teacher_cache,
    temperature,
    uld,
)

__all__ = [
    "alignment",
    "chat",
    "divergences",
    "feature_dynamics",
    "loss_weights",
    "objective",
    "on_policy",
    "own_layers",
    "pruned_width",
    "teacher_cache",
    "temperature",
    "uld",
]
