"""Cross-entropy, and any other loss of logits, without ever holding tokens x vocabulary.

The logits are the memory of a small model with a real vocabulary: N tokens x V entries, and the
plain loss keeps about three fp32 copies of them. But each row's loss needs only that row. So the
head is applied to a chunk of rows at a time, and because the gradient of a row is known as soon as
its loss is

    d loss_i / d logits_i = softmax(logits_i) - onehot(target_i)
    dH = dlogits W
    dW += dlogits^T H

both gradients are finished in the forward pass and the logits are thrown away. Backward only
multiplies by the incoming scalar. Same idea as Liger's fused linear cross-entropy and Apple's cut
cross-entropy (arXiv:2411.09009).

`chunked_loss` takes any row loss: `cross_entropy_rows` here, distances to a teacher in
methods/distill/divergences.py. torch 2.13 ships `F.linear_cross_entropy`, whose default options
save nothing; tests/benchmarks.py compares the two. Ours is used because it also takes a teacher,
sums in fp32 and runs on torch 2.11.

A *loss* is a function (model, batch) -> {name: loss summed over the supervised tokens}, the form
that the loop wants. It divides once by the tokens of all micro-batches and processes; a mean of
means is another loss on ragged batches.

Footgun: the gradients are computed for the weights as they are in the forward pass, and the buffers
are handed out once. Calling backward twice on the same loss raises.
"""

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from nblib import hf_forward
from nblib.batch import IGNORED, Batch, supervised_rows

# logits of one chunk: large enough to keep the matrix products busy, small next to the model
CHUNK_BYTES = 2**27

# on a CPU the row loss works on blocks that stay in its cache, because it reads each row repeatedly
BLOCK_BYTES = 2**23

# entries of the vocabulary whose low-precision gradient is made at a time
SLICE = 2**15

Terms = dict[str, Tensor]  # name -> loss summed over the supervised tokens of a batch
Loss = Callable[[nn.Module, Batch], Terms]

# model -> what it does around its head
_AROUND: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_COUNTS: ContextVar[list[Tensor] | None] = ContextVar(
    "supervised tokens of the losses of this block", default=None
)

# (logits (n, V), *per_row) -> losses (n,), and the gradient of their sum by the logits (n, V)
RowLoss = Callable[..., tuple[Tensor, Tensor]]


