"""Save all that a run is, atomically, and prove on reading that it is still what was written.

A run continues bit for bit only if everything that changes is stored. In the model: trainable weights and buffers.
Around it: the state and base rates of every optimizer, the loss scaler, the random generators of every process. And in
the loop: the position in the data, the step, and what the guards remember. Leave out one and the loss curves part, some
at once and some an epoch later (notebook 04).

On disk a checkpoint is a folder `step-00000120` with `model.safetensors`, `training.pt` and `manifest.json`, the
last holding the SHA-256 of the others. It is written under a temporary name, flushed to the device, and renamed: at
any instant the folder is either whole or not there. Reading checks the hashes. What is damaged is set aside as
`damaged-step-...` and the one before is taken; it never counts among those to keep. The one just written always does.
The records of all steps so far are in it too, so a training that was resumed has the same history as a straight one.

Several processes write one checkpoint through torch.distributed.checkpoint: each the shards that it holds and a part of
what all hold, and rank 0 the rest. Any number reads it, on any mesh, each its own shards. When the number changes:

    position    counts batches of the notebook, which the processes share (`Batches` told their `world` count their own)
    counters    steps, tokens, seconds, windows of the guards and the history are of all together, and go on
    generators  process r takes those of process r; where none was, it makes them from rank 0's and r; others are gone

In the background a thread writes a copy of the states, one at a time, while the steps go on. The last checkpoint is
written before the loop ends; an error of the thread is raised at the next step. The host holds the states once more.

Frozen parameters are not saved: whoever resumes rebuilds the base they came from; a hash of all of it notices another.

Footgun: `state_dict()` returns the live tensors, and `load_state_dict` may keep the ones it is given. A snapshot
held in memory must be cloned both ways, or training goes on writing into it.
"""

import contextlib
import copy
import errno
import functools
import hashlib
import re
import shutil
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from nblib import files, parallel, runtime, wiring

FILES = ("model.safetensors", "training.pt")
PARTS = {"optimizers": list, "scaler": dict, "generators": list, "progress": dict, "frozen": str}  # of training.pt
_HASHES = WeakIdKeyDictionary()  # tensor -> (its address and version, hash): frozen ones are hashed once


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or does not fit this run; the message says what to do."""


def capture(
    model: nn.Module, optimizers: list[Optimizer], *, progress: dict, batches=None, scaler=None, clone=False, **more
) -> dict:
    """Everything a run is. `clone` for snapshots kept in memory; without it the tensors are the live ones. `more` is
    stored beside it, for the caller."""
    state = {
        "weights": {name: tensor.detach() for name, tensor in _saved_tensors(model).items()},
        "training": {
            "optimizers": [o.state_dict() for o in optimizers],
            "scaler": scaler.state_dict() if scaler is not None else {},
            "generators": parallel.every(runtime.generators()),
            "batches": batches.state_dict() if hasattr(batches, "state_dict") else None,
            "progress": progress,
            "frozen": fingerprint((n, p) for n, p in model.named_parameters() if not p.requires_grad),
            **more,
        },
    }
    return copy.deepcopy(state) if clone else state


def restore(state: dict, model: nn.Module, optimizers: list[Optimizer], *, batches=None, scaler=None) -> dict:
    """Put a captured state back in place and return its progress. The state itself stays untouched."""
    training = copy.deepcopy({name: state["training"][name] for name in (*PARTS, "batches")})  # some keep what they get
    tensors = _saved_tensors(model)
    if tensors.keys() != state["weights"].keys():
        differ = sorted(tensors.keys() ^ state["weights"].keys())
        raise CheckpointError(f"checkpoint and model train different parameters, {len(differ)} of them: {differ[:3]}")
    if training["frozen"] != fingerprint((n, p) for n, p in model.named_parameters() if not p.requires_grad):
        raise CheckpointError("the frozen base under this checkpoint is not the one it was trained on; rebuild that")
    with torch.no_grad():
        for name, tensor in tensors.items():
            if tensor.shape != (saved := state["weights"][name]).shape:
                raise CheckpointError(f"{name}: checkpoint {tuple(saved.shape)}, model {tuple(tensor.shape)}")
            tensor.copy_(parallel.like(saved, tensor))
    _cut(training["optimizers"], optimizers)
    for optimizer, saved in zip(optimizers, training["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    if scaler is not None and training["scaler"]:
        scaler.load_state_dict(training["scaler"])
    if training["batches"] is not None and batches is not None:
        batches.load_state_dict(training["batches"])
    generators, rank = training["generators"], runtime.rank()
    runtime.set_generators(generators[rank if rank < len(generators) else 0])
    if rank >= len(generators):
        runtime.branch(rank)
    return training["progress"]


def save(folder: Path, state: dict, *, keep: int = 2, group=None) -> Path:
    """Write a captured state as `folder/step-N`; keep the newest `keep`. Where processes have joined a world, each of
    them must call it, and it returns when all have written."""
    final = Path(folder) / f"step-{state['training']['progress']['step']:08d}"
    try:
        if dist.is_initialized():
            _write_shards(final, state, group)
        elif runtime.rank() == 0:
            with files.replacing(final) as partial:  # this step may be there already, of one resumed from an older one
                partial.mkdir()
                save_file({n: t.contiguous() for n, t in state["weights"].items()}, partial / FILES[0])
                torch.save(state["training"], partial / FILES[1])
                files.seal(partial)
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        free = shutil.disk_usage(next(p for p in final.parents if p.exists())).free
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error) or free < _bytes(state)
        sizes = f"{free / 2**20:.1f} MiB free, about {_bytes(state) / 2**20:.1f} needed"
        reason = f"no space left on the device ({sizes})" if full else error
        intact = ", ".join(path.name for path in folders(folder)) or "none"
        raise CheckpointError(f"checkpoint {final} not written: {reason}. Intact: {intact}") from error
    if runtime.rank() == 0:
        for path in [path for path in folders(folder) if path != final][keep - 1 :]:
            shutil.rmtree(path)
        files.remove_partials(Path(folder), "step-*")
    return final


def _write_shards(final: Path, state: dict, group) -> None:
    """Each of three parts ends in all processes before the next begins, and an error of one is that of all."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    from torch.distributed.checkpoint import save as write

    rank = runtime.rank()
    with contextlib.ExitStack() as stack:

        def begin() -> Path | None:
            if rank == 0:
                (place := stack.enter_context(files.replacing(final))).mkdir()
                return place

        def share() -> dict[str, str]:
            tensors = {name: t.contiguous() for name, t in _named(state).items()}
            write(tensors, storage_writer=HuggingFaceStorageWriter(partial, save_distributed=True), process_group=group)
            return {path.name: files.sha256(path) for path in partial.glob(f"shard-{rank + 1:05d}-*")}

        def end() -> None:
            if rank == 0:
                rest = _mapped(state, lambda _, t: torch.empty(t.shape, dtype=t.dtype, device="meta") if t.ndim else t)
                names = sorted({*hashes, *(path.name for path in partial.iterdir())})
                torch.save(rest["training"] | {"weights": rest["weights"], "shards": names}, partial / FILES[1])
                files.seal(partial, hashes)
                stack.close()  # the folder gets its name

        partial = parallel.together(begin, group)[0]
        hashes = dict(ChainMap(*parallel.together(share, group)))
        parallel.together(end, group)


