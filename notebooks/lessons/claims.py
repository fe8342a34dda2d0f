"""What the five write-ups claim, where each claim is tried, and what came out: the source of
docs/claims.md.

`python -m lessons.claims` writes the page. A claim that a pitfall tries takes its link and its
reason from the catalogue and from the notebook that shows it. So the page cannot say something else
than they do. A test holds the verdicts here to those of the catalogue, and the page to this file.

Footgun: the words are ours. What a write-up says is told short, and its numbers are its own, never
measured here.
"""

import json
import re
from typing import NamedTuple
from urllib.parse import quote

from lessons.pitfalls import pitfall
from nblib import files, paths

HOLDS, PART, OTHER, NOT, UNTRIED = (
    "holds",
    "holds in part",
    "another cause",
    "does not hold",
    "not tried",
)
VERDICTS = {
    HOLDS: "what the write-up says is what the experiment shows",
    PART: "one half of it is right, or it is right with a condition that the write-up leaves out",
    OTHER: "the symptom is real; what is blamed does not bring it, and something else does",
    NOT: "the experiment shows something else",
    UNTRIED: "and why",
}


class Claim(NamedTuple):
    words: str
    verdict: str
    tried: str = ""  # P01, or a notebook and a text of the cell that tries it: "02_compile: gain"
    why: str = ""  # in place of the first sentence of the pitfall's verdict


class WriteUp(NamedTuple):
    anchor: str
    title: str
    about: str
    claims: tuple[Claim, ...]


