"""The two ways in: `watch` stands around a loop, `preflight` makes a few steps from a function that returns the loss.

Footgun: the report of a watch fills when its steps are over or the block is left. Inside the block `report.findings`
is empty until then, which is not the same as healthy: ask `report.done`.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from train_doctor import causes, checks
from train_doctor.evidence import Backward, Call, Step
from train_doctor.finding import NOTE, Report
from train_doctor.observe import Observer
from train_doctor.probes import generators, restore

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
DECLARED = {"tokenizer": None, "untied": False, "from_scratch": False, "orig_vocab": None}  # see `watch`
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
) -> Iterator[Report]:
    """Watch the first `steps` training steps of the loop inside the block.

    model: what is trained; found by itself when not given
    optimizer, teacher: one or several; found by themselves, but naming the teacher lets its absence be noticed
    say: print the report when the watched steps are over and something was found
    tokenizer: for the ids of its special tokens; the model's config is asked otherwise
    untied: the embedding and the head are apart on purpose, whatever the config says
    from_scratch: the model is untrained, so that its first loss must be near ln(vocabulary)
    orig_vocab: size of the vocabulary before tokens were added
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
    )
    try:
        yield report
    except BaseException as error:
        end(report, observer, error, say=say)
        raise
    end(report, observer, None, say=say)


def begin(report: Report, model, *, optimizers, teachers, steps: int, say: bool, **declared) -> Observer:
    """Start to observe; for code that cannot be a block (callbacks)."""
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model = {type(model).__name__}: must be a torch.nn.Module or None")
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps = {steps!r}: must be a whole number of at least 1")
    if wrong := sorted(set(declared) - set(DECLARED)):
        raise TypeError(f"{wrong[0]} = {declared[wrong[0]]!r}: no such option; allowed are {', '.join(DECLARED)}")
    made: list[Observer] = []
    observer = Observer(
        model,
        optimizers,
        teachers,
        steps,
        full=lambda: (end(report, made[0], None, say=say), report.when_done()),
        terms=lambda: _taken(report),
        **(DECLARED | declared),
    )
    made.append(observer)
    observer.start()
    return observer


def end(report: Report, observer: Observer, error: BaseException | None, *, say: bool) -> None:
    """Stop observing and write the report; later calls change nothing but note an error."""
    report.exception = _bare(error)
    if report.done:
        return
    e = observer.e
    observer.stop()
    e.exception = error
    e.rounds = len({s.round for s in e.of(Step)} | {b.round for b in e.of(Backward)})
    state = generators()
    try:
        found, report.verdicts = checks.examine(e)
    finally:
        restore(state)
        observer.release()
        e.exception = None
    report.faults = e.faults + [f"{c}: {v.why}" for c, v in report.verdicts.items() if "itself failed" in v.why]
    report.findings, report.rounds, report.done = causes.order(found), e.rounds, True
    report.calls, report.stepped = len(e.of(Call)), e.stepped
    if say and any(f.severity != NOTE for f in report.findings):
        print(report, file=sys.stderr, flush=True)


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
    """Make `steps` training steps with `step()`, which returns the loss, and put everything back as it was.

    A step that calls `backward` and `optimizer.step` itself is left to do so. Weights, buffers, gradients, optimizer
    state and generators are restored, so trainable weights are held twice meanwhile. An exception in the step is
    diagnosed and kept as `report.exception`, not raised.
    """
    optimizers = _several("optimizer", optimizer, torch.optim.Optimizer)
    saved, state = _photograph(model, optimizers), generators()
    report = Report()
    teachers = _several("teacher", teacher, nn.Module)
    observer = begin(report, model, optimizers=optimizers, teachers=teachers, steps=steps, say=False, **declared)
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
    weights = [(p, p.detach().clone(), None if p.grad is None else p.grad.clone()) for p in ps.values()]
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
        one = getattr(one, "optimizer", one) if kind is torch.optim.Optimizer else one  # accelerate wraps them
        if not isinstance(one, kind):
            raise TypeError(f"{name} = {type(one).__name__}: must be a {kind.__name__}, several in a list, or None")
    return [getattr(o, "optimizer", o) if kind is torch.optim.Optimizer else o for o in found]


def _bare(error: BaseException | None) -> BaseException | None:
    """The exception without its traceback, whose frames hold the user's tensors."""
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
