"""Two modes that change tensors: autocast chooses their dtype, inference mode hides them from
autograd.

Autocast is a list of operations per device, and the lists differ: what runs in fp32 on a card may
stay in bf16 on a CPU (P32). Under inference mode, tensors carry no record for autograd: it may read
them, but may not save them for the backward pass (P33). What it saves over `no_grad` is a little
bookkeeping per call, which only tiny models notice.

Footgun: code that is right on one device can be wrong on another, and nothing raises. Assert the
dtype of your loss.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lessons.pitfalls import VERSIONS, Pitfall, bench

# ---------------------------------------------------------------- P32


def loss_left_to_autocast(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = F.linear(hidden, weight)  # (rows, classes), bf16
        total = logits.logsumexp(dim=1)  # at fault: on a CPU this stays in bf16
        return total - logits.gather(1, target[:, None]).squeeze(1)


def loss_in_fp32(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = F.linear(hidden, weight).float()  # bf16 product, fp32 from here on
        total = logits.logsumexp(dim=1)
        return total - logits.gather(1, target[:, None]).squeeze(1)


def _loss_of_the_library(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(F.linear(hidden, weight), target, reduction="none")


def own_loss(end: str) -> dict:
    """Cross-entropy of each row after a bf16 product under CPU autocast, against float64.

    `end`: 'by hand' leaves the dtype to autocast, 'by hand, lifted' calls .float() first, 'library'
    is F.cross_entropy.
    """
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(512, 64, generator=generator),
        torch.randn(4096, 64, generator=generator) / 8,
    )
    target = torch.randint(4096, (512,), generator=generator)
    # (512,)
    exact = F.cross_entropy((hidden.double() @ weight.double().T), target, reduction="none")
    ends = {
        "by hand": loss_left_to_autocast,
        "by hand, lifted": loss_in_fp32,
        "library": _loss_of_the_library,
    }
    rows = ends[end](hidden, weight, target)
    with torch.autocast("cpu", torch.bfloat16):
        product = str(F.linear(hidden, weight).dtype)
    return {
        "end": end,
        "product": product,
        "dtype of the loss": str(rows.dtype),
        "different losses in 512 rows": len(rows.unique()),
        "mean loss": float(rows.double().mean()),
        "exact": float(exact.mean()),
        "largest error of a row": float((rows.double() - exact).abs().max()),
    }


def lifted(device: str = "cpu") -> list[dict]:
    """Return the dtype of the result of each operation under autocast, when its input is bf16."""
    x = torch.randn(8, 8, device=device, dtype=torch.bfloat16)
    classes = torch.zeros(8, dtype=torch.long, device=device)
    calls = {
        "softmax": lambda: F.softmax(x, dim=1),
        "log_softmax": lambda: F.log_softmax(x, dim=1),
        "sum": lambda: x.sum(),
        "mean": lambda: x.mean(),
        "exp": lambda: x.exp(),
        "layer_norm": lambda: F.layer_norm(x, (8,)),
        "matmul": lambda: x @ x,
        "cross_entropy": lambda: F.cross_entropy(x, classes),
        "mse_loss": lambda: F.mse_loss(x, x),
        "kl_div": lambda: F.kl_div(x, x.exp(), reduction="sum"),
        "bf16 + fp32": lambda: x + x.float(),
    }
    with torch.autocast(device, torch.bfloat16):
        return [
            {"operation": name, device: str(call().dtype).removeprefix("torch.")}
            for name, call in calls.items()
        ]


# ---------------------------------------------------------------- P33
# what a distillation computes from the logits of the teacher (t) and student (s), and a temperature
# (T)
DOWNSTREAM = {
    "mse(s, t)": lambda s, t, T: F.mse_loss(s, t),
    "kl(s, softmax(t / 2))": lambda s, t, T: F.kl_div(
        F.log_softmax(s, -1), F.softmax(t / 2, -1), reduction="sum"
    ),
    "t / T, T learnable": lambda s, t, T: (t / T).sum(),
    "t * T, T learnable": lambda s, t, T: (t * T).sum(),
    "t.detach() / T": lambda s, t, T: (t.detach() / T).sum(),
    "t.float() / T": lambda s, t, T: (t.float() / T).sum(),
    "t[:, :-1] / T": lambda s, t, T: (t[:, :-1] / T).sum(),
    "t + T": lambda s, t, T: (t + T).sum(),
    "t.clone() / T": lambda s, t, T: (t.clone() / T).sum(),
    "t.bfloat16() / T": lambda s, t, T: (t.bfloat16() / T).sum(),
    "soft labels, ce(s, t)": lambda s, t, T: F.cross_entropy(s.flatten(0, 1), t.flatten(0, 1)),
}


def inference_logits(teacher: nn.Module, ids: Tensor, student: Tensor) -> Tensor:
    with torch.inference_mode():
        target = teacher(ids).logits
    return F.mse_loss(student, target)  # at fault: autograd has to save `target`


def copied_logits(teacher: nn.Module, ids: Tensor, student: Tensor) -> Tensor:
    with torch.inference_mode():
        target = teacher(ids).logits
    return F.mse_loss(student, target.clone())  # the copy is an ordinary tensor


def downstream(use: str, *, mode=torch.inference_mode, clone: bool = False) -> torch.Tensor:
    """Return a loss computed from the teacher's logits, which were computed under `mode`."""
    model, ids = bench.byte_model(), bench.stream("prose")[:64].view(2, 32)
    with mode():
        teacher = model.eval()(ids).logits
    teacher = teacher.clone() if clone else teacher
    student = torch.zeros_like(teacher).requires_grad_()
    temperature = torch.ones((), requires_grad=True)
    return DOWNSTREAM[use](student, teacher, temperature)


