"""Compile: what a graph captures, which faults it hides, and what breaks it.

A compiled step is another program than the eager one. Where tracing succeeds, autograd sees the graph and not the
modules, so a fault of the modules (a reentrant checkpoint without an input that requires grad) can vanish, and come
back with the first graph break. All runs here use the backend aot_eager: it captures and differentiates as inductor
does and generates no code, so what is shown is about graphs and takes seconds.

Footgun: dynamo stores compiled code by code object, for all models together. Without a reset between two experiments
the second one starts with the guards of the first.
"""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from lessons.pitfalls import WITH_PEFT, Pitfall, Unavailable
from lessons.pitfalls.bench import alive, flow, fresh_dynamo
from lessons.pitfalls.recomputation import library_checkpointing, lora, outcome, tokens, whole_logits
from nblib import compiling, models


def difference(got: dict[str, Tensor | None], right: dict[str, Tensor]) -> float:
    """Largest difference over all gradients; one that is missing counts as wrong by its own size."""
    return max(float((g - got[n]).abs().max() if got[n] is not None else g.abs().max()) for n, g in right.items())


# ------------------------------------------------------------------------------- P15, the hook and the full graph


def compiled_gradients(*, hook: bool, checkpointing: bool = False) -> dict:
    """One step of a frozen model with adapters as a single graph, against the same step in eager mode."""
    model, ids = lora(layers=1), tokens()
    right = flow(model, lambda: whole_logits(model, ids))["gradients"]
    if checkpointing:
        library_checkpointing(model, use_reentrant=False)
    if hook:
        model.enable_input_require_grads()
    with fresh_dynamo():
        step = torch.compile(whole_logits, backend="aot_eager", fullgraph=True)
        compiled = flow(model, lambda: step(model, ids))
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
    title="Compile does not need the input-gradient hook, it stumbles over it",
    symptom="torch.compile with fullgraph=True refuses the model: returning intermediate with requires_grad_()",
    claim="with frozen embeddings torch.compile works only after enable_input_require_grads() (a lesson noted after "
    "a long run on a large card)",
    verdict=f"Seen on {WITH_PEFT}: without the hook the frozen model is one graph with the eager gradients, with and "
    "without checkpointing. The hook switches requires_grad on inside the graph, and that cannot be captured",
    fix="no hook; if the checkpointing switch has put one there, disable_input_require_grads() and use_reentrant=False",
    broken=lambda: compiled_gradients(hook=True),
    fixed=lambda: compiled_gradients(hook=False),
    claimed=lambda: compiled_gradients(hook=False, checkpointing=True),
    seen=lambda facts: bool(facts["raised"]) or facts["largest difference"] > 1e-5,
    slow=True,
)


# -------------------------------------------------------------------------------- P16, compile masks the fault


def eager_and_compiled(*, reentrant: bool | None, graph_break: bool = False) -> dict:
    """Gradients of adapters in the blocks while the head trains too: in eager mode, and compiled."""
    model, ids = lora(layers=2, tie_word_embeddings=False), tokens()
    model.get_output_embeddings().requires_grad_(True)
    if reentrant is not None:  # None: no checkpointing at all
        library_checkpointing(model, use_reentrant=reentrant)
    facts = {"use_reentrant": reentrant, "graph break": graph_break, "eager": outcome(model, ids)}
    if graph_break:
        compiling.blocks(model)[0].mlp.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    with fresh_dynamo():
        step = torch.compile(whole_logits, backend="aot_eager")
        compiled = flow(model, lambda: step(model, ids))
    return facts | {"compiled": f"{alive(compiled)} of {len(compiled['gradients'])} gradients"}


P16 = Pitfall(
    id="P16",
    title="Compile masks the reentrant fault",
    symptom="the compiled model trains; the same script in eager mode, or after one graph break, trains its head only",
    claim="the adapters are wired wrongly, or eager mode is at fault (what comparing the two runs suggests)",
    verdict=f"Seen on {WITH_PEFT}: a reentrant checkpoint whose input needs no gradient leaves the adapters without "
    "one in eager mode. Dynamo replaces the checkpoint by its own and the fault is gone, until a graph break inside a "
    "block hands that block back to the eager code",
    fix="use_reentrant=False, and judge gradients in eager mode",
    broken=lambda: eager_and_compiled(reentrant=True),
    fixed=lambda: eager_and_compiled(reentrant=False),
    claimed=lambda: eager_and_compiled(reentrant=None),
    seen=lambda facts: facts["eager"] != facts["compiled"],
    check="S10",
    slow=True,
)


# ------------------------------------------------------------------------ P17, the prefix, and what recompiles


def saved_and_loaded(*, in_place: bool, from_wrapper: bool = True) -> dict:
    """Save a compiled model's weights, load them into a plain one that forgives missing names.

    `from_wrapper` False asks the trained model itself for its weights, and not what torch.compile has put around it.
    """
    trained, plain = models.tiny(64, hidden=32, layers=2, seed=1), models.tiny(64, hidden=32, layers=2, seed=2)
    with fresh_dynamo():
        if in_place:
            trained.compile(backend="aot_eager")
            wrapped = trained
        else:
            wrapped = torch.compile(trained, backend="aot_eager")
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        whole_logits(wrapped, tokens(vocabulary=64)).backward()
        optimizer.step()
        saved = (wrapped if from_wrapper else trained).state_dict()
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
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    with fresh_dynamo():
        step = torch.compile(whole_logits, backend=counter)
        length = 16
        for name, change in changes.items():
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
    verdict=f"Seen on {WITH_PEFT}: torch.compile(model) returns a wrapper whose state dict has _orig_mod. before every "
    "name, and strict=False forgives that nothing matches. What was trained is fine",
    fix="model.compile() or compiling.compile_blocks, which change the model in place; and strict=True",
    broken=lambda: saved_and_loaded(in_place=False),
    fixed=lambda: saved_and_loaded(in_place=True),
    claimed=lambda: saved_and_loaded(in_place=False, from_wrapper=False),
    seen=lambda facts: facts["equal after loading"] < facts["parameters"],
    slow=True,
)


