"""Memory and recomputation: what fills the memory of a step, and what checkpointing really does.

The bytes of a step are logits, activations, weights, gradients and optimizer state. People blame
what they changed last (the rank), so each kind is measured alone here, with everything else as it
was.

Recomputation is exact only if the second forward pass does what the first one did. A KV cache that
has grown in between breaks this, and nothing is raised. `eval()` switches checkpointing off, so a
check made there checks nothing.

Footgun: two runs on the same broken path have equal gradients. The reference must not checkpoint at
all.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as recompute
from torch.utils.flop_counter import FlopCounterMode

from lessons.pitfalls import WITH_PEFT, Pitfall, bench
from nblib import compiling, losses, memory, models

MIB = 2**20
VOCABULARY = 512


def lora(
    rank: int = 8, *, vocabulary: int = VOCABULARY, targets="all-linear", **shape
) -> nn.Module:
    """Return a tiny Qwen3 with LoRA on its projections; B starts away from zero, so that no
    gradient is zero by design.
    """
    frozen = bench.base(vocabulary=vocabulary, **shape)
    return bench.lora(frozen, r=rank, target_modules=targets, init_lora_weights=False).train()


def tokens(rows: int = 2, length: int = 16, vocabulary: int = VOCABULARY) -> Tensor:
    return bench.rows(rows, length, vocabulary=vocabulary, seed=0)


# ---------------------------------------------------------------------------------- P19, the logits


def whole_logits(model: nn.Module, ids: Tensor) -> Tensor:
    # the model makes all logits, tokens x vocabulary, and backward needs copies
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def in_chunks(model: nn.Module, ids: Tensor) -> Tensor:
    # the hidden states meet the vocabulary a few rows at a time
    summed = losses.causal_lm(model, {"input_ids": ids, "labels": ids})["ce"]
    return summed / ids[:, 1:].numel()


def torch_linear(model: nn.Module, ids: Tensor, *, chunk: int | None = None) -> Tensor:
    """torch's own fused loss; without options it holds all logits, as the plain loss does."""
    hidden, weight = losses.hidden_states(model, {"input_ids": ids})
    hidden, targets = losses.shifted_rows(hidden, ids)
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk) if chunk else None
    return nn.functional.linear_cross_entropy(hidden, weight, targets, options=options)


def step_memory(
    loss=whole_logits,
    *,
    rank: int = 16,
    checkpointing: bool = False,
    vocab: int = 32_768,
    length: int = 256,
    device: torch.device | str = "cpu",
) -> dict:
    """Peak of one forward and backward over what was there before, beside the size of one fp32 copy
    of the logits.
    """
    ids = tokens(2, length, vocab).to(device)
    model = lora(rank, vocabulary=vocab, layers=2, length=max(1024, length)).to(device)
    if checkpointing:
        compiling.checkpoint_blocks(model)
    loss(model, ids[:, :8]).backward()  # buffers and gradients of a first step belong to the start
    with memory.peak(device) as peak:
        value = loss(model, ids)
        value.backward()
    one = ids[:, 1:].numel() * vocab * 4
    return {
        "rank": rank,
        "checkpointing": checkpointing,
        "peak MiB": peak.bytes / MIB,
        "one copy of the logits MiB": one / MIB,
        "copies": peak.bytes / one,
        "loss": float(value.detach()),
    }


P19 = Pitfall(
    id="P19",
    title="Out of memory, and the rank is blamed",
    symptom="CUDA out of memory as soon as the adapters are on; a lower rank and checkpointing "
    "change next to nothing",
    claim="the rank of the low-rank factors is too high, take a smaller one and switch on "
    "checkpointing "
    "(lore about adapters at a quarter of the model's width)",
    verdict="The logits fill the memory, not the rank. The plain loss holds several fp32 "
    "copies of tokens x "
    "vocabulary, and neither the rank nor checkpointing changes that. With the logits in "
    "chunks a high rank fits even "
    f"without checkpointing. Seen on {WITH_PEFT}",
    fix="Score the vocabulary in chunks (`losses.causal_lm`, Liger, cut cross-entropy). "
    "`F.linear_cross_entropy` needs "
    "a `batch_chunk_size`; its default saves nothing",
    # both remedies of the claim are on, the logits still whole
    broken=lambda: step_memory(rank=1, checkpointing=True),
    fixed=lambda: step_memory(in_chunks, rank=1, checkpointing=True),
    claimed=lambda: step_memory(in_chunks, rank=16, checkpointing=False),
    seen=lambda facts: facts["copies"] > 2,
    wrong=whole_logits,
    right=in_chunks,
)


# -------------------------------------------------------------------- P20, what checkpointing saves


Run = Callable[[list[nn.Module], Tensor], Tensor]  # runs some blocks on hidden states


