"""Two modes that change what tensors are: autocast chooses dtypes by operation, inference mode forbids saving.

Autocast is a list of operations per device, and the lists differ: what is lifted to fp32 on a card stays in bf16 on a
CPU (P32). Inference mode makes tensors that autograd may read and may not keep; that is where it fails, and the gain
over `no_grad` is the bookkeeping of each call, which only tiny models notice (P33).

Footgun: code that was right on one device can be wrong on another without a word. Assert the dtype of your loss.
"""

from functools import partial

import torch
from torch.nn import functional as F

from lessons.pitfalls import VERSIONS, Pitfall, bench

# ---------------------------------------------------------------- P32


def own_loss(end: str) -> dict:
    """Cross-entropy of each row after a bf16 product under CPU autocast, against float64.

    `end`: 'by hand' trusts autocast, 'by hand, lifted' calls .float() first, 'library' is F.cross_entropy.
    """
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(512, 64, generator=generator), torch.randn(4096, 64, generator=generator) / 8
    target = torch.randint(4096, (512,), generator=generator)
    exact = F.cross_entropy((hidden.double() @ weight.double().T), target, reduction="none")  # (512,)
    with torch.autocast("cpu", torch.bfloat16):
        logits = F.linear(hidden, weight)  # (512, 4096), bf16
        product = str(logits.dtype)
        if end == "library":
            rows = F.cross_entropy(logits, target, reduction="none")
        else:
            logits = logits.float() if end == "by hand, lifted" else logits
            rows = logits.logsumexp(dim=1) - logits.gather(1, target[:, None]).squeeze(1)
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
    """Which operations autocast lifts to fp32 when their input is bf16."""
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
        return [{"operation": name, device: str(call().dtype).removeprefix("torch.")} for name, call in calls.items()]


# ---------------------------------------------------------------- P33
DOWNSTREAM = {  # what a distillation does with the teacher's logits t, the student's s, a temperature
    "mse(s, t)": lambda s, t, T: F.mse_loss(s, t),
    "kl(s, softmax(t / 2))": lambda s, t, T: F.kl_div(F.log_softmax(s, -1), F.softmax(t / 2, -1), reduction="sum"),
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


def downstream(use: str, *, mode=torch.inference_mode, clone: bool = False) -> torch.Tensor:
    """The teacher's logits made under `mode`, and a loss made of them."""
    model, ids = bench.byte_model(), bench.stream("prose")[:64].view(2, 32)
    with mode():
        teacher = model.eval()(ids).logits
    teacher = teacher.clone() if clone else teacher
    student = torch.zeros_like(teacher).requires_grad_()
    temperature = torch.ones((), requires_grad=True)
    return DOWNSTREAM[use](student, teacher, temperature)


def teacher_use(use: str, *, mode=torch.inference_mode, clone: bool = False) -> dict:
    """That loss, forward and backward: what is raised, and where."""
    facts = {"use": use, "under": mode.__name__, "raised": None, "in": None}
    try:
        loss = downstream(use, mode=mode, clone=clone)
    except RuntimeError as error:
        return facts | {"raised": str(error).split(". ")[0], "in": "forward"}
    try:
        loss.backward()
    except RuntimeError as error:
        return facts | {"raised": str(error).split(". ")[0], "in": "backward"}
    return facts


def teacher_speed(*, hidden: int, rows: int, length: int, rounds: int = 15) -> dict:
    """Median seconds of a forward pass without gradients in the two modes."""
    model = bench.byte_model(hidden=hidden).eval()
    ids = bench.stream("prose")[: rows * length].view(rows, length)

    def forward(mode) -> None:
        with mode():
            model(ids)

    modes = {mode.__name__: partial(forward, mode) for mode in (torch.no_grad, torch.inference_mode)}
    medians = bench.medians(modes, rounds)
    facts = {"hidden": hidden, "tokens": rows * length, "no_grad in ms": 1000 * medians["no_grad"]}
    return facts | {"no_grad / inference_mode": medians["no_grad"] / medians["inference_mode"]}


def _raised(facts: dict) -> bool:
    return facts["raised"] is not None


PITFALLS = [
    Pitfall(
        id="P32",
        title="What autocast lifts to fp32 depends on the device",
        symptom="a loss written by hand takes few distinct values under bf16 autocast; curves show steps",
        claim="the bf16 products cost the digits; sums and softmax are lifted to fp32 anyway (write-up)",
        verdict="The products alone cost little. On a CPU autocast lifts losses, not sums, exponentials or softmax, so "
        f"a loss written from those stays in bf16 to the end. {VERSIONS}",
        fix="logits.float() before a loss of your own; dtypes asserted, not assumed",
        broken=lambda: own_loss("by hand"),
        claimed=lambda: own_loss("library"),
        fixed=lambda: own_loss("by hand, lifted"),
        seen=lambda facts: facts["largest error of a row"] > 0.02,
    ),
    Pitfall(
        id="P33",
        title="A teacher under inference mode",
        symptom="RuntimeError: Inference tensors cannot be saved for backward",
        claim="it fails only where something learnable stands downstream of the teacher, as a temperature (write-up)",
        verdict="It fails wherever autograd has to save the teacher's tensor, learnable temperature or not, and "
        f"already in the forward pass. Under no_grad the learnable temperature is harmless. {VERSIONS}",
        fix="torch.no_grad(), or .clone() of exactly the tensors that leave",
        broken=lambda: teacher_use("mse(s, t)"),
        claimed=lambda: teacher_use("t / T, T learnable", mode=torch.no_grad),
        fixed=lambda: teacher_use("mse(s, t)", clone=True),
        seen=_raised,
        check="F9",
    ),
]
