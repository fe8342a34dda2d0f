"""Check a run of ARD-LoRA before it starts, and write its adapters to files after it.

`preflight` raises the reason if anything but the adapters trains or they are not fp32; if tokenizer
and model disagree about special tokens; if padding is supervised or unmasked; or if a tensor gets
no gradient. Notebook 11 shows a run in between.

    save, load     the full state in a folder `ard`: tensors, recipe.json, and the hashes of both
    export_peft    the mean adapter as an ordinary PEFT folder, which the model computes when it
                   is in evaluation mode

Footgun: PEFT's LoRA has no noise and no priors. An exported adapter gives the same logits, but
nobody can draw from it or go on training it as ARD-LoRA; for that there is `save`.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nblib import files, losses, wiring
from nblib.losses import Batch, Loss
from nblib.methods import lora_folder
from nblib.methods.ard.layer import adapters, install

FOLDER = "ard"
TENSORS = "adapters.safetensors"
RECIPE = "recipe.json"  # rank, scale and bounds of each adapter
OLD_FILE = "ard.safetensors"  # of nblib 0.1


# ------------------------------------------------------------------ before


def preflight(model: nn.Module, tokenizer, batch: Batch, *, loss: Loss | None = None) -> dict:
    """Raise what would spoil the run, or return facts about it.

    With `loss`, two trial steps show that every tensor trains; everything is put back afterwards.
    """
    # the adapters train, and nothing else
    own: dict[str, nn.Parameter] = {}
    for name, adapter in adapters(model).items():
        for key, parameter in adapter.named_parameters(recurse=False):
            own[f"{name}.{key}"] = parameter
    if not own:
        raise ValueError("the model has no adapters: attach first")
    differ = sorted(own.keys() ^ wiring.trainable(model).keys())
    if differ:
        name = differ[0]
        problem = (
            "is an adapter and is frozen" if name in own else "trains, but it is not an adapter"
        )
        raise ValueError(f"{name} {problem} ({len(differ)} in all)")
    for name, parameter in own.items():
        if parameter.dtype != torch.float32:
            raise ValueError(
                "adapters must be fp32, small updates are lost otherwise: "
                f"{name} is {parameter.dtype}"
            )

    # what the tokenizer and the batch say
    _check_tokens(model, tokenizer)
    _check_batch(model, tokenizer, batch)

    # every tensor trains
    if loss is not None:
        tokens = losses.supervised(batch["labels"])
        canary = wiring.canary(model, lambda: sum(loss(model, batch).values()) / tokens)
        if not canary.alive:
            raise ValueError(f"a trial of two steps failed: {canary.sentence}")

    frozen = [p for p in model.parameters() if not p.requires_grad]
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in frozen})
    count = sum(p.numel() for p in own.values())
    return {
        "adapters": len(adapters(model)),
        "tensors": len(own),
        "trainable": count,
        "bytes of the base": sum(p.numel() * p.element_size() for p in frozen),
        "bytes of adapters, gradients and two moments": 4 * 4 * count,
        "dtypes of the base": ", ".join(dtypes),
    }


def _check_tokens(model: nn.Module, tokenizer) -> None:
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model embeds {rows}: "
            "they do not belong together"
        )
    for kind in ("pad", "eos", "bos"):
        token = getattr(tokenizer, f"{kind}_token_id")
        of_model = getattr(model.config, f"{kind}_token_id", None)
        allowed = of_model if isinstance(of_model, list) else [of_model]
        if token is not None and of_model is not None and token not in allowed:
            raise ValueError(
                f"{kind} is token {token} for the tokenizer and {of_model} for the model: "
                "set one of them"
            )


def _check_batch(model: nn.Module, tokenizer, batch: Batch) -> None:
    ids, labels, mask = batch["input_ids"], batch["labels"], batch.get("attention_mask")
    rows = model.get_input_embeddings().weight.shape[0]
    largest = int(ids.max())
    if largest >= rows:
        raise ValueError(f"input_ids: token {largest}, the model embeds {rows}")
    if not int(losses.supervised(labels)):
        raise ValueError(f"labels: none is supervised, all are {losses.IGNORED}")

    # a token that is pad and eos at once says nothing about padding
    pad = tokenizer.pad_token_id
    if pad == tokenizer.eos_token_id:
        pad = None
    if mask is None and pad is not None and bool((ids == pad).any()):
        raise ValueError(
            f"input_ids hold the pad token {pad} and there is no attention_mask: its KL would count"
        )

    padding = torch.zeros_like(ids, dtype=torch.bool) if mask is None else ~mask.bool()
    if pad is not None:
        padding = padding | (labels == pad)
    wrong = int((padding & (labels != losses.IGNORED)).sum())
    if wrong:
        raise ValueError(
            f"labels: {wrong} padding positions are supervised; set them to {losses.IGNORED}"
        )


# ------------------------------------------------------------------ after


def save(model: nn.Module, folder: Path | str) -> Path:
    """Write all that the adapters are, priors and step count too, and return the folder of it.

    The base is not in it.
    """
    layers = adapters(model)
    if not layers:
        raise ValueError("the model has no adapters: there is nothing to save")
    recipe = {
        name: {
            "rank": adapter.rank,
            "scale": adapter.scale,
            "deterministic": adapter.lora_logvar is None,
            "bounds": adapter.bounds,
        }
        for name, adapter in layers.items()
    }
    tensors = {name: tensor.contiguous() for name, tensor in _state(model).items()}

    place = Path(folder) / FOLDER
    with files.replacing(place) as partial:
        partial.mkdir()
        save_file(tensors, partial / TENSORS, metadata={"format": "pt"})
        (partial / RECIPE).write_text(json.dumps(recipe, indent=1))
        files.seal(partial)
    return place


def load(model: nn.Module, folder: Path | str) -> nn.Module:
    """Put saved adapters into a model and return it.

    The model is the base that they were made for, or holds such adapters already.
    """
    place = Path(folder) / FOLDER
    if place.parent.is_dir():
        files.remove_partials(place.parent, FOLDER)  # puts back a save that was being replaced
    if not place.exists():
        if (Path(folder) / OLD_FILE).exists():
            raise ValueError(
                f"{Path(folder) / OLD_FILE} was written by nblib 0.1 and is no longer read: "
                "save the adapters again"
            )
        raise FileNotFoundError(f"{place}: no saved adapters there")
    files.verify(place, {TENSORS, RECIPE})
    recipe = json.loads((place / RECIPE).read_text())
    saved = load_file(place / TENSORS)

    # adapters of the same shapes
    if not adapters(model):
        modules = dict(model.named_modules())
        missing = [name for name in recipe if name not in modules]
        if missing:
            raise ValueError(
                f"{place} has adapters for modules that this model lacks, the first is {missing[0]}"
            )
        install(model, recipe)
    state = _state(model)
    differ = sorted(state.keys() ^ saved.keys())
    if differ:
        raise ValueError(
            f"{place} and the model hold different adapters, the first difference is {differ[0]}"
        )
    for name, tensor in state.items():
        saved_shape = tuple(saved[name].shape)
        if tuple(tensor.shape) != saved_shape:
            raise ValueError(f"{place}: {name} is {saved_shape}, the model's {tuple(tensor.shape)}")

    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(saved[name])
    return model


def export_peft(model: nn.Module, folder: Path | str) -> Path:
    """Write the mean adapter as a PEFT LoRA folder and return the folder.

    `PeftModel.from_pretrained(base, folder)` gives the same logits.
    """
    layers = adapters(model)
    if not layers:
        raise ValueError("the model has no adapters: there is nothing to export")
    factors = {
        name: lora_folder.Factors(adapter.lora_mean, adapter.lora_up, adapter.scale)
        for name, adapter in layers.items()
    }
    transposed = any(wiring.is_conv1d(adapter.base) for adapter in layers.values())
    base = getattr(model, "name_or_path", None)
    return lora_folder.save(factors, folder, base=base, transposed=transposed)


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the adapters by name, the live ones."""
    state = {"ard_steps": model.ard_steps}
    for name, adapter in adapters(model).items():
        for key, tensor in adapter.named_parameters(recurse=False):
            state[f"{name}.{key}"] = tensor.detach()
        for key, tensor in adapter.named_buffers(recurse=False):
            state[f"{name}.{key}"] = tensor.detach()
    return state
