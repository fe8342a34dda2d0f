"""What replays of the first batch showed: F5, F10 to F13 and F121.

Footgun: a probe that could not be made (a model that cannot be called again as it was) is UNKNOWN, not OK.
"""

import math

from loopdoctor.check import Fired, check, fires
from loopdoctor.checks.seen import spoilt
from loopdoctor.documents import resets
from loopdoctor.evidence import Backward, Call, Evidence
from loopdoctor.finding import ERROR, OK, WARN, Verdict, not_applicable, unknown

CLEAR = 0.02  # smaller shifts may come of numbers scaled together over a batch (8-bit activations)


@check("F5")
def not_finite(e: Evidence) -> Fired | Verdict:
    """The loss is NaN from the first step, or from one special batch on.

    Fires when a loss was not finite and the logits it came from were not either, while the weights were. The batch is
    run again, and the first module whose output is not finite though its input was is named, with the range of what
    went into it; so it is where a model gives no logits. Logits that are minus infinity on purpose (a vocabulary
    filled up, a mask) give a finite loss and are left alone.

    ERROR or WARN output-not-finite: The model's own output is NaN or infinite: something in this module divides by 0 or
    takes the logarithm or root of what is not positive. Fix: Add a small number inside the division, logarithm or root.
    ERROR or WARN output-not-finite/overflow: The model's own output is NaN or infinite: an overflow: float16 (fp16)
    ends at 65504 and an activation went over it. Fix: Use bfloat16, or keep this module in float32.
    ERROR or WARN output-not-finite/masked-row: The model's own output is NaN or infinite: rows of the attention mask
    are masked from end to end (padding at the left), and a softmax over nothing is NaN. Fix: Let padding attend to
    itself, use a large negative number in place of -inf, or pad at the right.
    """
    wrong = [b for b in e.of(Backward) if b.value is not None and not math.isfinite(b.value)]
    if not e.forwards:
        return unknown("no forward of the model was seen")
    if not wrong:
        return OK
    calls = [c for c in wrong[0].calls if c.role == "model" and c.finite is False]
    name, kind, fact, inputs = e.probes.get("broken") or ("", "", "", "")
    if not calls and kind:
        calls = [c for c in wrong[0].calls if c.role == "model"]
    if fact == "weights":
        return not_applicable("the weights themselves are not finite")
    if not calls:
        seen = any(c.finite for c in wrong[0].calls) or "broken" in e.probes
        return OK if seen else unknown("no logits were seen, and the batch could not be run again")
    if not kind and wrong[0].round > 0:
        return unknown("the batch could not be run again")
    where = f"the first is the output of {name or kind} ({kind}, {fact.split(' ')[0]})" if kind else "in the logits"
    where += f", into which went {inputs}" if inputs else ""
    return fires(
        f"non-finite values in the forward of step {wrong[0].round + 1}; {where}",
        "finite activations",
        ERROR if spoilt(e) or len(wrong) > 1 or len(e.of(Backward)) == 1 else WARN,
        _cause(calls[0], kind, fact),
    )


def _cause(call: Call, kind: str, fact: str) -> str:
    if fact.startswith("float16") or call.autocast is not None and str(call.autocast) == "torch.float16":
        return "output-not-finite/overflow"
    left = call.mask is not None and bool((call.mask[:, 0] == 0).any())
    return "output-not-finite/masked-row" if left or "ttention" in kind else "output-not-finite"


@check("F10")
def cache_on(e: Evidence) -> Fired | Verdict:
    """Training takes more memory than it should: each forward keeps keys and values for a generation.

    A note, because the result is right. With packed documents it is wrong, and F12 says so. Under checkpointing written
    by hand the gradients are wrong without a message: the recomputation in backward appends to the cache that the
    forward has filled. That is seen by the cache's length, and an error.

    ERROR cache-on/recomputed: A key-value cache is on under activation checkpointing: when backward recomputes a block,
    it appends to the keys and values of the first time, so attention and all gradients through it are wrong. Fix: Pass
    use_cache=False (or set model.config.use_cache = False) while training.
    NOTE cache-on/kept: The key-value cache of generation is on while training, which costs memory. Fix: Set
    model.config.use_cache = False (or pass use_cache=False).
    """
    calls = e.forwards
    if not calls:
        return unknown("no forward of the model was seen")
    if not any(c.cached for c in calls):
        return OK
    if grown := next((c for c in calls if c.recached), None):
        return fires(
            f"the key-value cache held {grown.kept} positions after the forward, {grown.recached} after the backward",
            "no cache, or one that backward leaves alone",
            fault="cache-on/recomputed",
        )
    return fires(
        f"{sum(c.cached for c in calls)} of {len(calls)} training forwards returned a key-value cache",
        "none",
        fault="cache-on/kept",
    )


