"""Text in, packed token batches out, with a position that can be saved.

Two corpora travel with every Python, so nothing is downloaded. *prose* is Python's own
documentation: the language topics and every docstring of the standard library. *code* is the
standard library's source with docstrings and comments removed. Two domains give a real shift to
adapt to. Text of your own, and of the hub, is opened by corpora.py.

Splits are by document, decided by the hash of its text, so the same document can never stand in two
of them. A training row is `length` tokens cut from all documents laid end to end, each closed by
the end-of-text token. Every epoch shuffles the rows and shifts where they are cut; seed, epoch and
row say exactly where a run stands.

Batches follow the transformers convention: `labels` equal `input_ids`, -100 is not supervised, and
the shift by one happens inside the loss. Footgun: shift them here as well and the model learns to
predict two tokens ahead, with a loss that looks healthy.
"""

import ast
import hashlib
import json
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from nblib import corpus_files, files, paths

# of hash % 100
SPLITS = {"held_out": range(0, 10), "validation": range(10, 16), "train": range(16, 100)}
SKIPPED = set(
    "test tests site-packages dist-packages idlelib lib2to3 turtledemo encodings pydoc_data".split()
)
# three different tokens: a pad that is also eos never gets learned
PAD, EOS, MASK = "<|pad|>", "<|eos|>", "<|mask|>"


def documents(source: str = "prose", split: str = "train") -> list[str]:
    """Return the documents of one split of an embedded corpus: 'prose' or 'code'."""
    if split not in SPLITS:
        raise ValueError(f"split = {split!r}: allowed are {', '.join(SPLITS)}")
    if source not in corpus_files.EMBEDDED:
        raise ValueError(
            f"corpus {source!r} is neither {' nor '.join(corpus_files.EMBEDDED)}: shards.open "
            "reads all others"
        )
    return [d for d in _embedded(source) if _percentile(d) in SPLITS[split]]


def _percentile(document: str) -> int:
    return int(hashlib.sha256(document.encode()).hexdigest(), 16) % 100


def fingerprint(documents: list[str]) -> str:
    """Return a hash of the text itself, part of the name of everything made from it."""
    return hashlib.sha256("\0".join(documents).encode()).hexdigest()[:16]


def _embedded(source: str) -> list[str]:
    """Return reading the standard library takes seconds, so the result is kept per Python
    version.
    """
    code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    name = f"{source}-{platform.python_version()}-{code[:8]}.json"
    stored = paths.store() / "text" / name
    try:
        kept = files.read_json(stored)
        if kept and kept.get("hash") != fingerprint(kept["texts"]):
            raise files.Unreadable(f"cannot read {stored}: it changed since it was written")
    except (files.Unreadable, KeyError, TypeError) as error:
        files.set_aside(stored, str(error))
        kept = {}
    if kept:
        return kept["texts"]
    texts = list(dict.fromkeys(_python_prose() if source == "prose" else _python_code()))
    # as a whole: two notebooks may start together
    files.write(stored, json.dumps({"hash": fingerprint(texts), "texts": texts}))
    return texts


def _library() -> Iterator[tuple[str, ast.Module]]:
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.rglob("*.py")):
        if not SKIPPED & set(path.relative_to(folder).parts):
            try:
                yield path.stem, ast.parse(path.read_text("utf-8"))
            except (SyntaxError, UnicodeDecodeError):
                continue  # a template or a file in an old encoding: not ours to fix


def _documented(tree: ast.Module) -> Iterator[ast.AST]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return (
        node
        for node in ast.walk(tree)
        if isinstance(node, kinds) and ast.get_docstring(node) is not None
    )


def _python_prose() -> Iterator[str]:
    from pydoc_data.topics import topics

    yield from topics.values()
    seen: set[str] = set()
    for name, tree in _library():
        parts = []
        for node in _documented(tree):
            text = ast.get_docstring(node)
            if text not in seen:  # posixpath and ntpath share theirs
                seen.add(text)
                parts.append(f"{getattr(node, 'name', name)}\n{text}")
        if parts:
            yield "\n\n".join(parts)


