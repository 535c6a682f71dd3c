from __future__ import annotations

import msgspec

from pipecompile.ir.schedule import Action, Event, Idle, Timeline
from pipecompile.ir.schedule_problem import NamedOrder, Order
from pipecompile.report.order import order_text, order_title

BEST = NamedOrder(name="1f1b", placement_shape="linear", value_ns=500, peak_bytes=8, over_bytes=0)
LARGE = NamedOrder(
    name="gpipe", placement_shape="linear", value_ns=380, peak_bytes=4096, over_bytes=2048
)
TIMELINE = Timeline(((Event(Action.parse("0F0"), 0, 400),),), ())
ORDER = Order(
    request="search",
    name="search",
    weight_versions="synchronous",
    microbatches=1,
    placement=(0,),
    placement_shape="linear",
    orders=(("0F0", "0B0"),),
    objective="makespan",
    makespan_ns=400,
    span_ns=350,
    lower_bound_ns=320,
    proven=False,
    bubble=0.125,
    idle=(Idle(dependency_ns=10, transfer_ns=20, memory_ns=30, imbalance_ns=40),),
    peak_bytes=(8,),
    memory_bytes=(2048,),
    fits=True,
    violations=(),
    best_named=BEST,
    named=(LARGE, BEST),
    seconds=1.25,
)


def _lines(order: Order) -> list[str]:
    return [" ".join(line.split()) for line in order_text(order, TIMELINE).splitlines()]


def test_the_figures_of_a_searched_order() -> None:
    lines = _lines(ORDER)
    assert lines[:6] == [
        "search: 1 stage on 1 rank, 1 microbatch (linear)",
        "step 400 ns, bound 320 ns, gap 20.00%, not proven",
        "span 350 ns at most from a rank's start to its end",
        "bubble 12.5%",
        "memory activations of at most 8 B on a rank; they fit",
        "search 20.00% less than 1f1b (linear), the best named one that fits; 1.25 s",
    ]
    assert "gpipe linear 380 ns - 4.0 KiB, 2.0 KiB over" in lines
    assert "1f1b linear 500 ns 36.00% 8 B, fits" in lines
    assert "named placed step gap activations ≤" in lines
    idle = "rank idle dependency transfer memory imbalance"
    assert f"{idle} activations ≤ left for activations" in lines
    assert "0 25.0% 2.5% 5.0% 7.5% 10.0% 8 B 2.0 KiB" in lines
    assert "0 0F0 0B0" in lines
    assert order_title(ORDER) == "search: 1 stage on 1 rank, 1 microbatch"


def test_the_bound_stands_behind_the_objective() -> None:
    lines = _lines(msgspec.structs.replace(ORDER, objective="span", proven=True))
    assert lines[1:3] == [
        "step 400 ns",
        "span 350 ns at most from a rank's start to its end, bound 320 ns, gap 8.57%, proven",
    ]


def test_where_the_search_finds_nothing_better() -> None:
    assert "search nothing better than 1f1b; 1.25 s" in _lines(
        msgspec.structs.replace(ORDER, name="1f1b")
    )
    assert "search no named schedule fits; 1.25 s" in _lines(
        msgspec.structs.replace(ORDER, best_named=None)
    )


def test_what_is_over_its_cap_has_no_gap() -> None:
    text = ("rank 0: from 0F0 on it holds up to 8 B, 4 B over its cap of 4 B",)
    lines = _lines(
        msgspec.structs.replace(
            ORDER, request="gpipe", fits=False, violations=text, memory_bytes=(4,)
        )
    )
    assert lines[1] == "step 400 ns"
    assert "memory activations of at most 8 B on a rank; they do not fit" in lines
    assert text[0] in lines


def test_long_orders_are_cut_off() -> None:
    row = tuple(f"0F{index}" for index in range(500))
    assert (
        max(
            map(
                len,
                order_text(msgspec.structs.replace(ORDER, orders=(row,)), TIMELINE).splitlines(),
            )
        )
        <= 100
    )


def test_the_order_for_a_plan_with_flops_costs_has_units() -> None:
    text = order_text(ORDER, TIMELINE, time_unit="relative")
    assert "  step       400 units, bound 320 units, gap 20.00%, not proven" in text
    assert "  times      relative units, not seconds (1 k is 1,000 units)" in text
