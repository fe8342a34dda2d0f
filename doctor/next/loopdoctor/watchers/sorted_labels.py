"""Batches that hold one class each, one after the other: the data lie sorted, and nobody shuffles them.

    DataLoader(ImageFolder(root), batch_size=32, shuffle=False)         all of the first folder, then all of the second

Labels that rise within each batch, and from each batch to the next, are told by no chance. Tasks of few examples sort
theirs as well, and begin anew in each step.

Footgun: who attacks a model asks for one class again and again. So a loader must have given the data.
"""

from loopdoctor.eye import Eye, Op, Watcher
from loopdoctor.fed import chain

ROWS, CLASSES, MANY = 8, 3, 0.5  # rows of a batch; classes of the answer; share of the classes that a batch may hold


class SortedLabels(Watcher):
    names = begins = {"cross_entropy", "nll_loss"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.last: int | None = None  # label of the batch before
        self.wrong = False  # some batch was not sorted
        self.steps = 0

    def saw(self, op: Op) -> None:
        if len(op.given) < 2 or self.wrong:
            return
        answer, labels = op.given[0], op.given[1].detach()
        if chain(answer.grad_fn, 4)[-4:].count("Cat"):
            return  # the positive's column beside those of its negatives: all labels are 0 by the method
        plain = labels.dim() == 1 and not labels.is_floating_point() and answer.dim() == 2 and answer.requires_grad
        if not plain or len(labels) < ROWS or answer.shape[1] < CLASSES:
            return
        rises = bool((labels[1:] >= labels[:-1]).all()) and len(labels.unique()) <= max(1, MANY * answer.shape[1])
        self.wrong = not rises or self.last is not None and int(labels[0]) < self.last
        self.last, self.steps = int(labels[-1]), self.steps + 1
        if self.wrong:
            self.e.habits["D27"].clear()  # the others were sorted by chance
        elif self.steps >= 2 and self.e.restarted:
            self.note("D27", (len(labels), len(labels.unique())))
