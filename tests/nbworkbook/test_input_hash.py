"""What a parameter points at, as files and as a hash; what is installed; how many threads were
asked for.
"""

import os
import re
from pathlib import Path

import pytest
from huggingface_hub import constants

from nblib import corpora, corpus_files, paths
from nbworkbook import input_hash, jobs


@pytest.fixture
def folder(tmp_path) -> Path:
    for name in (
        "b.txt",
        "a/z.md",
        "a/b/c.py",
        "a.b/c.txt",
        "A.txt",
        "é.jsonl",
        ".hidden.txt",
        ".d/e.txt",
        "no.bin",
    ):
        (tmp_path / "corpus" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "corpus" / name).write_text(f'{{"text": "{name}"}}')
    (tmp_path / "corpus" / "a folder.txt").mkdir()
    return tmp_path / "corpus"


def under(folder: Path, **options) -> list[str]:
    return [str(file.relative_to(folder)) for file in corpus_files.files_of(folder, **options)]


def test_of_a_plain_folder_all_texts_in_the_order_that_corpora_always_had(folder):
    every = sorted(
        file for file in folder.rglob("*") if file.suffix in corpus_files.TEXTS and file.is_file()
    )
    assert corpus_files.files_of(folder) == every and len(every) == 8
    assert corpus_files.files_of(folder, ()) == sorted(
        file for file in folder.rglob("*") if file.is_file()
    )
    assert corpus_files.files_of(folder / "no.bin") == [folder / "no.bin"], (
        "a file that is named is read whatever its kind"
    )
    assert (
        corpus_files.files_of(folder / "nothing") == [] == corpus_files.files_of(Path("/dev/null"))
    )


def test_links_are_followed_and_loops_end(folder, tmp_path):
    other = tmp_path / "other"
    (other / "deep").mkdir(parents=True)
    (other / "deep" / "x.txt").write_text("x")
    (other / "deep" / "back").symlink_to(folder)
    (folder / "link").symlink_to(other)
    # sorts before what it leads to, which keeps its own name
    (folder / "0 again").symlink_to(folder / "a")
    (folder / "self").symlink_to(folder)
    (folder / "circle").symlink_to(folder / "circle")
    (folder / "file.txt").symlink_to(other / "deep" / "x.txt")
    plain = {
        "b.txt",
        "a/z.md",
        "a/b/c.py",
        "a.b/c.txt",
        "A.txt",
        "é.jsonl",
        ".hidden.txt",
        ".d/e.txt",
    }
    assert sorted(under(folder)) == sorted(plain | {"link/deep/x.txt", "file.txt"})
    (tmp_path / "door").symlink_to(folder)
    assert sorted(under(tmp_path / "door")) == sorted(plain | {"link/deep/x.txt", "file.txt"})


def test_what_is_no_file_is_not_read_and_a_link_to_nowhere_is_not_passed_over(folder):
    os.mkfifo(folder / "pipe.txt")
    assert "pipe.txt" not in under(folder)
    (folder / "gone.txt").symlink_to(folder / "nowhere.txt")
    assert "gone.txt" in under(folder)
    before = corpus_files.fingerprint(folder)
    with pytest.raises(FileNotFoundError, match="gone.txt"):
        list(corpora._local(folder, "text", 0))
    (folder / "nowhere.txt").symlink_to(folder / "b.txt")
    assert corpus_files.fingerprint(folder) != before


def test_the_texts_of_a_corpus_are_those_of_its_files(folder, tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "m.txt").write_text("more")
    (folder / "link").symlink_to(tmp_path / "more")
    read = [file.read_text() for file in corpus_files.files_of(folder) if file.suffix != ".jsonl"]
    assert [
        each for each in corpora._local(folder, "text", 0) if each != "é.jsonl"
    ] == read and "more" in read
    assert list(corpora._local(folder / "é.jsonl", "text", 0)) == ["é.jsonl"]


def test_a_folder_is_known_by_names_and_contents_wherever_it_lies(folder, tmp_path):
    before = corpus_files.fingerprint(folder)
    moved = folder.rename(tmp_path / "moved")
    assert corpus_files.fingerprint(moved) == before != corpus_files.fingerprint(moved, ())
    (moved / "no.bin").write_text("changed")
    assert corpus_files.fingerprint(moved) == before
    (moved / "a" / "z.md").rename(moved / "a" / "y.md")
    assert corpus_files.fingerprint(moved) != before, (
        "under another name, at the same place in the order"
    )
    (moved / "a" / "y.md").rename(moved / "a" / "z.md")
    assert corpus_files.fingerprint(moved) == before
    (moved / "b.txt").write_text("swapped"), (moved / "A.txt").write_text('{"text": "b.txt"}')
    assert corpus_files.fingerprint(moved) != before


