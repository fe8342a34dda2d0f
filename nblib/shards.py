"""Corpora of any size: tokenised once into files of token ids, which are then read as if they were a tensor in memory.

    streams = shards.open("hf:HuggingFaceFW/fineweb-edu?name=sample-10BT&tokens=200M", tokenizer)
    batches = text.Batches(streams["train"], rows=8, length=1024)

A corpus is a dataset of the hub, streamed by `datasets`, or a local file or folder: parquet, jsonl, txt, md, py.
Options stand behind a question mark. `tokens=200M` stops there; `column=text` names the field; a dataset also has
`name`, `split` and `revision`. Documents are read one by one and go into the splits of text.py, by its rule.

The store is a folder under outputs/corpora, named by a hash of all that decides its ids. It holds a file of ids per
split and `manifest.json`. That lists the shards: how far each file goes, where the corpus goes on, and a SHA-256 of
both and of the bytes that were added. A shard is listed when it is on disk. So a maker that was killed goes on after
the last one, and ends with the same bytes. All are checked on opening; a damaged store is set aside and made again.

Footgun: text.py reads a text that stands twice in a small corpus once; here it counts twice, in one split.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from nblib import files, inputs, paths, text

SMALL = 8 * 2**20  # bytes of local text that text.py still reads as a whole
BATCH, SHARD = 2**20, 2**23  # characters tokenised at a time; tokens in a shard, at least
Documents = Iterator[tuple[Any, int, int, int]]  # each with the place after it: file, byte or row group, row


class Tokens(Tensor):
    """Token ids that stay on disk, (N,). What is taken out of it is an ordinary int64 tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # what is computed from it is no Tokens

    def __getitem__(self, at) -> Tensor:
        return super().__getitem__(at).long()


def needed(corpus: str) -> bool:
    """Whether a corpus is to be read from here; text.py reads the embedded ones and small local texts as a whole."""
    place, options = inputs.corpus_options(corpus, Path())
    if options or place.startswith("hf:"):
        return True
    listed = inputs.files_of(inputs.resolve(place, Path()), inputs.CORPORA) if place not in inputs.EMBEDDED else []
    return any(file.suffix == ".parquet" for file in listed) or sum(file.stat().st_size for file in listed) > SMALL