WRITE_UPS = (
    WriteUp(
        "lrc",
        "The write-up on LRC",
        "Notes of January 2026 on fine-tuning Qwen3-0.6B on one H100. The weights are rounded "
        "to three values and "
        "frozen; "
        "a low-rank correction beside each of them is trained, with next-word and masked-word "
        "objectives. It reports "
        "an "
        "error in backward, a validation loss that stayed flat, and an out-of-memory error, "
        "and declares all of them "
        "fixed. It gives a speed-up for torch.compile and no loss.",
        (
            Claim("Frozen embeddings cut the gradient to the correction.", OTHER, "P01"),
            Claim(
                "After freezing, always call enable_input_require_grads().",
                NOT,
                "P49",
                "Frozen embeddings without the hook train every tensor. What never moved were "
                "two factors that both "
                "start at zero.",
            ),
            Claim(
                "Learned objective weights (LDC-MTL) made the validation loss flat.",
                OTHER,
                "P49",
                "Both factors of the correction started at zero, so every gradient was exactly "
                "zero.",
            ),
            Claim(
                "LDC-MTL destabilises training.",
                NOT,
                "P52",
                "No step rises more than with learned weights that work. What they do is drop "
                "the larger loss, in "
                "silence.",
            ),
            Claim(
                "torch.compile works only after enable_input_require_grads().",
                NOT,
                "P15",
                "Without the hook the frozen model is one graph with the eager gradients. The "
                "hook itself breaks the "
                "graph.",
            ),
            Claim(
                "Compile and eager mode compute the same gradients for the correction.",
                PART,
                "P54",
                "They do. The check that said so compared zeros with zeros and would have "
                "passed a wrong layer.",
            ),
            Claim(
                "torch.compile trains 38 % faster on an H100.",
                UNTRIED,
                "",
                "It needs that card and that model. Notebook 02 measures the gain of the "
                "machine it runs on, by mode.",
            ),
            Claim(
                "Reentrant checkpointing loses requires_grad during recomputation; "
                "use_reentrant=False helps.",
                PART,
                "P01",
                "The fix is right. The mechanism is another one: a reentrant block decides by "
                "its inputs "
                "whether its output has a gradient at all.",
            ),
            Claim("A rank of 25 % is too high for the memory; take 15 %.", OTHER, "P51"),
            Claim(
                "Gradient checkpointing makes room for twice the batch.",
                PART,
                "P19",
                "It makes room for what blocks keep. It does not touch the logits, which were "
                "most of the peak.",
            ),
            Claim(
                "Rounded weights and rounded inputs need nothing else to train a correction.",
                NOT,
                "P50",
                "Without a straight-through estimator at the inputs the gradient below the top "
                "layers points "
                "elsewhere.",
            ),
            Claim(
                "Token 0 can serve as the mask.",
                NOT,
                "P53",
                "In Qwen3 id 0 is an exclamation mark. The model forgets what follows that "
                "token, and only there.",
            ),
            Claim("Logs do not appear until output is unbuffered.", HOLDS, "P47"),
        ),
    ),
    WriteUp(
        "ard-lora",
        "The write-up on ARD-LoRA",
        "Notes of September 2025 on a probabilistic LoRA for Llama-2-7B in 4 bits on a 40 GB "
        "A100. Each rank carries "
        "noise "
        "and pays a KL term against a prior, whose variance is estimated from held-out text "
        "and read as relevance "
        "(automatic relevance determination). It reports three errors and their fixes, and "
        "settings; no result.",
        (
            Claim(
                "The loss had lost its parameters; adding p.sum() * 0 connects it again.",
                NOT,
                "P12",
            ),
            Claim(
                "A term of the loss that is a constant must be tied to the parameters.",
                OTHER,
                "P13",
                "A term made under no_grad is a number. It must be computed with a graph; tied "
                "to parameters it "
                "stays dead.",
            ),
            Claim(
                "The tokenizer is missing in callbacks; fall back to the trainer's.",
                OTHER,
                "P14",
                "Callbacks receive `processing_class` now. The old name is gone there and on "
                "the trainer.",
            ),
            Claim(
                "Quantised weights cannot require a gradient.",
                HOLDS,
                "P09",
                "A packed weight holds bytes, and bytes have no gradient. Asking for one raises.",
            ),
            Claim("bitsandbytes quantises the LoRA matrices themselves.", NOT, "P09"),
            Claim(
                "Skipping what is not floating point protects the training.",
                NOT,
                "P10",
                "It hides which tensors were taken for factors. Packed factors are skipped in "
                "silence and never train.",
            ),
            Claim(
                "The key-value cache must be off in training.",
                PART,
                "P21",
                "Under checkpointing written by hand it corrupts gradients. The library's own "
                "switch turns it off, "
                "and without checkpointing it changes nothing.",
            ),
            Claim(
                "hidden_states gives the inputs of the projections, as in DeBERTa.",
                NOT,
                "P55",
                "In a pre-norm model they are the stream before the norm. The projections see "
                "it after the norm.",
            ),
            Claim(
                "The prior's variance is beta / alpha with alpha from the nominal length.",
                NOT,
                "P56",
                "The sum ran over real tokens and was divided by a count of all positions, so "
                "padding made the "
                "variance small.",
            ),
            Claim(
                "The variance of a prior says how relevant its rank is.",
                NOT,
                "P58",
                "A rank that nobody needs rests at its prior and keeps its variance. What a "
                "rank adds to the output "
                "tells.",
            ),
            Claim(
                "Accuracy, NLL and ECE of the evaluated model measure its uncertainty.",
                NOT,
                "P59",
                "In evaluation the latent is its mean and nothing is drawn: a deterministic "
                "LoRA was measured.",
            ),
            Claim(
                "Checkpointing and the sampler of the noise go together.",
                PART,
                "P57",
                "Dropout is put back by checkpointing. Noise that was drawn ahead into a "
                "buffer is not, and the "
                "gradients are wrong.",
            ),
            Claim(
                "Held-out text is drawn anew for each epoch.",
                UNTRIED,
                "",
                "The Trainer builds its data loader before "
                "the epochs begin, so the change never reached it; our loop draws its own.",
            ),
            Claim(
                "A memory fraction of 90 % and emptying the cache keep a 40 GB card stable.",
                UNTRIED,
                "",
                "It needs a CUDA device.",
            ),
        ),
    ),
    WriteUp(
        "lora-checkpointing",
        "The write-up on LoRA and checkpointing",
        "Notes of January 2026 on fine-tuning Qwen2.5-7B with LoRA to parse Vietnamese "
        "sentences. The log shows loss "
        "0.0, "
        "gradient norm nan and rate 0.0, and a test raises an error in backward. One cause is "
        "named for both: "
        "checkpointing was enabled before the adapters were attached. The losses that it "
        "prints are expected ones.",
        (
            Claim(
                "Checkpointing enabled before LoRA breaks the gradients; enable it afterwards.",
                NOT,
                "P03",
                "Both orders work today. Under three versions of transformers 4 the order that "
                "the write-up "
                "recommends is the one that raises.",
            ),
            Claim(
                "The same order makes the log say loss 0.0, grad_norm nan, learning_rate 0.0.",
                OTHER,
                "P26",
            ),
            Claim("The loss is 0.0 because there are no gradients.", OTHER, "P41"),
            Claim(
                "The error means that the adapters do not track gradients.",
                OTHER,
                "P01",
                "The block drops out of the graph because its input requires no gradient. The "
                "adapters are fine.",
            ),
            Claim(
                "A loss that falls shows that the adapters learn.",
                NOT,
                "P02",
                "A trainable head above the blocks learned alone, and no adapter moved.",
            ),
            Claim("A short check of one backward pass proves the wiring.", PART, "P22"),
            Claim(
                "An earlier program of theirs worked because its order was another.",
                UNTRIED,
                "",
                "That program and its versions are not part of the write-up.",
            ),
        ),
    ),
    WriteUp(
        "spiking-distillation",
        "The write-up on training strategies for a spiking student",
        "Notes on distilling GPT-2 into ASNN-Goose, a recurrent student whose keys and values "
        "take three levels. It "
        "is a "
        "collection of advice, from precision to distributed training, with code for each. It "
        "reports a perplexity of "
        "1318.5 with a temperature stuck at 10, and expects less than 530 after the fixes.",
        (
            Claim(
                "inference_mode at the teacher breaks a learnable temperature; no_grad does not.",
                PART,
                "P33",
                "no_grad is right. Inference mode fails with or without a temperature, "
                "wherever autograd must save "
                "the teacher's tensor.",
            ),
            Claim("inference_mode made the temperature stick at 10.", OTHER, "P66"),
            Claim("Under a reversed gradient the temperature learns freely at first.", NOT, "P67"),
            Claim(
                "Autocast keeps sums, means, softmax and losses in fp32.",
                PART,
                "P32",
                "On a CPU losses are lifted to fp32; sums, exponentials and softmax are not.",
            ),
            Claim(
                "Unscale before you clip.",
                HOLDS,
                "P27",
                "Clipped before it is unscaled, next to nothing of the gradient is left.",
            ),
            Claim(
                "fp16 needs a scaler, bf16 does not.",
                HOLDS,
                "P28",
                "Without an active scaler small fp16 gradients become zero; bf16 loses none.",
            ),
            Claim(
                "A print or a number read in the forward pass breaks the compiled graph.",
                HOLDS,
                "P18",
                "An .item() in the forward pass ends the graph, once per block.",
            ),
            Claim(
                "Compiling makes transformers 1.3 to 1.8 times faster on an A100.",
                UNTRIED,
                "",
                "It needs that card. Notebook 02 measures the gain of the machine it runs on.",
            ),
            Claim(
                "More workers mend a starved loader.",
                PART,
                "P45",
                "They help where each item waits for a disk or a decoder. For rows in memory "
                "they make an epoch "
                "slower.",
            ),
            Claim(
                "Checkpointing every layer needs memory of the order of the square root of the "
                "depth.",
                NOT,
                "P20",
            ),
            Claim(
                "Divide the loss by the number of micro-batches.",
                PART,
                "P36",
                "The division is needed. It is right only if all micro-batches supervise "
                "equally many tokens.",
            ),
            Claim("no_sync around backward saves the communication of accumulation.", NOT, "P37"),
            Claim(
                "The schedule is stepped with the loop, and the cosine ends at half the rate.",
                NOT,
                "P34",
                "Stepped with the loop it counts micro-batches. A plain cosine ends at zero "
                "and climbs again after "
                "its end.",
            ),
            Claim(
                "zero_grad(set_to_none=True) is only faster.",
                NOT,
                "P35",
                "With zeros the optimizer goes on with its momentum and its decay. With None "
                "it skips the weight.",
            ),
            Claim(
                "A distillation loss starts at ln V, times the squared temperature.",
                NOT,
                "P44",
                "Cross-entropy starts at ln V. A KL starts at ln V minus the teacher's "
                "entropy, times the squared "
                "temperature.",
            ),
            Claim("A gradient of zero after the first backward pass is a warning.", PART, "P05"),
            Claim(
                "Fitting a tiny subset shows that the set-up is right.",
                PART,
                "P42",
                "It finds what cannot learn. Labels that are shifted twice pass it.",
            ),
            Claim(
                "Weights, optimizer, scheduler, scaler and step are the complete state.",
                NOT,
                "P38",
                "The random generators, the order of the epoch and the position in it are missing.",
            ),
            Claim(
                "Write the checkpoint to a temporary name and rename it.",
                HOLDS,
                "P48",
                "Written over the old file, a kill leaves neither state. To survive a power "
                "cut it must be flushed "
                "as well.",
            ),
            Claim("A backward hook on modules finds every NaN.", NOT, "P40"),
            Claim(
                "Load the last good state and halve the rate after a spike.",
                NOT,
                "P39",
                "The state that was kept is the live one, Adam keeps the moments of the spike, "
                "the scheduler "
                "overwrites the rate, and nan passes the test.",
            ),
            Claim(
                "Cache the teacher's answers on disk and only the student's speed counts.",
                PART,
                "P69",
                "It works if the tail is kept. Renormalised, the largest ones claim the mass "
                "of all others, and the "
                "student learns something false.",
            ),
            Claim(
                "The weight of the distillation term is what its coefficient says.",
                NOT,
                "P68",
                "With reduction='mean' the term is divided by the vocabulary too, so it counts "
                "one part in V.",
            ),
            Claim(
                "Capacity was the bottleneck of the student.",
                OTHER,
                "P70",
                "The parallel form of its recurrence forgot what it had read. With the right "
                "state, half the width "
                "uses it.",
            ),
            Claim(
                "A feature loss (CKA) that falls means layers that align.",
                NOT,
                "P71",
                "It falls with noise in the teacher's place. The debiased one does not.",
            ),
            Claim(
                "Evaluate every 300 steps instead of every 100 to save a third of the time.",
                UNTRIED,
                "",
                "It depends on the length of the evaluation. Notebook 13 measures the share of "
                "its own.",
            ),
            Claim(
                "DDP or FSDP by what fits into memory; FSDP needs use_orig_params for compile.",
                UNTRIED,
                "",
                "It needs several cards.",
            ),
            Claim(
                "Flash attention, fused AdamW, TF32 and pinned memory make training faster.",
                UNTRIED,
                "",
                "They need a CUDA device.",
            ),
        ),
    ),
    WriteUp(
        "moe-muon",
        "The write-up on a mixture of experts with Muon",
        "Notes on a mixture of experts of 1.5 to 3 billion parameters, with layers that skip "
        "tokens, state-space "
        "layers "
        "and several tokens ahead, trained by Muon. Its loss stood still. It names two causes, "
        "weights in bf16 and a "
        "rate "
        "too low for Muon, and gives no loss after the fixes.",
        (
            Claim(
                "Parameters in bf16 lose small updates.",
                HOLDS,
                "P24",
                "Updates below half the distance to the next bf16 number are lost.",
            ),
            Claim(
                "The norms stood at one, and a model whose norms cannot move cannot learn.",
                NOT,
                "P24",
                "fp32 weights with frozen norms win what fp32 wins. What is lost are the "
                "updates of all other weights.",
            ),
            Claim(
                "Norms near one after 411 steps show a rate that is too low.",
                OTHER,
                "P64",
                "AdamW trains the norms. At the end of a warm-up its rates sum to about the "
                "distance seen, so the "
                "norms moved as far as they could.",
            ),
            Claim("Muon needs a rate of 1e-3 to 3e-3; 3e-4 trains nothing.", NOT, "P30"),
            Claim(
                "Matrices are what has two dimensions.",
                NOT,
                "P31",
                "Embeddings, heads and routers have two dimensions as well, and stacked "
                "experts have three.",
            ),
            Claim(
                "With bf16=True the Trainer handles precision correctly.",
                NOT,
                "P25",
                "bf16=True is autocast: it lowers products and lifts no parameter. "
                "from_pretrained takes the dtype "
                "of the file.",
            ),
            Claim(
                "The loss of the model includes the auxiliary losses.",
                NOT,
                "P63",
                "By default it includes none. Switched on, it is in the evaluation too, and "
                "its exponential is no "
                "perplexity.",
            ),
            Claim(
                "A custom loss and an optimizer that is returned are enough for the HF Trainer.",
                NOT,
                "P46",
                "The item count is ignored, an optimizer that is returned and not set raises, "
                "and experts are lost "
                "at a resume.",
            ),
            Claim(
                "Layers that skip tokens can be left in; switch them off only to simplify.",
                OTHER,
                "P60",
                "The residual was added to an output that already held it, so skipped tokens "
                "doubled at every layer.",
            ),
            Claim(
                "A layer that skips tokens behaves the same in training and at inference.",
                NOT,
                "P61",
                "With a softmax over the chosen tokens the layer shrinks in training and is "
                "whole at inference.",
            ),
            Claim(
                "Its own Muon is the published one.",
                NOT,
                "P62",
                "It writes the orthogonalised matrix back into the momentum, which then "
                "forgets how much it has seen.",
            ),
            Claim(
                "Experts that choose their tokens are a drop-in for tokens that choose experts.",
                NOT,
                "P65",
                "Whether a token is served depends on later tokens, so what is evaluated "
                "cannot generate.",
            ),
            Claim(
                "The two causes together stopped the training.",
                PART,
                "12_moe_muon: muon_race.trial",
                "Each change is tried alone and all together: read the shares there.",
            ),
            Claim(
                "Within 100 steps parameters should have moved.",
                PART,
                "12_moe_muon: weight_movement.audit",
                "How far they can move is bounded by the sum of the rates, which is small "
                "during a warm-up.",
            ),
            Claim(
                "The loss falls from about 7 to 5 in 1000 steps after the fixes.",
                UNTRIED,
                "",
                "The write-up never shows it, and an untrained model starts at ln V, which is "
                "higher.",
            ),
        ),
    ),
)


