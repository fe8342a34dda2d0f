"""What a place sees that it should not, or does not see: F10 to F13, F34, S25. Mostly asked by
replays (probes.py).

Footgun: a probe that could not be made (a model that cannot be called again as it was) is UNKNOWN,
not OK.
"""

from loopdoctor.check import Fired, check, fires
from loopdoctor.checks.seen import BLIND, HABIT, no_habit
from loopdoctor.documents import resets
from loopdoctor.evidence import Backward, Evidence
from loopdoctor.finding import ERROR, OK, WARN, Verdict, not_applicable, unknown

CLEAR = 0.02  # smaller shifts may come of numbers scaled together over a batch (8-bit activations)


@check("F10")
def cache_on(e: Evidence) -> Fired | Verdict:
    """Training takes more memory than it should: each forward keeps keys and values for a
    generation.

    A note, because the result is right. With packed documents it is wrong, and F12 says so. Under
    checkpointing written by hand the gradients are wrong without a message: the recomputation in
    backward appends to the cache that the forward has filled. That is seen by the cache's length,
    and an error.

    ERROR cache-on/recomputed: A key-value cache is on under activation checkpointing: when backward
    recomputes a block, it appends to the keys and values of the first time, so attention and all
    gradients through it are wrong. Fix: Pass use_cache=False (or set model.config.use_cache =
    False) while training.
    NOTE cache-on/kept: The key-value cache of generation is on while training, which costs memory.
    Fix: Set model.config.use_cache = False (or pass use_cache=False).
    """
    calls = e.forwards
    if not calls:
        return unknown("no forward of the model was seen")
    if not any(c.cached for c in calls):
        return OK
    if grown := next((c for c in calls if c.recached), None):
        return fires(
            f"the key-value cache held {grown.kept} positions after the forward, "
            f"{grown.recached} after the backward",
            "no cache, or one that backward leaves alone",
            fault="cache-on/recomputed",
        )
    return fires(
        f"{sum(c.cached for c in calls)} of {len(calls)} training forwards returned a "
        "key-value cache",
        "none",
        fault="cache-on/kept",
    )


@check("F11")
def future(e: Evidence) -> Fired | Verdict:
    """Return the training loss falls far below what is possible, and generated text is senseless.

    Later tokens were changed: logits at earlier supervised positions must not move. Only where
    targets are next tokens; masked models look both ways and rightly so, a prefix may see all of
    itself, and a text may be told by a latent that is drawn for it (a VAE of sentences). The same
    for series of numbers, where the target given to a loss of torch is found to be the input, some
    times later, by less than half of them.

    ERROR or WARN sees-the-future: The model sees the future, the very tokens it is asked to
    predict: the causal mask is missing, wrong or one too wide. Fix: Mask attention above the
    diagonal (is_causal=True; torch.tril without an offset), and mix nothing over time.
    ERROR or WARN sees-the-future/decoder: The decoder sees the tokens that it is asked for: its
    mask is missing, or hides nothing of what comes later (in torch's layers True hides, and numbers
    are added to the scores). Fix:
    tgt_mask=nn.Transformer.generate_square_subsequent_mask(target.size(1)).
    WARN sees-the-future/series: The model of a series sees the very values that it is asked for,
    which stand {shift} later in its input: no causal mask, a layer that runs both ways, or padding
    on both sides. Fix: Mask attention above the diagonal, run recurrent layers forward only, pad
    convolutions on the left; or leave those values out.
    """
    leak = e.probes.get("leak")
    if leak is not None and leak.early > (0.1 if leak.coupled else 1e-3) * leak.late:
        return fires(
            f"the target is the input {leak.shift} later; changing the second half of the "
            "input moved answers before "
            f"it by {leak.early:.2g}, and those in it by {leak.late:.2g}",
            "0",
            WARN,
            "sees-the-future/series",
            shift=leak.shift,
        )
    if e.habits["F11 latent"]:
        return not_applicable("a latent was drawn for each text, which may tell of all of it")
    readings = [b.reading for b in e.of(Backward) if b.reading is not None]
    if len(both := e.habits["F11 both ways"]) >= 2:
        name = f"nn.{next(iter(both.values())).upper()}"
        what = f"in {len(both)} steps {name} ran both ways, and the targets were next tokens"
        return fires(what, "one way", WARN)
    decoder = e.probes.get("decoder")
    if decoder is not None and decoder.early > (0.1 if _coupled(e) else 1e-3) * decoder.late:
        return fires(
            "other tokens in the second half of the decoder's text moved answers before it by "
            f"{decoder.early:.2g}, "
            f"and those in it by {decoder.late:.2g}",
            "0",
            WARN if _coupled(e) else ERROR,
            "sees-the-future/decoder",
        )
    if leak is not None or decoder is not None:
        return OK
    if not any(r.offset == 1 for r in readings):
        return not_applicable("the targets are not known to be the next tokens")
    if "ahead" not in e.probes:
        return unknown("the first batch could not be run again")
    reach = e.probes.get("reach")
    if reach is None or reach < 1:
        return OK
    return fires(
        f"changing later tokens moved logits up to {reach} positions before them, by "
        f"{e.probes['ahead']:.2g} of their "
        "spread",
        "0",
        ERROR if e.probes["ahead"] > CLEAR and not _coupled(e) else WARN,
    )


