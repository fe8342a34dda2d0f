"""The table of the tokens and the output layer: S9, S14.

Footgun: peft keeps a trained copy beside the original (modules_to_save). Only the active one
counts, which is what `Evidence.embedding` and `Evidence.head` return.
"""

from torch import Tensor

from loopdoctor.check import Fired, check, fires
from loopdoctor.checks.labels import batches
from loopdoctor.evidence import Call, Evidence, asked
from loopdoctor.finding import ERROR, OK, WARN, Verdict, not_applicable, unknown

NEAR = 0.05  # of the usual distance from the mean: a row that close was made from the mean
LEARNED = 1.5  # times the spread at the start, or a part of it: rows that learned
# standard errors within which numbers are as drawn; the least number of them
CHANCE, DRAWN = 4.0, 256
FRONT, FEW = 16, 0.2  # rows in front of those, and the share that may look like them


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr()


def _comparable(into: Tensor | None, out: Tensor | None) -> bool:
    if into is None or out is None or into.shape != out.shape:
        return False
    return into.device.type != "meta" and out.device.type != "meta" and into.is_floating_point()


@check("S9")
def tie_broken(e: Evidence) -> Fired | Verdict:
    """Return the loss is worse than it should be, and after saving and loading the model is worse
    again.

    Fires when the config says that embedding and output layer are one matrix and they are two: the
    tie was lost in to_empty, in sharding, or both ends were put into modules_to_save. A model
    without a config is asked whether both began with equal values. `untied=True` says that it is on
    purpose; then nothing is looked at.

    ERROR or WARN tie-broken: The tie is broken: embedding and output layer (lm_head) are two
    matrices: the tie was lost when weights were materialised, copied or sharded; each gets half of
    the gradient, and a reload keeps only one of them. Fix: Call model.tie_weights() (or assign the
    one weight to both) after to_empty, sharding or loading, and before the optimizer is built.
    ERROR or WARN tie-broken/copied: The tie is broken: modules_to_save copied the ends of a tied
    model, and the copies are trained apart; each gets half of the gradient, and a reload keeps only
    one of them. Fix: Use trainable_token_indices, or only the embedding with
    ensure_weight_tying=True.
    """
    into, out = e.embedding(), e.head()
    if e.declared.get("untied"):
        return not_applicable("declared untied")
    if not _comparable(into, out):
        return unknown("no pair of embedding and output layer was found")
    told = None  # a module of one's own may carry a config whose default says tied
    if hasattr(e.model, "tie_weights"):
        told = getattr(e.config, "tie_word_embeddings", None)
    if told is None and e.tied_at_start is None and not _same(into, out):
        return unknown(
            "no backward was seen, so it is not known whether both began with equal values"
        )
    if (
        _same(into, out)
        or e.tied_at_start
        or not (told is True or (told is None and e.alike_at_start))
    ):
        return OK
    both = into.requires_grad and out.requires_grad
    gap = float((into.detach().float() - out.detach().float()).abs().max())
    why = "their values were equal at the start" if told is None else "the config says tied"
    copied = any("modules_to_save" in n for n in e.parameters())
    return fires(
        f"{why}, but the two matrices {tuple(into.shape)} have separate storage and differ by "
        f"up to {gap:.2g}",
        "one storage for both",
        # a head of its own may be new on purpose
        ERROR if both and told and e.alike_at_start else WARN,
        "tie-broken/copied" if copied else "tie-broken",
    )


def _used(e: Evidence) -> set[int]:
    """Ids in the training batches, padding left out."""
    found: set[int] = set()
    for c in e.of(Call):
        if c.role == "model" and c.ids is not None:
            whole = c.mask is not None and c.mask.shape == c.ids.shape
            found |= set((c.ids[c.mask.bool()] if whole else c.ids).unique().tolist())
    return found - {e.token("pad")}