def page() -> str:
    """docs/claims.md."""
    parts = [
        "# The five write-ups and their claims",
        "The workbook started from five public notes about trainings that failed. Each names "
        "causes and fixes. This "
        "page "
        "lists what they claim, where the workbook tries it, and what came out. It is made by "
        "`python -m "
        "lessons.claims` "
        "from the catalogue of pitfalls and the notebooks.",
        "\n".join(f"- **{verdict}**: {meaning}" for verdict, meaning in VERDICTS.items()),
    ]
    cells = _cells()
    for w in WRITE_UPS:
        rows = [f"| {c.words} | {c.verdict} | {_reason(c)} | {_link(c, cells)} |" for c in w.claims]
        table = "\n".join(["| claim | verdict | why | tried in |", "|---|---|---|---|", *rows])
        counts = ", ".join(f"{sum(c.verdict == v for c in w.claims)} {v}" for v in VERDICTS)
        parts += [
            f'<a id="{w.anchor}"></a>\n\n## {w.title}',
            w.about,
            f"{len(w.claims)} claims: {counts}.",
            table,
        ]
    return "\n\n".join(parts) + "\n"


def _reason(claim: Claim) -> str:
    if claim.why:
        return claim.why
    first, *rest = re.split(r"(?<=[a-z)0-9])\. (?=[A-Z`])", pitfall(claim.tried).verdict)
    return (first if not rest else f"{first}.").replace("|", "\\|")