def test_a_large_file_is_known_by_its_size_its_time_and_its_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_files, "WHOLE", 10)
    monkeypatch.setattr(corpus_files, "MIB", 4)
    file, seen = tmp_path / "large.bin", []

    def known(content: str, time: int = 5) -> str:
        file.write_text(content)
        os.utime(file, ns=(time, time))
        return corpus_files.fingerprint(file)

    for content in ("0123456789ab", "x123456789ab", "0123456789ax", "0123456789abc"):
        seen.append(known(content))
    seen.append(known("0123456789ab", time=6))
    assert len(set(seen)) == 5 and known("0123456789ab") == seen[0]
    assert known("0123xxxx89ab") == seen[0] != known("0123xxxxx89ab"), (
        "the middle does not count, but its length does"
    )
    assert known("short") == known("short", time=6) != known("shorT")


def test_a_hash_is_kept_while_the_file_is_not_touched(tmp_path, monkeypatch):
    file, reads, sha256 = tmp_path / "a.txt", [], corpus_files.files.sha256
    file.write_text("a")
    monkeypatch.setattr(
        corpus_files.files, "sha256", lambda path: reads.append(path) or sha256(path)
    )
    now = corpus_files.time.time_ns()
    before = corpus_files.fingerprint(file), corpus_files.fingerprint(file)
    assert len(reads) == 2, "it was written just now"
    monkeypatch.setattr(corpus_files.time, "time_ns", lambda: now + 10**10)
    after = [corpus_files.fingerprint(file) for _ in range(5)]
    assert len(reads) == 3 and {*before, *after} == {before[0]}
    file.write_text("b")
    assert corpus_files.fingerprint(file) != before[0]


