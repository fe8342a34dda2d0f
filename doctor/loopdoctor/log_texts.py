"""Messages of torch and its neighbours that name a cause, as they stand in a log.

A library often says what is wrong, and its words are read past: a warning scrolls by between two
progress bars, an error is answered with the first line that silences it. Each row of MESSAGES has
the words to look for and the check of the live doctor that they belong to. Name, cause and fix are
quoted from the page of that check, so a log and a run are called by the same names.

    for key, begin, end in log_texts.look(text): ...
    found = log_texts.findings(log.messages, zero_norm=False)

Footgun: a message is said of a program and not of its weights. "None of the inputs have
requires_grad=True" is harmless where all that is checkpointed is frozen on purpose. Each finding
says what the log cannot tell, and that a run under `loopdoctor` can.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from loopdoctor import checks
from loopdoctor.finding import ERROR, WARN, Finding
from loopdoctor.log_faults import LIVE
from loopdoctor.log_lines import Message

AROUND = 400  # characters of a line before and behind the words of a message
HITS = 200  # of one message in a block
OVERFLOWS = 20  # skipped steps from which on a scaler is not just finding its scale
SHOWN = 150  # characters of a message in the report


class Known(NamedTuple):
    """A message, and the fault of a check that it tells of."""

    needle: str  # what a text is searched for first, which is fast
    pattern: str  # what the needle must stand in; "" for the needle alone
    check: str  # id of the check; "" for what is evidence only
    fault: str  # key on the page of the check
    severity: str
    unseen: str  # what a log cannot tell
    cause: str = ""  # where that of the page names what a log does not have
    fix: str = ""


def _evidence(needle: str, pattern: str = "") -> Known:
    return Known(needle, pattern, "", "", "", "")


CHECKPOINTING = (
    r"(?:gradient|activation)[ _]checkpointing(?:_enable)?\b"
    r"(?![\"'`]?\s*(?:[:=]\s*(?:false|none|null)|is deprecated))"
)
MESSAGES = {
    "inputs": Known(
        "None of the inputs have requires_grad=True",
        "",
        "S10",
        "reentrant-checkpoint-cut",
        WARN,
        "whether something inside the checkpointed part should have learned: where all of it is "
        f"frozen on purpose, nothing is lost. {LIVE}: S10 counts the tensors that get no gradient.",
    ),
    "element": Known(
        "does not require grad and does not have a grad_fn",
        r"(?:element \d+ of tensors )?does not require grad and does not have a grad_fn",
        "F1",
        "loss-cut-off/inside",
        ERROR,
        "which of three causes it was: the loss was cut off between the model and backward (F1), "
        "all weights are frozen (S1), or reentrant gradient checkpointing stands behind frozen "
        f"inputs (S10). {LIVE}, which names one of them, and the line.",
        "The loss that backward was called on hangs on no weight that may learn.",
        "Print sum(p.requires_grad for p in model.parameters()): with 0 unfreeze what should "
        "learn. "
        "Else compute the loss from the model's own output, without detach, .item() or no_grad; "
        "with gradient checkpointing use use_reentrant=False.",
    ),
    "no-trainable": Known(
        "trainable params: 0 ||",
        "",
        "S1",
        "nothing-trainable",
        ERROR,
        "what has frozen it: an adapter that was loaded with is_trainable=False, or "
        f"prepare_model_for_kbit_training after get_peft_model. {LIVE}: S1 counts the tensors.",
    ),
    "no-parameter": Known(
        "doesn't have any parameters that require a gradient",
        "",
        "S1",
        "nothing-trainable",
        ERROR,
        f"what has frozen the model. {LIVE}: S1 counts the tensors.",
    ),
    "empty-optimizer": Known(
        "optimizer got an empty parameter list",
        "",
        "S2",
        "empty-optimizer",
        ERROR,
        f"why the list was empty. {LIVE}: S2 and S1 tell frozen weights from a filter that is "
        "wrong.",
    ),
    "quantised": Known(
        "cannot perform fine-tuning on purely quantized models",
        "",
        "S8",
        "quantised-without-adapter",
        ERROR,
        f"whether an adapter was attached and lost again. {LIVE}: S8 and S1 look at each tensor.",
    ),
    "scheduler": Known(
        "lr_scheduler.step()` before `optimizer.step()",
        "",
        "N9",
        "scheduler-before-optimizer",
        WARN,
        "whether the order in the code is wrong: a GradScaler that skips the first step, as many "
        f"do, makes torch say the same. {LIVE}: N9 sees the order, N15 the steps that are skipped.",
    ),
    "unscale": Known(
        "Attempting to unscale FP16 gradients",
        "",
        "S7",
        "fp16-parameters-under-a-scaler",
        ERROR,
        f"which tensors are in fp16. {LIVE}: S7 counts them.",
    ),
    "inference": Known(
        "Inference tensors cannot be saved for backward",
        "",
        "F9",
        "inference-mode-teacher",
        ERROR,
        f"which module was called under inference_mode. {LIVE}: F9 names it.",
    ),
    "target-size": Known(
        "Using a target size (",
        r"Using a target size \([^\r\n]{0,60}?\) that is different to the input size "
        r"\([^\r\n]{0,60}?\)+",
        "F21",
        "shapes-broadcast",
        WARN,
        f"which loss it was. {LIVE}: F21 names the line.",
    ),
    "kl-mean": Known(
        "reduction: 'mean' divides the total loss by both",
        "",
        "F89",
        "divergence-per-class",
        WARN,
        "over how many classes it divides, and so how much too small the divergence is. "
        f"{LIVE}: F89 counts them.",
        'kl_div\'s "mean" divides by the classes as well as by the rows, so the divergence counts '
        "far less than it says.",
    ),
    "overflow": Known(
        "kipping step",
        r"(?:OVERFLOW!?|overflow\.?)[^\r\n]{0,40}kipping step",
        "N15",
        "scaler-skips-steps",
        WARN,
        f"which module makes the first infinity. {LIVE}: F5 names it.",
    ),
    "scale-minimum": Known(
        "Current loss scale already at minimum",
        "",
        "N15",
        "scaler-skips-steps",
        ERROR,
        f"which module makes the first infinity. {LIVE}: F5 names it.",
    ),
    "stopping": Known(
        "Loss is nan, stopping training",
        "",
        "N17",
        "loss-not-finite",
        ERROR,
        f"which module or batch made it. {LIVE}: F5 and F14 name it.",
        "The loss was NaN, and the program ended itself.",
    ),
    "anomaly": Known(
        " returned nan values in its ",
        r"Function '?\w+'? returned nan values in its \w+ output",
        "B4",
        "gradients-not-finite",
        ERROR,
        f"whether that function was given a NaN already. {LIVE}: F5 names the module.",
        "A derivative is NaN: the function that is named gave it in the backward pass.",
    ),
    "not-clipped": Known(
        "is non-finite, so it cannot be clipped",
        "",
        "B4",
        "gradients-not-finite",
        ERROR,
        f"which tensor's gradient it was. {LIVE}: B4 names it.",
        "The norm of the gradients is NaN or infinite, and clipping refused it.",
    ),
    "response": Known(
        "Could not find response key",
        "",
        "F14",
        "rows-without-targets",
        WARN,
        f"how many rows it concerns. {LIVE}: F14 counts them.",
        "The marker of the answer (response template) was not found in some rows, and all "
        "labels of these are masked.",
    ),
    "recompile": Known(
        "torch._dynamo hit config.",
        r"torch\._dynamo hit config\.\w+ ?(?:\(\d+\))?",
        "N18",
        "recompiles",
        WARN,
        f"which number or shape changes. {LIVE}: N18 counts the compilations.",
    ),
    "memory": _evidence(
        "ut of memory", r"(?i:CUDA|HIP|MPS|XPU)[^\r\n]{0,20}out of memory[^\r\n]{0,60}"
    ),
    "memory-host": _evidence("DefaultCPUAllocator: can't allocate memory"),
    "memory-torch": _evidence("OutOfMemoryError", r"OutOfMemoryError: [^\r\n]{0,80}"),
    "cache": _evidence("aching is incompatible with gradient checkpointing"),
    "use-cache": _evidence("`use_cache=True` is incompatible with gradient checkpointing"),
    "checkpointing": _evidence("checkpointing", CHECKPOINTING),
    "checkpoint-file": _evidence("torch/utils/checkpoint.py"),
    "not-reentrant": _evidence("use_reentrant", r"use_reentrant[\"']?\s*[:=]\s*False"),
    "error": _evidence("Error: ", r"(?m)^[\w.]*(?-i:[A-Z]\w*Error): [^\r\n]{1,200}"),
}
PATTERNS = {
    key: re.compile(known.pattern or re.escape(known.needle), re.IGNORECASE)
    for key, known in MESSAGES.items()
}
ON = ("use-cache", "cache", "checkpoint-file", "checkpointing")  # checkpointing is switched on
ENDS = frozenset(
    ("element", "no-parameter", "empty-optimizer", "quantised", "unscale", "inference", "anomaly")
    + ("scale-minimum", "stopping", "memory", "memory-host", "memory-torch", "error", "not-clipped")
)  # what ends a run, and is said of none that comes after it
MEMORY = ("memory-torch", "memory", "memory-host")
NEEDLES = {key: known.needle.lower() for key, known in MESSAGES.items()}
PAGES = {check.id: check for check in checks.ALL}


def look(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the messages in a text: key, begin and end."""
    low = text.lower()
    low = low if len(low) == len(text) else text  # a few letters become two
    for key, known in NEEDLES.items():
        at = low.find(known)
        hits = 0
        while at >= 0 and hits < HITS:
            # the pattern is looked for around the words, in their line
            begin = max(low.rfind("\n", 0, at) + 1, at - AROUND)
            end = low.find("\n", at, at + AROUND)
            end = min(at + AROUND, len(low)) if end < 0 else end
            match = PATTERNS[key].search(text, begin, end)
            hits += 1
            if match is not None:
                yield key, match.start(), match.end()
                end = max(match.end(), at + 1)
            at = low.find(known, end)


