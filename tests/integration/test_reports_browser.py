"""Report pages in headless Chromium, offline, at two widths and in both themes."""

import html
import json
import re
import subprocess
from pathlib import Path

import pytest
from fixtures.browser import find_chromium
from fixtures.run_folders import (
    ABLATION,
    GRID,
    LARGE_GRID,
    STRATEGY_GRID,
    ablation_job,
    grid_job,
    large_job,
    make_run,
    make_sweep,
    out_of_memory,
    strategy_job,
)

from scalewise.reports import html_report

pytestmark = pytest.mark.browser

PROBE_SCRIPT = """<script>
addEventListener("error", (event) => problems.push(event.message));
addEventListener("load", () => setTimeout(() => {
  const drawn = [...document.querySelectorAll("figure svg[role=img]")];
  const shown = drawn.filter((svg) => svg.checkVisibility());
  const marks = (svg) => svg.querySelectorAll("path, rect, circle").length;
  const wide = [...document.querySelectorAll("body *")].filter((one) =>
    one.getBoundingClientRect().right > innerWidth + 1 && !one.closest(".scroll, .tablebox, svg"));
  const head = document.querySelector("#cmp thead button");
  if (head) head.click();
  document.documentElement.dataset.probe = JSON.stringify({
    width: innerWidth,
    scroll: document.documentElement.scrollWidth,
    outside: wide.slice(0, 3).map((one) => one.outerHTML.slice(0, 80)),
    pictures: shown.length,
    fewest: Math.min(...shown.map(marks)),
    background: getComputedStyle(document.body).backgroundColor,
    sorted: document.querySelector("#cmp th[aria-sort]")?.textContent.trim() ?? null,
    load: Math.round(performance.now()),
    problems,
  });
}, 50));
</script></body>"""


FRAME_PAGE = """<!doctype html>
<iframe src="probe.html" style="border:0;width:WIDTHpx;height:800px"></iframe>
<script>
const waiting = setInterval(() => {
  const inside = frames[0].document.documentElement?.dataset.probe;
  if (!inside) return;
  document.documentElement.dataset.probe = inside;
  clearInterval(waiting);
}, 50);
</script>"""


def probe(path: Path, tmp_path: Path, width: int, dark_theme: bool) -> dict[str, object]:
    """Measurements of a probe script in a copy of the page."""
    source = path.read_text("utf-8").replace(
        "<head>", "<head><script>const problems = [];</script>", 1
    )
    copy = tmp_path / "probe.html"
    copy.write_text(source.replace("</body>", PROBE_SCRIPT), "utf-8")
    target = copy
    if width < 500:  # windows have a minimum width: the page is shown in a frame
        target = tmp_path / "frame.html"
        target.write_text(FRAME_PAGE.replace("WIDTH", str(width)), "utf-8")
    theme = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark_theme else []
    completed = subprocess.run(
        [
            find_chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", "--allow-file-access-from-files", "--enable-logging=stderr", "--v=0",
            f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={max(width, 500)},900",
            "--virtual-time-budget=4000", *theme, "--dump-dom", target.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    console = [line for line in completed.stderr.splitlines() if "CONSOLE" in line]
    assert not console, console
    match = re.search(r'<html[^>]*data-probe="([^"]*)"', completed.stdout)
    assert match is not None, completed.stdout[:500]
    answer: dict[str, object] = json.loads(html.unescape(match[1]))
    return answer


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pages")
    return {
        "run": html_report.write_page(make_run(root / "run")),
        "failed": html_report.write_page(make_run(root / "failed", **out_of_memory())),
        "sweep": html_report.write_page(make_sweep(root / "sweep", STRATEGY_GRID, strategy_job)),
        "grid": html_report.write_page(make_sweep(root / "grid", GRID, grid_job)),
        "ladder": html_report.write_page(make_sweep(root / "ladder", ABLATION, ablation_job)),
    }


NUM_CHARTS = {"run": 6, "sweep": 6, "failed": 0, "grid": 9, "ladder": 10}
"""Number of charts of each page at one width."""


@pytest.mark.parametrize("dark_theme", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize(("name", "pictures"), NUM_CHARTS.items())
def test_report_page_renders_in_the_browser(
    pages: dict[str, Path], tmp_path: Path, name: str, pictures: int, width: int, dark_theme: bool
) -> None:
    page_state = probe(pages[name], tmp_path, width, dark_theme)
    assert page_state["width"] == width
    assert page_state["problems"] == []
    assert page_state["outside"] == []
    assert page_state["scroll"] <= width
    assert page_state["pictures"] == pictures
    assert pictures == 0 or page_state["fewest"] >= 1
    assert page_state["background"] == ("rgb(19, 20, 22)" if dark_theme else "rgb(253, 253, 252)")
    assert page_state["sorted"] == (None if name in ("run", "failed") else "job")


LAYOUT_SCRIPT = """<script>addEventListener("load", () => {
  document.body.offsetHeight;  // lays it out
  document.documentElement.dataset.opened = performance.now();
});</script></body>"""


@pytest.mark.timed
def test_report_page_of_two_hundred_jobs_opens(tmp_path: Path) -> None:
    path = html_report.write_page(make_sweep(tmp_path / "large", LARGE_GRID, large_job))
    assert path.stat().st_size < 10e6
    path.write_text(path.read_text("utf-8").replace("</body>", LAYOUT_SCRIPT), "utf-8")
    overrides = [find_chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom", path.as_uri()]  # fmt: skip
    durations = []
    for _ in range(3):
        completed = subprocess.run(
            overrides, capture_output=True, text=True, timeout=120, check=True
        )
        match = re.search(r'<html[^>]*data-opened="([0-9.]+)"', completed.stdout)
        assert match is not None, completed.stdout[:500]
        durations.append(float(match[1]) / 1e3)
    print(f"{path.stat().st_size / 1e6:.2f} MB, open after {min(durations):.2f} s")
    assert min(durations) < 2
