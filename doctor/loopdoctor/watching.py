"""The two ways in: `watch` stands around a loop, `preflight` makes a few steps from a function that
returns the loss.

Footgun: the report of a watch fills when its steps are over or the block is left. Inside the block
`report.findings` is empty until then, which is not the same as healthy: ask `report.done`.

The parts that look at a loop and judge it are imported when a watch begins and when it ends:
together they take longer than the rest of this package.
"""

import copy
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from loopdoctor.control import ControlError, control
from loopdoctor.draws import generators, restore
from loopdoctor.finding import NOTE
from loopdoctor.report import Report

if TYPE_CHECKING:
    from loopdoctor.observe import Observer
    from loopdoctor.windows import Windows

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
# see `watch`
DECLARED = {"tokenizer": None, "untied": False, "from_scratch": False, "orig_vocab": None}
Models = nn.Module | Sequence[nn.Module] | None


@contextmanager
def watch(
    model: nn.Module | None = None,
    *,
    optimizer: Optimizers = None,
    teacher: Models = None,
    steps: int = 10,
    say: bool = True,
    tokenizer=None,
    untied: bool = False,
    from_scratch: bool = False,
    orig_vocab: int | None = None,
    ignore: Mapping[str, str] | None = None,
    severity: Mapping[str, str] | None = None,
    at: Sequence[int] = (),
    every: int | None = None,
) -> Iterator[Report]:
    """Watch the first `steps` training steps of the loop inside the block, or windows of as many.

    model: what is trained; found by itself when not given
    optimizer, teacher: one or several; found by themselves, but naming the teacher lets its absence
    be noticed say: print the report when the watched steps are over and something was found
    tokenizer: for the ids of its special tokens; the model's config is asked otherwise untied: the
    embedding and the head are apart on purpose, whatever the config says from_scratch: the model is
    untrained, so that its first loss must be near ln(vocabulary) orig_vocab: size of the vocabulary
    before tokens were added ignore: ids of checks, each with a reason: what they find decides
    nothing and is listed at the end of the report severity: ids of checks, each with "error",
    "warn" or "note"; both may stand in pyproject.toml, see control.py at, every: steps at which a
    window opens, for a watch that stays on: at=[0, 500], every=1000; see windows.py
    """
    report = Report()
    observer = begin(
        report,
        model,
        optimizers=_several("optimizer", optimizer, torch.optim.Optimizer),
        teachers=_several("teacher", teacher, nn.Module),
        steps=steps,
        say=say,
        tokenizer=tokenizer,
        untied=untied,
        from_scratch=from_scratch,
        orig_vocab=orig_vocab,
        ignore=ignore,
        severity=severity,
        at=at,
        every=every,
    )
    try:
        yield report
    except BaseException as error:
        end(report, observer, error, say=say)
        raise
    end(report, observer, None, say=say)


def begin(
    report: Report,
    model,
    *,
    optimizers,
    teachers,
    steps: int,
    say: bool,
    ignore=None,
    severity=None,
    at: Sequence[int] = (),
    every: int | None = None,
    **declared,
) -> "Observer | Windows":
    """Start to observe; for code that cannot be a block (callbacks).

    What is returned is given to `end`.
    """
    report.control = control(ignore, severity)
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model = {type(model).__name__}: must be a torch.nn.Module or None")
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps = {steps!r}: must be a whole number of at least 1")
    if wrong := sorted(set(declared) - set(DECLARED)):
        allowed = ", ".join([*DECLARED, "ignore", "severity"])
        raise TypeError(
            f"{wrong[0]} = {declared[wrong[0]]!r}: no such option; allowed are {allowed}"
        )

    from loopdoctor.observe import Observer
    from loopdoctor.windows import Windows

    def opened(
        part: Report, hold: Callable | None = None, known: Sequence[torch.optim.Optimizer] = ()
    ) -> Observer:
        made: list[Observer] = []
        late = part.first > 0
        observer = Observer(
            model,
            list({id(o): o for o in (*optimizers, *known)}.values()),
            teachers,
            steps,
            full=lambda: (
                end(part, made[0], None, say=say and part is report, on=part is report),
                part.when_done(),
            ),
            terms=lambda: _taken(report),
            **(DECLARED | declared | ({"from_scratch": False} if late else {})),
        )
        made.append(observer)
        part.control = report.control
        observer.e.late, observer.optimizers.hold = late, hold
        observer.start()
        return observer

    def closed(
        part: Report, observer: Observer | None, error: BaseException | None, fresh: bool = False
    ) -> None:
        if observer is not None:
            end(part, observer, error, say=False)
            part.when_done()
        elif say and fresh:
            _print(part)

    if not at and every is None:
        return opened(report)
    _check_windows(at, every, steps)
    return Windows(report, at, every, opened, closed)


def _check_windows(at: Sequence[int], every: int | None, steps: int) -> None:
    if every is not None and (not isinstance(every, int) or every <= steps):
        raise ControlError(
            f"every = {every!r}: must be a whole number above steps = {steps}, or None"
        )
    if (
        isinstance(at, str)
        or not isinstance(at, Sequence)
        or not all(isinstance(s, int) and s >= 0 for s in at)
    ):
        raise ControlError(f"at = {at!r}: must be a list of whole numbers from 0 on")
    if close := [b for a, b in itertools.pairwise(sorted(set(at))) if b - a <= steps]:
        raise ControlError(
            f"at = {at!r}: the window at {close[0]} opens before the one before it is over"
        )


def _print(report: Report) -> None:
    if any(f.severity != NOTE for f in report.findings):
        print(report, file=sys.stderr, flush=True)