def teacher_use(use: str, *, mode=torch.inference_mode, clone: bool = False) -> dict:
    """Return that loss, forward and backward: what is raised, and where."""
    facts = {"use": use, "under": mode.__name__}
    return facts | _raised_by(lambda: downstream(use, mode=mode, clone=clone))


def _error_against(loss: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> dict:
    """Return the same for a mean squared error of a student against the teacher."""
    teacher, ids = bench.byte_model().eval(), bench.stream("prose")[:64].view(2, 32)
    student = torch.zeros(*ids.shape, bench.VOCABULARY, requires_grad=True)
    return {"use": "mse(s, t)", "under": "inference_mode"} | _raised_by(
        lambda: loss(teacher, ids, student)
    )


def _raised_by(loss: Callable[[], Tensor]) -> dict:
    where = "forward"
    try:
        value, where = loss(), "backward"
        value.backward()
    except RuntimeError as error:
        return {"raised": str(error).split(". ")[0], "in": where}
    return {"raised": None, "in": None}


def teacher_speed(*, hidden: int, rows: int, length: int, rounds: int = 15) -> dict:
    """Median seconds of a forward pass without gradients in the two modes."""
    model = bench.byte_model(hidden=hidden).eval()
    ids = bench.stream("prose")[: rows * length].view(rows, length)

    def forward(mode) -> None:
        with mode():
            model(ids)

    modes = {
        mode.__name__: partial(forward, mode) for mode in (torch.no_grad, torch.inference_mode)
    }
    medians = bench.medians(modes, rounds)
    facts = {"hidden": hidden, "tokens": rows * length, "no_grad in ms": 1000 * medians["no_grad"]}
    return facts | {"no_grad / inference_mode": medians["no_grad"] / medians["inference_mode"]}


def _raised(facts: dict) -> bool:
    return facts["raised"] is not None


PITFALLS = [
    Pitfall(
        id="P32",
        title="What autocast computes in fp32 depends on the device",
        symptom="a loss written by hand takes few distinct values under bf16 autocast; its "
        "curve has steps",
        claim="the bf16 products cost the digits; sums and softmax run in fp32 anyway (write-up)",
        verdict="The products cost little: the loss of the library, computed from the same "
        "product, is close to exact. "
        "The loss by hand is not, because a CPU's autocast runs losses in fp32 but leaves "
        "sums, exponentials and "
        f"softmax in bf16. Seen with {VERSIONS}.",
        fix="logits.float() before a loss of your own; assert the dtype of the loss",
        broken=lambda: own_loss("by hand"),
        claimed=lambda: own_loss("library"),
        fixed=lambda: own_loss("by hand, lifted"),
        seen=lambda facts: facts["largest error of a row"] > 0.02,
        wrong=loss_left_to_autocast,
        right=loss_in_fp32,
    ),
    Pitfall(
        id="P33",
        title="A teacher under inference mode",
        symptom="RuntimeError: Inference tensors cannot be saved for backward",
        claim="it fails only where something learnable uses the teacher's output, a "
        "temperature say (write-up)",
        verdict="A plain mean squared error, without a temperature, fails already in the "
        "forward pass. It fails "
        "wherever autograd has to save the teacher's tensor. Under no_grad a learnable "
        "temperature works. Seen with "
        f"{VERSIONS}.",
        fix="torch.no_grad() for the teacher, or .clone() of the tensors it hands over",
        broken=lambda: _error_against(inference_logits),
        claimed=lambda: teacher_use("t / T, T learnable", mode=torch.no_grad),
        fixed=lambda: _error_against(copied_logits),
        seen=_raised,
        check="F9",
        wrong=inference_logits,
        right=copied_logits,
    ),
]
