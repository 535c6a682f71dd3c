"""The page of a plan in a browser: it draws without errors, and pointer and keyboard work."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from pipecompile.ir.plan import Plan
from pipecompile.ir.size import size_text
from pipecompile.report.plan_page import OtherPlan, plan_page
from pipecompile.report.run_comparison import compare_run
from pipecompile.schedule.simulator import simulate_plan
from tests.recorded_runs import recorded_run, recorded_step
from tests.report.chromium import BROWSER, NAMES, Chromium
from tests.report.transformers import transformer_plan

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(NAMES)} is installed")

# Of each canvas: how many colours it has, and its size.
CANVASES = """
[...document.querySelectorAll("canvas")].map((canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const { width, height } = canvas.getBoundingClientRect();
  return [new Set(new Uint32Array(data.buffer)).size, width, height];
})
"""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
PLACE = "(({ left, top }) => [left, top])(document.querySelector('canvas').getBoundingClientRect())"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    browser = Chromium(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@cache
def small() -> Plan:
    return transformer_plan(4, 12, 10, memory_bytes=1 << 30)


@pytest.fixture
def opened(browser: Chromium, tmp_path: Path) -> Iterator[Chromium]:
    """A browser with the page of a small plan, which leaves nothing on the console."""
    path = tmp_path / "plan.html"
    path.write_text(plan_page(small(), simulate_plan(small())))
    browser.open(path)
    yield browser
    assert browser.console == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("ranks", "width"), [(4, 500), (64, 1280)])
def test_charts_are_drawn(
    browser: Chromium, tmp_path: Path, ranks: int, width: int, dark: bool
) -> None:
    plan = small() if ranks == 4 else transformer_plan(ranks, 4, 126, memory_bytes=2 << 30)
    path = tmp_path / "plan.html"
    path.write_text(plan_page(plan, simulate_plan(plan)))
    browser.open(path, width=width, dark=dark)
    canvases = browser.run(CANVASES)
    assert len(canvases) == 2
    for colours, wide, high in canvases:
        # Several colours, within the window, and at least 12 pixels for each rank.
        assert colours > 4 and width / 2 < wide < width and high >= 12 * ranks
    assert browser.run(OVERFLOW) == 0, "tables may scroll, but not the page"
    assert browser.console == []


def test_the_keyboard_goes_from_action_to_action_and_zooms(opened: Chromium) -> None:
    opened.run("document.querySelector('canvas.timeline').focus()")
    first = "rank 0, stage 0: forward of microbatch 0\npredicted: 0.000 to "
    assert opened.text("hint").startswith(first)
    opened.press("ArrowRight")
    assert opened.text("hint").startswith("rank 0, stage 0: forward of microbatch 1\n")
    opened.press("ArrowDown", "End")
    event = simulate_plan(small()).events[1][-1]
    assert opened.text("hint") == (
        "rank 1, stage 1: backward of microbatch 11\n"
        f"predicted: {event.start_ns / 1e6:.3f} to {event.end_ns / 1e6:.3f} ms, "
        f"{(event.end_ns - event.start_ns) / 1e6:.3f} ms long"
    )
    opened.press("+", "+")
    step_ns = small().prediction.step_ns
    assert opened.text("shown").endswith(f", {step_ns / 1.5**2 / 1e6:.3f} ms long")
    opened.press("Escape")
    assert opened.text("shown") == f"whole step: {step_ns / 1e9:.3f} s"
    assert opened.text("hint") == ""


def test_memory_is_told_by_kind(opened: Chromium) -> None:
    opened.run("document.querySelector('canvas.memory').focus()")
    opened.press("ArrowDown", "End")
    first, *parts = opened.text("hint").split("\n")
    assert first.startswith("rank 1: ") and first.endswith(" in stage 1, optimizer step")
    parameters = small().stages[1].footprint.parameters.expected
    assert f"parameters {size_text(parameters)}" in parts
    bound = small().prediction.memory[1].total.bound
    assert parts[-1] == f"bound at the peak {size_text(bound)} of 1.0 GiB"


def test_the_pointer_shows_details_drags_and_zooms(opened: Chromium) -> None:
    left, top = opened.run(PLACE)
    x, y = left + 62, top + 20
    whole = opened.text("shown")
    opened.mouse("mouseMoved", x, y)
    assert opened.text("hint").startswith("rank 0, stage 0: forward of microbatch 0\n")
    opened.run("document.querySelector('.zoom button').focus()")
    opened.mouse("mouseWheel", x, y, deltaX=0, deltaY=-240)
    assert opened.text("shown") == whole, "the wheel scrolls a page whose chart has no focus"
    opened.run("scrollTo(0, 0)")
    opened.mouse("mousePressed", x + 300, y, button="left", clickCount=1)
    opened.mouse("mouseReleased", x + 300, y, button="left", clickCount=1)
    opened.mouse("mouseWheel", x + 300, y, deltaX=0, deltaY=-240)
    zoomed = opened.text("shown")
    assert zoomed.endswith(f", {small().prediction.step_ns / 2 / 1e6:.3f} ms long")
    opened.mouse("mousePressed", x + 300, y, button="left", clickCount=1)
    opened.mouse("mouseMoved", x + 200, y, button="left", buttons=1)
    opened.mouse("mouseReleased", x + 200, y, button="left", clickCount=1)
    moved = opened.text("shown")
    starts = [float(span.split(" ")[0]) for span in (zoomed, moved)]
    assert 0 < starts[0] < starts[1] and zoomed.split(",")[1] == moved.split(",")[1]
    opened.run("document.querySelector('[data-zoom=all]').click()")
    opened.press("Shift")
    assert opened.text("shown") == whole


def test_blocks_are_one_stop_of_the_tab_key(opened: Chromium) -> None:
    stops = "document.querySelectorAll('.stages [tabindex=\"0\"]')"
    assert opened.run(f"{stops}.length") == 1
    opened.run(f"{stops}[0].focus()")
    opened.press("ArrowRight")
    # The embedding takes 1.2 ms, attention and MLP of a layer 23.4 ms.
    assert opened.text("hint").startswith("model.layers.0\nstage 0 on rank 0\n23.4 ms, ")
    opened.press("ArrowDown")
    assert opened.text("hint").startswith("model.layers.2, in part\nstage 1 on rank 1\n")
    assert opened.run(f"{stops}.length") == 1


def test_an_action_is_told_in_all_timelines(browser: Chromium, tmp_path: Path) -> None:
    plan, old = small(), transformer_plan(4, 12, 10, schedule="gpipe", moved=2)
    run = recorded_run(plan, recorded_step(plan, 3, forward=2, backward=2, peak_bytes=700 << 20))
    comparison = compare_run(plan, simulate_plan(plan), run)
    other = OtherPlan("old.json", old, simulate_plan(old))
    path = tmp_path / "plan.html"
    path.write_text(plan_page(plan, simulate_plan(plan), comparison, other))
    browser.open(path)
    browser.run("document.querySelectorAll('canvas.timeline')[1].focus()")
    name, *times = browser.text("hint").split("\n")
    assert name == "rank 0, stage 0: forward of microbatch 0"
    names = [line.partition(":")[0] for line in times]
    assert names == ["measured, step 3", "predicted", "old.json"]
    lengths = [float(line.split(" ")[-3]) for line in times]
    assert lengths[0] == pytest.approx(2 * lengths[1], abs=0.002)
    browser.run("document.querySelector('canvas.memory').focus()")
    assert browser.text("hint").endswith("\nmeasured peak 700.0 MiB")
    assert browser.console == []
