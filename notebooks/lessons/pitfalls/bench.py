"""The toy bench of all pitfalls: small texts, small models, adapters, one backward pass, three ways
to train.

Bytes need no tokenizer, so a vocabulary of 256 does, and models of a hundred kilobytes learn it in
seconds:

    byte_model, trained      a language model on bytes, new or after a hundred steps of prose
    base, attach, wired
    a frozen model of three layers, with adapters, put together in one way or another
    flow, compare
    one backward pass: what it raised, what it warned, every gradient; against a reference
    plain_loop, fit, learn
    the bare loop; the same on one batch, counting what moved; the loop of nblib.train
    run_trainer              the Hugging Face Trainer: short, silent, without files

Every demonstration starts from the same seeds and leaves generators, warnings and dynamo's memory
as they were.

Footgun: a fresh LoRA has one factor at zero, so half of its gradients are zero for a good reason.
`wired` gives both factors random values first (`wake`), or no comparison could tell a dead gradient
from a healthy zero.
"""

import contextlib
import copy
import io
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache

import torch
import transformers as tf
from torch import Tensor, nn

from lessons.single_process import alone
from nblib import losses, models, runtime, text, wiring
from nblib import train as loop
from nblib.runtime import seeded as seeded

CPU = runtime.Machine(torch.device("cpu"), "fp32", "demonstrations are exact on a CPU in fp32")
VOCABULARY = 256  # bytes
LENGTH = 64  # tokens per row
LAYERS = 3  # of the model under adapters
CORPUS_BYTES = 200_000  # of each corpus that are used

CHECKPOINTING = ("none", "non-reentrant", "reentrant", "default")
HOOK = ("left to the library", "asked for", "removed")
ORDER = ("adapter, then checkpointing", "checkpointing, then adapter")
ABOVE = ("nothing", "norm", "head")
ADAPTER = ("LoRA (peft)", "low rank (own)")


# ----------------------------------------------------------------------------- what surrounds a run
def quiet(call: Callable, *args, **kwargs):
    """Return the result, and the warnings as text instead of lines on stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # one that was given before counts too
        result = call(*args, **kwargs)
    return result, [str(w.message).splitlines()[0] for w in caught]


@contextlib.contextmanager
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled before, nothing left behind, and no warning about what is provoked on
    purpose.
    """
    torch._dynamo.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch._dynamo.reset()


def medians(calls: dict[str, Callable], rounds: int) -> dict[str, float]:
    """Median seconds of each call, made in turn so that all meet the same machine; two rounds warm
    up.
    """
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            spent[name].append(time.perf_counter() - started)
    return {name: statistics.median(times[2:]) for name, times in spent.items()}


# -------------------------------------------------------------------------------------------- texts
def rows(
    count: int = 4, length: int = 24, *, vocabulary: int = VOCABULARY, seed: int = 7
) -> Tensor:
    """Random token ids, (count, length), the same on every call."""
    return torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(seed))


def byte_rows(count: int, length: int) -> Tensor:
    """Python's documentation as bytes, (count, length): rows to learn by heart."""
    from pydoc_data.topics import topics

    raw = "".join(topics[name] for name in sorted(topics)).encode()[: count * length]
    return torch.tensor(list(raw)).view(count, length)


@cache
def stream(source: str, split: str = "train") -> Tensor:
    """Return a corpus as one long row of bytes."""
    joined = "\n".join(text.documents(source, split))[:CORPUS_BYTES].encode()[:CORPUS_BYTES]
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8).long()


def batches(source: str = "prose", *, rows: int = 8, seed: int = 0) -> text.Batches:
    return text.Batches(stream(source), rows=rows, length=LENGTH, seed=seed)


# -------------------------------------------------------------------------------------- byte models
def byte_model(*, seed: int = 0, **shape) -> nn.Module:
    """Return a new language model on bytes, with random weights."""
    return models.tiny(
        VOCABULARY, **(dict(hidden=64, layers=2, heads=2, length=LENGTH, seed=seed) | shape)
    )


@cache
def _trained() -> nn.Module:
    model = byte_model()
    learn(model, steps=100, schedule=loop.cosine(100), clip=0)
    return model