def every_block(run: Run, blocks: list[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:  # keeps the input of each: proportional to the depth
        x = recompute.checkpoint(run, [block], x, use_reentrant=False)
    return x


def segments(run: Run, blocks: list[nn.Module], x: Tensor) -> Tensor:
    size = round(len(blocks) ** 0.5)
    for at in range(0, len(blocks), size):  # keeps one input per sqrt(depth) blocks
        x = recompute.checkpoint(run, blocks[at : at + size], x, use_reentrant=False)
    return x


def kept_and_flops(layers: int, how: str, *, width: int = 64, frozen: bool = True) -> dict:
    """Bytes alive when backward begins, and the work of the step, for a stack of `layers` blocks.

    `how`: nothing (all activations kept), blocks (one input kept per block), segments (one per
    sqrt(layers) blocks).
    """
    model = models.tiny(64, hidden=width, layers=layers).requires_grad_(not frozen)
    blocks = compiling.blocks(model)
    hidden = torch.randn(2, 64, width, generator=torch.Generator().manual_seed(0)).requires_grad_()
    rotary = model.model.rotary_emb(hidden, torch.arange(64)[None])

    def run(part: list[nn.Module], x: Tensor) -> Tensor:
        for block in part:
            x = block(x, position_embeddings=rotary, use_cache=False)
        return x

    checkpointed = {
        "nothing": lambda run, part, x: run(part, x),
        "blocks": every_block,
        "segments": segments,
    }[how]
    # alone: it keeps tensors alive that would be freed
    with FlopCounterMode(display=False) as flops:
        x = checkpointed(run, blocks, hidden)
        once = flops.get_total_flops()
        x.sum().backward()
    model.zero_grad(set_to_none=True)
    hidden.grad = None
    with memory.Account([*model.parameters(), *model.buffers(), hidden, *rotary]) as account:
        x = checkpointed(run, blocks, hidden)
        kept = account.live
        x.sum().backward()
    return {
        "layers": layers,
        "checkpointed": how,
        "weights frozen": frozen,
        "kept for backward KiB": kept / 1024,
        "peak KiB": account.most / 1024,
        "work over forward": flops.get_total_flops() / once,
    }


def growth(how: str) -> dict:
    """How many times as much is kept with 16 blocks as with 4."""
    small, large = kept_and_flops(4, how), kept_and_flops(16, how)
    return {
        "checkpointed": how,
        "layers x": 4,
        "kept x": large["kept for backward KiB"] / small["kept for backward KiB"],
        "peak KiB at 16 layers": large["peak KiB"],
        "work over forward": large["work over forward"],
    }


P20 = Pitfall(
    id="P20",
    title="Checkpointing every block does not need the square root of the memory",
    symptom="checkpointing is on, and what it keeps still grows with every layer that is added",
    claim="checkpointing costs a third more and needs memory of the order of the square root "
    "of the depth "
    "(said of gradient checkpointing in general, after arXiv:1604.06174)",
    verdict="What is kept grows in proportion to the depth, because the switch of the library "
    "keeps one input per "
    "block. Segments of sqrt(depth) blocks keep only the square root. But while a segment is "
    "recomputed, all its "
    "blocks are alive, and at ordinary depths that makes the higher peak. The price is at most "
    "a forward pass: up to a "
    "third more work when weights train, up to half more when they are frozen. Seen on "
    f"{WITH_PEFT}",
    fix="Expect one kept input per block and leave it so. Segments help only at depths of "
    "hundreds of blocks",
    broken=lambda: growth("blocks"),
    fixed=lambda: growth("segments"),
    seen=lambda facts: facts["kept x"] > 3,
    wrong=every_block,
    right=segments,
)


# ----------------------------------------------------------------- P21, a cache under checkpointing


def reentrant(forward: Callable) -> Callable:
    """Return a block's forward wrapped in checkpoint(), as code outside transformers does it."""

    # the reentrant kind takes no keyword arguments
    def through(hidden: Tensor, **options) -> Tensor:
        return recompute.checkpoint(partial(forward, **options), hidden, use_reentrant=True)

    return through


def non_reentrant(forward: Callable) -> Callable:
    return partial(recompute.checkpoint, forward, use_reentrant=False)


def with_cache(model: nn.Module, ids: Tensor, checkpointed: Callable) -> Tensor:
    for block in compiling.blocks(model):
        block.forward = checkpointed(block.forward)
    # both forward passes append to the same cache, so the second one sees keys twice
    return model(input_ids=ids, labels=ids, use_cache=True).loss


def without_cache(model: nn.Module, ids: Tensor, checkpointed: Callable) -> Tensor:
    for block in compiling.blocks(model):
        block.forward = checkpointed(block.forward)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def cached_gradients(
    *, use_cache: bool, checkpointing: bool = True, use_reentrant: bool = True
) -> dict:
    """Gradients of every adapter against the same model without cache and without checkpointing."""
    model, ids = lora(), tokens()
    model.enable_input_require_grads()  # the reentrant kind needs it; that is another pitfall (P01)
    right = bench.flow(model, lambda: whole_logits(model, ids))["gradients"]
    loss = with_cache if use_cache else without_cache
    checkpointed = (
        (reentrant if use_reentrant else non_reentrant)
        if checkpointing
        else lambda forward: forward
    )
    flowed = bench.flow(model, lambda: loss(model, ids, checkpointed))
    got = flowed["gradients"]
    off = {
        n: float((got[n] - g).norm() / g.norm()) if got[n] is not None else 1.0
        for n, g in right.items()
    }
    zero = [n for n, g in got.items() if g is None or not g.any()]
    return {
        "tensors": len(right),
        "zero gradients": len(zero),
        "wrong gradients": sum(v > 1e-3 for v in off.values()),
        "largest relative error": max(off.values()),
        "zero in": sorted({n.split(".")[-4] for n in zero}),
        "warnings": flowed["warnings"],
    }


P21 = Pitfall(
    id="P21",
    title="A KV cache under hand-written checkpointing",
    symptom="the loss falls a little; the adapters of keys and values never learn; nothing is "
    "printed",
    claim="a model left with use_cache=True trains wrongly (advice in fine-tuning recipes, "
    "with no reason given)",
    verdict="The cache alone changes no gradient. Under a reentrant checkpoint written by hand "
    "the gradients are "
    "wrong, and nothing is raised or warned: the second forward pass appends to the cache that "
    "the first one has "
    f"filled. The library's own switch notices this and turns the cache off. Seen on {WITH_PEFT}",
    fix="Pass `use_cache=False` in the call. Checkpoint with the library's switch or with "
    "`use_reentrant=False`",
    broken=lambda: cached_gradients(use_cache=True),
    fixed=lambda: cached_gradients(use_cache=False),
    claimed=lambda: cached_gradients(use_cache=True, checkpointing=False),
    seen=lambda facts: facts["wrong gradients"] > 0,
    check="F10",
    wrong=with_cache,
    right=without_cache,
)


# ----------------------------------------------------------------------------- P22, eval() hides it


def checked_as_loaded(model: nn.Module, ids: Tensor) -> tuple[str, str]:
    model.eval()  # as from_pretrained returns it: checkpointing is off
    check = outcome(model, ids)
    model.train()
    return check, outcome(model, ids)


def checked_in_training_mode(model: nn.Module, ids: Tensor) -> tuple[str, str]:
    model.train()  # checkpointing is on, as it will be in training
    check = outcome(model, ids)
    return check, outcome(model, ids)


def check_then_train(*, check_in: str, reentrant: bool = True) -> dict:
    """Return a gradient check in one mode, then the first training step of a model with the
    reentrant fault of P01.
    """
    model, ids = lora(), tokens()
    if reentrant:
        library_checkpointing(model, use_reentrant=True)
    check, training = {"eval": checked_as_loaded, "train": checked_in_training_mode}[check_in](
        model, ids
    )
    return {"check made in": check_in, "the check": check, "training": training}


def library_checkpointing(model: nn.Module, *, use_reentrant: bool) -> None:
    """Use the library's switch, without the hook on the embeddings that transformers 5 adds."""
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    model.disable_input_require_grads()


def outcome(model: nn.Module, ids: Tensor) -> str:
    """'42 of 42 gradients', or the first line of what was raised."""
    flowed = bench.flow(model, lambda: whole_logits(model, ids))
    # the only other hint is a warning: None of the inputs have requires_grad=True
    if flowed["raised"]:
        return f"raised: {flowed['raised']}"
    return f"{bench.alive(flowed)} of {len(flowed['gradients'])} gradients"


P22 = Pitfall(
    id="P22",
    title="A check made in evaluation mode",
    symptom="the gradient check passes, but the first training step raises (or trains almost "
    "nothing)",
    claim="training mode itself is at fault, dropout or the like (what the difference between "
    "the two runs suggests)",
    verdict="The check ran without the checkpointing that it was meant to check. Checkpointing "
    "acts only in training "
    "mode, and from_pretrained returns a model in evaluation mode. Training mode without "
    "checkpointing is fine. "
    f"Seen on {WITH_PEFT}",
    fix="Call `model.train()` before any check of gradients; `wiring.canary` does so",
    broken=lambda: check_then_train(check_in="eval"),
    fixed=lambda: check_then_train(check_in="train"),
    claimed=lambda: check_then_train(check_in="eval", reentrant=False),
    seen=lambda facts: facts["the check"] != facts["training"],
    check="S10",
    wrong=checked_as_loaded,
    right=checked_in_training_mode,
)

PITFALLS = [P19, P20, P21, P22]
