"""An executed notebook becomes a page when it is newer than its page, and what cannot be read is a sentence."""

import json

import pytest

from nblib import files
from nblib.run import pages

CELL = {"cell_type": "code", "id": "a", "metadata": {}, "source": "1 + 1", "execution_count": 1, "outputs": []}


@pytest.fixture
def folder(tmp_path):
    document = {"cells": [CELL], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "notebook.ipynb").write_text(json.dumps(document))
    return tmp_path


def test_a_page_is_converted_again_only_when_its_notebook_changed(folder):
    assert pages.convert(folder) is None
    stamp = (folder / "notebook.html").stat().st_mtime_ns
    pages.convert(folder)
    assert (folder / "notebook.html").stat().st_mtime_ns == stamp, "converted again although nothing changed"
    (folder / "notebook.ipynb").touch()
    pages.convert(folder)
    assert (folder / "notebook.html").stat().st_mtime_ns > stamp


def test_a_page_of_another_policy_is_converted_again(folder):
    pages.convert(folder)
    page = folder / "notebook.html"
    page.write_text(page.read_text().replace("script-src", "style-src"))
    pages.convert(folder)
    assert pages.POLICY in page.read_text() and "1" in page.read_text()


def test_what_is_no_notebook_leaves_no_page_and_says_so(folder):
    pages.convert(folder)
    files.write(folder / "notebook.ipynb", "{")
    sentence = pages.convert(folder)
    assert sentence.startswith("unreadable: ") and "notebook.ipynb" in sentence
    assert not (folder / "notebook.html").exists()
    assert pages.convert(folder / "nowhere") is None, "a run without a notebook has no page"


def test_text_is_no_markup_in_an_attribute_either():
    assert pages.text("<b a='1' c=\"2\">&\ud800") == "&lt;b a=&#x27;1&#x27; c=&quot;2&quot;&gt;&amp;?"
