"""Compile: what a graph captures, which faults it hides, and what breaks it.

A compiled step is a different program from the eager one. Where tracing succeeds, autograd sees the
graph and not the modules. So a fault of the modules (a reentrant checkpoint whose input requires no
gradient) can disappear, and come back with the first graph break. All runs here use the backend
aot_eager. It captures and differentiates as inductor does but generates no code, so a run takes
seconds and shows only what the graphs do.

Footgun: dynamo stores compiled code by code object, for all models together. Without a reset
between two experiments the second one starts with the guards of the first.
"""

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from lessons import compile_cache
from lessons.graph_breaks import breaks
from lessons.pitfalls import WITH_PEFT, Pitfall, Unavailable
from lessons.pitfalls.bench import alive, flow, fresh_dynamo, inside
from lessons.pitfalls.recomputation import (
    library_checkpointing,
    lora,
    outcome,
    tokens,
    whole_logits,
)
from lessons.progress import each
from nblib import compiling, models

Loss = Callable[[nn.Module, Tensor], Tensor]
# peft's own choice for most models; each adapted layer is more to trace
ADAPTED = ["q_proj", "v_proj"]


def difference(got: dict[str, Tensor | None], right: dict[str, Tensor]) -> float:
    """Largest difference over all gradients; one that is missing counts as wrong by its own
    size.
    """
    return max(
        float((g - got[n]).abs().max() if got[n] is not None else g.abs().max())
        for n, g in right.items()
    )


# ----------------------------------------------------------------- P15, the hook and the full graph


def with_hook(model: nn.Module, ids: Tensor) -> Tensor:
    model.enable_input_require_grads()  # sets requires_grad_() inside the graph
    step = torch.compile(whole_logits, backend="aot_eager", fullgraph=True)
    return step(model, ids)


def without_hook(model: nn.Module, ids: Tensor) -> Tensor:
    step = torch.compile(whole_logits, backend="aot_eager", fullgraph=True)
    return step(model, ids)


def compiled_gradients(loss: Loss, *, checkpointing: bool = False) -> dict:
    """One step of a frozen model with adapters as a single graph, against the same step in eager
    mode.
    """
    model, ids = lora(targets=ADAPTED, layers=1), tokens()
    right = flow(model, lambda: whole_logits(model, ids))["gradients"]
    if checkpointing:
        library_checkpointing(model, use_reentrant=False)
    with fresh_dynamo():
        compiled = flow(model, lambda: loss(model, ids))
    hook = bool(getattr(inside(model), "_require_grads_hooks", None))
    facts = {"hook": hook, "checkpointing": checkpointing, "raised": compiled["raised"] or ""}
    if compiled["raised"]:
        return facts
    gradients = compiled["gradients"]
    return facts | {
        "gradients": f"{alive(compiled)} of {len(gradients)}",
        "largest difference": difference(gradients, right),
    }


P15 = Pitfall(
    id="P15",
    title="Compile does not need the input-gradient hook and fails with it",
    symptom="torch.compile with fullgraph=True refuses the model: returning intermediate with "
    "requires_grad_()",
    claim="with frozen embeddings torch.compile works only after enable_input_require_grads() "
    "(a lesson noted after "
    "a long run on a large card)",
    verdict="The claim is backwards. Without the hook the frozen model is one graph with the "
    "eager gradients, with and "
    "without checkpointing. The hook sets requires_grad inside the graph, and dynamo cannot "
    "capture that. "
    f"Seen on {WITH_PEFT}",
    fix="Use no hook. If the checkpointing switch has added one, call "
    "`disable_input_require_grads()` and pass "
    "`use_reentrant=False`",
    broken=lambda: compiled_gradients(with_hook),
    fixed=lambda: compiled_gradients(without_hook),
    claimed=lambda: compiled_gradients(without_hook, checkpointing=True),
    seen=lambda facts: bool(facts["raised"]) or facts["largest difference"] > 1e-5,
    wrong=with_hook,
    right=without_hook,
    slow=True,
)


# --------------------------------------------------------------------- P16, compile hides the fault


def compiled_over_reentrant(model: nn.Module) -> Loss:
    # cuts the adapters off: they get no gradient in eager mode (P01)
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.disable_input_require_grads()
    # dynamo puts its own checkpoint in place of this one, and the fault is not seen
    return torch.compile(whole_logits, backend="aot_eager")


