"""Drawings of notebook 02: which cure for an out-of-memory error works, recomputation, and the size
of the logits.

With B rows of T tokens, hidden size D, L blocks and vocabulary V, in fp32:

    logits = 4 B (T - 1) V bytes, about three times over
    kept by checkpointing = 4 B T D L bytes

Footgun: `cures` makes four small training steps and counts their bytes, which takes a second; the
others only draw.
"""

from lessons.drawings import COMPUTED, LOSS, STORED, TRAINED, Sketch
from nbworkbook import show


def cures() -> show.Picture:
    """Return the bytes of one training step as it was, and under three cures for an out-of-memory
    error.
    """
    from lessons.pitfalls import bench
    from nblib import compiling, losses, memory

    vocabulary, ids = 32_768, bench.rows(2, 128)

    def whole(model):
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    def chunked(model):
        hidden, weight = losses.hidden_states(model, {"input_ids": ids})
        return losses.chunked_loss(
            *losses.shifted_rows(hidden, ids)[:1], weight, ids[:, 1:].flatten(), chunk=32
        )

    def peak(loss=whole, rank=16, checkpointing=False) -> float:
        model = bench.lora(bench.base(vocabulary=vocabulary, layers=2, length=128), r=rank)
        if checkpointing:
            compiling.checkpoint_blocks(model)
        with memory.Account([*model.parameters(), *model.buffers(), ids]) as account:
            loss(model).backward()
        return account.most / 2**20

    peaks = {
        "rank 16, as it was": peak(),
        "rank 1": peak(rank=1),
        "checkpointing": peak(checkpointing=True),
        "logits in chunks of rows": peak(chunked),
    }
    return show.bars(
        peaks,
        x="peak of one training step (MiB)",
        summary="A small model with LoRA and a vocabulary of 32,768; all bytes that a step "
        "adds, counted. Neither a "
        "lower rank nor checkpointing helps. The table of logits fills the memory: one number "
        "per token and entry of "
        "the vocabulary.",
        title="Out of memory: which cure helps?",
    )


def recomputed() -> show.Picture:
    """Return what checkpointing keeps in the forward pass, and what it computes again in the
    backward pass.
    """
    s = Sketch(7.4, 2.6)
    s.text(0.55, 2.05, "forward", size=8.5)
    s.text(0.55, 0.6, "backward", size=8.5)
    row, again = [], []
    for n in range(3):
        row.append(s.box(1.55 + 2.1 * n, 2.05, f"x[{n}]", width=0.6, fill=STORED))
        if n < 2:
            row.append(s.box(2.6 + 2.1 * n, 2.05, f"layers[{n}]", width=0.95))
    loss = s.box(6.85, 2.05, "loss", width=0.7, fill=LOSS)
    for start, end in zip([*row], [*row[1:], loss]):
        s.arrow(start, end)
    for n in range(2):
        again.append(
            s.box(2.6 + 2.1 * n, 0.6, f"layers[{n}]\nagain", width=0.95, height=0.5, fill=COMPUTED)
        )
        s.arrow(row[2 * n], again[n])
    s.arrow(loss, again[1], dashed=True)
    s.arrow(again[1], again[0], dashed=True)
    return s.picture(
        "Yellow: what is kept, one input x per block. White: what is computed and thrown away. "
        "In the backward pass "
        "each block is computed again from its kept input, just before its gradient (dashed) "
        "is taken. So the inside "
        "of only one block is in memory at a time.",
        title="Checkpointing: keep the inputs, compute the rest again",
    )


def logits() -> show.Picture:
    """Return the tables of one step, drawn to scale."""
    s = Sketch(7.4, 2.3)
    width = 5.6  # inches for the vocabulary
    hidden = s.box(0.55, 1.25, "", width=width * 1024 / 151_936, height=1.1, fill=TRAINED)
    s.text(0.55, 0.5, "hidden\nN x D", size=8)
    table = s.box(1.5 + width / 2, 1.25, "logits, N x V", width=width, height=1.1, fill=LOSS)
    s.box(1.5 + width / 2, 1.69, "one chunk of rows", width=width, height=0.22, fill=STORED)
    s.arrow(hidden, table)
    s.text(
        1.5 + width / 2,
        0.42,
        "the plain loss keeps about three tables of this size, in fp32",
        size=8,
    )
    return s.picture(
        "The hidden states of N tokens and their logits, drawn to scale for a hidden size D of "
        "1,024 and a vocabulary "
        "V of 151,936 (Qwen3 0.6B). Red: the whole table. Yellow: a few rows of it, which is "
        "all that a loss in "
        "chunks holds at a time.",
        title="The logits' share of memory",
    )
