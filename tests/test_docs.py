"""What stands in docs/ agrees with the code, and every link in prose leads somewhere.

Nothing is asked of a network.
"""

import json
import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from lessons import claims
from lessons.pitfalls import catalogue
from nblib import paths

ROOT = paths.root()
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("[ndto]*/**/*.md"),
        *ROOT.glob("notebooks/*.ipynb"),
        *ROOT.glob("docs/*"),
    ]
)
PAGES = sorted(
    {page for page in PAGES if page.suffix in (".md", ".ipynb") and ".venv" not in page.parts}
)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
PITFALLS = {p.id: p for p in catalogue()}
CLAIMS = [
    pytest.param(c, id=f"{w.anchor}-{n}") for w in claims.WRITE_UPS for n, c in enumerate(w.claims)
]


def prose(page: Path) -> str:
    """The markdown of a page, without code."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        text = "\n\n".join(
            "".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "markdown"
        )
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)


def anchors(page: Path) -> set[str]:
    """What can follow the # in a link to it: the ids that headings get, and those that are written
    down.
    """
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        text = "\n\n".join(
            "".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "markdown"
        )
        return {claims.heading_id(heading) for heading in re.findall(r"^#+ (.+)$", text, re.M)}
    headings = re.findall(r"^#+ (.+)$", text, re.M)  # a forge makes lower case of those in a .md
    return {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings} | set(
        re.findall(r'<a id="([^"]+)"></a>', text)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_an_anchor(page):
    for target in LINK.findall(prose(page)):
        if re.match(r"(https?|mailto):", target):
            continue
        path, _, anchor = target.partition("#")
        file = page if not path else (page.parent / unquote(path)).resolve()
        assert file.exists(), f"{target}: there is no {path}"
        if anchor:
            assert unquote(anchor) in anchors(file), f"{target}: {file.name} has no such anchor"


def test_there_is_something_to_check():
    assert len(PAGES) > 20 and sum(len(LINK.findall(prose(page))) for page in PAGES) > 100


def test_the_page_of_claims_is_what_the_catalogue_and_the_notebooks_make_it():
    assert (ROOT / "docs/claims.md").read_text(encoding="utf-8") == claims.page(), (
        "run python -m lessons.claims"
    )


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_verdict_agrees_with_the_catalogue(claim):
    assert claim.verdict in claims.VERDICTS
    if claim.verdict == claims.UNTRIED:
        assert claim.why and not claim.tried
    else:
        assert claim.tried and (claim.why or claim.tried in PITFALLS)
    tried = PITFALLS.get(claim.tried)
    if tried and tried.claimed and not tried.claim_holds and not claim.why:
        assert claim.verdict != claims.HOLDS  # the catalogue says that its claim does not hold
    if tried and tried.claim_holds:
        assert claim.verdict in (claims.HOLDS, claims.PART)


def test_every_pitfall_that_quotes_a_write_up_is_on_the_page():
    tried = {c.tried for w in claims.WRITE_UPS for c in w.claims}
    quoting = {p.id for p in PITFALLS.values() if "write-up" in p.claim}
    assert quoting <= tried, sorted(quoting - tried)


def test_the_glossary_is_short_sorted_and_complete():
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    entries = re.findall(r'^<a id="([^"]+)"></a>\*\*([^*]+)\*\*\. (.+)$', text, re.M)
    assert len(entries) >= 40
    assert [term.lower() for _, term, _ in entries] == sorted(
        term.lower() for _, term, _ in entries
    )
    for anchor, term, meaning in entries:
        assert anchor == term.lower().replace(" ", "-")
        assert len(re.sub(r"\]\([^)]*\)", "", meaning).split()) <= 40, term
