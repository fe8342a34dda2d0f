"""Memory and traffic of each rank, for models and numbers of cards that nobody here has: computed,
not measured.

`memory.estimate` runs a training step on shapes alone, for a model of one block and for one of two,
because blocks are alike: what the second one adds, every further one adds (a test holds that
against deeper models). `per_rank` spreads it over the ranks:

    ddp    all states, and autocast's low copy of all weights until the forward pass ends;
           sends 2 (n-1)/n of the gradient bytes per step, as a ring does
    fsdp   1/n of the states, and whole: two blocks, one block's gradient, embedding and head;
           sends per micro-batch (n-1)/n of the weight bytes for forward, of the blocks again for
           backward, and of the gradients
    hsdp   fsdp within groups of g ranks, and between the groups once per step an all-reduce of 1/g
           of the gradients

States are weights, gradients and two moments of AdamW, all in fp32, as the loop here keeps them.
Rows are those of one rank, with checkpointed blocks. What tensors need is counted; a CUDA context
and an allocator's gaps come on top.

Footgun: bytes sent say nothing about time. Within a node they travel ten times as fast as between
nodes, and with enough rows per card all but the first and last of them travel while the card
computes.
"""

from functools import cache
from typing import NamedTuple

from nblib import memory
from nbworkbook import show

NODE = 8  # cards of a node
MESHES = ("ddp", "fsdp", "hsdp")


class Shape(NamedTuple):
    name: str  # whose shapes they are
    family: str
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool  # embedding and head are one matrix


SHAPES = {
    "0.6 B": Shape("Qwen3-0.6B", "qwen3", 1024, 28, 16, 8, 128, 3072, 151_936, True),
    "4 B": Shape("Qwen3-4B", "qwen3", 2560, 36, 32, 8, 128, 9728, 151_936, True),
    "8 B": Shape("Qwen3-8B", "qwen3", 4096, 36, 32, 8, 128, 12_288, 151_936, False),
    "32 B": Shape("Qwen3-32B", "qwen3", 5120, 64, 64, 8, 128, 25_600, 151_936, False),
    "70 B": Shape("Llama-3.1-70B", "llama", 8192, 80, 64, 8, 128, 28_672, 128_256, False),
}


class Need(NamedTuple):
    """Bytes of one process; `block` and `root` are weights, the rest is what a step holds beside
    the states.
    """

    layers: int
    block: int
    root: int  # embedding, last norm, head
    kept: int  # by the forward pass of checkpointed blocks
    inside: int  # of the block that is computed again
    logits: int

    @property
    def weights(self) -> int:
        return self.layers * self.block + self.root


def config(shape: Shape, layers: int):
    import transformers as tf

    options = dict(
        hidden_size=shape.hidden, num_hidden_layers=layers, num_attention_heads=shape.heads
    )
    options |= dict(
        num_key_value_heads=shape.key_value_heads, head_dim=shape.head_dim, use_cache=False
    )
    options |= dict(
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
    )
    return {"qwen3": tf.Qwen3Config, "llama": tf.LlamaConfig}[shape.family](**options)


