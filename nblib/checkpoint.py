"""Save all that a training is, atomically, and check on reading that it is still what was written.

A training continues bit for bit only if everything that changes is stored: trainable weights and
buffers, the state and base rates of every optimizer, the loss scaler, the random generators of
every process, the position in the data, the step, and the windows of the guards. Leave out one and
the loss curves part, some at once and some an epoch later (notebook 04).

A checkpoint is a folder `step-00000120`, written by one process or by many in the same format:

    model.safetensors       weights and buffers by their names, whole: any safetensors tool reads it
    training-*.safetensors  tensors of optimizers and generators, a file from each process
    training.pt             everything else: numbers, lists, and the shapes of those tensors
    meta.json               for a person: step, loss, parameters, versions, and what wrote it
    manifest.json           the SHA-256 of each of the other files

torch.distributed.checkpoint writes and reads the tensors, in its safetensors storage. Each process
writes the shards that it holds and a part of what all hold; then process 0 puts the weights
together. Any number of processes reads a checkpoint, on any mesh, each only its own shards.

The folder is written under a temporary name, flushed to the device, and renamed: at any instant it
is whole or not there. Reading checks the hashes. A damaged checkpoint is renamed to
`damaged-step-...`, and the one before it is read; it does not count among those to keep.

When the number of processes changes:

    position    counts batches of the notebook, which the processes share
    counters    steps, tokens, seconds and records are those of all processes together
    generators  process r takes those of process r, or makes new ones from those of process 0 and r

In the background a thread writes a copy of the states while the steps go on, one at a time. The
last checkpoint is written before the loop ends. The host then holds the states twice.

Frozen parameters are not saved: whoever resumes builds the base again. A hash of all of them
notices another base.

Footgun: `state_dict()` returns the live tensors, and `load_state_dict` may keep the tensors that it
is given. A snapshot held in memory must be cloned both ways, or training writes into it.
"""

import contextlib
import copy
import datetime
import errno
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from nblib import files, parallel, runtime, wiring

WEIGHTS = "model.safetensors"
TRAINING = "training.pt"
META = "meta.json"
FORMAT = 2  # 1 had other names for several processes than for one, and no meta.json
ENTRIES = {  # of training.pt, with their types
    "optimizers": list,
    "scaler": dict,
    "generators": list,
    "progress": dict,
    "frozen": str,
    "files": list,
}
PACKAGES = ("nblib", "torch", "transformers", "safetensors", "numpy")

_HASHES = WeakIdKeyDictionary()  # tensor -> (its address and version, its hash)

State = dict[str, Any]  # {"weights": {name: tensor}, "training": {...}}
Place = Callable[[State], None]


class CheckpointError(RuntimeError):
    """Report in one sentence that a checkpoint was not written or does not fit this training."""


class OldFormat(CheckpointError):
    """Report in one sentence that a checkpoint has a format that is no longer read."""


# ------------------------------------------------------------------ from and to a live training


def capture(
    model: nn.Module,
    optimizers: list[Optimizer],
    *,
    progress: dict,
    batches=None,
    scaler=None,
    clone: bool = False,
    **more,
) -> State:
    """Return everything a training is.

    The tensors are the live ones, or copies with `clone`, which a snapshot in memory needs. `more`
    is stored beside it for the caller.
    """
    weights = {name: tensor.detach() for name, tensor in _saved_tensors(model).items()}
    training = {
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "scaler": scaler.state_dict() if scaler is not None else {},
        "generators": parallel.every(runtime.generators()),
        "batches": batches.state_dict() if hasattr(batches, "state_dict") else None,
        "progress": progress,
        "frozen": _fingerprint_of_frozen(model),
        "about": _describe(model, optimizers, weights),
    }
    state = {"weights": weights, "training": training | more}
    return copy.deepcopy(state) if clone else state


