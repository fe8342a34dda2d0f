"""What the loss of a text asks for: F14 to F18, from the targets laid over the ids that went in.

Footgun: a token counts as supervised where it is a target, which is one position before it is read.
All tables here are at the position of the token itself.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from loopdoctor import decoders
from loopdoctor.check import Fired, check, fires
from loopdoctor.evidence import Backward, Call, Entropy, Evidence
from loopdoctor.finding import ERROR, OK, WARN, Verdict, not_applicable, unknown
from loopdoctor.probes import runs, tail
from loopdoctor.targets import IGNORED, shifted

PADDED = 0.05  # share of padding
# padding without a name: length of a run; runs that a text follows, for each that ends a row
ENDS, LEFT = 4, 0.05
FEW = 8  # different tokens, below which one in which rows end may be a state that is not left
SAME, STEPS = " (pad_token and eos_token are one, and the collator masks padding by its id)", 2


class Batch(NamedTuple):
    """One training forward: which of its tokens the loss asks for."""

    ids: Tensor  # (B, T)
    asked: Tensor  # (B, T) the token is a target
    mask: Tensor | None  # (B, T) attention
    offset: int | None


def batches(e: Evidence) -> Iterator[Batch]:
    """Training batches with known targets: from the loss, else from the labels given to the
    model.
    """
    for event in e.of(Backward):
        reading = event.reading
        known = reading is not None and reading.targets is not None and reading.masked
        if known and reading.offset in (0, 1, 2):
            asked = shifted((reading.targets != IGNORED).long(), -reading.offset, 0).bool()
            yield Batch(reading.ids, asked, reading.mask, reading.offset)
        elif reading is None or reading.targets is None:
            yield from (_from_labels(c) for c in event.calls if _labelled(e, c))


def _labelled(e: Evidence, call: Call) -> bool:
    plain = call.role == "model" and call.grad and call.labels is not None and call.ids is not None
    return plain and call.labels.shape == call.ids.shape and "labels" in call.kwargs


def _from_labels(call: Call) -> Batch:
    return Batch(call.ids, call.labels != IGNORED, call.mask, None)


@check("F14")
def rows_without_targets(e: Evidence) -> Fired | Verdict:
    """Return the loss is NaN or 0 from the start, or the model learns from far fewer examples than
    it is given.

    Counts rows in which no token is a target: every label is -100. A single such row happens (an
    answer cut off by truncation); all rows, or a good part of them over several batches, mean that
    the place where the answer begins was not found. Rows that a packed batch leaves empty at its
    end are few, so they stay below the limit.

    ERROR or WARN rows-without-targets: {effect}: the labels of these rows are all masked, because
    the marker of the answer (response template) was not found in them or truncation cut it off.
    Fix: Print one row's labels; correct the response marker (or the truncation length) so that
    answers keep labels.
    """
    rows = empty = seen = 0
    for event in e.of(Backward):
        for asked in _asked_rows(e, event):
            seen += 1
            rows, empty = rows + len(asked), empty + int((~asked).sum())
    if not rows:
        return unknown("no targets were seen")
    share = empty / rows
    if share < 0.2 or (share < 1 and (rows < 8 or empty < 3)):
        return OK
    return fires(
        f"{empty} of {rows} rows have no supervised token: all their labels are {IGNORED}",
        "some supervised tokens in nearly every row",
        ERROR if share == 1 and (seen > 1 or rows >= 8) else WARN,
        effect="Nothing is asked of the model"
        if share == 1
        else "Much of the data is not learnt from",
    )


def _asked_rows(e: Evidence, event: Backward) -> Iterator[Tensor]:
    reading = event.reading
    if reading is not None and reading.targets is not None:
        yield (reading.targets != IGNORED).any(1)
        return
    for call in event.calls:
        if _labelled(e, call):
            yield (call.labels[:, 1:] != IGNORED).any(1)


@check("F15")
def padding_supervised(e: Evidence) -> Fired | Verdict:
    """Return the loss falls fast and looks too good, answers are short or full of padding.

    Counts targets that are padding: where the attention mask is 0, or, without a mask, in runs of
    the pad token at the end of rows. Where no pad token is known either, it is one with which rows
    of most batches end in runs of several lengths, and behind which a text hardly ever goes on;
    eight different tokens are asked for then. One such target in a row is taken for an end-of-text
    token that serves as padding too and is meant to be learnt. Of programs that name each word of a
    row, it is asked whether one and the same label stands at all of the padding and counts.

    ERROR or WARN padding-supervised: The loss counts padding (pad tokens) as text: the model learns
    to write padding, which is easy, and the loss looks better than it is. Fix: Set the labels to
    -100 where the attention mask is 0 (or pass ignore_index=pad_token_id).
    WARN padding-supervised/divergence: The divergence from the teacher is averaged over all places,
    and {share:.0%} of them are padding: the student learns what the teacher says of padding. Fix:
    (kl * mask).sum() / mask.sum(), with kl = F.kl_div(..., reduction="none").sum(-1).
    WARN padding-supervised/tags: {share:.0%} of the labels stand at padding, all of them {label},
    and the loss counts them: easy answers that make it look better than it is, and draw rare
    classes to {label}. Fix: Set the labels of padding to -100 (pad_sequence(tags, batch_first=True,
    padding_value=-100)), or ignore_index.
    WARN padding-supervised/prompt: The labels of the prompts are all {label}, which the loss
    counts, so {share:.0%} of what the model is asked for is token {label}. Fix: labels[prompt] =
    -100, or ignore_index={label}.
    """
    if len(filled := e.habits["F15 filled"]) >= 3:
        label, share = next(iter(filled.values()))
        what = (
            f"in {len(filled)} steps the labels in front of each row were {label}, where "
            "the text has its words"
        )
        return fires(
            what, "-100 there", WARN, "padding-supervised/prompt", label=label, share=share
        )
    if seen := e.habits["F15"]:
        label, share = next(iter(seen.values()))
        what = (
            f"in {len(seen)} steps labels at the ends of rows, where one id fills them up, "
            f"were all {label}"
        )
        return fires(what, "-100 there", WARN, "padding-supervised/tags", label=label, share=share)
    if len(divergences := e.habits["F15 divergence"]) >= 3:
        places = next(iter(divergences.values()))
        masks = [c.mask for c in e.forwards if c.mask is not None and c.mask.shape == places]
        masks += [c.mask for c in e.forwards if c.mask is not None and (c.mask.numel(),) == places]
        share = sum(float((mask == 0).float().mean()) for mask in masks) / max(1, len(masks))
        if share > PADDED:
            what = (
                f"in {len(divergences)} steps a divergence was averaged over all places, "
                f"{share:.0%} of them padding"
            )
            return fires(
                what, "the places of the text", WARN, "padding-supervised/divergence", share=share
            )
    if (counted := decoders.fills(e)) is not None:
        what = (
            f"{counted[0]} of {counted[1]} targets of the decoder were {counted[2]}, which "
            "fills the rows up"
        )
        return fires(what, "ignore_index of the padding", WARN)
    bad = total = outside = 0
    masked = seen = False
    known = list(batches(e))
    guess = e.token("pad") is None and "goes on" not in e.probes
    nameless = _nameless([b.ids for b in known if not _masks(b)]) if guess else None
    for batch in known:
        pads = _pads(e, batch, nameless)
        if pads is None:
            continue
        seen, masked = True, masked or batch.mask is not None
        wrong = batch.asked & pads
        wrong[:, 0] = False
        many = wrong.sum(1, keepdim=True) > 1
        bad, total = bad + int((wrong & many).sum()), total + int(batch.asked.sum())
        outside += int((batch.asked & ~pads)[:, 1:].sum())
    ignored = {n.ignored for n in e.of(Entropy) if n.connected and n.used}
    for call in (
        e.forwards
        if getattr(e.config, "is_encoder_decoder", False) and e.token("pad") not in ignored
        else ()
    ):
        if call.grad and call.labels is not None and (pad := e.token("pad")) is not None:
            counted = runs(call.labels, pad)
            seen, masked = True, True
            bad, total = bad + int(counted.sum()), total + int((call.labels != IGNORED).sum())
            outside += int((~counted & (call.labels != IGNORED)).sum())
    if not seen:
        return unknown(
            "no padding could be told from text: neither a mask nor a pad token was seen"
        )
    if not bad or bad < 0.005 * total:
        return OK
    if not outside:
        return unknown(
            "every target lies where the mask is 0: this mask seems to mean the opposite"
        )
    return fires(
        f"{bad} of {total} supervised tokens are padding ({bad / total:.0%})",
        f"labels of padding are {IGNORED}, which the loss ignores",
        ERROR if masked else WARN,
    )


def _masks(batch: Batch) -> bool:
    return batch.mask is not None and batch.mask.shape == batch.ids.shape


def _pads(e: Evidence, batch: Batch, nameless: int | None) -> Tensor | None:
    if _masks(batch):
        return batch.mask == 0
    pad = e.token("pad")
    if pad is not None:
        return runs(batch.ids, pad)
    return _long(batch.ids, nameless) if nameless is not None else None


def _nameless(seen: list[Tensor]) -> int | None:
    """Return padding without a name: most batches end in it, and no text goes on behind it.

    Footgun: a word that often follows itself, or the background of a picture, ends rows as well.
    But the texts go on behind it. A token that begins each row may serve as padding too, so the
    first column isn't asked. And of a handful of tokens the last one may be meant: the last letter
    of a formal language, a state that nobody leaves. So it is where actions go on beside it.
    """
    token, times = Counter(map(_guessed, seen)).most_common(1)[0] if seen else (None, 0)
    if (
        token is None
        or 2 * times <= len(seen)
        or len(set().union(*(ids.unique().tolist() for ids in seen))) < FEW
    ):
        return None
    left = sum(int(((ids[:, 1:-1] == token) & (ids[:, 2:] != token)).sum()) for ids in seen)
    return token if left <= LEFT * sum(int((ids[:, -1] == token).sum()) for ids in seen) else None


def _long(ids: Tensor, token: int) -> Tensor:
    ends = tail(ids, token)
    return ends & (ends.sum(1, keepdim=True) >= ENDS)


def _guessed(ids: Tensor) -> int | None:
    """One and the same token that ends several rows of a batch, in runs of different lengths."""
    token = int(ids[:, -1].mode().values)
    lengths = tail(ids, token).sum(1)
    long = lengths[lengths >= ENDS]
    few = len(long) < 2 or len(long) < 0.4 * len(ids)
    return (
        None
        if few or len(set(long.tolist())) < 2 or bool((lengths == ids.shape[1]).all())
        else token
    )


@check("F16")
def end_never_supervised(e: Evidence) -> Fired | Verdict:
    """Return the trained model never stops: it writes on after its answer.

    Fires when most rows contain the end-of-text token among what is attended, after a token that is
    learnt, and not once is it a target. This is what a collator does that masks padding by its id
    while padding and end-of-text share one. Texts without an end token, and an end token that only
    begins the row or stands in a prompt, are left alone. Where the token is not known, a number
    that is hidden in the labels tells it: all rows end in it, also the longest of batches that
    differ in length, or it is the last of what was asked in each row.

    WARN end-never-supervised: The end-of-text token (EOS) is never a target{same}, so the model
    does not learn to stop. Fix: Give padding a pad_token of its own (not the eos_token), or mask
    labels by the attention mask and not by the pad id.
    """
    eos = e.token("eos")
    hidden = _hidden(e)
    if eos is None and hidden is None:
        return unknown("the end-of-text token is not known; give the tokenizer")
    rows = have = 0
    for batch in batches(e) if eos is not None else ():
        if batch.offset not in (None, 1):
            continue
        ends = batch.ids == eos
        if batch.mask is not None and batch.mask.shape == ends.shape:
            ends &= batch.mask != 0
        if bool((ends & batch.asked).any()):
            return OK
        begun = batch.asked.int().cummax(1).values.bool()
        rows, have = rows + len(ends), have + int((ends & begun).any(1).sum())
    if have < 0.5 * rows or not rows:
        if hidden is not None:
            what = (
                f"all rows end in token {hidden}, and the labels are hidden where they are {hidden}"
            )
            return fires(what, "the end of an answer is supervised", same=SAME)
        return OK if rows else unknown("too few rows with known targets")
    if rows < 4:
        return unknown("too few rows with known targets")
    same = SAME if e.token("pad") == eos else ""
    return fires(
        f"{have} of {rows} rows end their text with token {eos} (eos_token_id), and it is "
        "never a target",
        "the end of an answer is supervised",
        same=same,
    )


def _hidden(e: Evidence) -> int | None:
    """Return the number that is hidden in the labels at the end of every row, where no padding
    alone can be.
    """
    seen = list(e.habits["F16 hidden"].values())
    numbers, ends, most, widths, alike = map(set, zip(*seen)) if len(seen) >= STEPS else [set()] * 5
    if len(numbers) != 1 or ends != {True}:
        return None
    filled = len(widths) > 1 and any(width % 8 for width in widths) and alike == {False}
    return next(iter(numbers)) if most == {1} or filled else None


@check("F17")
def labels_shifted_twice(e: Evidence) -> Fired | Verdict:
    """Return the loss is stuck high, text comes out with every second word missing.

    Fires when the labels given to the model are already one ahead of its ids and the loss inside it
    is computed two ahead: the model shifts by itself. A model that takes targets as they are has a
    loss one ahead and is left alone.

    ERROR labels-already-shifted: A double shift: the labels were shifted by hand and the model
    shifts them again, so every position learns the token after the next one. Fix: Pass
    labels=input_ids (with -100 where nothing is asked); do not shift before the model.
    """
    readings = [b.reading for b in e.of(Backward) if b.reading is not None]
    if not any(r.offset is not None for r in readings):
        given = [r for r in readings if r.given is not None]
        return unknown(
            "no targets of a loss were seen"
            if not given
            else "the loss inside the model was not seen"
        )
    wrong = [r for r in readings if r.given == 1 and r.offset == 2 and 1 not in r.offsets]
    if not wrong or len(wrong) < len([r for r in readings if r.offset is not None]):
        return OK
    return fires(
        "labels[t] is input_ids[t + 1], and the loss pairs the logits at t with input_ids[t + 2]",
        "labels equal to input_ids for a model that shifts them itself",
    )


@check("F18")
def two_beginnings(e: Evidence) -> Fired | Verdict:
    """Slightly worse results than the base model's, with no error anywhere: each text begins with
    two BOS tokens.

    Fires when nearly all rows begin with the beginning-of-text token twice, as chat templates make
    it that write one into a text that the tokenizer then gives another. Padding at the left that
    uses the same token is left alone.

    WARN two-beginnings: Every text has a double BOS: the chat template already writes the
    beginning-of-text token and the tokenizer adds another. Fix: Tokenize templated text with
    add_special_tokens=False.
    """
    bos, pad = e.token("bos"), e.token("pad")
    if bos is None:
        return not_applicable("no beginning-of-text token is known")
    calls = [c for c in e.forwards if c.ids is not None and c.ids.shape[1] > 2]
    rows = twice = 0
    for call in calls:
        ids = call.ids
        masked = call.mask is not None and call.mask.shape == ids.shape
        text = (
            call.mask != 0
            if masked
            else ids != pad
            if pad is not None and pad != bos
            else torch.ones_like(ids) != 0
        )
        text &= text.sum(1, keepdim=True) > 2
        begin = text.int().argmax(1).clamp(max=ids.shape[1] - 3)  # behind padding at the left
        one, two, three = (ids.gather(1, begin[:, None] + n)[:, 0] for n in range(3))
        attended = text.any(1) & (masked or bos != pad)
        rows += len(ids)
        twice += int(((one == bos) & (two == bos) & (three != bos) & attended).sum())
    if not rows:
        return unknown("no ids were seen")
    if twice < 0.9 * rows:
        return OK
    return fires(
        f"{twice} of {rows} rows begin with token {bos} (bos_token_id) twice",
        "one beginning-of-text token",
    )