def quote(message: Message) -> str:
    """Return a message with its line, as it stands in a report."""
    text = " ".join(message.text.split())
    text = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
    times = f" ({message.times} times)" if message.times > 1 else ""
    return f'line {message.line} says "{text}"{times}'


def first(messages: dict[str, Message], keys: tuple[str, ...]) -> Message | None:
    """Return the first message that is there."""
    return next((messages[key] for key in keys if key in messages), None)


def checkpointing(messages: dict[str, Message]) -> Message | None:
    """Return what says that gradient checkpointing is on, unless it is of the other kind."""
    return None if "not-reentrant" in messages else first(messages, ON)


def findings(messages: dict[str, Message], stuck: str, flat: str) -> list[Finding]:
    """Return the findings of a log's messages.

    `stuck` says that the gradient norm is 0, and `flat` that the loss does not fall, or are empty.
    """
    found: dict[str, Finding] = {}
    for key, known in MESSAGES.items():
        if key not in messages or not known.check:
            continue
        if key == "overflow" and messages[key].times < OVERFLOWS:
            continue  # a scaler that looks for its scale at the start
        # two messages of one check are one finding: the first in the table
        found.setdefault(known.check, _finding(known, quote(messages[key])))
    _judge_checkpointing(found, messages, stuck, flat)
    return list(found.values())