def restore(
    state: State, model: nn.Module, optimizers: list[Optimizer], *, batches=None, scaler=None
) -> dict:
    """Put a captured state back in place and return its progress. The state is not changed."""
    # load_state_dict may keep what it is given, so it gets copies
    names = ("optimizers", "scaler", "generators", "progress", "batches")
    training = copy.deepcopy({name: state["training"][name] for name in names})
    saved_weights = state["weights"]
    tensors = _saved_tensors(model)

    # refuse the checkpoint of another model or base before anything is changed
    if tensors.keys() != saved_weights.keys():
        differ = sorted(tensors.keys() ^ saved_weights.keys())
        raise CheckpointError(
            f"checkpoint and model train different parameters, {len(differ)} of them: {differ[:3]}"
        )
    if state["training"]["frozen"] != _fingerprint_of_frozen(model):
        raise CheckpointError(
            "the frozen base under this checkpoint is not the one it was trained on; rebuild that"
        )
    for name, tensor in tensors.items():
        saved_shape = tuple(saved_weights[name].shape)
        if tuple(tensor.shape) != saved_shape:
            raise CheckpointError(f"{name}: checkpoint {saved_shape}, model {tuple(tensor.shape)}")

    # weights and buffers
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(parallel.like(saved_weights[name], tensor))

    # optimizers, scaler and data
    _cut_moments(training["optimizers"], optimizers)
    for optimizer, saved in zip(optimizers, training["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    if scaler is not None and training["scaler"]:
        scaler.load_state_dict(training["scaler"])
    if training["batches"] is not None and batches is not None:
        batches.load_state_dict(training["batches"])

    # random generators: those of this process, or new ones where there was none of its rank
    generators = training["generators"]
    rank = runtime.rank()
    if rank < len(generators):
        runtime.set_generators(generators[rank])
    else:
        runtime.set_generators(generators[0])
        runtime.branch(rank)
    return training["progress"]


# ------------------------------------------------------------------ writing


def save(
    folder: Path, state: State, *, keep: int = 2, group=None, parameters: Mapping | None = None
) -> Path:
    """Write a captured state as `folder/step-N`, keep the newest `keep`, and return its path.

    Where processes have joined a world, each of them must call it, and it returns when all have
    written. `parameters` are values for meta.json.
    """
    folder = Path(folder)
    final = folder / f"step-{state['training']['progress']['step']:08d}"

    # write it
    try:
        if dist.is_initialized() or runtime.rank() == 0:
            _write(final, state, group, parameters)
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save: RuntimeError if full
        raise CheckpointError(_why_not_written(final, state, error)) from error

    # remove what is older than those to keep, and what killed processes left
    if runtime.rank() == 0:
        others = [path for path in folders(folder) if path != final]
        for path in others[keep - 1 :]:
            shutil.rmtree(path)
        files.remove_partials(folder, "step-*")
    return final


def _write(final: Path, state: State, group, parameters: Mapping | None) -> None:
    """Write one checkpoint.

    Each of three parts ends in all processes before the next begins, and an error in one process
    is raised in all of them.
    """
    rank = runtime.rank()
    world = dist.get_world_size() if dist.is_initialized() else 1

    with contextlib.ExitStack() as stack:

        def begin() -> Path | None:
            if rank != 0:
                return None
            place = stack.enter_context(files.replacing(final))
            place.mkdir()
            return place

        def write_tensors() -> dict[str, str]:
            if world == 1:
                _save_weights(partial, state["weights"])
                _dcp_save(partial, _named_tensors(state["training"]), {}, group)
            else:
                _dcp_save(partial, _named_tensors(state["training"]), state["weights"], group)
            own = partial.glob(f"shard-{rank + 1:05d}-model-00001-of-*.safetensors")
            return {path.name: files.sha256(path) for path in own}

        def end() -> None:
            if rank != 0:
                return
            if world > 1:
                _save_weights(partial, _put_together(partial, state["weights"]))
            hashes = _name_shards(partial, dict(ChainMap(*hashes_by_rank)))
            _write_training(partial, state)
            meta = describe_for_people(state, world, parameters)
            files.write(partial / META, files.to_json(meta, indent=1) + "\n")
            files.seal(partial, hashes)
            stack.close()  # the folder gets its name

        partial = parallel.together(begin, group)[0]
        hashes_by_rank = parallel.together(write_tensors, group)
        parallel.together(end, group)


def _save_weights(partial: Path, weights: Mapping[str, Tensor]) -> None:
    """Write whole weights as a file that any safetensors tool reads."""
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})


