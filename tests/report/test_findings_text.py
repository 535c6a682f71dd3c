from __future__ import annotations

from pipecompile.ir.finding import Finding
from pipecompile.report.findings_text import findings_headline, findings_markdown, findings_text

SOUND = Finding(code="schedule", passed=True, message="sound")
WITHIN = Finding(code="imbalance", passed=True, message="imbalance 1.05 is within 1.1")
OVER = Finding(code="bubble", message="bubble 25.0% is over 20.0%")


def test_each_finding_is_a_line_with_a_tick_if_it_passed() -> None:
    assert findings_text([SOUND, OVER]) == "✓ sound\n✗ bubble 25.0% is over 20.0%"


def test_the_headline_counts() -> None:
    assert findings_headline([SOUND]) == "the plan is sound"
    assert findings_headline([SOUND, WITHIN]) == "all 2 checks passed"
    assert findings_headline([SOUND, WITHIN, OVER]) == "1 of 3 checks failed"
    assert findings_headline([OVER]) == "1 of 1 check failed"


def test_markdown_has_the_headline_and_the_lines_as_they_are() -> None:
    assert findings_markdown("plan.json", [SOUND]).splitlines() == [
        "### plan.json: the plan is sound",
        "",
        "```",
        "✓ sound",
        "```",
    ]