def compiled_over_non_reentrant(model: nn.Module) -> Loss:
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.disable_input_require_grads()
    return torch.compile(whole_logits, backend="aot_eager")


def only_compiled(model: nn.Module) -> Loss:
    """No checkpointing at all."""
    return torch.compile(whole_logits, backend="aot_eager")


def eager_and_compiled(*, reentrant: bool | None, graph_break: bool = False) -> dict:
    """Gradients of adapters in the blocks while the head trains too: in eager mode, and
    compiled.
    """
    layers = 1 + graph_break  # two blocks, one of them with the break
    model, ids = lora(targets=ADAPTED, layers=layers, tie_word_embeddings=False), tokens()
    model.get_output_embeddings().requires_grad_(True)
    with fresh_dynamo():
        step = {
            None: only_compiled,
            True: compiled_over_reentrant,
            False: compiled_over_non_reentrant,
        }[reentrant](model)
        facts = {
            "use_reentrant": reentrant,
            "graph break": graph_break,
            "eager": outcome(model, ids),
        }
        if graph_break:
            compiling.blocks(model)[0].mlp.register_forward_hook(
                lambda *_: torch._dynamo.graph_break()
            )
        compiled = flow(model, lambda: step(model, ids))
    return facts | {"compiled": f"{alive(compiled)} of {len(compiled['gradients'])} gradients"}


P16 = Pitfall(
    id="P16",
    title="Compile hides the reentrant fault",
    symptom="the compiled model trains; the same script in eager mode, or after one graph "
    "break, trains its head only",
    claim="the adapters are wired wrongly, or eager mode is at fault (what comparing the two "
    "runs suggests)",
    verdict="The fault of P01 is there, and compile hides it. In eager mode a reentrant "
    "checkpoint whose input "
    "requires no gradient leaves the adapters without one. Dynamo replaces that checkpoint by "
    "its own, so the "
    "compiled model trains. A graph break inside a block gives the block back to the eager "
    "code, and the "
    f"fault returns. Seen on {WITH_PEFT}",
    fix="`use_reentrant=False`, and check gradients in eager mode",
    broken=lambda: eager_and_compiled(reentrant=True),
    fixed=lambda: eager_and_compiled(reentrant=False),
    claimed=lambda: eager_and_compiled(reentrant=None),
    seen=lambda facts: facts["eager"] != facts["compiled"],
    check="S10",
    wrong=compiled_over_reentrant,
    right=compiled_over_non_reentrant,
    slow=True,
)


# ------------------------------------------------------------- P17, the prefix, and what recompiles


def from_the_wrapper(model: nn.Module) -> dict[str, Tensor]:
    compiled = torch.compile(model, backend="aot_eager")  # a wrapper around the model
    one_step(compiled)
    return compiled.state_dict()  # "_orig_mod." stands before every name


def from_the_model(model: nn.Module) -> dict[str, Tensor]:
    model.compile(backend="aot_eager")  # in place
    one_step(model)
    return model.state_dict()


def past_the_wrapper(model: nn.Module) -> dict[str, Tensor]:
    """Trained through the wrapper, saved from the model inside."""
    one_step(torch.compile(model, backend="aot_eager"))
    return model.state_dict()


def one_step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole_logits(model, tokens(vocabulary=64)).backward()
    optimizer.step()


def saved_and_loaded(train: Callable[[nn.Module], dict[str, Tensor]]) -> dict:
    """Return what a compiled training saves, loaded into a plain model that forgives missing
    names.
    """
    trained, plain = (models.tiny(64, hidden=32, layers=1, seed=seed) for seed in (1, 2))
    with fresh_dynamo():
        saved = train(trained)
        unmatched = plain.load_state_dict(saved, strict=False)
    same = sum(bool(torch.equal(a, b)) for a, b in zip(trained.parameters(), plain.parameters()))
    return {
        "first name": next(iter(saved)),
        "missing": len(unmatched.missing_keys),
        "unexpected": len(unmatched.unexpected_keys),
        "parameters": len(list(plain.parameters())),
        "equal after loading": same,
    }