def _python_code() -> Iterator[str]:
    return (strip_code(tree) for _, tree in _library())


def strip_code(tree: ast.Module) -> str:
    """Source without docstrings and comments: what the code does, not what it says."""
    for node in list(_documented(tree)):
        node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def train_tokenizer(documents: list[str], *, vocab_size: int = 4096):
    """Return a byte-level BPE tokenizer, so any text has a spelling and no byte is ever unknown."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        documents, vocab_size=vocab_size, special_tokens=[PAD, EOS, MASK], show_progress=False
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, pad_token=PAD, eos_token=EOS, mask_token=MASK
    )


def token_bytes(tokenizer) -> Tensor:
    """UTF-8 bytes each token stands for, (V,).

    Special tokens stand for none: they cost bits and explain no text.
    """
    special = set(tokenizer.all_special_ids)
    if getattr(tokenizer, "is_fast", False) and "ByteLevel" in str(
        tokenizer.backend_tokenizer.decoder
    ):
        tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        lengths = [len(token) for token in tokens]  # one character stands for one byte
    else:
        # other families mark spaces in their own way; decoding alone is right but for leading
        # spaces
        lengths = [len(tokenizer.decode([i]).encode()) for i in range(len(tokenizer))]
    return torch.tensor([0 if i in special else n for i, n in enumerate(lengths)])


def encode(documents: list[str], tokenizer) -> Tensor:
    """All documents end to end, each closed by the end-of-text token, (N,)."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos_token: documents could not be told apart")
    ids: list[int] = []
    for encoded in tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]:
        ids += encoded + [tokenizer.eos_token_id]
    return torch.tensor(ids)


def fixed_rows(stream: Tensor, *, length: int, limit: int | None = None) -> Tensor:
    """Return the stream cut into rows in order, (R, length), for evaluation: the same rows every
    time.
    """
    if len(stream) < length:
        raise ValueError(f"length = {length}: longer than the whole split of {len(stream)} tokens")
    # the stream may be on disk: no more is taken into memory
    count = len(range(len(stream) // length)[:limit])
    return stream[: count * length].view(-1, length)


class Batches:
    """Endless shuffled batches of packed rows; two integers say where it stands.

    `rows` is the micro-batch of one process. With `world` processes every global batch of rows *
    world is dealt out by rank. So the data seen does not depend on how many processes share it.
    """

    def __init__(
        self,
        stream: Tensor,
        *,
        rows: int,
        length: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ):
        self.stream, self.rows, self.length, self.seed, self.rank, self.world = (
            stream,
            rows,
            length,
            seed,
            rank,
            world,
        )
        # one length kept back for the shift
        self.per_epoch = (len(stream) - length) // length // (rows * world)
        if self.per_epoch < 1:
            raise ValueError(
                f"{len(stream)} tokens are too few for {rows * world} rows of {length}: lower "
                "rows or length"
            )
        self.epoch, self.position, self.tokens = 0, 0, len(stream)  # tokens of an epoch
        self._order: tuple[int, int, Tensor] | None = None

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> dict[str, Tensor]:
        if self.position >= self.per_epoch:
            self.epoch, self.position = self.epoch + 1, 0
        shift, order = self._shuffled()
        start = (self.position * self.world + self.rank) * self.rows
        # (B, T)
        at = (
            shift + order[start : start + self.rows, None] * self.length + torch.arange(self.length)
        )
        self.position += 1
        ids = self.stream[at]
        return {"input_ids": ids, "labels": ids}

    def _shuffled(self) -> tuple[int, Tensor]:
        if self._order is None or self._order[0] != self.epoch:  # a pure function of seed and epoch
            draw = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            shift = int(torch.randint(self.length, (1,), generator=draw))
            order = torch.randperm((len(self.stream) - self.length) // self.length, generator=draw)
            self._order = (self.epoch, shift, order)
        return self._order[1:]

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seed, self.epoch, self.position, self._order = (
            state["seed"],
            state["epoch"],
            state["position"],
            None,
        )