def open(corpus: str, tokenizer) -> dict[str, Tensor]:
    """The token ids of each split, (N,), mapped from disk; tokenised now if they are not there."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos_token: documents could not be told apart")
    source, read = _source(corpus)
    vocabulary = tokenizer.get_vocab()
    words = sorted(vocabulary.items())
    if getattr(tokenizer, "is_fast", False):  # without what its last call left in it, which plays no part here
        words = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
    about = source | {"tokenizer": _hash([type(tokenizer).__name__, tokenizer.eos_token_id, words])}
    about |= {"splits": {name: [rule.start, rule.stop] for name, rule in text.SPLITS.items()}, "layout": 1}
    about |= {"dtype": "uint16" if max(vocabulary.values()) < 2**16 else "uint32"}
    folder = paths.outputs() / "corpora" / _hash(about)
    waiting = f"another process is tokenising the corpus {corpus}; waiting for it"
    with files.locked(folder.with_name(f".{folder.name}.lock"), waiting=waiting):
        shards = _intact(folder, about)
        if not shards or shards[-1]["next"]:
            _tokenise(folder, about, shards, read, tokenizer, corpus)
            if "dataset" not in about and _source(corpus)[0] != source:
                files.set_aside(folder, f"{corpus} changed while it was read")
                raise ValueError(f"corpus {corpus!r} changed while it was read: start again when it is complete")
    dtype, ends = getattr(torch, about["dtype"]), shards[-1]["ends"]
    if empty := [name for name in text.SPLITS if not ends[name]]:
        raise ValueError(f"corpus {corpus!r} has no document in its {empty[0]} split: it needs more documents")
    sizes = {str(folder / name): ends[name] // dtype.itemsize for name in text.SPLITS}
    mapped = (torch.from_file(file, shared=False, size=size, dtype=dtype) for file, size in sizes.items())
    return dict(zip(text.SPLITS, (ids.as_subclass(Tokens) for ids in mapped)))


def _hash(about: Any) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def _shard(folder: Path, before: dict[str, int], ends: dict[str, int], place: list[int] | None) -> dict:
    """An entry of the manifest; `next` is where the corpus goes on, None at its end."""
    digest = hashlib.sha256(json.dumps([ends, place], sort_keys=True).encode())
    for name in text.SPLITS:
        with (folder / name).open("rb") as file:
            file.seek(before[name])
            digest.update(file.read(ends[name] - before[name]))
    return {"ends": ends, "next": place, "sha256": digest.hexdigest()}


def _intact(folder: Path, about: dict) -> list[dict]:
    """The shards of a folder, and its files cut to them: nothing behind them was promised to anybody."""
    ends = [dict.fromkeys(text.SPLITS, 0)]
    try:
        manifest = files.read_json(folder / files.MANIFEST) or {"about": about, "shards": []}
        shards = manifest["shards"]
        ends += [shard["ends"] for shard in shards]
        whole = (_shard(folder, start, end, shard["next"]) for start, end, shard in zip(ends, ends[1:], shards))
        if manifest["about"] != about or not all(map(dict.__eq__, whole, shards)):
            raise files.Unreadable("it changed since it was written")
    except (ValueError, LookupError, TypeError, OSError) as error:
        files.set_aside(folder, f"{folder} is damaged: {error}")  # whoever has it mapped still reads it there
        shards, ends = [], ends[:1]
    files.remove_partials(files.make_folder(folder))
    for name in text.SPLITS if not shards or shards[-1]["next"] else ():
        with (folder / name).open("ab") as file:
            file.truncate(ends[-1][name])
    return shards


def _tokenise(folder: Path, about: dict, shards: list[dict], read: Callable, tokenizer, corpus: str) -> None:
    """Read on after the last shard, to the end of the corpus or to its number of tokens."""
    start, before = (shards[-1]["next"], shards[-1]["ends"]) if shards else ([0, 0, 0], dict.fromkeys(text.SPLITS, 0))
    ends, dtype = dict(before), numpy.dtype(about["dtype"])
    for documents, place in _batches(read(*start), corpus):
        rows, ids = tokenizer(documents or [""], add_special_tokens=False, verbose=False)["input_ids"], {}
        for document, row in zip(documents, rows):
            split = next(name for name, rule in text.SPLITS.items() if text._percentile(document) in rule)
            ids.setdefault(split, []).append(numpy.array([*row, tokenizer.eos_token_id], dtype))
            ends[split] += ids[split][-1].nbytes
            if sum(ends.values()) >= about["tokens"] * dtype.itemsize:
                place = None
                break
        for split, some in ids.items():
            with (folder / split).open("ab") as file:
                file.write(numpy.concatenate(some))
        if place is None or sum(ends.values()) - sum(before.values()) >= SHARD * dtype.itemsize:
            for split in text.SPLITS:
                files.flush(folder / split)
            shards.append(_shard(folder, before, dict(ends), place))
            files.write(folder / files.MANIFEST, json.dumps({"about": about, "shards": shards}))
            before = dict(ends)
            print(f"tokenised {sum(ends.values()) / dtype.itemsize / 1e6:.1f} M tokens of {corpus}", flush=True)
        if place is None:
            return


def _batches(documents: Documents, corpus: str) -> Iterator[tuple[list[str], list[int] | None]]:
    """Documents, about a million characters at a time, and the place after them: None at the end of the corpus."""
    batch, size = [], 0
    for document, *place in documents:
        if not isinstance(document, str | None):
            raise ValueError(f"corpus {corpus!r}: its column holds {type(document).__name__}, not text")
        if document and document.strip():
            batch.append(document)
            size += len(document)
        if size >= BATCH:
            yield batch, place
            batch, size = [], 0
    yield batch, None


def _source(corpus: str) -> tuple[dict, Callable[[int, int, int], Documents]]:
    """What a corpus is, for the name of its store, and how to read it from a place on."""
    place, options = inputs.corpus_options(corpus, Path())
    about = {"column": options.get("column", "text"), "tokens": inputs.count(options.get("tokens", "1000000B"))}
    path = inputs.resolve(place.removeprefix("hf:"), Path())
    if not place.startswith("hf:"):
        if not path.exists():
            raise FileNotFoundError(
                f"corpus {corpus!r} does not exist: use prose, code, a file, a folder or hf:<dataset>"
            )
        return about | {"content": inputs.fingerprint(path, inputs.CORPORA)}, partial(_local, path, about["column"])
    about |= {"dataset": place[3:], "name": options.get("name"), "split": options.get("split", "train")}
    if path.is_dir():
        return about | {"content": inputs.fingerprint(path, ())}, partial(_hub, corpus, str(path), about, None)
    if len(commit := options.get("revision", "")) != 40:
        with _reaching(corpus):  # the cache of the hub then knows the commit, and inputs.py as well
            from huggingface_hub import hf_hub_download

            here = hf_hub_download(place[3:], ".gitattributes", repo_type="dataset", revision=commit or None)
        commit = Path(here).parent.name
    return about | {"content": commit}, partial(_hub, corpus, place[3:], about, commit)


def _local(path: Path, column: str, file: int, place: int, row: int) -> Documents:
    for number, each in enumerate(inputs.files_of(path, inputs.CORPORA)[file:], file):
        reader = {".parquet": _parquet, ".jsonl": _jsonl}.get(each.suffix, _pieces)
        for document, *after in reader(each, column, place):
            if after > [place, row]:
                yield document, number, *after
        place = row = 0


def _parquet(path: Path, column: str, group: int) -> Iterator[tuple[Any, int, int]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ImportError(f"{path} needs the package pyarrow: pip install datasets") from None
    try:
        with parquet.ParquetFile(path, buffer_size=2**20) as file:
            if column not in (names := file.schema_arrow.names):
                raise LookupError(f"{path} has no column {column!r}, it has {', '.join(names)}: choose with ?column=")
            for number in range(group, file.num_row_groups):
                rows = (value.as_py() for part in file.iter_batches(256, [number], [column]) for value in part[0])
                yield from ((document, number, at) for at, document in enumerate(rows, 1))
    except (ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from None


def _jsonl(path: Path, column: str, byte: int) -> Iterator[tuple[str, int, int]]:
    with path.open("rb") as file:
        file.seek(byte)
        for line in filter(bytes.strip, file):
            try:
                document = json.loads(line.decode("utf-8", "replace"))[column]
                document.encode()
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                at = f"{path} at byte {file.tell() - len(line)}"
                raise ValueError(f"{at}: expected a JSON object with a {column!r} field") from None
            yield document, file.tell(), 0


def _pieces(path: Path, column: str, done: int) -> Iterator[tuple[str, int, int]]:
    """The pieces that text.py cuts a file into, without the whole file in memory."""
    rest, number = "", 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for block in iter(partial(file.read, BATCH), ""):
            *paragraphs, tail = (rest + block).split("\n\n")
            *whole, rest = text._pieces("\n\n".join(paragraphs))
            yield from ((piece, number := number + 1, 0) for piece in whole)
            rest = f"{rest}\n\n{tail}" if paragraphs else tail
    yield from ((piece, number := number + 1, 0) for piece in text._pieces(rest))


@contextlib.contextmanager
def _reaching(corpus: str) -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise ImportError(f"corpus {corpus!r} needs the package datasets: pip install datasets") from None
    except Exception as error:
        kind = type(error).__name__  # of the second sort is also what is not in the cache while the hub is out of reach
        if isinstance(error, ValueError | LookupError | FileNotFoundError) and kind != "LocalEntryNotFoundError":
            raise ValueError(f"corpus {corpus!r}: {str(error).strip().splitlines()[0]}") from None
        raise ConnectionError(
            f"corpus {corpus!r} cannot be fetched ({kind}): what is tokenised is kept, a next start goes on. "
            "A local parquet file or folder (corpus=/path/to/it) and corpus=prose need no network"
        ) from None


def _hub(corpus: str, name: str, about: dict, commit: str | None, file: int, place: int, row: int) -> Documents:
    with _reaching(corpus):
        from datasets import load_dataset

        rows = load_dataset(name, about["name"], split=about["split"], revision=commit, streaming=True)
        column, names = about["column"], rows.column_names or list(next(iter(rows), {}))
        if column not in names:
            raise LookupError(f"no column {column!r}, it has {', '.join(names)}: choose with column=")
        for number, each in enumerate(rows.select_columns(column).skip(row), row + 1):
            yield each[column], 0, 0, number