def recompiles(changes: dict[str, object]) -> list[dict]:
    """How many graphs are compiled at each change: a length, or a function of the model."""
    model, rows, before = models.tiny(64, hidden=32, layers=1), [], 0
    # what dynamo captures, and nothing behind it
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    with fresh_dynamo():
        step = torch.compile(whole_logits, backend=counter)
        length = 16
        for name in each(changes, "changes"):
            change = changes[name]
            length = change if isinstance(change, int) else length
            if not isinstance(change, int):
                change(model)
            loss = step(model, tokens(length=length, vocabulary=64))
            if loss.requires_grad:
                loss.backward()
            rows.append({"change": name, "graphs compiled": counter.frame_count - before})
            before = counter.frame_count
    return rows


P17 = Pitfall(
    id="P17",
    title="The wrapper's prefix",
    symptom="weights saved from a compiled run load without an error, and the model talks nonsense",
    claim="compile trained a wrong model (what a good loss and a bad evaluation suggest)",
    verdict="The training was right; not one of its tensors was loaded. torch.compile(model) "
    "returns a wrapper whose "
    "state dict has _orig_mod. before every name, and strict=False accepts that no name matches. "
    f"Seen on {WITH_PEFT}",
    fix="Use `model.compile()` or `compiling.compile_blocks`, which change the model in place, "
    "and load with "
    "`strict=True`",
    broken=lambda: saved_and_loaded(from_the_wrapper),
    fixed=lambda: saved_and_loaded(from_the_model),
    claimed=lambda: saved_and_loaded(past_the_wrapper),
    seen=lambda facts: facts["equal after loading"] < facts["parameters"],
    wrong=from_the_wrapper,
    right=from_the_model,
    slow=True,
)


# ----------------------------------------------------------------------- P18, find the graph breaks


def read_norm(module: nn.Module, inputs: tuple, output: Tensor) -> None:
    """Read the norm as the usual monitor does: a number per step."""
    NORMS.append(output.norm().item())  # .item() leaves the graph to read a number


def keep_norm(module: nn.Module, inputs: tuple, output: Tensor) -> None:
    """Keep the norm as a tensor, to be read once per step outside the model."""
    NORMS.append(output.detach().norm())  # read it after the step


NORMS: list = []


def graph_breaks(monitor=None, *, adapters: bool = False) -> dict:
    """Return breaks of one forward pass, with the line of each."""
    model = lora(layers=2) if adapters else models.tiny(512, hidden=32, layers=2)
    NORMS.clear()
    if monitor:
        for block in compiling.blocks(model):
            block.mlp.register_forward_hook(monitor)
    whole_logits(model, tokens())  # in eager mode
    read = len(NORMS)
    with fresh_dynamo():
        explained = breaks(whole_logits, model, tokens())
    NORMS.clear()  # they keep the model's tensors alive
    lines = [f"{Path(w['line']).name}: {w['reason']}" for w in explained["where"]]
    return {
        "norms read": read,
        "graphs": explained["graphs"],
        "breaks": explained["breaks"],
        "where": sorted(set(lines)),
    }


P18 = Pitfall(
    id="P18",
    title="A number read inside the model breaks the graph",
    symptom="the compiled model is hardly faster; TORCH_LOGS shows many small graphs",
    claim="adapters cannot be compiled (said when compile disappoints after adding LoRA)",
    verdict="The adapters add no graph break; the monitor does. An .item() in the forward pass "
    "ends the graph, and "
    "every function around it is cut at that place too. So one number per block makes several "
    "graphs per block. "
    f"Seen on {WITH_PEFT}",
    fix="Keep the number a tensor and read it after the step; `lessons.graph_breaks.breaks` "
    "names the line",
    broken=lambda: graph_breaks(read_norm),
    fixed=lambda: graph_breaks(keep_norm),
    claimed=lambda: graph_breaks(adapters=True),
    seen=lambda facts: facts["breaks"] > 0,
    wrong=read_norm,
    right=keep_norm,
    slow=True,
)


# ------------------------------------------------------------------- P23, a cache cut off by a kill