def _dcp_save(
    partial: Path, training: dict[str, Tensor], weights: Mapping[str, Tensor], group
) -> None:
    """Write this process's shards, those of weights and those of training in two files."""
    from torch.distributed import checkpoint as dcp

    tensors = {name: tensor.contiguous() for name, tensor in (training | weights).items()}
    file_of = dict.fromkeys(training, 1) | dict.fromkeys(weights, 2)
    writer = dcp.HuggingFaceStorageWriter(
        str(partial), fqn_to_index_mapping=file_of, save_distributed=True
    )
    alone = not dist.is_initialized()
    with _dcp_errors_as_they_were():
        dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=alone)


def _put_together(partial: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read the weights that all processes have written, whole, and remove their shards."""
    whole = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in weights.items()}
    _dcp_load(partial, whole)
    for shard in partial.glob("shard-*-model-00002-of-*.safetensors"):
        shard.unlink()
    return whole


def _name_shards(partial: Path, hashes: Mapping[str, str]) -> dict[str, str]:
    """Give torch's files the names of this format; return their hashes by the new names."""
    renamed = {}
    for number, name in enumerate(sorted(hashes), start=1):
        new_name = f"training-{number:05d}-of-{len(hashes):05d}.safetensors"
        (partial / name).rename(partial / new_name)
        renamed[new_name] = hashes[name]
    return renamed


def _write_training(partial: Path, state: State) -> None:
    """Write what is no tensor, and the shapes of what is one."""

    def described(_: str, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    def described_if_stored(name: str, tensor: Tensor) -> Tensor:
        return described(name, tensor) if tensor.ndim else tensor

    content = {
        **_mapped(state["training"], described_if_stored),
        "weights": _mapped(state["weights"], described),
        "files": sorted(path.name for path in partial.glob("*.safetensors")),
        "format": FORMAT,
    }
    torch.save(content, partial / TRAINING)


def _why_not_written(final: Path, state: State, error: BaseException) -> str:
    """Return the sentence for a checkpoint that could not be written."""
    parent = next(path for path in final.parents if path.exists())
    free = shutil.disk_usage(parent).free
    needed = 3 * sum(t.numel() * t.element_size() for t in state["weights"].values())  # + moments

    out_of_space = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
    reason: object = error
    if out_of_space or free < needed:
        sizes = f"{free / 2**20:.1f} MiB free, about {needed / 2**20:.1f} needed"
        reason = f"no space left on the device ({sizes})"

    intact = ", ".join(path.name for path in folders(final.parent)) or "none"
    return f"checkpoint {final} not written: {reason}. Intact: {intact}"


@dataclass(frozen=True)
class Checkpoints:
    """Save a training in a folder, and resume from the newest checkpoint there.

    folder      None saves nothing
    every       steps between checkpoints; 0 saves the end alone
    keep        how many stay: the newest
    background  the steps go on while a copy of the states is written
    parameters  values for meta.json, such as those of the notebook
    """

    folder: Path | None
    every: int = 0
    keep: int = 2
    background: bool = False
    parameters: Mapping | None = None

    def __post_init__(self):
        if self.every < 0:
            raise ValueError(f"every = {self.every}: must be at least 0; 0 saves the end alone")
        if self.keep < 1:
            raise ValueError(f"keep = {self.keep}: must be at least 1")


class Saver(contextlib.AbstractContextManager):
    """Save the checkpoints of one training as `Checkpoints` says; without them, none."""

    def __init__(self, checkpoints: Checkpoints | None):
        if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
            raise TypeError(
                f"checkpoints = {checkpoints!r}: must be Checkpoints(folder, every=...) or None"
            )
        folder = parallel.every(checkpoints.folder if checkpoints else None)[0]
        self.folder: Path | None = folder
        self.every = checkpoints.every if checkpoints else 0
        self.background = bool(checkpoints and checkpoints.background)
        self.writing: Future | None = None
        group = None
        if folder and dist.is_initialized():
            group = parallel.beside(dist.group.WORLD)
        self.write = functools.partial(
            save,
            folder,
            keep=checkpoints.keep if checkpoints else 1,
            group=group,
            parameters=checkpoints.parameters if checkpoints else None,
        )

        if self.background:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            self.stager = DefaultStager(StagingOptions(False, False, False, False))
            self.thread = ThreadPoolExecutor(1)

    def is_due(self, step: int, *, last: bool) -> bool:
        """Return whether to save after this step; steps count from 1."""
        if self.folder is None:
            return False
        return last or bool(self.every and step % self.every == 0)

    def save(self, state: State, *, last: bool) -> None:
        """Save when the one before is written. The last one is on disk when this returns."""
        self.wait()
        if last or not self.background:
            self.write(state)
            return

        # copy the tensors to the host; the records of earlier steps do not change
        history = list(state["training"].pop("history", []))
        copied = self.stager.stage(state)
        copied["training"]["history"] = history
        self.writing = self.thread.submit(self.write, copied)

    def wait(self) -> None:
        """Wait until nothing is being written; raise what went wrong there."""
        if self.writing:
            self.writing.result()

    def failed(self) -> bool:
        """Return whether the last write in the background has failed."""
        if self.writing is None or not self.writing.done():
            return False
        return self.writing.exception() is not None

    def __exit__(self, error, *_) -> None:
        if not self.background:
            return
        self.thread.shutdown()  # what is being written becomes whole, whatever ends the training
        self.stager.close()
        if error in (None, GeneratorExit):
            self.wait()


# ------------------------------------------------------------------ meta.json


def _describe(model: nn.Module, optimizers: list[Optimizer], weights: dict[str, Tensor]) -> dict:
    return {
        "model": type(model).__name__,
        "saved_tensors": len(weights),
        "saved_numbers": sum(tensor.numel() for tensor in weights.values()),
        "optimizers": [type(optimizer).__name__ for optimizer in optimizers],
    }


def describe_for_people(state: State, world: int, parameters: Mapping | None = None) -> dict:
    """Return the content of meta.json for a captured state."""
    training = state["training"]
    progress = training["progress"]

    # the loss of the last step: from its record, or from the guards' window of recent losses
    loss = None
    if training.get("history"):
        loss = training["history"][-1].get("loss")
    elif progress.get("recent"):
        loss = progress["recent"][-1]

    return {
        "format": FORMAT,
        "step": progress["step"],
        "loss": loss,
        "tokens": progress.get("tokens"),
        "training_seconds": progress.get("seconds"),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        **training.get("about", {}),
        "parameters": dict(parameters) if parameters is not None else None,
        "versions": {"python": platform.python_version(), **_versions()},
        "written_by": {
            "program": Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python",
            "host": files.HOST,
            "process": os.getpid(),
            "processes": world,
        },
    }


@functools.cache
def _versions() -> dict[str, str]:
    """Return the versions of those packages that decide what a checkpoint means."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def read_meta(path: Path) -> dict:
    """Return meta.json of one checkpoint; empty where there is none or it cannot be read."""
    try:
        return files.read_json(Path(path) / META)
    except files.Unreadable:
        return {}


# ------------------------------------------------------------------ reading


def folders(folder: Path) -> list[Path]:
    """Return the checkpoints of a training, newest first; partial and damaged ones are not."""
    named = [p for p in Path(folder).glob("step-*") if re.fullmatch(r"step-\d{8}", p.name)]
    own = [path for path in named if path.is_dir() and not path.is_symlink()]
    return sorted(own, reverse=True)


def read(path: Path, place: Place = lambda state: None, *, trusted: bool = False) -> State:
    """Return the state of one checkpoint; CheckpointError where it is not what was written.

    Its hashes are checked unless another process did that (`trusted`). Nothing is unpickled that
    could run code. `place` may replace tensors that are only described (on meta) by shards; the
    others are read whole.
    """
    path = Path(path)
    try:
        sealed = None
        if not trusted:
            sealed = files.verify(path)
            if META not in sealed:
                raise OldFormat(
                    f"{path} was written by nblib 0.1, whose checkpoints are no longer read: "
                    "delete the folder and train again, or go on with nblib 0.1"
                )
        training = torch.load(path / TRAINING, map_location="cpu", weights_only=True)
        state = _described_state(path, training, sealed)
        place(state)
        return _filled(path, state)
    except CheckpointError:
        raise
    except files.Unreadable as error:
        raise CheckpointError(str(error).replace(str(path), path.name)) from None
    except Exception as error:  # rubbish can have a true hash, and each reader has its own error
        raise CheckpointError(f"{path.name} is damaged: {type(error).__name__}: {error}") from error


def _described_state(path: Path, training: dict, sealed: set[str] | None) -> State:
    """Return the state with empty tensors, as training.pt describes it."""
    wrong = [name for name, kind in ENTRIES.items() if not isinstance(training[name], kind)]
    if wrong:
        raise CheckpointError(f"{path.name} is damaged: no {wrong[0]} in {TRAINING}")

    needed = {TRAINING, META, *training.pop("files")}
    if sealed is not None and sealed != needed:
        names = ", ".join(sorted(needed))
        raise CheckpointError(f"{path.name} is damaged: its {files.MANIFEST} does not name {names}")
    return {"weights": training.pop("weights"), "training": training}


def _filled(path: Path, state: State) -> State:
    """Return the state with the tensors of the files in place of those that are described."""

    def real(_: str, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor

    state = {part: _mapped(state[part], real) for part in ("weights", "training")}
    _dcp_load(path, state["weights"] | _named_tensors(state["training"]))
    return state


def _dcp_load(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors or shards in place from the safetensors files of a folder."""
    from torch.distributed import checkpoint as dcp

    with _dcp_errors_as_they_were():
        reader = dcp.HuggingFaceStorageReader(str(path))
        dcp.load(tensors, storage_reader=reader, no_dist=True)


def newest(folder: Path) -> State | None:
    """Return the newest checkpoint that is whole, or None. Damaged ones are renamed."""
    for path in _candidates(folder):
        state = _read_if_whole(path)
        if state is not None:
            return state
    return None


def resume(
    folder: Path, model: nn.Module, optimizers: list[Optimizer], *, progress: dict, **parts
) -> State | None:
    """Restore the newest checkpoint of a folder and return it; None where there is none.

    Its progress must have the names and types of the one given. CheckpointError where it is of
    another model or base, or where none can be restored.
    """
    broken = None
    for path in _candidates(folder):
        state = _read_if_whole(path, lambda state: _place_shards(state, model, optimizers))
        if state is None:
            continue
        try:
            restored = restore(state, model, optimizers, **parts)
            for name, value in progress.items():
                if type(restored.get(name)) is not type(value):
                    raise KeyError(name)
            return state
        except CheckpointError:  # of another model or base: nothing is damaged
            raise
        except Exception as error:  # rubbish can have a true hash: try the one before
            broken = error
            _set_aside(path, f"{path.name} is damaged: {type(error).__name__}: {error}")

    # a part of it is in the model already, so this would be no fresh start
    if broken is not None:
        raise CheckpointError(
            f"no checkpoint of {folder} can be restored; start this run again"
        ) from broken
    return None


def _candidates(folder: Path) -> list[Path]:
    """Return the checkpoints that process 0 finds, newest first, after a kill too."""
    if runtime.rank() == 0:
        files.remove_partials(Path(folder), "step-*")
    return parallel.every(folders(folder))[0]


def _read_if_whole(path: Path, place: Place = lambda state: None) -> State | None:
    """Return one checkpoint, or None where it is damaged and was set aside.

    Process 0 judges for all, because another one would find it renamed already.
    """
    state = None
    problem: CheckpointError | None = None
    if runtime.rank() == 0:
        try:
            state = read(path, place)
        except CheckpointError as error:
            problem = error

    problem = parallel.every(problem)[0]
    if isinstance(problem, OldFormat):
        raise problem
    if problem is not None:
        _set_aside(path, str(problem))
        return None
    if state is None:
        state = read(path, place, trusted=True)
    return state


def _set_aside(path: Path, why: str) -> None:
    if runtime.rank() == 0:
        files.set_aside(path, f"checkpoint {why}")


def _place_shards(state: State, model: nn.Module, optimizers: list[Optimizer]) -> None:
    """Put empty shards where a tensor is described that is cut in this process."""
    tensors = _saved_tensors(model)
    state["weights"] = {
        name: parallel.like(described, tensors.get(name))
        for name, described in state["weights"].items()
    }
    _cut_moments(state["training"]["optimizers"], optimizers)
    snapshot = state["training"].get("snapshot")
    if snapshot:
        _place_shards(snapshot, model, optimizers)


def _cut_moments(saved: list[dict], optimizers: list[Optimizer]) -> None:
    """Cut the optimizers' saved tensors as the parameters they belong to are cut."""
    for optimizer, known in zip(optimizers, saved):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        numbered = dict(enumerate(params))
        for number, values in known.get("state", {}).items():
            for name, value in values.items():
                if isinstance(value, Tensor):
                    values[name] = parallel.like(value, numbered.get(number))


# ------------------------------------------------------------------ tensors in a nest


def _mapped(value, change: Callable[[str, Tensor], Tensor], name: str = "training"):
    """Return the same nest of dicts and lists with each tensor changed.

    The way to a tensor is its name: "training/optimizers/0/state/3/exp_avg".
    """
    if isinstance(value, dict):
        return {key: _mapped(item, change, f"{name}/{key}") for key, item in value.items()}
    if type(value) in (list, tuple):
        items = (_mapped(item, change, f"{name}/{n}") for n, item in enumerate(value))
        return type(value)(items)
    return change(name, value) if isinstance(value, Tensor) else value


def _named_tensors(training: dict) -> dict[str, Tensor]:
    """Return the tensors that go to the shards; those without a dimension stay in training.pt."""
    tensors: dict[str, Tensor] = {}

    def collect(name: str, tensor: Tensor) -> Tensor:
        if tensor.ndim:
            tensors[name] = tensor
        return tensor

    _mapped(training, collect)
    return tensors


@contextlib.contextmanager
def _dcp_errors_as_they_were() -> Iterator[None]:
    """Raise the first error that DCP has wrapped, and silence its warning.

    DCP wraps everything, Ctrl-C too, in an exception that is no Exception. It warns about
    no_dist=True, which is intended here.
    """
    from torch.distributed.checkpoint import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as wrapped:
        error, _ = wrapped.failures[min(wrapped.failures)]
        raise error from None


# ------------------------------------------------------------------ what is saved, and hashes


def _saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return what trains, and the buffers that the state dict holds.

    Other buffers (rotary tables) are computed with the model.
    """
    computed = set()
    for prefix, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            computed.add(f"{prefix}.{name}".lstrip("."))
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in computed}
    return wiring.trainable(model) | buffers


def _fingerprint_of_frozen(model: nn.Module) -> str:
    return fingerprint((name, p) for name, p in model.named_parameters() if not p.requires_grad)


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of names, shapes, types and all bytes."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        content = _hash(tensor.detach(), tensor)
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}{content}".encode())
    return digest.hexdigest()[:16]


def _hash(values: Tensor, tensor: Tensor) -> str:
    """Return the hash of a tensor's bytes, computed once until the tensor changes."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    version = None if tensor.is_inference() else tensor._version
    now = (local.data_ptr(), version)
    known, value = _HASHES.get(tensor, (None, ""))
    if known != now:
        raw = parallel.gathered(values).cpu().contiguous().flatten().view(torch.uint8)
        value = hashlib.sha256(raw.numpy()).hexdigest()
        _HASHES[tensor] = (now, value)
    return value
