"""A watch that stays on: windows of a few steps, at=[0, 500] or every=1000, and next to nothing
between them.

Between two windows one hook counts the steps of optimizers, and nothing else is attached: no hook
on a module, no replaced function. A window is a watch of its own. Its findings join those of the
earlier ones, and each says in which steps it was seen first.

Footguns: steps are counted by the optimizer that steps most often, so a loop without an optimizer
of torch has its first window and no later one. torch walks through its hooks after a step while
this one opens a window, and must find as many as before: so the window's own hook after steps is
called from here and never registered.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import optimizer as torch_optimizer

from loopdoctor import causes
from loopdoctor.report import Report

KEPT = 16  # windows whose reports are kept: the first, and the last ones
RECENT = 64  # steps of any optimizer within which one has stepped that a new window is told of


class Windows:
    """Opens a window at each of its steps.

    `opened(report, hold)` begins a watch, `closed` ends it.
    """

    def __init__(
        self,
        report: Report,
        at: Sequence[int],
        every: int | None,
        opened: Callable,
        closed: Callable,
    ):
        self.report, self.opened, self.closed = report, opened, closed
        self.starts, self.every = sorted(set(at)), every
        self.steps: dict[int, int] = {}  # id of an optimizer -> how often it has stepped
        # optimizers, in the order of their steps
        self.recent: deque[weakref.ref] = deque(maxlen=RECENT)
        self.step = 0  # the most of these
        self.start = self._next(-1)
        self.after: Callable | None = None  # the open window's own hook after a step
        self.window: Any = None  # observer of the open window
        self.remove = torch_optimizer.register_optimizer_step_post_hook(self._stepped).remove
        if self.start == 0:
            self._open()

    def hold(self, after: Callable) -> Callable[[], None]:
        """Call this after each step of an optimizer until what is returned is called."""
        self.after = after
        return self._let_go

    def end(self, error: BaseException | None) -> None:
        """Leave the block."""
        self.remove()
        if self.window is not None:
            self.closed(self.part, self.window, error)
        self.report.done = True

    def _let_go(self) -> None:
        self.after = None

    def _next(self, step: int) -> int | None:
        """Return the first step after this one at which a window opens."""
        later = [s for s in self.starts if s > step]
        later += [(step // self.every + 1) * self.every] if self.every else []
        return min(later, default=None)

    def _stepped(self, optimizer, args, kwargs) -> None:
        if self.after is not None:
            self.after(optimizer, args, kwargs)
        self.recent.append(weakref.ref(optimizer))
        count = self.steps[id(optimizer)] = self.steps.get(id(optimizer), 0) + 1
        if count > self.step:
            self.step = count
            if count == self.start:
                self._open()

    def _open(self) -> None:
        begins, self.start = self.start, self._next(self.start)
        if self.window is None:  # one that is still open goes on
            self.part = Report()
            self.part.first, self.part.when_done = begins, self._done
            known = {id(o): o for ref in self.recent if (o := ref()) is not None}
            self.window = self.opened(self.part, self.hold, list(known.values()))

    def _done(self) -> None:
        """End a window: its report joins the rest."""
        self.window, part, report = None, self.part, self.report
        if not part.rounds and report.windows:
            return  # the run ended as it opened
        report.windows = [*report.windows[:1], *report.windows[1:][-KEPT + 2 :], part]
        known = {f.check for f in report.findings} | {f.check for f, _ in report.ignored}
        where = f"steps {part.first + 1} to {part.first + part.rounds}: "
        fresh = [
            f._replace(observed=where + f.observed) for f in part.findings if f.check not in known
        ]
        report.findings = causes.order([f._replace(because="") for f in (*report.findings, *fresh)])
        report.ignored += [
            (f._replace(observed=where + f.observed), why)
            for f, why in part.ignored
            if f.check not in known
        ]
        found = {f.check for f in report.findings} | {f.check for f, _ in report.ignored}
        report.verdicts = {check: v for check, v in part.verdicts.items() if check not in found}
        report.rounds, report.calls = report.rounds + part.rounds, report.calls + part.calls
        report.stepped |= part.stepped
        report.faults = (report.faults + part.faults)[-KEPT:]
        report.record, report.exception, report.done = part.record, part.exception, True
        self.closed(self.report, None, None, fresh=bool(fresh))
        if self.start is None:
            report.when_done()