def end(
    report: Report,
    observer: "Observer | Windows",
    error: BaseException | None,
    *,
    say: bool,
    on: bool = False,
) -> None:
    """Stop observing and write the report. A later call adds what was seen since, where something
    stayed `on`, and notes an error.
    """
    from loopdoctor import checks, raising, record
    from loopdoctor.after import After
    from loopdoctor.evidence import Backward, Call, Step
    from loopdoctor.windows import Windows

    if isinstance(observer, Windows):
        observer.end(error)
    else:
        observer.eye.leave()
    report.exception = _bare(error)
    if report.done:
        _add(report, observer, error, say=say)
        return
    e = observer.e
    e.raised = raising.read(error, e)
    observer.stop()
    e.exception = error
    e.rounds = len({s.round for s in e.of(Step)} | {b.round for b in e.of(Backward)})
    state = generators()
    try:
        found, report.verdicts, report.asked = checks.examine(e)
        report.record = record.of(e)
        observer.after = After(e) if on else None
    finally:
        restore(state)
        observer.release()
        e.exception = None
    report.faults = e.faults + [
        f"{c}: {v.why}" for c, v in report.verdicts.items() if "check itself failed" in v.why
    ]
    report.findings, report.ignored = report.control.sort(found)
    report.rounds, report.done = e.rounds, True
    report.calls, report.stepped = len(e.of(Call)), e.stepped
    if say:
        _print(report)


def _add(
    report: Report, observer: "Observer | Windows", error: BaseException | None, *, say: bool
) -> None:
    """Add what the steps after the watched ones have shown, and an error that ended them."""
    from loopdoctor import checks, raising
    from loopdoctor.evidence import Evidence

    after, observer.after = getattr(observer, "after", None), None
    known = {f.check for f in report.findings} | {f.check for f, _ in report.ignored}
    pages = {c.id: c for c in checks.ALL}
    later = list(after.findings() if after else ())
    e = getattr(observer, "e", None) or Evidence()
    e.raised = raising.read(error, e)
    if e.raised is not None:
        later.append(("R1", pages["R1"].function(e)))
    seen = [pages[check].finding(*fired) for check, fired in later if check not in known]
    if seen:
        found, ignored = report.control.sort(
            [f._replace(because="") for f in (*report.findings, *seen)]
        )
        report.findings, report.ignored = found, report.ignored + ignored
        report.verdicts = {
            check: v for check, v in report.verdicts.items() if check not in {f.check for f in seen}
        }
        if say:
            _print(report)


def preflight(
    model: nn.Module,
    step: Callable[[], Tensor],
    optimizer: Optimizers = None,
    *,
    teacher: Models = None,
    steps: int = 8,
    say: bool = True,
    **declared,
) -> Report:
    """Make `steps` training steps with `step()`, which returns the loss, and put everything back as
    it was.

    A step that calls `backward` and `optimizer.step` itself is left to do so. Weights, buffers,
    gradients, optimizer state and generators are restored, so trainable weights are held twice
    meanwhile. An exception in the step is diagnosed and kept as `report.exception`, not raised.
    """
    from loopdoctor.evidence import Backward, Step

    optimizers = _several("optimizer", optimizer, torch.optim.Optimizer)
    saved, state = _photograph(model, optimizers), generators()
    report = Report()
    teachers = _several("teacher", teacher, nn.Module)
    observer = begin(
        report, model, optimizers=optimizers, teachers=teachers, steps=steps, say=False, **declared
    )
    e, error = observer.e, None
    try:
        for _ in range(steps):
            backwards, steps_made = len(e.of(Backward)), len(e.of(Step))
            loss = step()
            if len(e.of(Backward)) == backwards:
                for o in optimizers:
                    o.zero_grad()
                loss.backward()
            if len(e.of(Step)) == steps_made:
                for o in optimizers:
                    o.step()
    except Exception as raised:  # diagnosed below: the caller asked for a diagnosis
        error = raised
    finally:
        end(report, observer, error, say=say)
        saved()
        restore(state)
    return report


def _photograph(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Callable[[], None]:
    """Everything that a step may change; the function returned puts it back."""
    ps = {id(p): p for p in model.parameters() if p.requires_grad}
    ps |= {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
    weights = [
        (p, p.detach().clone(), None if p.grad is None else p.grad.clone()) for p in ps.values()
    ]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    states = [copy.deepcopy(o.state_dict()) for o in optimizers]
    modes = [(m, m.training) for m in model.modules()]

    def back() -> None:
        with torch.no_grad():
            for p, value, gradient in weights:
                p.copy_(value)
                p.grad = gradient
            for b, value in buffers:
                b.copy_(value)
        for o, state in zip(optimizers, states):
            o.load_state_dict(state)
        for m, mode in modes:
            m.training = mode

    return back


def _several(name: str, given, kind: type) -> list:
    found = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    for one in found:
        # accelerate wraps them
        one = getattr(one, "optimizer", one) if kind is torch.optim.Optimizer else one
        if not isinstance(one, kind):
            raise TypeError(
                f"{name} = {type(one).__name__}: must be a {kind.__name__}, several in a list, "
                "or None"
            )
    return [getattr(o, "optimizer", o) if kind is torch.optim.Optimizer else o for o in found]


def _bare(error: BaseException | None) -> BaseException | None:
    """Return the exception without its traceback, whose frames hold the user's tensors."""
    if error is None:
        return None
    try:
        bare = copy.copy(error)
    except Exception:  # some constructors want more than `args` holds
        bare = None
    if type(bare) is not type(error) or str(bare) != str(error):
        bare = RuntimeError(f"{type(error).__name__}: {error}")
    bare.__traceback__ = bare.__cause__ = bare.__context__ = None
    return bare


def _taken(report: Report) -> dict:
    taken, report.declared = report.declared, {}
    return taken