# --------------------------------------------------------------------------------- P18, find the graph breaks


def read_norm(module: nn.Module, inputs: tuple, output: Tensor) -> None:
    """The usual monitor: a number per step."""
    NORMS.append(output.norm().item())


def keep_norm(module: nn.Module, inputs: tuple, output: Tensor) -> None:
    """The same monitor; the number stays a tensor, to be read once per step outside the model."""
    NORMS.append(output.detach().norm())


NORMS: list = []


def graph_breaks(monitor=None, *, adapters: bool = False) -> dict:
    """Breaks of one forward pass, with the line of each."""
    model = lora(layers=2) if adapters else models.tiny(512, hidden=32, layers=2)
    NORMS.clear()
    if monitor:
        for block in compiling.blocks(model):
            block.mlp.register_forward_hook(monitor)
    with fresh_dynamo():
        explained = compiling.breaks(whole_logits, model, tokens())
    NORMS.clear()  # they keep the model's tensors alive
    lines = [f"{Path(w['line']).name}: {w['reason']}" for w in explained["where"]]
    return {"graphs": explained["graphs"], "breaks": explained["breaks"], "where": sorted(set(lines))}


P18 = Pitfall(
    id="P18",
    title="A number read inside the model breaks the graph",
    symptom="compiled, and hardly faster; TORCH_LOGS shows many small graphs",
    claim="adapters cannot be compiled (said when compile disappoints after adding LoRA)",
    verdict=f"Seen on {WITH_PEFT}: the adapters add no break. An .item() in the forward pass ends the graph, and "
    "every frame around it is cut with it, so one number per block makes several graphs per block",
    fix="keep the number a tensor and read it after the step; compiling.breaks names the line",
    broken=lambda: graph_breaks(read_norm),
    fixed=lambda: graph_breaks(keep_norm),
    claimed=lambda: graph_breaks(adapters=True),
    seen=lambda facts: facts["breaks"] > 0,
    slow=True,
)


# ------------------------------------------------------------------------------- P23, a cache cut off by a kill

PROGRAM = "import torch; print(float(torch.compile(lambda x: (x.sin() + 1).sum())(torch.ones(8))))"


def run_with(cache: Path) -> str:
    """A fresh process compiles with inductor, its cache in `cache`; 'ok' or how it ended."""
    # Without vector instructions nothing is probed, and the first run takes seconds, not half a minute.
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_VEC_ISA_OK": "0"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode == 0:
        return "ok"
    if done.returncode < 0:
        return f"killed by signal {-done.returncode}"
    errors = [line for line in done.stderr.splitlines() if "Error: " in line]
    return errors[-1].replace(f"{cache}/", "") if errors else f"exit code {done.returncode}"


@functools.cache
def _warm_cache() -> tempfile.TemporaryDirectory:
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")  # as inductor looks for it
    if shutil.which(compiler) is None:
        raise Unavailable(f"P23 damages compiled code, so it needs a C++ compiler, and there is no {compiler} here")
    folder = tempfile.TemporaryDirectory(prefix="nblib-inductor-")
    if (outcome := run_with(Path(folder.name))) != "ok":
        raise RuntimeError(f"inductor cannot compile here, so there is no cache to damage: {outcome}")
    return folder


def cut_cache(what: str, *, repaired: bool = False, share: float = 0.0) -> dict:
    """Cut one kind of file in a warm cache to a share of its length, then run; again, if that failed."""
    with tempfile.TemporaryDirectory() as place:
        cache = Path(place) / "cache"
        shutil.copytree(_warm_cache().name, cache)
        files = [path for path in cache.rglob("*") if path.is_file() and path.match(what)]
        if not files:  # or a run that damaged nothing would count against the claim
            raise RuntimeError(f"nothing in inductor's cache matches {what}: this version keeps it in another way")
        for path in files:
            os.truncate(path, int(path.stat().st_size * share))
        deleted = compiling.repair(cache) if repaired else []
        first = run_with(cache)
        second = "not needed" if first == "ok" else run_with(cache)
        return {"cut": len(files), "deleted": len(deleted), "next run": first, "run after it": second}


P23 = Pitfall(
    id="P23",
    title="A compile cache cut off by a killed run",
    symptom="since a run was killed, every run on this machine fails at its first compiled step: file too short",
    claim="the installation is broken, or any file of the cache that a kill cuts short (what the message suggests)",
    verdict=f"Seen on {WITH_PEFT}: Python files and pickles of the cache are renamed into place, and a damaged pickle "
    "is noticed and made again. The library is written by the linker under its final name and later only looked for, "
    "so a partial one stays",
    fix="compiling.repair() deletes the libraries that are shorter than their header says; nothing else is lost",
    broken=lambda: cut_cache("*.main.so"),
    fixed=lambda: cut_cache("*.main.so", repaired=True),
    claimed=lambda: cut_cache("fxgraph/*/*/*"),
    seen=lambda facts: facts["run after it"] not in ("ok", "not needed"),
    slow=True,
)

PITFALLS = [P15, P16, P17, P18, P23]