def small(hidden: int, layers: int, vocabulary: int) -> Shape:
    """Return the shapes of `models.tiny`."""
    return Shape("tiny", "qwen3", hidden, layers, 4, 2, hidden // 4, 3 * hidden, vocabulary, True)


@cache
def need(shape: Shape, rows: int, length: int, precision: str = "bf16") -> Need:
    """From a model of one block and one of two. A checkpointed block keeps its input, in fp32."""
    options = dict(rows=rows, length=length, precision=precision)
    one, two = (memory.estimate(config(shape, n), **options) for n in (1, 2))
    block = two["weights"] - one["weights"]
    return Need(
        layers=shape.layers,
        block=block,
        root=one["weights"] - block,
        kept=shape.layers * rows * length * shape.hidden * 4,
        inside=two["activations"] - one["activations"],
        logits=one["logits"],
    )


def groups_of(cards: int) -> int:
    """Nodes, or the two halves of the one node."""
    return cards // NODE if cards > NODE else 2


def per_rank(of: Need, mesh: str, cards: int, *, accumulate: int = 1) -> dict[str, int]:
    """Bytes that a rank holds at most, and bytes that it sends in a step: within its group, and
    between groups.
    """
    if mesh not in MESHES:
        raise ValueError(f"mesh = {mesh!r}: allowed are {', '.join(MESHES)}")
    working = of.kept + of.inside + of.logits
    if mesh == "ddp":
        sent, low = 2 * _share(cards) * of.weights, of.weights // 2
        return {
            "states": 4 * of.weights,
            "together": low,
            "working": working,
            "sent": round(sent),
            "between": 0,
        }
    groups = groups_of(cards) if mesh == "hsdp" else 1
    shards = cards // groups
    # the root stays together between forward and backward
    gathered = 2 * of.layers * of.block + of.root
    sent = accumulate * _share(shards) * (gathered + of.weights)
    between = 2 * _share(groups) * of.weights / shards
    # two blocks' weights and one's gradient; the head's gradient is in the logits
    together = of.root + 3 * of.block
    states = -(-4 * of.weights // shards)
    return {
        "states": states,
        "together": together,
        "working": working,
        "sent": round(sent),
        "between": round(between),
    }


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks


def held(bytes_of: dict[str, int]) -> int:
    """Return the most at once, of what `per_rank` computed."""
    return bytes_of["states"] + bytes_of["together"] + bytes_of["working"]


def table(
    sizes: list[str], cards: list[int], *, rows: int, length: int, card_gb: float
) -> list[dict]:
    """Return a row for each model and mesh.

    A number of bytes that does not fit on a card is marked.
    """
    lines = []
    for size in sizes:
        of = need(SHAPES[size], rows, length)
        for mesh in MESHES:
            line = {"model": size, "mesh": mesh}
            each = {n: per_rank(of, mesh, n) for n in cards}
            for n, bytes_of in each.items():
                gb = held(bytes_of) / 1e9
                line[f"GB, {n} cards"] = f"{gb:,.0f}" + (
                    " fits" if gb <= card_gb * memory.SHARE else ""
                )
            for n, bytes_of in each.items():
                between = f" + {bytes_of['between'] / 1e9:,.1f}" if mesh == "hsdp" else ""
                line[f"GB sent, {n}"] = f"{bytes_of['sent'] / 1e9:,.1f}{between}"
            lines.append(line)
    return lines


def first_that_fits(size: str, cards: list[int], *, rows: int, length: int, card_gb: float) -> str:
    """Return the mesh that sends least among those that fit, for the fewest cards where one
    does.
    """
    of = need(SHAPES[size], rows, length)
    for n in sorted(cards):
        each = {mesh: per_rank(of, mesh, n) for mesh in MESHES}
        fitting = [mesh for mesh, b in each.items() if held(b) <= card_gb * 1e9 * memory.SHARE]
        if fitting:
            return f"{min(fitting, key=lambda m: each[m]['sent'] + each[m]['between'])} on {n}"
    return "none"


def picture(sizes: list[str], cards: int, *, length: int, card_gb: float) -> show.Picture:
    """GB of a rank against the number of cards, a line per model under fsdp, and the card."""
    counts = [n for n in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096) if n <= cards] or [8]
    lines = {}
    for size in sizes:
        of = need(SHAPES[size], 1, length)
        lines[size] = [(n, held(per_rank(of, "fsdp", n)) / 1e9) for n in counts]
    lines["the card"] = [(n, card_gb * memory.SHARE) for n in counts]
    looks = {"the card": {"color": "black", "linestyle": "--", "marker": ""}}
    words = (
        "Computed, not measured: a line per model, one row of text per card, fsdp. The "
        "dashed line is what a card has "
    )
    words += (
        f"for tensors, {memory.SHARE:.0%} of {card_gb:g} GB. The lines flatten where "
        "shards no longer matter."
    )
    title = "More cards shrink the states and nothing else"
    drawn = show.curves(
        lines, x="cards", y="GB of a rank", summary=words, title=title, log=True, looks=looks
    )
    drawn.figure.axes[0].set_xscale("log", base=2)
    return drawn