def _finding(known: Known, observed: str) -> Finding:
    """Return a finding with the words of the check's page."""
    page = PAGES[known.check].faults[known.fault]
    cause = f"{known.cause or page.cause} The log cannot tell {known.unseen}"
    fix = known.fix or page.fix
    return Finding(known.check, page.name, known.severity, observed, "no such message", cause, fix)


def _judge_checkpointing(
    found: dict[str, Finding], messages: dict[str, Message], stuck: str, flat: str
) -> None:
    """Tell a graph that reentrant checkpointing cuts from a loss that was cut off elsewhere."""
    warned = messages.get("inputs")
    raised = messages.get("element")
    on = checkpointing(messages)
    # nothing that may learn explains both messages
    if "S1" in found:
        found.pop("S10", None)
        return
    if warned is None and not (raised is not None and on is not None):
        return
    seen = [quote(m) for m in (warned, raised) if m is not None]
    if warned is None:
        seen.append(f"gradient checkpointing is on ({quote(on)})")
    seen += [text for text in (stuck, flat) if text]
    page = PAGES["S10"].faults["reentrant-checkpoint-cut"]
    # torch says the one message in a reentrant checkpoint alone, the other in other places as well
    if warned is None:
        unseen = (
            "whether the loss was cut off elsewhere (F1), or all weights are frozen (S1): "
            "both end in the same error."
        )
    elif raised is not None or stuck:
        unseen = (
            "which checkpointed modules are cut off, and how many tensors in them should learn."
        )
    else:
        unseen = (
            "whether something inside the checkpointed part should have learned: where all of "
            "it is "
            "frozen on purpose nothing is lost, and where a head outside of it learns, the loss "
            "falls a little and hides that the adapters stay as they are."
        )
    cause = (
        f"{page.cause} Behind a frozen embedding no gradient reaches the adapters. To call "
        "gradient_checkpointing_enable() after get_peft_model() does not mend it: peft makes the "
        "inputs require a gradient only where checkpointing is on already (with transformers 4; 5 "
        "does it in either order, and its checkpointing is not reentrant unless it is told to be). "
        f"The log cannot tell {unseen} "
        f"{LIVE}, which names S10 where this is so and counts the tensors without a gradient."
    )
    fix = (
        'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": '
        "False}), "
        "or model.enable_input_require_grads() before training."
    )
    severity = ERROR if raised is not None or stuck else WARN
    expected = "inputs that require a gradient, or use_reentrant=False"
    if raised is not None:
        found.pop("F1", None)  # the same error, with its cause
    found["S10"] = Finding("S10", page.name, severity, "; ".join(seen), expected, cause, fix)
