"""Corpora of any size: tokenised once into files of token ids, which are then read as if they were
a tensor in memory.

    streams = shards.open("hf:HuggingFaceFW/fineweb-edu?name=sample-10BT&tokens=200M", tokenizer)
    batches = text.Batches(streams["train"], rows=8, length=1024)

A corpus is a dataset of the hub, streamed by `datasets`, or a local file or folder: parquet, jsonl,
txt, md, py. Options stand behind a question mark. `tokens=200M` stops there; `column=text` names
the field; a dataset also has `name`, `split` and `revision`. Documents are read one by one and go
into the splits of text.py, by its rule.

The store is a folder under paths.corpora(), named by a hash of all that decides its ids. It holds a
file of ids per split and `manifest.json`: how far the files go, their SHA-256, and the document
that comes next. The files grow by shards; the manifest is replaced when a shard is on disk. So a
maker that was killed goes on after the last one, and ends with the same bytes. All is checked on
opening; a damaged store is set aside and made again.

Footgun: `tokens` counts all three splits, so training gets 84 % of them.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from nblib import corpus_files, files, paths, text

BATCH, SHARD = 2**16, 2**24  # characters tokenised at a time; bytes of ids in a shard, at least


class Tokens(Tensor):
    """Token ids that stay on disk, (N,). What is taken out of it is an ordinary int64 tensor."""

    # what is computed from it is no Tokens
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __getitem__(self, at) -> Tensor:
        return super().__getitem__(at).long()


def open(corpus: str, tokenizer) -> dict[str, Tensor]:
    """Return the token ids of each split, (N,): mapped from disk, tokenised now if they are not
    there. Those of the embedded corpora are made in memory.
    """
    if corpus in corpus_files.EMBEDDED:
        return {
            split: text.encode(text.documents(corpus, split), tokenizer) for split in text.SPLITS
        }
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos_token: documents could not be told apart")
    source, read = _source(corpus)
    about = source | _words(tokenizer) | {"splits": str(text.SPLITS)}
    folder = paths.corpora() / files.digest(about)[:16]
    waiting = f"another process is tokenising the corpus {corpus}; waiting for it"
    with files.locked(folder.with_name(f".{folder.name}.lock"), waiting=waiting):
        state, hashes = _intact(folder, about)
        if state["next"] is not None:
            state = _tokenise(folder, state, hashes, read, tokenizer, corpus)
            if "dataset" not in about and _source(corpus)[0] != source:
                files.set_aside(folder, f"{corpus} changed while it was read")
                raise ValueError(
                    f"corpus {corpus!r} changed while it was read: start again when it is complete"
                )
    if empty := [name for name, size in state["sizes"].items() if not size]:
        raise ValueError(
            f"corpus {corpus!r} has no document in its {empty[0]} split: it needs more documents"
        )
    dtype, sizes = getattr(torch, about["dtype"]), state["sizes"].items()
    mapped = {
        name: torch.from_file(str(folder / name), size=n // dtype.itemsize, dtype=dtype)
        for name, n in sizes
    }
    return {name: ids.as_subclass(Tokens) for name, ids in mapped.items()}


def _words(tokenizer) -> dict[str, str]:
    """Return what decides the ids of a text, and how they are stored."""
    words: Any = tokenizer.get_vocab()
    dtype = "uint16" if max(words.values()) < 2**16 else "uint32"
    # without what its last call left in it, which plays no part here
    if getattr(tokenizer, "is_fast", False):
        words = json.loads(tokenizer.backend_tokenizer.to_str()) | {
            "padding": None,
            "truncation": None,
        }
    return {
        "tokenizer": files.digest([type(tokenizer).__name__, tokenizer.eos_token_id, words])[:16],
        "dtype": dtype,
    }


def _intact(folder: Path, about: dict) -> tuple[dict, dict]:
    """Return the state of a store, and the running hash of each file, cut to it: nothing behind was
    promised to anybody.
    """
    files.remove_partials(files.make_folder(folder))
    state, hashes = {"about": about, "sizes": dict.fromkeys(text.SPLITS, 0), "next": 0}, {}
    try:
        if manifest := files.read_checked_json(folder / files.MANIFEST):
            state = manifest["state"]
            if state["about"] != about:
                raise files.Unreadable("its manifest is that of another corpus")
        for name, size in state["sizes"].items():
            if state["next"] is not None:
                (folder / name).touch()
                os.truncate(folder / name, size)
            with (folder / name).open("rb") as file:
                hashes[name] = hashlib.file_digest(file, "sha256")
        if manifest and state["sha256"] != {
            name: each.hexdigest() for name, each in hashes.items()
        }:
            raise files.Unreadable("it changed since it was written")
        return state, hashes
    except (ValueError, LookupError, TypeError, OSError) as error:
        # whoever has it mapped still reads it there
        files.set_aside(folder, f"{folder} is damaged: {error}")
        if folder.exists():  # in a place that is read only
            raise
        return _intact(folder, about)


def _tokenise(
    folder: Path, state: dict, hashes: dict, read: Callable, tokenizer, corpus: str
) -> dict:
    """Read on to the end of the corpus or to its number of tokens.

    `next` is the first document that is not stored.
    """
    about, sizes, dtype = state["about"], dict(state["sizes"]), numpy.dtype(state["about"]["dtype"])
    for documents, place in _batches(read(state["next"]), corpus, state["next"]):
        ids = {name: bytearray() for name in sizes}
        for document, row in zip(
            documents, tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]
        ):
            split = next(
                name for name, rule in text.SPLITS.items() if text._percentile(document) in rule
            )
            ids[split] += numpy.array([*row, tokenizer.eos_token_id], dtype).tobytes()
            if (
                sum(sizes.values()) + sum(map(len, ids.values()))
                >= about["tokens"] * dtype.itemsize
            ):
                place = None
                break
        for name, some in ids.items():
            hashes[name].update(some)
            sizes[name] += len(some)
            with (folder / name).open("ab") as file:
                file.write(some)
        if place is None or sum(sizes.values()) - sum(state["sizes"].values()) >= SHARD:
            for name in sizes:
                files.flush(folder / name)
            digests = {name: each.hexdigest() for name, each in hashes.items()}
            state = {"about": about, "sizes": dict(sizes), "next": place, "sha256": digests}
            files.write_checked_json(folder / files.MANIFEST, {"state": state})
            print(
                f"tokenised {sum(sizes.values()) / dtype.itemsize / 1e6:.1f} M tokens of {corpus}",
                flush=True,
            )
        if place is None:
            break
    return state


def _batches(
    documents: Iterator, corpus: str, start: int
) -> Iterator[tuple[list[str], int | None]]:
    """Documents, BATCH characters at a time, and the place after them: None at the end of the
    corpus.
    """
    batch, size = [], 0
    for place, document in enumerate(documents, start + 1):
        if not isinstance(document, str | None):
            raise ValueError(
                f"corpus {corpus!r}: its column holds {type(document).__name__}, not text"
            )
        if document and document.strip():
            batch.append(document)
            size += len(document)
        if size >= BATCH:
            yield batch, place
            batch, size = [], 0
    yield batch or [""], None


def _source(corpus: str) -> tuple[dict, Callable[[int], Iterator]]:
    """Return what a corpus is, for the name of its store, and how to read it from a document on."""
    place, options = corpus_files.corpus_options(corpus, Path())
    about = {"column": options.get("column", "text"), "tokens": options.get("tokens", 10**15)}
    if not place.startswith("hf:"):
        if not (path := corpus_files.resolve(place, Path())).exists():
            raise FileNotFoundError(
                f"corpus {corpus!r} does not exist: use prose, code, a file, a folder or "
                "hf:<dataset>"
            )
        return about | {"content": corpus_files.fingerprint(path)}, partial(
            _local, path, about["column"]
        )
    if len(commit := options.get("revision", "")) != 40:
        # the cache of the hub then knows the commit, and input_hash.py as well
        with _reading(corpus):
            from huggingface_hub import hf_hub_download

            here = hf_hub_download(
                place[3:], ".gitattributes", repo_type="dataset", revision=commit or None
            )
        commit = Path(here).parent.name
    about |= {
        "dataset": place[3:],
        "name": options.get("name"),
        "split": options.get("split", "train"),
    }
    return about | {"commit": commit}, partial(_hub, corpus, about, commit)


def _hub(corpus: str, about: dict, commit: str, start: int) -> Iterator:
    with _reading(corpus):
        from datasets import load_dataset

        rows = load_dataset(
            about["dataset"], about["name"], split=about["split"], revision=commit, streaming=True
        )
        _check(about["column"], rows.column_names or list(next(iter(rows), {})))
        yield from (
            row[about["column"]] for row in rows.select_columns(about["column"]).skip(start)
        )


def _local(path: Path, column: str, start: int) -> Iterator:
    kinds = {".parquet": partial(_parquet, column=column), ".jsonl": partial(_lines, column=column)}
    read = (kinds.get(file.suffix, _pieces)(file) for file in corpus_files.files_of(path))
    return islice(chain.from_iterable(read), start, None)


def _parquet(path: Path, column: str) -> Iterator:
    with _reading(str(path)):
        from pyarrow import parquet

        # what is fetched ahead is kept to the end of the file, so memory would grow with it
        with parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as file:
            _check(column, file.schema_arrow.names)
            for part in file.iter_batches(256, columns=[column]):
                yield from part[0].to_pylist()


def _lines(path: Path, column: str) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(filter(bytes.strip, file), 1):
            try:
                document = json.loads(line.decode("utf-8", "replace"))[column]
                document.encode()
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                raise ValueError(
                    f"{path} line {number}: expected a JSON object with a {column!r} field"
                ) from None
            yield document


def _pieces(path: Path, size: int = 8192) -> Iterator[str]:
    """One long file would fall into one split whole, so it is cut at blank lines, or after BATCH
    characters.
    """
    piece = ""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in iter(partial(file.readline, BATCH), ""):
            piece += line
            if len(piece) >= (size if line == "\n" else BATCH) and (
                cut := piece.removesuffix("\n\n")
            ):
                yield cut
                piece = ""
    if piece:
        yield piece


def _check(column: str, names: list[str]) -> None:
    if column not in names:
        raise LookupError(f"no column {column!r}, it has {', '.join(names)}: choose with ?column=")


@contextlib.contextmanager
def _reading(corpus: str) -> Iterator[None]:
    """Raise what a library says of a corpus that it cannot read or reach as one sentence."""
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"corpus {corpus!r} needs the package {error.name}: pip install datasets"
        ) from None
    except Exception as error:
        # of the second sort is also what is not in the cache while the hub is out of reach
        kind = type(error).__name__
        known = (
            isinstance(error, ValueError | LookupError | FileNotFoundError)
            and kind != "LocalEntryNotFoundError"
        )
        if known or not corpus.startswith("hf:"):
            raise ValueError(
                f"corpus {corpus!r} cannot be read: {str(error).strip().partition(chr(10))[0]}"
            ) from None
        raise ConnectionError(
            f"corpus {corpus!r} cannot be fetched ({kind}): start again with a network, it "
            "goes on where it stopped, "
            "or without one give a local parquet file or folder (corpus=/path/to/it) or "
            "corpus=prose"
        ) from None
