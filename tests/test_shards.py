"""A corpus on disk is the corpus in memory: the same documents, splits, ids and batches, through kills and damage."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from bit_flips import flips
from hypothesis import given, settings
from hypothesis import strategies as st

from nblib import files, models, paths, shards, start, text, train

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

WORDS = "the corpus of documents that one reads is split by the hash of each text, naïve or 漢字, and kept".split()


def documents(count: int, length: int = 60, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [f"{n}: " + " ".join(draw.choices(WORDS, k=draw.randint(length // 2, length))) for n in range(count)]


@pytest.fixture(scope="module")
def tokenizer():
    return text.train_tokenizer(documents(200), vocab_size=400)


@pytest.fixture(autouse=True)
def outputs(tmp_path, monkeypatch) -> Path:
    """A store of its own, and shards so small that a few hundred documents fill several."""
    monkeypatch.setenv("NBLIB_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setattr(shards, "SHARD", 3000)
    monkeypatch.setattr(shards, "BATCH", 2000)
    return tmp_path / "outputs" / "corpora"


def write_parquet(path: Path, texts: list, **columns) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"number": list(range(len(texts))), "text": texts, **columns})
    parquet.write_table(table, path, row_group_size=30)
    return path


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": each}, ensure_ascii=False) + "\n" for each in texts))
    return path


def in_memory(texts: list[str], tokenizer) -> dict[str, torch.Tensor]:
    split = {name: [t for t in texts if text._percentile(t) in rule] for name, rule in text.SPLITS.items()}
    return {name: text.encode(some, tokenizer) for name, some in split.items()}


def equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name][:], others[name][:]) for name in others)


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def store(outputs: Path) -> Path:
    (folder,) = stores(outputs)
    return folder


def stores(outputs: Path) -> list[Path]:
    return [each for each in outputs.iterdir() if each.is_dir() and not each.name.startswith("damaged")]


# ------------------------------------------------------------------------------------------ the same as in memory


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "hf"])
def test_the_ids_are_those_of_the_documents_in_memory(kind, tokenizer, tmp_path):
    texts = documents(300)
    if kind == "jsonl":
        corpus = str(write_jsonl(tmp_path / "a.jsonl", texts))
    else:
        write_parquet(tmp_path / "set" / "a.parquet", texts[:170])
        write_parquet(tmp_path / "set" / "b.parquet", [None, "", " \n", *texts[170:]])
        corpus = f"{'hf:' if kind == 'hf' else ''}{tmp_path / 'set'}"
    streams = shards.open(corpus, tokenizer)
    assert equal(streams, in_memory(texts, tokenizer))
    assert len(json.loads((store(paths.outputs() / "corpora") / "manifest.json").read_text())["shards"]) > 3


def test_a_folder_of_texts_is_what_text_py_reads(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "BATCH", 5000)
    (tmp_path / "corpus" / "deep").mkdir(parents=True)
    for number in range(5):
        paragraphs = documents(200, seed=number)
        (tmp_path / "corpus" / f"{number}.txt").write_text("\n\n".join(f"{number} {each}" for each in paragraphs))
    (tmp_path / "corpus" / "deep" / "a.md").write_bytes("one\r\n\r\ntwo \xff three".encode("latin-1"))
    write_jsonl(tmp_path / "corpus" / "b.jsonl", documents(50, seed=9))
    expected = {split: text.encode(text.documents(str(tmp_path / "corpus"), split), tokenizer) for split in text.SPLITS}
    assert equal(shards.open(str(tmp_path / "corpus"), tokenizer), expected)


@settings(max_examples=300, deadline=None)
@given(st.text("a\n ", max_size=60), st.integers(1, 9), st.integers(1, 12))
def test_a_file_is_cut_into_the_same_pieces_in_blocks_of_any_size(tmp_path_factory, written, block, size):
    file = tmp_path_factory.getbasetemp() / "pieces.txt"
    file.write_text(written)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BATCH", block)
        patch.setattr(text._pieces, "__defaults__", (size,))
        whole = [piece for piece in text._pieces(written) if piece.strip()]
        cut = [piece for piece, *_ in shards._pieces(file, "text", 0)]
        assert [piece for piece in cut if piece.strip()] == whole
        assert [piece for piece, *_ in shards._local(file, "text", 0, 2, 0)] == cut[2:]


def test_documents_are_whole_in_order_and_closed_and_no_split_holds_one_of_another(tokenizer, tmp_path):
    texts = documents(300)
    streams = shards.open(str(write_parquet(tmp_path / "a.parquet", texts)), tokenizer)
    read = {}
    for split, stream in streams.items():
        assert stream[-1] == tokenizer.eos_token_id
        read[split] = tokenizer.decode(stream[:]).split(text.EOS)[:-1]
        assert [int(each.split(":")[0]) for each in read[split]] == sorted(
            int(each.split(":")[0]) for each in read[split]
        )
        assert all(text._percentile(each) in text.SPLITS[split] for each in read[split])
    assert sorted(sum(read.values(), [])) == sorted(texts)


def test_a_number_of_tokens_is_a_prefix_of_whole_documents(tokenizer, tmp_path):
    corpus = str(write_parquet(tmp_path / "a.parquet", documents(300)))
    whole, part = (shards.open(f"{corpus}{query}", tokenizer) for query in ("", "?tokens=5k"))
    total = sum(map(len, part.values()))
    assert 5000 <= total < 5000 + 200
    assert all(torch.equal(part[split][:], whole[split][: len(part[split])]) for split in text.SPLITS)
    assert all(part[split][-1] == tokenizer.eos_token_id for split in text.SPLITS)


def test_what_is_read_is_int64_and_of_its_own_and_the_rest_stays_on_disk(tokenizer, tmp_path, outputs):
    stream = shards.open(str(write_parquet(tmp_path / "a.parquet", documents(200))), tokenizer)["train"]
    assert (store(outputs) / "train").stat().st_size == 2 * len(stream)
    for taken in (stream[:10], stream[3], stream[torch.tensor([[1, 2], [3, 4]])], stream[5:2]):
        assert type(taken) is torch.Tensor and taken.dtype == torch.int64
    before = content(store(outputs))
    stream[:10].zero_()
    stream.zero_()  # a private map: this stays in the memory of this process
    assert content(store(outputs)) == before


def test_ids_above_65535_take_four_bytes(tmp_path, outputs):
    tokenizer = text.train_tokenizer(documents(200), vocab_size=400)
    tokenizer.add_tokens([f"<{n}>" for n in range(66_000)])
    texts = [f"{each} <65999>" for each in documents(100)]
    streams = shards.open(str(write_jsonl(tmp_path / "a.jsonl", texts)), tokenizer)
    assert equal(streams, in_memory(texts, tokenizer)) and int(streams["train"][:].max()) > 2**16
    assert (store(outputs) / "train").stat().st_size == 4 * len(streams["train"])


@pytest.mark.parametrize("world", [1, 2])
def test_batches_are_the_same_bits_and_resume_at_their_position(world, tokenizer, tmp_path):
    texts = documents(300)
    mapped = shards.open(str(write_parquet(tmp_path / "a.parquet", texts)), tokenizer)["train"]
    held = in_memory(texts, tokenizer)["train"]
    for rank in range(world):
        options = dict(rows=4, length=16, seed=3, rank=rank, world=world)
        one, two = text.Batches(mapped, **options), text.Batches(held, **options)
        for _ in range(one.per_epoch + 5):
            a, b = next(one), next(two)
            assert a["input_ids"].dtype == b["input_ids"].dtype and torch.equal(a["input_ids"], b["input_ids"])
        again = text.Batches(mapped, **options)
        again.load_state_dict(one.state_dict())
        assert all(torch.equal(next(one)["input_ids"], next(again)["input_ids"]) for _ in range(one.per_epoch))


@pytest.mark.slow
def test_training_has_the_losses_of_memory_and_resumes_to_the_same_bits(tokenizer, tmp_path, machine):
    texts = documents(300)
    mapped = shards.open(str(write_parquet(tmp_path / "a.parquet", texts)), tokenizer)["train"]
    held = in_memory(texts, tokenizer)["train"]

    def trained(stream, total: int, **options) -> tuple[list[float], dict]:
        torch.manual_seed(0)
        model = models.tiny(len(tokenizer), hidden=32, layers=1, heads=2)
        batches = text.Batches(stream, rows=4, length=16)
        records = train.fit(model, batches, train.adamw(model, lr=1e-2), total=total, machine=machine, **options)
        return [record["loss"] for record in records], model.state_dict()

    straight, weights = trained(mapped, 12)
    assert trained(held, 12)[0] == straight
    trained(mapped, 5, checkpoints=tmp_path / "checkpoints")
    resumed, others = trained(mapped, 12, checkpoints=tmp_path / "checkpoints")
    assert resumed == straight and all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_start_reads_large_corpora_from_here_and_gives_the_same(tokenizer, tiny, tmp_path, machine, monkeypatch):
    tiny.resize_token_embeddings(len(tokenizer))
    tiny.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    corpus = str(write_jsonl(tmp_path / "a.jsonl", documents(300)))
    starts = []
    for small in (shards.SMALL, 100):
        monkeypatch.setattr(shards, "SMALL", small)
        starts.append(start.open(str(tmp_path / "model"), corpus=corpus, length=16, rows=3, machine=machine))
    in_memory, on_disk = starts
    assert isinstance(on_disk.stream, shards.Tokens) and not isinstance(in_memory.stream, shards.Tokens)
    for name in ("stream", "validation", "held_out"):
        assert torch.equal(getattr(in_memory, name)[:], getattr(on_disk, name)[:])
    assert on_disk.validation.shape == (3, 16) and type(on_disk.validation) is torch.Tensor
    assert torch.equal(*(next(each.batches(rows=2))["input_ids"] for each in starts))
    assert in_memory.loss(in_memory.model) == on_disk.loss(in_memory.model)


@pytest.mark.parametrize(
    "corpus, expected",
    [
        ("prose", False),
        ("code", False),
        ("hf:some/set", True),
        ("small.txt", False),
        ("small.txt?tokens=1k", True),
        ("small.txt?column=a", True),
        ("large.txt", True),
        ("folder", True),
    ],
)
def test_who_is_read_from_here(corpus, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shards, "SMALL", 100)
    (tmp_path / "small.txt").write_text("a" * 100)
    (tmp_path / "large.txt").write_text("a" * 101)
    write_parquet(tmp_path / "folder" / "a.parquet", ["a"])
    assert shards.needed(corpus) is expected


# --------------------------------------------------------------------------------------------------- kept for good


def test_a_second_opening_reads_no_document(tokenizer, tmp_path, monkeypatch):
    corpus = str(write_parquet(tmp_path / "a.parquet", documents(200)))
    first = shards.open(corpus, tokenizer)
    monkeypatch.setattr(shards, "_tokenise", None)
    assert equal(shards.open(corpus, tokenizer), first)


def test_another_corpus_option_or_tokenizer_is_another_store(tokenizer, tmp_path, outputs):
    texts = documents(200)
    file = write_parquet(tmp_path / "a" / "a.parquet", texts, other=texts[::-1])
    other = text.train_tokenizer(documents(100, seed=1), vocab_size=401)
    for corpus, words in (
        (f"{file}", tokenizer),
        (f"{file}?column=other", tokenizer),
        (f"{file}?tokens=4k", tokenizer),
    ):
        shards.open(corpus, words)
    shards.open(f"{file}", other)
    shards.open(f"hf:{file.parent}", tokenizer)
    before = stores(outputs)
    assert len(before) == 5
    tokenizer(["a", "b c"], padding=True, truncation=True, max_length=3)  # leaves its mark in the tokenizer
    shards.open(f"{file}?tokens=4000", tokenizer)
    shards.open(str(file.parent.rename(tmp_path / "b") / "a.parquet"), tokenizer)
    assert stores(outputs) == before
    write_parquet(tmp_path / "b" / "a.parquet", texts[1:])
    shards.open(str(tmp_path / "b" / "a.parquet"), tokenizer)
    assert len(stores(outputs)) == 6


def interrupted(corpus: str, tokenizer, monkeypatch, after: int) -> None:
    """Tokenise until `after` batches are done."""
    real = shards._batches

    def some(*args):
        for number, batch in enumerate(real(*args)):
            if number == after:
                raise KeyboardInterrupt
            yield batch

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shards, "_batches", some)
        shards.open(corpus, tokenizer)


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "txt", "hf"])
@pytest.mark.parametrize("after", [1, 7, 19])
def test_an_interrupted_making_goes_on_to_the_same_bytes(
    kind, after, tokenizer, tmp_path, outputs, monkeypatch, capsys
):
    texts = documents(400)
    if kind == "txt":
        monkeypatch.setattr(text._pieces, "__defaults__", (200,))
    for number in (0, 1):
        some, folder = texts[200 * number : 200 * number + 200], tmp_path / "corpus"
        if kind in ("parquet", "hf"):
            write_parquet(folder / f"{number}.parquet", some)
        else:
            folder.mkdir(exist_ok=True)
            (folder / f"{number}.txt").write_text("\n\n".join(some)) if kind == "txt" else write_jsonl(
                folder / f"{number}.jsonl", some
            )
    corpus = f"hf:{folder}" if kind == "hf" else str(folder)
    shards.open(corpus, tokenizer)
    straight = content(store(outputs))
    store(outputs).rename(tmp_path / "straight")
    interrupted(corpus, tokenizer, monkeypatch, after)
    left = len(files.read_json(store(outputs) / "manifest.json").get("shards", []))
    assert (left > 0) == (after > 1)
    shards.open(corpus, tokenizer)
    assert content(store(outputs)) == straight


def test_parquet_goes_on_at_its_row_group_and_the_hub_skips(tokenizer, tmp_path, monkeypatch):
    corpus = str(write_parquet(tmp_path / "set" / "a.parquet", documents(400)))
    interrupted(corpus, tokenizer, monkeypatch, 19)
    groups, skipped = [], []
    real = parquet.ParquetFile.iter_batches
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", lambda s, n, g, c: groups.append(g[0]) or real(s, n, g, c))
    shards.open(corpus, tokenizer)
    assert groups == list(range(groups[0], 14)) and groups[0] > 3
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setattr(shards, "SHARD", 3000), patch.setattr(shards, "BATCH", 2000)
        patch.setenv("NBLIB_OUTPUTS", str(tmp_path / "outputs"))
        from datasets import IterableDataset

        interrupted(f"hf:{tmp_path / 'set'}", tokenizer, monkeypatch, 19)
        skip = IterableDataset.skip
        patch.setattr(IterableDataset, "skip", lambda self, n: skipped.append(n) or skip(self, n))
        shards.open(f"hf:{tmp_path / 'set'}", tokenizer)
    assert skipped[0] > 100


def harm(folder: Path, how: str) -> None:
    if how == "a bit of the middle":
        raw = bytearray((folder / "train").read_bytes())
        raw[len(raw) // 2] ^= 4
        (folder / "train").write_bytes(raw)
    elif how == "cut short":
        os.truncate(folder / "held_out", 100)
    elif how == "a file gone":
        (folder / "validation").unlink()
    else:
        (folder / "manifest.json").write_text(how)


@pytest.mark.parametrize(
    "how", ["a bit of the middle", "cut short", "a file gone", "{", "[]", '{"shards": 3}', '{"about": 1, "shards": []}']
)
@pytest.mark.parametrize("finished", [True, False])
def test_damage_is_noticed_and_made_again(how, finished, tokenizer, tmp_path, outputs, monkeypatch, capsys):
    corpus = str(write_parquet(tmp_path / "a.parquet", documents(400)))
    mapped = shards.open(corpus, tokenizer)
    straight, expected = content(store(outputs)), mapped["train"][:]
    if not finished:
        store(outputs).rename(tmp_path / "straight")
        interrupted(corpus, tokenizer, monkeypatch, 19)
    harm(store(outputs), how)
    capsys.readouterr()
    shards.open(corpus, tokenizer)
    assert content(store(outputs)) == straight
    assert "is damaged: " in (said := capsys.readouterr().out) and "set aside as" in said
    if how != "a bit of the middle" and how != "cut short":
        assert torch.equal(mapped["train"][:], expected), "a training that reads from the old one is not disturbed"


def test_no_bit_of_a_manifest_can_change_what_is_read(tokenizer, tmp_path, outputs):
    corpus = str(write_jsonl(tmp_path / "a.jsonl", documents(120)))
    expected = {name: stream[:] for name, stream in shards.open(corpus, tokenizer).items()}
    manifest = store(outputs) / "manifest.json"
    written = manifest.read_bytes()
    for _ in flips(manifest, count=20):
        assert equal(shards.open(corpus, tokenizer), expected)
        assert manifest.read_bytes() == written
    assert len(list(outputs.glob("damaged-*"))) == 20


def forked(corpus: str, tokenizer, printed: str) -> int:
    """A process of its own that opens the corpus; what it prints goes into a file."""
    if pid := os.fork():
        return pid
    try:
        os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT), 1)
        streams = shards.open(corpus, tokenizer)
        print({name: int(stream[:].sum()) for name, stream in streams.items()}, flush=True)
        os._exit(0)
    finally:
        os._exit(1)


def test_processes_at_once_make_one_store(tokenizer, tmp_path, outputs, monkeypatch, capfd):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # threads do not survive a fork
    corpus, names = str(write_parquet(tmp_path / "a.parquet", documents(1500))), [tmp_path / n for n in "abc"]
    with capfd.disabled():
        ends = [os.waitpid(pid, 0)[1] for pid in [forked(corpus, tokenizer, str(name)) for name in names]]
    printed = [name.read_text().splitlines() for name in names]
    assert ends == [0, 0, 0] and len({lines[-1] for lines in printed}) == 1 and store(outputs)
    assert sum(any(line.startswith("tokenised") for line in lines) for lines in printed) == 1
    assert sum(any("waiting for it" in line for line in lines) for lines in printed) >= 1


@pytest.mark.slow
def test_killed_twenty_times_it_has_the_same_bytes(tokenizer, tmp_path, outputs, monkeypatch, capfd):
    corpus = str(write_parquet(tmp_path / "a.parquet", documents(6000)))
    began = time.monotonic()
    shards.open(corpus, tokenizer)
    took = time.monotonic() - began
    straight = content(store(outputs))
    store(outputs).rename(tmp_path / "straight")
    draw = random.Random(0)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    left = []  # shards after each kill
    with capfd.disabled():
        for _ in range(20):
            pid = forked(corpus, tokenizer, os.devnull)
            time.sleep(draw.uniform(0.02, took / 10))
            os.kill(pid, signal.SIGKILL)
            assert os.WIFSIGNALED(os.waitpid(pid, 0)[1]), "it was at work"
            (folder,) = stores(outputs) or [tmp_path]
            left.append(len(files.read_json(folder / "manifest.json").get("shards", [])))
    assert left == sorted(left) and left[-1] > left[0]
    assert equal(shards.open(corpus, tokenizer), in_memory(documents(6000), tokenizer))
    assert content(store(outputs)) == straight


@pytest.mark.slow
def test_memory_stays_flat_and_reading_is_much_faster_than_training(tmp_path):
    """Five million tokens here; docs/log.md has fifty."""
    command = [sys.executable, Path(__file__).with_name("corpus_bench.py"), tmp_path, "5000000"]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(paths.root())})
    facts = json.loads(run.stdout.splitlines()[-1])
    print(facts)
    assert facts["tokens"] > 4e6 and facts["peak MiB"] < 500
    assert facts["read per s"] > 20 * facts["trained per s"]


# --------------------------------------------------------------------------------------------- what cannot be read


def test_a_corpus_that_changes_while_it_is_read_is_refused(tokenizer, tmp_path, outputs, monkeypatch, capsys):
    file = write_parquet(tmp_path / "a.parquet", documents(200))
    real = shards._parquet

    def grows(*args):
        yield from real(*args)
        write_parquet(file, documents(201))

    with monkeypatch.context() as patch:
        patch.setattr(shards, "_parquet", grows)
        with pytest.raises(ValueError, match="changed while it was read: start again"):
            shards.open(str(file), tokenizer)
    assert stores(outputs) == []
    assert equal(shards.open(str(file), tokenizer), in_memory(documents(201), tokenizer))


@pytest.mark.parametrize(
    "corpus, says",
    [
        ("a.parquet?colum=text", "corpus 'a.parquet?colum=text' has no option 'colum': allowed are column, tokens"),
        ("a.parquet?split=train", "has no option 'split': allowed are column, tokens"),
        ("hf:some/set?subset=a", "has no option 'subset': allowed are column, tokens, name, split, revision"),
        ("a.parquet?tokens=abc", "tokens = 'abc': must be a number above 0 like 500000, 200k, 1.5M or 10B"),
        ("a.parquet?tokens=0", "tokens = '0': must be a number above 0"),
        ("a.parquet?column=body", "a.parquet has no column 'body', it has number, text: choose with ?column="),
        ("a.parquet?column=number", "its column holds int, not text"),
        ("broken.parquet", "broken.parquet cannot be read as parquet: "),
        ("cut.parquet", "cut.parquet cannot be read as parquet: "),
        ("empty.parquet", "corpus 'empty.parquet' has no document in its held_out split: it needs more documents"),
        ("nothing.txt?tokens=1k", "has no document in its held_out split"),
        ("few.jsonl?tokens=1k", "has no document in its "),
        ("few.jsonl?column=body", "few.jsonl at byte 0: expected a JSON object with a 'body' field"),
        ("not.parquet?x", "corpus 'not.parquet?x' has no option 'x'"),
        ("not.parquet", "corpus 'not.parquet' does not exist: use prose, code, a file, a folder or hf:<dataset>"),
        (
            "hf:set?column=body",
            "corpus 'hf:set?column=body': no column 'body', it has number, text: choose with column=",
        ),
        ("hf:set?split=test", "Bad split: test. Available splits: ['train']"),
        ("hf:set?name=other", "BuilderConfig 'other' not found. Available: ['default']"),
        (
            "hf:some/set",
            "corpus 'hf:some/set' cannot be fetched (LocalEntryNotFoundError): what is tokenised is kept, a",
        ),
        (
            f"hf:some/set?revision={'a' * 40}",
            "A local parquet file or folder (corpus=/path/to/it) and corpus=prose need",
        ),
        ("hf:a b/c", "corpus 'hf:a b/c': Repo id must use alphanumeric"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(corpus, says, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_parquet(tmp_path / "a.parquet", documents(100))
    write_parquet(tmp_path / "set" / "a.parquet", documents(100))
    write_parquet(tmp_path / "empty.parquet", pa.array([], pa.string()))
    raw = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "broken.parquet").write_bytes(b"no parquet" * 100)
    (tmp_path / "cut.parquet").write_bytes(raw[: len(raw) // 2])
    (tmp_path / "nothing.txt").write_text(" \n\n \n")
    write_jsonl(tmp_path / "few.jsonl", ["one"])
    with pytest.raises((ValueError, LookupError, OSError), match=re.escape(says)) as raised:
        shards.open(corpus, tokenizer)
    assert "\n" not in str(raised.value) and raised.value.__suppress_context__ | (raised.value.__context__ is None)


def test_a_damaged_page_of_a_parquet_file_is_one_sentence(tokenizer, tmp_path):
    file = write_parquet(tmp_path / "a.parquet", documents(100))
    raw = bytearray(file.read_bytes())
    raw[200:4000] = bytes(3800)
    file.write_bytes(raw)
    with pytest.raises(ValueError, match="cannot be read as parquet"):
        shards.open(str(file), tokenizer)


@pytest.mark.parametrize("package, corpus", [("datasets", "hf:set"), ("pyarrow", "set")])
def test_a_package_that_is_missing_is_named_with_the_line_that_installs_it(
    package, corpus, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_parquet(tmp_path / "set" / "a.parquet", documents(10))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"needs the package {package}: pip install datasets"):
        shards.open(corpus, tokenizer)


def test_a_tokenizer_without_an_end_is_refused(tokenizer):
    other = text.train_tokenizer(documents(50), vocab_size=300)
    other.eos_token = None
    with pytest.raises(ValueError, match="no eos_token"):
        shards.open("hf:some/set", other)
