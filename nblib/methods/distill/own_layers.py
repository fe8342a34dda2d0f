"""Students that people have: some of the teacher's own layers, and a teacher whose vocabulary is
padded.

    student = from_layers(teacher, keep=every_other(teacher))
    a copy with these layers; embeddings and norms stay
    control = with_new_weights(student, seed=0)                    the same shape, random
    fit_vocabulary(model, size, words=len(tokenizer))              rows of padding are cut off, or
                                                                   added

Layers add to one residual stream, so a model without some of them still works, only worse
(DistilBERT, arXiv:1910.01108, starts like that). Models of one tokenizer often differ by rows of
padding that no token uses: a distillation needs one vocabulary, so these are cut off; after it they
may be added again.

Footgun: layers carry their own number (`layer_idx`), which the KV cache goes by. It is counted anew
here; a student that keeps the teacher's numbers generates nonsense and trains well.
"""

import copy
from collections.abc import Sequence

from torch import nn

from nblib import compiling, losses, runtime


def every_other(teacher: nn.Module) -> list[int]:
    """Return the first layer, the third, and so on."""
    return list(range(0, len(compiling.blocks(losses.backbone_and_head(teacher)[0])), 2))


def from_layers(teacher: nn.Module, *, keep: Sequence[int]) -> nn.Module:
    """Return a student of the teacher's layers `keep`, in their order, with weights of its own in
    fp32 that train.
    """
    student = copy.deepcopy(teacher).float().train().requires_grad_(True)
    blocks = list(compiling.blocks(losses.backbone_and_head(student)[0]))
    if not keep or not all(0 <= i < len(blocks) for i in keep) or list(keep) != sorted(set(keep)):
        raise ValueError(
            f"keep = {list(keep)}: must be different layers in order, from 0 to {len(blocks) - 1}"
        )
    holders = [
        (m, name) for m in student.modules() for name, c in m.named_children() if _holds(c, blocks)
    ]
    if len(holders) != 1:
        raise ValueError(f"{type(teacher).__name__}: its layers are not in one list")
    (holder, name), config = holders[0], student.config
    setattr(holder, name, nn.ModuleList([blocks[i] for i in keep]))
    for number, i in enumerate(keep):
        for module in blocks[i].modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = number
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in keep]
    config.num_hidden_layers = len(keep)
    return student


def _holds(module: nn.Module, blocks: list[nn.Module]) -> bool:
    return isinstance(module, nn.ModuleList) and [*module] == blocks


def with_new_weights(model: nn.Module, *, seed: int) -> nn.Module:
    """Return a model of the same shape with random weights that depend on the seed alone."""
    with runtime.seeded(seed):
        return type(model)(copy.deepcopy(model.config)).train()


def fit_vocabulary(model: nn.Module, size: int, *, words: int) -> nn.Module:
    """Return the model with `size` rows in embeddings and head, of which the tokenizer uses
    `words`.
    """
    now = len(losses.backbone_and_head(model, needed=True)[1])
    if size < words:
        raise ValueError(
            f"size = {size}: the tokenizer has {words} tokens, and only padding may go"
        )
    if size != now:
        with runtime.seeded(0):
            model.resize_token_embeddings(size)
    return model
