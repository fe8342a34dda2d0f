"""`assert_trains(model, step, optimizer)`: a test that says why a training step does not train.

A step may run, return a loss and learn nothing. A test that looks at the loss alone needs many
steps to see it and then cannot say why. This one makes a few steps, lets the doctor look, and fails
with the name of the cause and its fix.

Footgun: a test that passes says that eight steps of this step look sound. It does not say that the
model will be good.
"""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from loopdoctor.finding import WARN
from loopdoctor.report import Report
from loopdoctor.watching import Optimizers, preflight


def assert_trains(
    model: nn.Module,
    step: Callable[[], Tensor],
    optimizer: Optimizers,
    *,
    steps: int = 8,
    ignore: Mapping[str, str] | None = None,
    warnings: bool = False,
    **options,
) -> Report:
    """Make a few training steps and fail, with the doctor's report, where they train nothing.

        def test_my_step_trains():
            torch.manual_seed(0)
            model = Net()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            images, labels = next(iter(loader))

            def step():
                return F.cross_entropy(model(images), labels)

            loopdoctor.assert_trains(model, step, optimizer)

    `step()` returns the loss. The backward and the optimizer's step are made for it, unless it
    makes them itself. All is put back afterwards: weights, gradients, the optimizer's state, random
    numbers.

    It raises AssertionError with the report as its text

    - where an ERROR is found, which no healthy run can show; with `warnings=True` also where a WARN
      is found, which may be there on purpose;
    - where the step raises; that exception is the cause of the AssertionError;
    - where no step was seen, so that nothing can be said.

    steps: how many are made
    ignore: ids of checks, each with a reason, `{"S3": "a probe on purpose"}`: they fail no test
    options: the others of `preflight`, for example `teacher=` and `severity=`

    It returns the report, for tests that ask it for more.
    """
    __tracebackhide__ = True  # pytest shows the test's own line
    raised: list[Exception] = []

    def kept() -> Tensor:
        """Keep the exception as it is: the report has it without the lines that it came through."""
        try:
            return step()
        except Exception as error:
            raised.append(error)
            raise

    report = preflight(model, kept, optimizer, steps=steps, say=False, ignore=ignore, **options)
    if report.exception is not None:
        raise AssertionError(f"the step raises.\n{report}") from (raised or [report.exception])[0]
    if not report.rounds:
        raise AssertionError(f"no training step was seen, so nothing can be said.\n{report}")
    failing = [f for f in report.findings if f in report.errors or warnings and f.severity == WARN]
    if failing:
        raise AssertionError(f"the step does not train the model as it should.\n{report}")
    return report