@check("S14")
def new_tokens_frozen(e: Evidence) -> Fired | Verdict:
    """Return the tokens that were added to the vocabulary (tags, special tokens) are never learnt.

    Fires when batches use ids beyond `orig_vocab`, or rows at the end of the table that still are
    the mean of the others as resizing makes them, and the embedding is frozen: an adapter on the
    layers leaves it as it was. Padding does not count. Copies in modules_to_save,
    trainable_token_indices and adapters on the embedding do train them. Also when the loss asks for
    ids whose rows at the end of a frozen output layer are as transformers draws them
    (mean_resizing=False), where the others are spread half as much again, or more, or less, as
    trained ones are.

    ERROR or WARN new-tokens-frozen: New tokens were added to the vocabulary
    (resize_token_embeddings), but the embedding is frozen, so their rows stay as resizing made
    them. Fix: Name them in LoraConfig(trainable_token_indices=[...]), or put embedding and head
    into modules_to_save.
    WARN new-tokens-frozen/drawn: New tokens were added to the vocabulary (resize_token_embeddings),
    but the output layer is frozen, so their rows stay the random numbers that were drawn for them.
    Fix: Put embedding and head into modules_to_save, or name them in
    LoraConfig(trainable_token_indices=[...]).
    """
    if drawn := _drawn_and_asked_for(e):
        what = (
            f"the loss asks for {len(drawn)} ids ({drawn[:4]}) whose rows in the frozen "
            "output layer are as drawn"
        )
        return fires(what, "rows that train", WARN, "new-tokens-frozen/drawn")
    table = e.embedding()
    if table is None or not table.is_floating_point() or table.dim() != 2:
        return unknown("no embedding was found")
    if table.requires_grad or not e.trainable():
        return OK
    if any("trainable_tokens" in n or "lora_embedding" in n for n in e.trainable()):
        return OK
    original = e.declared.get("orig_vocab")
    new = set(range(original, len(table))) if original else _like_the_mean(table.detach())
    used = sorted(_used(e) & new)
    if not used:
        return OK if original or new else unknown("orig_vocab was not given and no row looks new")
    how = (
        f"at or above orig_vocab = {original}"
        if original
        else "whose rows are the mean of the table"
    )
    return fires(
        f"batches use {len(used)} ids {how} ({used[:4]}), and the embedding is frozen",
        "new rows of the embedding trainable",
        ERROR if original else WARN,
    )


def _like_the_mean(table: Tensor) -> set[int]:
    """Rows at the end of the table that are nearly the mean of those before: not one of them is
    random.
    """
    rows = table[: max(1, len(table) // 2)].float()
    mean = rows.mean(0)
    usual = float((rows - mean).norm(dim=1).median())
    if usual == 0:
        return set()
    last = table[-min(len(table) // 4, 4096) :].float()
    near = (last - mean).norm(dim=1) < max(NEAR * usual, 0.0)
    # the mean of all rows and that of the first half differ by this
    noise = usual * (2.0 / len(rows)) ** 0.5
    near |= (last - mean).norm(dim=1) < 1.5 * noise
    first = len(table) - len(last)
    count = 0
    for flag in reversed(near.tolist()):
        if not flag:
            break
        count += 1
    return (
        set(range(len(table) - count, len(table)))
        if count < len(last)
        else set(range(first, len(table)))
    )


def _drawn_and_asked_for(e: Evidence) -> list[int]:
    """Ids among the targets whose rows of a frozen output layer are as they were drawn, while the
    others learned.
    """
    table, spread = e.head(), asked(e.config, "initializer_range")
    if table is None or table.dim() != 2 or table.is_meta or not table.is_floating_point():
        return []
    layers = [
        n.rsplit(".", 1)[0].removesuffix("base_layer")
        for n, p in e.parameters().items()
        if p is table
    ]
    if any(n.startswith(layer) for n in e.trainable() for layer in layers):
        return []  # an adapter on the output layer itself
    if not e.trainable() or not isinstance(spread, float) or spread <= 0:
        return []
    first = len(table) - _drawn_at_the_end(table.detach(), spread)
    targets: set[int] = set()
    for batch in batches(e) if first < len(table) else ():
        targets |= set(batch.ids[batch.asked].unique().tolist())
    return sorted(n for n in targets - {e.token("pad")} if n >= first)


def _drawn_at_the_end(table: Tensor, spread: float) -> int:
    """How many rows at the end are N(0, spread), where the first half is of another spread and
    those in front are too: rare words at the end of a vocabulary learned little, and come near to
    it one after the other.
    """
    columns = table.shape[1]
    usual = float(table[: len(table) // 2].float().std(1).median()) / spread
    if 1 / LEARNED < usual < LEARNED:
        return 0
    last = table[-min(len(table) // 2, 4096) :].float()
    drawn = (last.std(1) / spread - 1).abs() < CHANCE / (2 * columns) ** 0.5
    drawn &= last.mean(1).abs() < CHANCE * spread / columns**0.5
    count = int(drawn.flip(0).long().cumprod(0).sum())
    front, numbers = drawn[: len(drawn) - count][-FRONT:], last[len(last) - count :]
    if numbers.numel() < DRAWN or not len(front) or float(front.float().mean()) > FEW:
        return 0
    return (
        count
        if abs(float(numbers.std()) / spread - 1) < CHANCE / (2 * numbers.numel()) ** 0.5
        else 0
    )