# Importing torch takes seconds, so it is done once. Each run is a fork of this process, which has
# compiled nothing.
PROGRAM = """
import os, signal, sys, torch
import torch._inductor.compile_fx


def outcome():
    try:
        torch.compile(lambda x: (x.sin() + 1).sum())(torch.ones(8))
    except Exception as error:
        lines = f"{type(error).__name__}: {error}".splitlines()
        return [line for line in lines if "Error: " in line][-1]
    return "ok"


for cache in sys.stdin:
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        print("" if code == 0 else ended, flush=True)
    else:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache.strip()
        signal.alarm(300)  # one that hangs is killed
        print(outcome(), end="", flush=True)
        os._exit(0)
"""


@functools.cache
def _forks() -> subprocess.Popen:
    # Without vector instructions nothing is probed, and the first run takes seconds, not half a
    # minute.
    environment = os.environ | {"TORCHINDUCTOR_VEC_ISA_OK": "0"}
    pipes = dict(
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    forks = subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, **pipes)
    # closes its input: it ends, as it does if this process is killed
    atexit.register(forks.communicate)
    return forks


def run_with(cache: Path) -> str:
    """Return a fresh process compiles with inductor, its cache in `cache`; 'ok' or how it ended."""
    print(cache, file=_forks().stdin, flush=True)
    return _forks().stdout.readline().strip().replace(f"{cache}/", "") or "it ended without a word"


@functools.cache
def _warm_cache() -> tempfile.TemporaryDirectory:
    # as inductor looks for it
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise Unavailable(
            "P23 damages compiled code, so it needs a C++ compiler, and there is no "
            f"{compiler} here"
        )
    folder = tempfile.TemporaryDirectory(prefix="nblib-inductor-")
    if (outcome := run_with(Path(folder.name))) != "ok":
        raise RuntimeError(
            f"inductor cannot compile here, so there is no cache to damage: {outcome}"
        )
    return folder


def cut_library(cache: Path) -> None:
    for library in cache.rglob("*.main.so"):
        # the linker was killed while it wrote this file; later runs find and load it
        os.truncate(library, 0)


def cut_library_and_repair(cache: Path) -> None:
    for library in cache.rglob("*.main.so"):
        os.truncate(library, 0)
    # deletes libraries that are shorter than their header says; later runs link anew
    compile_cache.repair(cache)


def cut_pickles(cache: Path) -> None:
    """Cut other files of the cache in the same way: the claim."""
    for pickled in cache.rglob("fxgraph/*/*/*"):
        os.truncate(pickled, 0)


def cut_cache(cut: Callable[[Path], None]) -> dict:
    """Cut files of a warm cache, then run; run again if that failed."""
    with tempfile.TemporaryDirectory() as place:
        cache = Path(place) / "cache"
        shutil.copytree(_warm_cache().name, cache)
        whole = [path for path in cache.rglob("*") if path.is_file() and path.stat().st_size]
        cut(cache)
        deleted = [path for path in whole if not path.exists()]
        shorter = [path for path in whole if path not in deleted and not path.stat().st_size]
        if not deleted + shorter:  # or a run that damaged nothing would count against the claim
            raise RuntimeError(
                "nothing in inductor's cache was cut: this version keeps it in another way"
            )
        first = run_with(cache)
        second = "not needed" if first == "ok" else run_with(cache)
        return {
            "cut": len(deleted + shorter),
            "deleted": len(deleted),
            "next run": first,
            "run after it": second,
        }


P23 = Pitfall(
    id="P23",
    title="A compile cache cut off by a killed run",
    symptom="since a run was killed, every run on this machine fails at its first compiled "
    "step: file too short",
    claim="the installation is broken, or any file of the cache that a kill cuts short (what "
    "the message suggests)",
    verdict="Only a library that was cut short stops later runs. The linker writes it under "
    "its final name, and later "
    "runs only ask whether it is there, so a partial one stays. Python files and pickles are "
    "renamed into place, and a "
    f"damaged pickle is noticed and made again. Seen on {WITH_PEFT}",
    fix="`lessons.compile_cache.repair()` deletes the libraries that lack their end; nothing "
    "else is lost",
    broken=lambda: cut_cache(cut_library),
    fixed=lambda: cut_cache(cut_library_and_repair),
    claimed=lambda: cut_cache(cut_pickles),
    seen=lambda facts: facts["run after it"] not in ("ok", "not needed"),
    wrong=cut_library,
    right=cut_library_and_repair,
    slow=True,
)

PITFALLS = [P15, P16, P17, P18, P23]