def _coupled(e: Evidence) -> bool:
    """Whether tokens of a batch meet outside of attention: experts with room for so many,
    statistics of a batch.
    """
    words = ("batchnorm", "expert", "moe", "router")
    return any(
        word in f"{name} {type(m).__name__}".lower() for name, m in e.modules() for word in words
    )


@check("F12")
def packed(e: Evidence) -> Fired | Verdict:
    """Packed training gives worse answers than unpacked: documents in one row read each other.

    Where positions begin anew inside a row, the first documents were changed: logits of the last
    one must not move. Positions are what is given as position_ids; or what is given or looked up
    beside the ids, rises by one and falls back in rows of three or more documents. Texts put end to
    end without new positions are pretraining as usual and are left alone, and so are rows whose
    documents have numbers in a table, or whose places are counted on as well, in a table or in
    angles (rotary). Also where all attention is kept inside blocks, other ones in each row, and the
    places that are looked up in a learned table go on over their borders.

    ERROR or WARN packed-documents-mix: Packed documents see each other (attention leaks across
    their boundary): {why}. Fix: Pass position_ids without an attention mask and with
    use_cache=False, or a block-diagonal mask.
    WARN packed-places-run-on: Documents of a packed row can't see each other, and the places that a
    table learns are counted over all {size} of the row, so few of them stand where a text alone
    will stand. Fix: Begin position_ids at 0 in each document.
    """
    if len(seen := e.habits["F12 places"]) > 1:
        what = (
            f"in {len(seen)} steps attention was in blocks, and a learned table was asked "
            "for one place after another"
        )
        return fires(
            what,
            "places that begin at 0 in each block",
            WARN,
            "packed-places-run-on",
            size=[*seen.values()][0],
        )
    calls = [c for c in e.forwards if c.positions is not None and c.ids is not None]
    calls = [c for c in calls if c.positions.shape[-1] == c.ids.shape[1]]
    if "packed" not in e.probes:
        if not any(bool(resets(c).any()) for c in calls):
            return not_applicable("no positions begin anew inside a row")
        return unknown("the first batch could not be run again")
    moved, limit, named = e.probes["packed"]
    if moved <= limit:
        return OK
    cached = any(c.cached for c in calls)
    ones = any(c.mask is not None and bool((c.mask != 0).all()) for c in calls)
    why = (
        "the key-value cache is on, which turns the separation off"
        if cached and not ones
        else "an attention mask of ones was given, which says that all tokens belong together"
        if ones
        else "positions alone do not separate them in this attention"
    )
    return fires(
        f"changing earlier documents of a row moved the logits of its last one by {moved:.2g} "
        "of their spread",
        "0",
        ERROR if moved > CLEAR and named else WARN,
        why=why,
    )


@check("F13")
def padding_seen(e: Evidence) -> Fired | Verdict:
    """Return the same text gives another answer in another batch: it depends on how much padding
    stands beside it.

    What stands in padding was changed: logits of attended tokens must not move. Padding after the
    text of a causal model cannot be seen in any case.

    WARN padding-seen: The attention mask is not given to the model, so text attends to its padding.
    Fix: Pass attention_mask to the model.
    WARN padding-seen/mask-ignored: The model ignores the attention mask it is given. Fix: Use the
    mask inside attention.
    """
    if "pads" not in e.probes and any(
        c.mask is not None and bool((c.mask == 0).any()) for c in e.forwards
    ):
        return unknown("there is padding, but the batch could not be run again")
    if "pads" not in e.probes:
        return not_applicable("no padding was seen in a batch that could be run again")
    moved, limit, masked = e.probes["pads"]
    if moved <= limit:
        return OK
    return fires(
        f"changing the padding moved the logits of attended tokens by {moved:.2g} of their spread",
        "0",
        fault="padding-seen/mask-ignored" if masked else "padding-seen",
    )