def _mapped(value, change: Callable[[str, Tensor], Tensor], name: str = ""):
    """The same nest of dicts and lists, each tensor changed. The way to a tensor is its name."""
    if isinstance(value, dict):
        return {key: _mapped(v, change, f"{name}/{key}") for key, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(v, change, f"{name}/{n}") for n, v in enumerate(value))
    return change(name, value) if isinstance(value, Tensor) else value


def _named(state: dict) -> dict[str, Tensor]:
    """What goes to the shards; numbers stay where they are."""
    found: dict[str, Tensor] = {}
    _mapped(state, lambda name, t: found.setdefault(name, t) if t.ndim else t)
    return found


class Saver(contextlib.AbstractContextManager):
    """Saves the checkpoints of one training, if it shall in the background."""

    def __init__(self, folder: Path | None, *, keep: int, background: bool = False):
        self.background, self.writing = background, None
        group = parallel.beside(dist.group.WORLD) if folder and dist.is_initialized() else None
        self.write = functools.partial(save, folder, keep=keep, group=group)
        if background:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            self.stager, self.thread = DefaultStager(StagingOptions(False, False, False, False)), ThreadPoolExecutor(1)

    def save(self, state: dict, *, last: bool) -> None:
        """When the one before is written. The last one is on disk when this returns."""
        self.wait()
        if last or not self.background:
            self.write(state)
        else:
            history = list(state["training"].pop("history", []))  # its records do not change
            copied = self.stager.stage(state)  # to the host
            copied["training"]["history"] = history
            self.writing = self.thread.submit(self.write, copied)

    def wait(self) -> None:
        """Until nothing is being written; raises what went wrong there."""
        if self.writing:
            self.writing.result()

    def failed(self) -> bool:
        return bool(self.writing and self.writing.done() and self.writing.exception())

    def __exit__(self, error, *_) -> None:
        if self.background:
            self.thread.shutdown()  # what is being written becomes whole, whatever ends the training
            self.stager.close()
            if error in (None, GeneratorExit):
                self.wait()


def folders(folder: Path) -> list[Path]:
    """Checkpoints of a run, newest first. Partial and damaged ones have another name; links are not ours."""
    named = [path for path in Path(folder).glob("step-*") if re.fullmatch(r"step-\d{8}", path.name)]
    return sorted((path for path in named if path.is_dir() and not path.is_symlink()), reverse=True)


