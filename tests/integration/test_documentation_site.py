"""The documentation site from files: offline search, no remote resources."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.browser import find_chromium
from fixtures.documentation import ROOT

pytest.importorskip("material", reason="the extra docs is not installed")

SEARCH = """<script>addEventListener("load", () => setTimeout(() => {
  document.querySelector("#__search").click();
  const query = document.querySelector("[data-md-component=search-query]");
  query.focus();
  query.value = "tensor parallelism";
  query.dispatchEvent(new Event("input", { bubbles: true }));
  query.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
  setTimeout(() => {
    const found = [...document.querySelectorAll(".md-search-result__link")];
    document.documentElement.dataset.found = found.map((one) => one.getAttribute("href")).join(" ");
  }, 3000);
}, 500));</script></body>"""
REMOTE_RESOURCE = re.compile(
    r'<(?:script|img|iframe)[^>]*src="https?:|<link[^>]*rel="stylesheet"[^>]*https?:'
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def test_site_pages_load_no_remote_resource(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        assert not REMOTE_RESOURCE.search(page.read_text("utf-8")), page


@pytest.mark.browser
def test_site_search_works_offline(site: Path, tmp_path: Path) -> None:
    page = site / "index.html"
    page.write_text(page.read_text("utf-8").replace("</body>", SEARCH), "utf-8")
    completed = subprocess.run(
        [
            find_chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000",
            "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    match = re.search(r'<html[^>]*data-found="([^"]*)"', completed.stdout)
    assert match is not None, completed.stdout[:500]
    assert "parallelism.html" in match[1]