@pytest.mark.parametrize(
    "value, mark, expected",
    [
        ("prose", "a corpus", None),
        ("code", "a corpus", None),
        ("hf:some/set", "a corpus", "c" * 12),
        ("hf:other/set", "a corpus", "unknown"),
        ("hf:some/set?name=a&tokens=1M", "a corpus", "c" * 12),
        ("hf:some/set?revision=v2", "a corpus", "d" * 12),
        ("hf:some/set?revision=v3", "a corpus", "unknown"),
        (f"hf:other/set?tokens=1M&revision={'e' * 40}", "a corpus", "e" * 12),
        ("corpus?column=body&tokens=1M", "a corpus", "sha256"),
        ("corpus", "a corpus", "sha256"),
        ("", "a model", None),
        ("corpus", "a model", "sha256"),
        ("some/model", "a model", "a" * 12),
        ("other/model", "a model", "unknown"),
        ("corpus/b.txt", None, "sha256"),
        ("corpus", None, "sha256"),
        ("corpus/nothing", None, None),
        ("svd", ("svd", "zeros"), None),
        ("", None, None),
        (".", None, None),
        ("/", None, None),
        ("../..", None, None),
        ("~nobody/x", None, None),
        ("x" * 5000, None, None),
        ("a\0b", None, None),
        ("\ud800", None, None),
    ],
)
def test_what_a_value_points_at(value, mark, expected, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("NBLIB_NOTEBOOKS", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for name, commit in {"models--some--model": "a", "datasets--some--set": "c"}.items():
        (tmp_path / "hub" / name / "refs").mkdir(parents=True)
        (tmp_path / "hub" / name / "refs" / "main").write_text(commit * 40 + "\n")
    (tmp_path / "hub/datasets--some--set/refs/v2").write_text("d" * 40)
    found = input_hash.named(value, mark)
    assert found == expected or (
        expected == "sha256" and re.fullmatch(r"sha256:[0-9a-f]{16}", found)
    )
    if found and found.startswith("sha256"):
        # a corpus has no such files, a model or an unknown folder may
        (folder / "no.bin").write_text("changed")
        assert (input_hash.named(value, mark) != found) == (
            value == "corpus" and mark != "a corpus"
        )
        (folder / "new.parquet").write_text("of a kind that only corpora.py reads")
        assert (input_hash.named(value, mark) == found) == (value == "corpus/b.txt")


@pytest.mark.parametrize(
    "value, place, options",
    [
        ("prose", "prose", {}),
        ("a/b.txt", "a/b.txt", {}),
        ("a/b.txt?tokens=1k", "a/b.txt", {"tokens": 1000}),
        ("what?.txt", "what?.txt", {}),
        ("hf:a/b", "hf:a/b", {}),
        ("hf:a/b?", "hf:a/b", {}),
        (
            "hf:a/b?name=c-d&split=train&revision=v1&column=body&tokens=2.5M",
            "hf:a/b",
            {
                "name": "c-d",
                "split": "train",
                "revision": "v1",
                "column": "body",
                "tokens": 2_500_000,
            },
        ),
    ],
)
def test_the_place_and_the_options_of_a_corpus(value, place, options, tmp_path):
    (tmp_path / "what?.txt").write_text("a question mark in a name")
    assert corpus_files.corpus_options(value, tmp_path) == (place, options)


@pytest.mark.parametrize(
    "value", ["a?name=b", "hf:a/b?nam=c", "a?x", "hf:a/b?tokens=", "a?tokens=1kk", "a?tokens=-1"]
)
def test_an_option_that_is_none_is_refused(value, tmp_path):
    with pytest.raises(ValueError, match="has no option|must be a number above 0"):
        corpus_files.corpus_options(value, tmp_path)


def test_numbers_of_tokens():
    numbers = {
        "1": 1,
        "500000": 500_000,
        "200k": 200_000,
        "1.5M": 1_500_000,
        "10B": 10**10,
        "0.001k": 1,
    }
    assert {
        text: corpus_files.corpus_options(f"a?tokens={text}")[1]["tokens"] for text in numbers
    } == numbers
    for text_ in ("", "k", "1 M", "1e6", "0", "0.0M", "-1", "1K", "1m", "nan", "1" * 13, "١"):
        with pytest.raises(
            ValueError, match="tokens = .*: must be a number above 0 like 500000, 200k, 1.5M or 10B"
        ):
            corpus_files.corpus_options(f"a?tokens={text_}")


def test_where_a_value_points(tmp_path, monkeypatch):
    monkeypatch.setenv("NBLIB_NOTEBOOKS", str(tmp_path))
    monkeypatch.setenv("HOME", "/home/someone")
    assert corpus_files.resolve("a/b.txt") == tmp_path / "a/b.txt" and corpus_files.resolve(
        "/a"
    ) == Path("/a")
    assert (
        corpus_files.resolve("~/a") == Path("/home/someone/a")
        and corpus_files.resolve("a~") == tmp_path / "a~"
    )


@pytest.fixture
def metadata(tmp_path, monkeypatch):
    """Write the metadata of packages to a folder that comes first on the path."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(paths, "root", lambda: tmp_path)

    def write(name: str, version: str, *required: str, modules: tuple[str, ...] = ()) -> None:
        folder = tmp_path / "site" / f"{name.replace(chr(45), chr(95))}-{version}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {line}" for line in required]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
        (folder / "top_level.txt").write_text("\n".join(modules))
        for module in modules:
            (tmp_path / "site" / f"{module}.py").write_text("")
        input_hash.forget()

    yield write
    input_hash.forget()


def test_versions_are_those_of_what_is_imported_and_of_what_that_requires(metadata):
    metadata(
        "one_a",
        "1.0",
        "Two.B>=1",
        "three-c; extra == 'more'",
        "four-d; python_version < '3'",
        "gone",
    )
    metadata("two-b", "2.0", "one-a")
    for name in ("three-c", "four-d"):
        metadata(name, "1.0")
    found = input_hash.versions(["one_a.part.of", "os.path", "no_such_module"])
    assert found == {"python": found["python"], "one-a": "1.0", "two-b": "2.0"}
    assert input_hash.versions([], ["one_a"]) == found and list(found)[0] == "python"


def test_a_module_stands_for_the_package_that_brings_it_whatever_it_is_called(metadata):
    metadata("Distribution-Of-It", "3.0", modules=("module_of_it",))
    assert input_hash.versions(["module_of_it"])["distribution-of-it"] == "3.0"
    assert {"pillow", "pyyaml"} <= input_hash.versions(["PIL.Image", "yaml"]).keys()
    assert (
        input_hash.distributions_of("PIL") == ["pillow"]
        and input_hash.distributions_of("__main__") == []
    )


def test_of_what_the_library_reaches_the_lock_decides_and_of_what_a_cell_imports_it_does_not(
    metadata, tmp_path
):
    for name in ("one", "two", "three"):
        metadata(name, "1.0", "four", modules=(name,))
    metadata("four", "1.0")
    (tmp_path / "requirements.lock").write_text(
        "# of a run\nTwo==7 ; python_version > '3'\nfour==1\nfive==1\n"
    )
    assert input_hash.versions(["one"], ["two", "three"]).keys() == {"python", "one", "two", "four"}


def test_what_a_notebook_of_ours_reaches_holds_no_tool(monkeypatch):
    input_hash.forget()
    versions = jobs.plan(["11"])[0].inputs
    assert {
        "torch",
        "transformers",
        "tokenizers",
        "peft",
        "numpy",
        "bitsandbytes",
        "matplotlib",
    } <= versions.keys()
    assert (
        not {"ruff", "pytest", "pytest-xdist", "playwright", "jupyterlab", "hypothesis", "nbval"}
        & versions.keys()
    )


def test_threads_are_those_asked_for(monkeypatch):
    for name in input_hash.THREADS:
        monkeypatch.delenv(name, raising=False)
    assert input_hash.threads() == {"OMP_NUM_THREADS": "auto", "MKL_NUM_THREADS": "auto"}
    monkeypatch.setenv("OMP_NUM_THREADS", " 4 ")
    assert input_hash.threads()["OMP_NUM_THREADS"] == "4"