def read(path: Path, place: Callable[[dict], None] = lambda state: None, *, trusted: bool = False) -> dict:
    """One checkpoint, its hashes verified unless another process did. Nothing is unpickled that could run code. `place`
    may put shards where tensors are only described; the others are read whole."""
    try:
        names = None if trusted else files.verify(path)
        training = torch.load(path / FILES[1], map_location="cpu", weights_only=True)
        if wrong := [name for name, kind in PARTS.items() if not isinstance(training[name], kind)]:
            raise CheckpointError(f"{path.name} is damaged: no {wrong[0]} in {FILES[1]}")
        shards = training.pop("shards", None)
        needed = {FILES[1], *(shards or FILES)}
        if names not in (None, needed):
            raise CheckpointError(f"{path.name} is damaged: its {files.MANIFEST} does not name {', '.join(needed)}")
        if shards:
            return _read_shards(path, {"weights": training.pop("weights"), "training": training}, place)
        return {"weights": load_file(path / FILES[0]), "training": training}
    except CheckpointError:
        raise
    except files.Unreadable as error:
        raise CheckpointError(str(error).replace(str(path), path.name)) from None
    except Exception as error:  # hashes of rubbish are true too, and each reader has its own words for that
        raise CheckpointError(f"{path.name} is damaged: {type(error).__name__}: {error}") from error


def _read_shards(path: Path, state: dict, place: Callable[[dict], None]) -> dict:
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, load

    place(state)
    state = _mapped(state, lambda _, t: torch.empty_like(t, device="cpu") if t.is_meta else t)
    try:
        with warnings.catch_warnings(action="ignore"):  # that it reads alone, which it shall
            load(_named(state), storage_reader=HuggingFaceStorageReader(path), no_dist=True)
    except CheckpointException as error:  # which is no Exception
        raise RuntimeError(str(error).splitlines()[-1]) from error
    return state


def newest(folder: Path) -> dict | None:
    """The newest checkpoint that is whole, or None. Damaged ones are set aside, and named."""
    candidates = parallel.every(folders(folder))[0]
    return next((state for path in candidates if (state := _whole(path)) is not None), None)


def resume(folder: Path, model: nn.Module, optimizers: list[Optimizer], *, progress: dict, **parts) -> dict | None:
    """Restore the newest checkpoint of a folder and return it; None when there is none. Its progress must look like
    the one given."""
    broken = None
    for path in parallel.every(folders(folder))[0]:
        if (state := _whole(path, lambda state: _place(state, model, optimizers))) is None:
            continue
        try:
            found = restore(state, model, optimizers, **parts)
            if wrong := [name for name, value in progress.items() if type(found.get(name)) is not type(value)]:
                raise KeyError(wrong[0])
            return state
        except CheckpointError:  # of another model or base: a sentence for whoever runs it, nothing is damaged
            raise
        except Exception as error:  # hashes of rubbish are true too, and each optimizer has its own words for that
            broken = error
            _set_aside(path, f"{path.name} is damaged: {type(error).__name__}: {error}")
    if broken is not None:  # half of it is in the model already, so this is not a fresh start
        raise CheckpointError(f"no checkpoint of {folder} can be restored; start this run again") from broken
    return None


def _place(state: dict, model: nn.Module, optimizers: list[Optimizer]) -> None:
    """Empty shards where a tensor is described that is cut in this process."""
    tensors = _saved_tensors(model)
    state["weights"] = {name: parallel.like(t, tensors.get(name)) for name, t in state["weights"].items()}
    _cut(state["training"]["optimizers"], optimizers)
    if snapshot := state["training"].get("snapshot"):
        _place(snapshot, model, optimizers)


def _cut(saved: list[dict], optimizers: list[Optimizer]) -> None:
    """The moments cut as their parameters are."""
    for optimizer, known in zip(optimizers, saved):
        params = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
        for number, values in known.get("state", {}).items():
            values |= {k: parallel.like(v, params.get(number)) for k, v in values.items() if isinstance(v, Tensor)}


def _whole(path: Path, place: Callable[[dict], None] = lambda state: None) -> dict | None:
    """Rank 0 judges for all: another process would find it set aside already."""
    state = None
    try:
        state = read(path, place) if runtime.rank() == 0 else None
    except CheckpointError as error:
        _set_aside(path, str(error))
    return read(path, place, trusted=True) if parallel.every(state is not None)[0] and not state else state


def _set_aside(path: Path, why: str) -> None:
    if runtime.rank() == 0:
        files.set_aside(path, f"checkpoint {why}")


def _saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What trains, and the buffers that the state dict holds; others (rotary tables) are computed with the model."""
    skip = {
        f"{prefix}.{name}".lstrip(".") for prefix, m in model.named_modules() for name in m._non_persistent_buffers_set
    }
    return wiring.trainable(model) | {n: b for n, b in model.named_buffers() if n not in skip}


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of names, shapes, types and all bytes."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}{_hash(tensor.detach(), tensor)}".encode())
    return digest.hexdigest()[:16]


def _hash(values: Tensor, tensor: Tensor) -> str:
    mine = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    state = (mine.data_ptr(), None if tensor.is_inference() else tensor._version)
    known, value = _HASHES.get(tensor, (None, ""))
    if known != state:
        raw = parallel.gathered(values).cpu().contiguous().flatten().view(torch.uint8)
        value = hashlib.sha256(raw.numpy()).hexdigest()
        _HASHES[tensor] = (state, value)
    return value


def _bytes(state: dict) -> int:
    return 3 * sum(t.numel() * t.element_size() for t in state["weights"].values())  # weights and two moments
