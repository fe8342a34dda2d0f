"""Around a run of ARD-LoRA: checks before it and files after it (notebook 11 watches one: `lessons.ard_watching`).

Before: `preflight` ends with the reason if anything but the adapters trains or they are not fp32. It also ends if
tokenizer and model disagree about special tokens, if padding is supervised or unmasked, or if a tensor gets no
gradient. After: the full state as one safetensors file, and the mean adapter as an ordinary PEFT folder, which is what
the model computes in evaluation.

Footgun: PEFT's LoRA has no noise and no priors. An exported adapter gives the same logits, but nobody can draw from it
or go on training it as ARD-LoRA; for that there is `save`.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from nblib import checkpoint, files, losses, wiring
from nblib.losses import Batch, Loss
from nblib.methods import lora_folder
from nblib.methods.ard import adapters, install

FILE = "ard.safetensors"


# ------------------------------------------------------------------ before


def preflight(model: nn.Module, tokenizer, batch: Batch, *, loss: Loss | None = None) -> dict:
    """Raise what would spoil the run, or return facts about it. With `loss` two trial steps show that every tensor
    trains; everything is put back afterwards."""
    own = {f"{name}.{p}": t for name, a in adapters(model).items() for p, t in a.named_parameters(recurse=False)}
    if not own:
        raise ValueError("the model has no adapters: attach first")
    if wrong := sorted(own.keys() ^ wiring.trainable(model).keys()):
        problem = "is an adapter and is frozen" if wrong[0] in own else "trains, but it is not an adapter"
        raise ValueError(f"{wrong[0]} {problem} ({len(wrong)} in all)")
    if wrong := [f"{name} is {p.dtype}" for name, p in own.items() if p.dtype != torch.float32]:
        raise ValueError(f"adapters must be fp32, small updates are lost otherwise: {wrong[0]}")
    _check_tokens(model, tokenizer)
    _check_batch(model, tokenizer, batch)
    if loss is not None:
        tokens = losses.supervised(batch["labels"])
        canary = wiring.canary(model, lambda: sum(loss(model, batch).values()) / tokens)
        if not canary.alive:
            raise ValueError(f"a trial of two steps failed: {canary.sentence}")
    frozen = [p for p in model.parameters() if not p.requires_grad]
    count = sum(p.numel() for p in own.values())
    return {
        "adapters": len(adapters(model)),
        "tensors": len(own),
        "trainable": count,
        "bytes of the base": sum(p.numel() * p.element_size() for p in frozen),
        "bytes of adapters, gradients and two moments": 4 * 4 * count,
        "dtypes of the base": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in frozen})),
    }


def _check_tokens(model: nn.Module, tokenizer) -> None:
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model embeds {rows}: they do not belong together"
        )
    for kind in ("pad", "eos", "bos"):
        token, config = getattr(tokenizer, f"{kind}_token_id"), getattr(model.config, f"{kind}_token_id", None)
        allowed = config if isinstance(config, list) else [config]
        if token is not None and config is not None and token not in allowed:
            raise ValueError(f"{kind} is token {token} for the tokenizer and {config} for the model: set one of them")


def _check_batch(model: nn.Module, tokenizer, batch: Batch) -> None:
    ids, labels, mask = batch["input_ids"], batch["labels"], batch.get("attention_mask")
    if int(ids.max()) >= (rows := model.get_input_embeddings().weight.shape[0]):
        raise ValueError(f"input_ids: token {int(ids.max())}, the model embeds {rows}")
    if not int(losses.supervised(labels)):
        raise ValueError(f"labels: none is supervised, all are {losses.IGNORED}")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id != tokenizer.eos_token_id else None  # or it means both
    if mask is None and pad is not None and bool((ids == pad).any()):
        raise ValueError(f"input_ids hold the pad token {pad} and there is no attention_mask: its KL would count")
    padding = torch.zeros_like(ids, dtype=torch.bool) if mask is None else ~mask.bool()
    padding = padding if pad is None else padding | (labels == pad)
    if wrong := int((padding & (labels != losses.IGNORED)).sum()):
        raise ValueError(f"labels: {wrong} padding positions are supervised; set them to {losses.IGNORED}")


# ------------------------------------------------------------------ after


def save(model: nn.Module, folder: Path | str) -> Path:
    """All that the adapters are, priors and step count included, as one safetensors file; the base is not in it."""
    specs = {
        name: {"rank": a.rank, "scale": a.scale, "deterministic": a.lora_logvar is None, "bounds": a.bounds}
        for name, a in adapters(model).items()
    }
    if not specs:
        raise ValueError("the model has no adapters: there is nothing to save")
    state, specs = _state(model), json.dumps(specs)
    path, about = Path(folder) / FILE, {"format": "pt", "ard": specs, "sha256": _digest(specs, state)}
    with files.replacing(path) as partial:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, partial, metadata=about)
    return path


def load(model: nn.Module, folder: Path | str) -> nn.Module:
    """Put saved adapters on the base they were made for, or back into a model that already holds such adapters."""
    path = Path(folder) / FILE
    if not path.exists():
        raise FileNotFoundError(f"{path}: no saved adapters there")
    try:
        with safe_open(path, framework="pt") as file:
            about, saved = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}
        if about["sha256"] != _digest(about["ard"], saved):
            raise ValueError("it changed since it was written")
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise files.Unreadable(f"{path} is damaged: {error}") from None
    specs = json.loads(about["ard"])
    if not adapters(model):
        if missing := [name for name in specs if name not in dict(model.named_modules())]:
            raise ValueError(f"{path} has adapters for modules that this model lacks, the first is {missing[0]}")
        install(model, specs)
    state = _state(model)
    if wrong := sorted(state.keys() ^ saved.keys()):
        raise ValueError(f"{path} and the model hold different adapters, the first difference is {wrong[0]}")
    with torch.no_grad():
        for name, tensor in state.items():
            if tensor.shape != saved[name].shape:
                raise ValueError(f"{path}: {name} is {tuple(saved[name].shape)}, the model's {tuple(tensor.shape)}")
            tensor.copy_(saved[name])
    return model


def export_peft(model: nn.Module, folder: Path | str) -> Path:
    """The mean adapter as a PEFT LoRA folder: `PeftModel.from_pretrained(base, folder)` gives the same logits."""
    layers = adapters(model)
    if not layers:
        raise ValueError("the model has no adapters: there is nothing to export")
    factors = {name: lora_folder.Factors(a.lora_mean, a.lora_up, a.scale) for name, a in layers.items()}
    transposed = any(isinstance(a.base, wiring.Conv1D) for a in layers.values())
    base = getattr(model, "name_or_path", None)
    return lora_folder.save(factors, folder, base=base, transposed=transposed)


def _state(model: nn.Module) -> dict[str, Tensor]:
    state = {"ard_steps": model.ard_steps}
    for name, a in adapters(model).items():
        own = [*a.named_parameters(recurse=False), *a.named_buffers(recurse=False)]
        state |= {f"{name}.{key}": tensor.detach() for key, tensor in own}
    return state


def _digest(specs: str, state: dict[str, Tensor]) -> str:
    return checkpoint.fingerprint((specs + name, state[name]) for name in sorted(state))