def _cells() -> list[tuple[str, str, str]]:
    """Notebook, the heading above, source: of every code cell."""
    found = []
    for notebook in sorted(paths.notebooks().glob("*.ipynb")):
        heading = ""
        for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                heading = (re.findall(r"^#+ (.+)$", source, re.M) or [heading])[-1]
            else:
                found.append((notebook.stem, heading, source))
    return found


def place(claim: Claim, cells: list[tuple[str, str, str]]) -> tuple[str, str] | None:
    """Return the notebook and the heading where a claim is tried; None for one that is not."""
    if not claim.tried:
        return None
    name, _, text = claim.tried.partition(": ")
    wanted = text or f'trial("{name}"'
    for notebook, heading, source in cells:
        if wanted in source and (not text or notebook.startswith(name)):
            return notebook, heading
    raise LookupError(f"{claim.tried}: no cell of a notebook has {wanted!r}")


def _link(claim: Claim, cells: list[tuple[str, str, str]]) -> str:
    where = place(claim, cells)
    if where is None:
        return ""
    notebook, heading = where
    number = claim.tried if claim.tried.startswith("P") else heading
    return (
        f"[{notebook[:2]}, "
        f"{number}](../notebooks/{notebook}.ipynb#{quote(heading_id(heading), safe=':,?!')})"
    )


def heading_id(heading: str) -> str:
    """Return the id that JupyterLab and forges give to a heading of a notebook."""
    return re.sub(r"[*`]|\[|\]\([^)]*\)", "", heading).strip().replace(" ", "-")


def main() -> None:
    files.write(paths.root() / "docs" / "claims.md", page())


if __name__ == "__main__":
    main()