@check("F11")
def future(e: Evidence) -> Fired | Verdict:
    """The training loss falls far below what is possible, and generated text is senseless.

    Later tokens were changed: logits at earlier supervised positions must not move. Only where targets are next
    tokens; masked models look both ways and rightly so, a prefix may see all of itself, and a text may be told by a
    latent that is drawn for it (a VAE of sentences). The same for series of numbers, where the target given to a loss
    of torch is found to be the input, some times later, by less than half of them.

    ERROR or WARN sees-the-future: The model sees the future, the very tokens it is asked to predict: the causal mask is
    missing, wrong or one too wide. Fix: Mask attention above the diagonal (is_causal=True; torch.tril without an
    offset), and mix nothing over time.
    ERROR or WARN sees-the-future/decoder: The decoder sees the tokens that it is asked for: its mask is missing, or
    hides nothing of what comes later (in torch's layers True hides, and numbers are added to the scores). Fix:
    tgt_mask=nn.Transformer.generate_square_subsequent_mask(target.size(1)).
    WARN sees-the-future/series: The model of a series sees the very values that it is asked for, which stand {shift}
    later in its input: no causal mask, a layer that runs both ways, or padding on both sides. Fix: Mask attention above
    the diagonal, run recurrent layers forward only, pad convolutions on the left; or leave those values out.
    """
    leak = e.probes.get("leak")
    if leak is not None and leak.early > (0.1 if leak.coupled else 1e-3) * leak.late:
        return fires(
            f"the target is the input {leak.shift} later; changing the second half of the input moved answers before "
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
            f"other tokens in the second half of the decoder's text moved answers before it by {decoder.early:.2g}, "
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
        f"changing later tokens moved logits up to {reach} positions before them, by {e.probes['ahead']:.2g} of their "
        "spread",
        "0",
        ERROR if e.probes["ahead"] > CLEAR and not _coupled(e) else WARN,
    )


def _coupled(e: Evidence) -> bool:
    """Whether tokens of a batch meet outside of attention: experts with room for so many, statistics of a batch."""
    words = ("batchnorm", "expert", "moe", "router")
    return any(word in f"{name} {type(m).__name__}".lower() for name, m in e.modules() for word in words)


@check("F12")
def packed(e: Evidence) -> Fired | Verdict:
    """Packed training gives worse answers than unpacked: documents in one row read each other.

    Where positions begin anew inside a row, the first documents were changed: logits of the last one must not move.
    Positions are what is given as position_ids; or what is given or looked up beside the ids, rises by one and falls
    back in rows of three or more documents. Texts put end to end without new positions are pretraining as usual and
    are left alone, and so are rows whose documents have numbers in a table, or whose places are counted on as well, in
    a table or in angles (rotary). Also where all attention is kept inside blocks, other ones in each row, and the
    places that are looked up in a learned table go on over their borders.

    ERROR or WARN packed-documents-mix: Packed documents see each other (attention leaks across their boundary): {why}.
    Fix: Pass position_ids without an attention mask and with use_cache=False, or a block-diagonal mask.
    WARN packed-places-run-on: Documents of a packed row can't see each other, and the places that a table learns are
    counted over all {size} of the row, so few of them stand where a text alone will stand. Fix: Begin position_ids at 0
    in each document.
    """
    if len(seen := e.habits["F12 places"]) > 1:
        what = (
            f"in {len(seen)} steps attention was in blocks, and a learned table was asked for one place after another"
        )
        return fires(
            what, "places that begin at 0 in each block", WARN, "packed-places-run-on", size=[*seen.values()][0]
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
        f"changing earlier documents of a row moved the logits of its last one by {moved:.2g} of their spread",
        "0",
        ERROR if moved > CLEAR and named else WARN,
        why=why,
    )


@check("F13")
def padding_seen(e: Evidence) -> Fired | Verdict:
    """The same text gives another answer in another batch: it depends on how much padding stands beside it.

    What stands in padding was changed: logits of attended tokens must not move. Padding after the text of a causal
    model cannot be seen in any case.

    WARN padding-seen: The attention mask is not given to the model, so text attends to its padding. Fix: Pass
    attention_mask to the model.
    WARN padding-seen/mask-ignored: The model ignores the attention mask it is given. Fix: Use the mask inside
    attention.
    """
    if "pads" not in e.probes and any(c.mask is not None and bool((c.mask == 0).any()) for c in e.forwards):
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