@check("F34")
def mask_inverted(e: Evidence) -> Fired | Verdict:
    """Return the model answers all texts of one length alike, and learns little more than the
    shares of the classes.

    Lays masks that become minus infinity on attention scores over the ids that went in. Fires when
    all ids that a mask shows are one and the same, the padding, and all others are hidden. Masks
    that show text are left alone, but where the first token of all rows is hidden and a table is
    asked for the padding in place of the types of the tokens.

    ERROR mask-inverted: The attention mask is inverted: it hides the text and shows the padding.
    Fix: For torch's key_padding_mask True means hidden: pass ids == pad_id. For scores by hand:
    masked_fill(~keep, -inf).
    ERROR mask-inverted/past: The mask hides each place from itself and from all before it, and
    shows what comes later: in nn.MultiheadAttention and nn.Transformer True hides. Fix:
    torch.ones(T, T).triu(1).bool(), or nn.Transformer.generate_square_subsequent_mask(length).
    WARN mask-inverted/ones: An attention of torch is given a mask of the numbers 0 and 1, which it
    adds to the scores: it hides nothing. Fix: A mask of bools (in nn.MultiheadAttention and
    nn.Transformer True hides, in scaled_dot_product_attention it shows), or 0 and float("-inf").
    WARN mask-inverted/first-tokens: The attention mask hides the first token of each row, which is
    no padding: something else was given in its place (the types of the tokens, without a name).
    Fix: Give it by its name, model(input_ids=ids, attention_mask=mask, token_type_ids=types).
    """
    calls = [
        c
        for c in e.forwards
        if c.ids is not None and c.mask is not None and c.mask.shape == c.ids.shape
    ]
    if len(calls) >= HABIT and (pad := e.token("pad")) is not None:
        if all(bool(((c.mask[:, 0] == 0) & (c.ids[:, 0] != pad)).all()) for c in calls):
            what = (
                f"in {len(calls)} calls the mask was 0 at the first token of all rows, "
                "which is not the padding"
            )
            return fires(what, "1 there", WARN, "mask-inverted/first-tokens")
    if len(e.shown) < HABIT:
        return BLIND
    if len(past := e.habits["F34 past"]) >= HABIT:
        what = (
            f"in {len(past)} steps a mask {next(iter(past.values()))} hid the past and "
            "showed the future"
        )
        return fires(what, "a mask that hides the future", fault="mask-inverted/past")
    if len(ones := e.habits["F34 ones"]) >= HABIT:
        what = (
            f"in {len(ones)} steps {next(iter(ones.values()))} was given a mask of 0 and 1 "
            "in floating point"
        )
        return fires(what, "bools, or 0 and minus infinity", WARN, "mask-inverted/ones")
    if len(exchanged := e.habits["F34 exchanged"]) >= HABIT:
        what = (
            f"in {len(exchanged)} steps attention hid the first token of all rows, and a "
            "table was given the padding"
        )
        return fires(what, "the padding as the mask", WARN, "mask-inverted/first-tokens")
    if not e.hiding:
        return not_applicable("no attention mask with a place for each token was seen")
    if not all(e.hiding.values()) or len(e.hiding) < HABIT:
        return OK
    return fires(
        f"in {len(e.hiding)} steps the mask showed padding alone, and hid all else",
        "a mask that hides it",
    )


@check("S25")
def state_after_padding(e: Evidence) -> Fired | Verdict:
    """Return a recurrent model is good with rows of full length and poor with short ones.

    Looks at what recurrent networks are given and what is taken of their answers. Fires when rows
    end in one and the same vector, in runs of several lengths, and the last state or output[:, -1]
    is used. Packed sequences, and states that are taken at the rows' own lengths, are left alone.

    A mean over all places of such rows is looked for as well, where no mask has multiplied them,
    and h[:, -1] of them.

    WARN state-after-padding: Rows are filled up at their ends, and the state that is used comes
    after the filling: it has gone through as many steps of padding as the row was short. Fix:
    pack_padded_sequence(x, lengths, ..., enforce_sorted=False), or output[torch.arange(len(x)),
    lengths - 1].
    WARN state-after-padding/last: Rows are filled up at their ends, and what is read is the last
    place, which is padding in most rows. Fix: h[torch.arange(len(h)), mask.sum(1) - 1].
    WARN state-after-padding/mean: Rows are filled up at their ends, and the mean over places takes
    the filling along, so a short row is mostly that. Fix: (h * mask[..., None]).sum(1) /
    mask.sum(1, keepdim=True).
    """
    lasts = e.habits["S25 last"]
    if len(e.endings) < HABIT <= len(lasts):
        padded, rows = next(iter(lasts.values()))
        what = (
            f"in {len(lasts)} steps {padded} of {rows} rows ended in padding, and the last "
            "place was read"
        )
        return fires(what, "the last place of each row's own", fault="state-after-padding/last")
    pooled = e.habits["S25"]
    if len(e.endings) < HABIT <= len(pooled):
        padded, rows = next(iter(pooled.values()))
        return fires(
            f"in {len(pooled)} steps {padded} of {rows} rows ended in padding, and the mean "
            "was over all places",
            "a mean over each row's own places",
            fault="state-after-padding/mean",
        )
    if (verdict := no_habit(e, e.endings)) is not None:
        return verdict
    padded, rows = next(iter(e.endings.values()))
    return fires(
        f"in {len(e.endings)} steps {padded} of {rows} rows ended in padding, and the last "
        "state was used",
        "the state at each row's own end",
    )