def cross_entropy_rows(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return -log softmax(logits)[target] and its gradient; both are 0 where the target is IGNORED.

    Overwrites the logits, so that one copy is all there is.
    """
    ignored = (targets == IGNORED)[:, None]  # (n, 1)
    targets = targets[:, None].clamp(min=0)  # (n, 1)
    picked = logits.gather(1, targets)
    top = logits.amax(dim=1, keepdim=True)
    grad = logits.sub_(top).exp_()  # (n, V), in place
    total = grad.sum(dim=1, keepdim=True)
    losses = (total.log() + top - picked).masked_fill(ignored, 0.0).squeeze(1)  # (n,)
    grad.div_(total.masked_fill(ignored, math.inf))
    grad.scatter_add_(1, targets, ignored.to(grad.dtype) - 1.0)
    return losses, grad


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    *per_row: Tensor,
    rows: RowLoss = cross_entropy_rows,
    chunk: int | None = None,
) -> Tensor:
    """Return the sum over rows of a loss of the logits `hidden @ weight.T`.

    hidden (N, D), weight (V, D), per_row tensors (N, ...)
    """
    return _Chunked.apply(hidden, weight, rows, chunk, torch.is_grad_enabled(), *per_row)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, rows, chunk, grad_enabled, *per_row):
        # under autocast the products run in its dtype, as nn.Linear would; losses and sums in fp32
        kind = hidden.device.type
        low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        want_h, want_w = (grad_enabled and need for need in ctx.needs_input_grad[:2])
        exact = torch.promote_types(hidden.dtype, torch.float32)  # float64 stays float64
        vocabulary = weight.shape[0]
        chunk = chunk or max(16, CHUNK_BYTES // (low.itemsize * vocabulary))
        block = max(1, BLOCK_BYTES // (exact.itemsize * vocabulary)) if kind == "cpu" else chunk
        with torch.autocast(kind, enabled=False):
            w = weight.detach().to(low)  # (V, D)
            d_hidden = torch.empty_like(hidden) if want_h else None
            d_weight = torch.zeros_like(weight, dtype=exact) if want_w else None
            total = hidden.new_zeros((), dtype=exact)
            for first in range(0, hidden.shape[0], chunk):
                part = slice(first, first + chunk)
                h = hidden.detach()[part].to(low)  # (n, D)
                logits = h @ w.T  # (n, V), in the low dtype

                # the logits turn into their own gradient, block by block
                for start in range(0, len(logits), block):
                    few = logits[start : start + block]
                    few_rows = (x[first + start : first + start + len(few)] for x in per_row)
                    losses, grad = rows(few.to(exact), *few_rows)  # (b,), (b, V)
                    total += losses.sum()
                    few.copy_(grad)
                if want_h:
                    d_hidden[part] = logits @ w
                if want_w and low == exact:
                    d_weight.addmm_(logits.T, h)
                elif want_w:
                    for v in range(0, vocabulary, SLICE):  # as a whole it is as large as the head
                        d_weight[v : v + SLICE] += logits[:, v : v + SLICE].T @ h
                del logits, few, grad  # before the next chunk is made
        ctx.grads = (d_hidden, d_weight.to(weight.dtype) if want_w else None)
        return total

    @staticmethod
    def backward(ctx, scale):
        if ctx.grads is None:
            raise RuntimeError(
                "backward called twice on a chunked loss: its gradients are handed out once"
            )
        gradients, ctx.grads = ctx.grads, None
        return *(None if g is None else g.mul_(scale) for g in gradients), *[None] * (
            len(ctx.needs_input_grad) - 2
        )


def supervised(labels: Tensor) -> Tensor:
    """Return how many tokens the labels supervise after the shift by one, on their device."""
    return (labels[:, 1:] != IGNORED).sum()


def shifted_rows(hidden: Tensor, labels: Tensor | Batch) -> tuple[Tensor, Tensor]:
    """Return the supervised rows of hidden states (B, T, D) and their targets: (n, D), (n,).

    Position t predicts label t + 1; other rows are dropped before the head computes anything. A
    batch has its rows counted already; those of bare labels are counted here, which waits for a
    card.
    """
    if isinstance(labels, Batch):
        rows, labels = labels.supervised, labels.labels
        counted = True
    else:
        rows = supervised_rows(labels)
        counted = False

    hidden = hidden[:, :-1].flatten(0, 1)  # (B, T, D) -> (B * (T - 1), D)
    targets = labels[:, 1:].flatten()  # (B * (T - 1),)
    if not isinstance(rows, slice):
        hidden, targets = hidden[rows], targets[rows]

    counts = _COUNTS.get()
    if counted and counts is not None:
        counts.append((targets != IGNORED).sum())
    return hidden, targets


@contextmanager
def counting_supervised(batch: Batch) -> Iterator[list[Tensor]]:
    """Collect how many tokens the losses of a block supervise; the loop compares them.

    The list has a number for each loss that selected rows of a batch, and at the end one for the
    labels of `batch` as they are then: a loss may have changed them in place. All are tensors on
    the device, so nothing waits.
    """
    counts: list[Tensor] = []
    token = _COUNTS.set(counts)
    try:
        yield counts
    finally:
        _COUNTS.reset(token)
    counts.append(supervised(batch.labels))


def backbone_and_head(model: nn.Module, *, needed: bool = False) -> tuple[nn.Module, Tensor] | None:
    """Return the module that gives last hidden states, and the (V, D) weight that scores them.

    None when the head is more than one matrix product (adapter, bias, soft cap, scaling): then the
    logits are needed. With `needed` that is an error, which names what else the model does.
    """
    # peft injects its layers into the modules of the base model
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    backbone = inner._modules.get(inner.base_model_prefix)
    head = inner.get_output_embeddings()
    more = f"its head is {head}, its backbone {type(backbone).__name__}"
    if type(head) is nn.Linear and head.bias is None and backbone is not None:
        if inner not in _AROUND:
            _AROUND[inner] = _around_the_head(inner, backbone, head)
        more = _AROUND[inner]
    if more and needed:
        raise ValueError(
            f"{type(model).__name__}: the head must be one matrix product, but {more}; Llama, "
            "Qwen3, Mixtral, OLMoE and GPT-2 have such a head; losses.causal_lm trains any model"
        )
    return None if more else (backbone, head.weight)


@torch.no_grad()
def _around_the_head(inner: nn.Module, backbone: nn.Module, head: nn.Linear) -> str:
    """Return what a model does besides `hidden @ head.T`, or "".

    Its own forward pass runs on made-up hidden states and logits: no block runs, and none of the
    many names by which configs scale logits matters.
    """
    whole = dict(inner._modules)

    # real numbers, also where fake tensors are counted
    with _disable_current_modes(), torch.device("cpu"):
        h, z = (99 * torch.linspace(-1, 1, n).expand(1, 2, n) for n in reversed(head.weight.shape))
        new = {backbone: _StandIn(backbone, _answer_type()(h)), head: _StandIn(head, z)}
        try:
            inner._modules.update({name: new.get(module, module) for name, module in whole.items()})
            out = inner.forward(
                input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False
            ).logits.float()
            if not torch.allclose(new[head].asked.float(), h):
                return "what its head is given is not what its backbone gives"
            changed = not torch.allclose(out, z, rtol=1e-3)
            return (
                f"it makes logits from -99 to 99 into {out.min():.3g} to {out.max():.3g}"
                if changed
                else ""
            )
        except (
            Exception
        ) as error:  # code of any model: whatever it stumbles over, its own logits are right
            return f"what it does around its head cannot be told ({type(error).__name__})"
        finally:
            inner._modules.update(whole)


@cache
def _answer_type() -> type:
    """Make an output of transformers whose other fields are all None."""
    from transformers.modeling_outputs import BaseModelOutput

    return type("_Answer", (BaseModelOutput,), {"__getattr__": lambda self, name: None})


class _StandIn(nn.Module):
    """Answer every call alike, and keep the input of the last one."""

    def __init__(self, original: nn.Module, answer):
        super().__init__()
        self.__dict__.update(original=original, answer=answer)  # no submodule

    def forward(self, asked=None, **_):
        self.asked = asked
        return self.answer

    def __getattr__(self, name: str):  # some models call the decoder inside of their backbone
        part = getattr(self.original, name)
        return self if hasattr(part, "get_input_embeddings") else part


def hidden_states(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor] | None:
    """Return last hidden states (B, T, D) and the head's weight (V, D).

    None where only the model can give logits.
    """
    parts = backbone_and_head(model)
    if parts is None:
        return None
    backbone, weight = parts
    return forward(backbone, batch).last_hidden_state, weight


def forward(model: nn.Module, batch: Mapping[str, Tensor], *, but: Collection[str] = ("labels",)):
    """Run the model, or its backbone, on what the batch holds for it.

    Nothing here waits for a card: rows are packed only where the batch has positions of its own,
    and a batch has no mask that leaves nothing out (batch.py).
    """
    inputs = {name: tensor for name, tensor in batch.items() if name not in but}
    with nullcontext() if "position_ids" in inputs else hf_forward.assume_unpacked_rows():
        return model(**inputs, use_cache=False)


def causal_lm(model: nn.Module, batch: Batch | Mapping[str, Tensor]) -> Terms:
    """Return next-token cross-entropy, summed over the supervised tokens: the default loss of the
    loop.
    """
    batch = Batch.of(batch)
    states = hidden_states(model, batch)
    if states is not None:
        hidden, targets = shifted_rows(states[0], batch)
        return {"ce": chunked_loss(hidden, states[1], targets)}
    logits, targets = shifted_rows(forward(model, batch).logits, batch)
    return {"ce": F.cross_entropy(logits.float(), targets, reduction="sum")}