def trained() -> nn.Module:
    """Return the byte model after a hundred steps of prose.

    Trained once per process; every caller gets a copy.
    """
    return copy.deepcopy(_trained()).train()


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loop's loss per supervised token, for demonstrations that write their own few
    steps.
    """
    return losses.causal_lm(model, batch)["ce"] / losses.supervised(batch["labels"])


def held_out_loss(model: nn.Module, source: str = "prose") -> float:
    """Nats per byte on held-out rows, judged by an fp32 copy so that no rounding of the judge is in
    it.
    """
    judge = copy.deepcopy(model).float()
    fixed = text.fixed_rows(stream(source, "held_out"), length=LENGTH, limit=128)
    return loop.evaluate(judge, fixed, machine=CPU, batch=64)["loss"]


# ---------------------------------------------------------------------- frozen models with adapters
class LowRank(nn.Module):
    """y = W x + up (down x) with W frozen: the whole idea of an adapter."""

    def __init__(self, base: nn.Linear, rank: int = 4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * base.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def base(family: str = "qwen3", vocabulary: int = VOCABULARY, **shape) -> nn.Module:
    """Return a small frozen model."""
    shape = dict(hidden=32, layers=LAYERS, length=LENGTH) | shape
    return models.tiny(vocabulary, family=family, **shape).requires_grad_(False)


def lora(model: nn.Module, *, seed: int = 0, **config) -> nn.Module:
    """peft's LoRA on every linear layer of the blocks, unless `config` says otherwise."""
    # here: it takes a second, and most notebooks that use this bench have no such adapter
    import peft

    with seeded(seed):  # peft reads a property that transformers has renamed, and is warned
        return quiet(
            peft.get_peft_model,
            model,
            peft.LoraConfig(**({"target_modules": "all-linear"} | config)),
        )[0]


def attach(model: nn.Module, adapter: str = ADAPTER[0], *, seed: int = 0) -> nn.Module:
    """Adapters of rank 4 on every linear layer of the blocks; everything else is frozen."""
    if adapter == ADAPTER[0]:
        return lora(model, seed=seed, r=4)
    with seeded(seed):
        wiring.swap(model, lambda _, linear: LowRank(linear), wiring.select(model))
    return model


def wake(model: nn.Module, *, seed: int = 1) -> nn.Module:
    """Random values in every adapter tensor, the same for the same shapes in the same order."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in wiring.trainable(model).values():
            p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    return model


def inside(model: nn.Module) -> nn.Module:
    """Return the causal model itself, without what peft wraps around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def checkpointed(model: nn.Module, mode: str) -> nn.Module:
    """Switch activation checkpointing on as `mode` says; "default" leaves the kind to
    transformers.
    """
    if mode != "none":
        inside(model).activation_checkpointing_enable(
            *[{"use_reentrant": mode == "reentrant"}][: mode != "default"]
        )
    return model


def hooked(model: nn.Module, hook: str) -> nn.Module:
    """Return the hook that makes the embedding's output require a gradient: as the library left it,
    asked for, or removed.
    """
    if hook == "asked for":
        inside(model).enable_input_require_grads()
    elif hook == "removed" and getattr(inside(model), "_require_grads_hooks", None):
        inside(model).disable_input_require_grads()
    return model


def wired(
    checkpointing: str = "none",
    hook: str = HOOK[0],
    order: str = ORDER[0],
    adapter: str = ADAPTER[0],
    family: str = "qwen3",
    above: str = ABOVE[0],
) -> nn.Module:
    """Return a frozen tiny model with adapters that have something to learn, put together in the
    given order.

    `above` names what else trains, above the blocks: the final norm, or a head of its own, not tied
    to the embedding.
    """
    for name, value, allowed in (
        ("checkpointing", checkpointing, CHECKPOINTING),
        ("hook", hook, HOOK),
        ("order", order, ORDER),
        ("adapter", adapter, ADAPTER),
        ("above", above, ABOVE),
    ):
        if value not in allowed:  # or a misspelt wiring would be shown as another one
            raise ValueError(f"{name} = {value!r}: allowed are {'; '.join(allowed)}")
    model = base(family, tie_word_embeddings=above != "head")
    if order == ORDER[0]:
        model = checkpointed(attach(model, adapter), checkpointing)
    else:
        model = attach(checkpointed(model, checkpointing), adapter)
    wake(hooked(model, hook))
    top = {"nothing": None, "norm": inside(model).model.norm, "head": inside(model).lm_head}[above]
    if top is not None:
        top.requires_grad_(True)
    return model.train()


# -------------------------------------------------------------------------------- one backward pass
def loss_of(model: nn.Module, ids: Tensor | None = None) -> Tensor:
    ids = rows() if ids is None else ids
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def flow(model: nn.Module, loss: Callable[[], Tensor] | None = None) -> dict:
    """One forward and one backward pass: what it raised, what it warned, and the gradients by
    name.
    """
    model.zero_grad()

    def both() -> str | None:
        try:
            (loss or (lambda: loss_of(model)))().backward()
        except RuntimeError as error:
            return str(error).splitlines()[0]

    raised, warned = quiet(both)
    gradients = {
        name: None if p.grad is None else p.grad.clone()
        for name, p in wiring.trainable(model).items()
    }
    about = [w for w in warned if "requires_grad" in w]
    return {"raised": raised, "warned": about, "warnings": len(warned), "gradients": gradients}


