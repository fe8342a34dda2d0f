"""What a program raised: R1. The reading is done by raising.py, while the traceback is there.

Footgun: most errors of a program have nothing to do with its training loop. Only those are read
that people meet in it again and again; of any other the check says nothing.
"""

from loopdoctor.check import Fired, check, fires
from loopdoctor.evidence import Evidence
from loopdoctor.finding import Verdict, not_applicable


@check("R1")
def program_raises(e: Evidence) -> Fired | Verdict:
    """Return the program ends with an error of torch, at a line that looks right.

    Fires when the program was ended by an error that is known: of the graph (a tensor changed in
    place, a second backward, a derivative that is NaN), of an index (a row that a table lacks, a
    label without a class), of sizes, dtypes or devices. The lines that are to blame are read from
    the traceback, the program's syntax tree and the calls and steps that were seen. An error that
    the program catches itself is none.

    ERROR changed-in-place: {name} was changed in place at {changed}, after {needed} had kept it for
    the backward pass. Fix: Make a new tensor there ({name} = {name} + ... in place of +=, a method
    without the underscore), or change it after backward().
    ERROR stepped-before-backward: The step at {changed} changed weights that a later backward still
    needs: what {needed} gave was computed with the old ones. Fix: Call the model again after the
    step, for the second loss; or make all backward passes before the first step.
    ERROR changed-in-place/somewhere: A tensor was changed in place after it had been kept for the
    backward pass, inside a function whose variables are gone. Fix: Write x = x + y in place of x +=
    y and leave out inplace=True where the model does so; torch.autograd.set_detect_anomaly(True)
    names the line that kept the tensor.
    ERROR graph-carried-on: {name} is carried from step to step with its graph ({line}), so each
    backward would run through the steps before it, whose graphs are freed. Fix: Cut it at the top
    of the loop: {name} = {name}.detach() (of several tensors, each).
    ERROR graph-used-twice: Two backward passes share a part of one graph, and the first has freed
    it. Fix: Add the losses and call backward() once; or compute the shared part again for the
    second loss (or detach it there).
    ERROR derivative-is-nan: The derivative of {function} is NaN there: an infinite slope (of a
    root, a norm, a logarithm, a quotient at 0) was multiplied with 0. Fix: Keep its argument above
    0: (x + 1e-12).sqrt(), clamp(min=...), or torch.where on the argument and not on the result.
    ERROR id-outside-table: The id {id} is looked up in a table of {rows} rows, 0 to {last}. Fix:
    Find where the id comes from (a tokenizer with added tokens, -100 among ids, a vocabulary from
    1), or make the table as large as it needs: resize_token_embeddings(len(tokenizer)).
    ERROR label-outside-classes: A label is {label}, and the answers have {classes} classes, 0 to
    {last}. Fix: Let labels begin at 0, or give the last layer one output for each class; what is
    not asked is -100.
    ERROR dtypes-differ: Tensors of two dtypes meet where torch wants one; data from numpy are
    float64. Fix: Convert at the source: x.float() for data, .long() for indices; under autocast
    leave the weights in float32.
    ERROR devices-differ: Tensors of two devices meet. Fix: Move the batch as well: x =
    x.to(device); make new tensors with device=x.device.
    ERROR sizes-differ: Sizes do not fit at this line. Fix: Print the shapes in front of it; change
    the layer's size to that of what it is given, or the view before it.
    """
    if e.raised is not None:
        return fires(
            e.raised.observed, "no error", fault=e.raised.fault, at=e.raised.at, **e.raised.blanks
        )
    if e.exception is None:
        return not_applicable("the program raised nothing")
    return not_applicable("the error is none of those that this check reads")