def alive(flowed: dict) -> int:
    """How many tensors have a gradient that is not zero."""
    return sum(g is not None and bool(g.any()) for g in flowed["gradients"].values())


def compare(model: nn.Module, reference: dict) -> dict:
    """`flow` in words and numbers: how many tensors got a gradient, and how far it is from the
    reference's.
    """
    flowed = flow(model)
    gradients = {n: g for n, g in flowed["gradients"].items() if g is not None}
    apart = [float((g - reference["gradients"][n]).abs().max()) for n, g in gradients.items()]
    return {
        "raised": flowed["raised"],
        "warned": flowed["warned"][0] if flowed["warned"] else None,
        "tensors with a gradient": len(gradients),
        "of": len(flowed["gradients"]),
        "largest difference": max(apart) if apart else None,
    }


def sentence(model: nn.Module, loss: Callable[[], Tensor] | None = None) -> dict:
    """Return the canary's sentence, as a fact."""
    return {"canary": quiet(wiring.canary, model, loss or (lambda: loss_of(model)))[0].sentence}


# ------------------------------------------------------------------------------------ ways to train
def plain_loop(
    model: nn.Module, optimizer, loss: Callable[[], Tensor], *, steps: int
) -> list[float]:
    """Return the plain loop: the loss of each step."""
    curve = []
    for _ in range(steps):
        model.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        curve.append(float(value.detach()))
    return curve


def fit(model: nn.Module, *, steps: int = 20, lr: float = 1e-2, optimizer=None) -> dict:
    """Train on one batch with AdamW and count what moved: the loss, and the tensors that changed at
    all.
    """
    trainable, before = (
        wiring.trainable(model),
        {name: p.detach().clone() for name, p in model.named_parameters()},
    )
    optimizer = optimizer or torch.optim.AdamW(trainable.values(), lr=lr, weight_decay=0.0)
    curve, _ = quiet(plain_loop, model, optimizer, lambda: loss_of(model), steps=steps)
    moved = sum(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    return {
        "first loss": curve[0],
        "last loss": curve[-1],
        "tensors that moved": moved,
        "of": len(trainable),
    }


def learn(
    model: nn.Module, *, steps: int, lr: float = 5e-3, optimizers=None, data=None, **options
) -> list[dict]:
    """nblib's loop, in fp32 on the CPU; AdamW on batches of prose unless told otherwise."""
    optimizers = loop.adamw(model, lr=lr) if optimizers is None else optimizers
    return loop.fit(
        model, batches() if data is None else data, optimizers, total=steps, machine=CPU, **options
    )


# ------------------------------------------------------------------------- the Hugging Face Trainer
@contextlib.contextmanager
def silent() -> Iterator[io.StringIO]:
    """Collect what the Trainer would print or log.

    What a library reports while it does wrong is a fact too. Among several processes each has a
    Trainer of its own.
    """
    output, logger, root = (
        io.StringIO(),
        logging.getLogger("transformers.trainer"),
        logging.getLogger("transformers"),
    )
    handler, level, handlers = (
        logging.StreamHandler(output),
        tf.utils.logging.get_verbosity(),
        root.handlers,
    )
    root.handlers = []
    tf.utils.logging.set_verbosity_warning()
    logger.addHandler(handler)
    try:
        with alone(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            yield output
    finally:
        logger.removeHandler(handler)
        root.handlers = handlers
        tf.utils.logging.set_verbosity(level)


# a string: to look the class up takes a second
def arguments(folder: str, **options) -> "tf.TrainingArguments":
    plain = dict(
        output_dir=folder,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        save_strategy="no",
        seed=0,
        per_device_train_batch_size=2,
        max_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
    )
    return tf.TrainingArguments(**(plain | options))


def run_trainer(
    kind: type, model, data, *, resume: str | None = None, folder: str | None = None, **options
):
    """Return the trainer after training, with all it printed as `trainer.output`, and its log
    lines, one per step.
    """
    trainer_options = {k: options.pop(k) for k in ("make_optimizer", "callbacks") if k in options}
    with tempfile.TemporaryDirectory() as temporary, seeded(), silent() as output:
        args = arguments(folder or temporary, **options)
        trainer = kind(model=model, args=args, train_dataset=data, **trainer_options)
        trainer.train(resume_from_checkpoint=resume)
    trainer.output = output.getvalue()
    return trainer, [line for line in trainer.state.log_history if "grad_norm" in line]
