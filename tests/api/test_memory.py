"""Plans and what their ranks hold: optimizers, and caps that are kept."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from pipecompile.api.costs import cost_graph
from pipecompile.api.options import options_for
from pipecompile.api.plan import make_plan
from pipecompile.cli import commands
from pipecompile.cost_models.device import Device, load_device
from pipecompile.errors import InfeasibleError, InputError
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import Captured, capture_target
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.plan import Plan, Provenance
from pipecompile.ir.serialization import decode, encode, read, write
from pipecompile.ir.size import size_text
from pipecompile.planner.draft import draft

WIDTH, BLOCKS, BATCH = 64, 6, 8
LINEAR = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of one layer's parameters


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    layers = [layer for _ in range(BLOCKS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers).to(dtype)


def target(optimizer: Any = None, dtype: torch.dtype = torch.float32) -> Target:
    sample = torch.zeros(BATCH, WIDTH, dtype=dtype)
    return Target.of(
        {"model": model(dtype), "sample_input": sample, "optimizer": optimizer}, "a test"
    )


def stepped_by(kind: type[torch.optim.Optimizer], **options: Any) -> Target:
    """A target that hands over an optimizer of its parameters."""
    made = model()
    optimizer = kind(made.parameters(), **options)  # type: ignore[call-arg]
    return Target.of(
        {"model": made, "sample_input": torch.zeros(BATCH, WIDTH), "optimizer": optimizer}, "a test"
    )


def planned(subject: Target, **options: Any) -> Plan:
    chosen = options_for(subject, **{"k": 2, "costs": "flops", **options})
    return make_plan(subject, chosen, capture_target(subject, chosen, verify=False))


def held(plan: Plan, kind: str = "optimizer") -> list[int]:
    return [getattr(memory, kind).expected for memory in plan.prediction.memory]


def counters(plan: Plan) -> list[int]:
    """Of steps, 4 bytes for each parameter."""
    return [4 * len(plan.parameters_of(stage)) for stage in range(plan.k)]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("adamw", "adamw"),
        (torch.optim.AdamW, "adamw"),
        (torch.optim.SGD, "sgd"),
        (None, None),
    ],
)
def test_a_target_names_its_optimizer_in_any_way(given: Any, name: str | None) -> None:
    assert target(given).optimizer == name
    assert options_for(target(given), k=2, costs="flops").optimizer == name


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 1e-4}, "momentum"),
        (torch.optim.SGD, {}, "sgd"),
        (torch.optim.RMSprop, {}, "rmsprop"),
        (torch.optim.AdamW, {"betas": (0.9, 0.95)}, "adamw"),
        (torch.optim.Adafactor, {}, "adafactor"),
    ],
)
def test_an_optimizer_that_is_ready_to_step_has_a_name(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], name: str
) -> None:
    assert stepped_by(kind, **options).optimizer == name


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (torch.optim.AdamW, {"amsgrad": True}, "AdamW with amsgrad=True"),
        (torch.optim.Adam, {"amsgrad": True}, "Adam with amsgrad=True"),
        (torch.optim.RMSprop, {"momentum": 0.9}, r"RMSprop with momentum=0\.9"),
        (torch.optim.RMSprop, {"centered": True}, "RMSprop with centered=True"),
    ],
)
def test_state_that_a_name_does_not_count_is_refused(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(
        InputError, match=rf"{said}, .*give optimizer='{kind.__name__.lower()}', its name"
    ):
        stepped_by(kind, **options)


def test_an_optimizer_of_some_parameters_is_refused_until_the_others_are_frozen() -> None:
    made, sample = model(), torch.zeros(BATCH, WIDTH)
    groups = [{"params": [made[0].weight]}, {"params": [made[0].bias], "lr": 0.1}]
    given = {"model": made, "sample_input": sample, "optimizer": torch.optim.AdamW(groups)}
    with pytest.raises(
        InputError, match=r"AdamW, does not step '2\.weight' .*give optimizer='adamw'"
    ):
        Target.of(given, "a test")
    for layer in made[1:]:
        layer.requires_grad_(False)
    assert Target.of(given, "a test").optimizer == "adamw"


def test_what_is_asked_for_goes_before_what_the_target_says() -> None:
    assert options_for(target("adamw"), k=2, costs="flops", optimizer="sgd").optimizer == "sgd"


@pytest.mark.parametrize("given", [torch.optim.Adagrad, "lion"])
def test_an_optimizer_that_is_not_known_is_refused_with_those_that_are(given: Any) -> None:
    with pytest.raises(
        InputError, match=r"unknown optimizer '(adagrad|lion)'; .*choose from sgd, .*adafactor"
    ):
        options_for(target(given), k=2, costs="flops")


def test_an_optimizer_that_is_not_known_is_said_to_be_the_targets_if_it_is() -> None:
    with pytest.raises(InputError, match=r"^the target's optimizer: unknown optimizer 'lion'"):
        options_for(target("lion"), k=2, costs="flops")
    with pytest.raises(InputError, match=r"^unknown optimizer 'tiger'"):
        options_for(target("lion"), k=2, costs="flops", optimizer="tiger")


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"optimizer is a float, but must be a name or a torch.optim.Optimizer"
    ):
        target(0.1)


def test_master_weights_need_an_optimizer() -> None:
    with pytest.raises(
        InputError, match="master weights are kept for an optimizer; name one of sgd"
    ):
        options_for(target(), k=2, costs="flops", master_weights=True)


def test_a_plan_counts_the_state_of_its_optimizer() -> None:
    """Adam keeps two copies of its rank's parameters, and a counter for each."""
    for name, copies in ((None, 0), ("sgd", 0), ("momentum", 1), ("adam", 2)):
        plan = planned(target(), optimizer=name)
        counted = counters(plan) if name == "adam" else [0, 0]
        assert held(plan) == [
            copies * p + c for p, c in zip(held(plan, "parameters"), counted, strict=True)
        ]


def test_master_weights_are_twice_the_parameters_of_two_bytes() -> None:
    plan = planned(target("adam", torch.bfloat16), master_weights=True)
    parameters = held(plan, "parameters")
    assert sum(parameters) == BLOCKS * LINEAR // 2
    assert held(plan) == [(2 + 4) * p + c for p, c in zip(parameters, counters(plan), strict=True)]


def test_updates_that_are_validated_later_keep_what_they_overwrite() -> None:
    """All is there twice in the optimizer's step, which is this model's peak: it steps on copies of
    gradients.
    """
    plan, later = (planned(target("adam"), post_validation=each) for each in (False, True))
    for kind in ("optimizer", "parameters", "gradients"):
        assert held(later, kind) == [2 * size for size in held(plan, kind)]
    fits = {"memory": max(memory.total.bound for memory in later.prediction.memory)}
    assert planned(target("adam"), post_validation=True, **fits)
    with pytest.raises(InfeasibleError):
        planned(target("adam"), post_validation=True, memory=fits["memory"] - 2048)


def test_updates_are_validated_later_only_where_there_are_steps_of_whole_parameters() -> None:
    with pytest.raises(InputError, match="post_validation is for steps, but schedule 'pipedream'"):
        options_for(target(), k=2, schedule="pipedream", post_validation=True)
    with pytest.raises(InputError, match="is not done for sharded parameters"):
        options_for(target(), k=2, replicas=2, shard="gradients", post_validation=True)
    with pytest.raises(InputError, match="post_validation is of training"):
        options_for(target(), k=2, schedule="forward-only", post_validation=True)


@pytest.mark.sweep
def test_an_optimizer_that_does_not_fit_is_refused() -> None:
    needed = max(memory.total.bound for memory in planned(target()).prediction.memory)
    assert planned(target(), memory=needed).prediction.memory
    with pytest.raises(InfeasibleError):
        planned(target("adam"), memory=needed)


def test_a_plan_is_cut_otherwise_so_that_its_optimizer_fits() -> None:
    """The first layer has many parameters and no operations. Of all cuts the one that needs least
    is found.
    """
    layers = [nn.Embedding(512, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(4))]
    subject = Target.of((nn.Sequential(*layers), torch.zeros(BATCH, dtype=torch.int64)), "a test")
    needed = {}
    for last in range(4):
        plan = planned(subject, optimizer="adam", pin={f"_{last}": 0, f"_{last + 1}": 1})
        needed[last] = max(memory.total.bound for memory in plan.prediction.memory)
    free = planned(subject, optimizer="adam")
    capped = planned(subject, optimizer="adam", memory=min(needed.values()))
    assert max(memory.total.bound for memory in capped.prediction.memory) == min(needed.values())
    assert capped.assignment != free.assignment


def test_a_plan_that_the_named_device_cannot_hold_is_answered_with_the_cap_to_give(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def small(name: str) -> Device:
        return msgspec.structs.replace(load_device(name), memory_bytes=100_000)

    monkeypatch.setattr("pipecompile.api.plan.load_device", small)
    plan = planned(target("adamw"), costs="roofline:h100")
    needed = size_text(max(memory.total.bound for memory in plan.prediction.memory))
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warning.startswith(f"a rank may need {needed}, but h100 has 97.7 KiB: ")
    assert "give --memory 100KB (in Python memory='100KB')" in warning


def test_a_plan_with_an_optimizer_is_read_back_as_it_was(tmp_path: Path) -> None:
    plan = planned(target("adamw"), memory="1GiB")
    write(tmp_path / "plan.json", encode(plan))
    assert read(tmp_path / "plan.json", Plan) == plan
    assert plan.options.optimizer == "adamw"


def test_the_command_line_names_an_optimizer_and_master_weights(tmp_path: Path) -> None:
    (tmp_path / "given.py").write_text(
        "import torch\nfrom torch import nn\n\ndef small():\n    model = "
        "nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(torch.bfloat16)\n    "
        "return model, torch.zeros(4, 8, dtype=torch.bfloat16)\n"
    )
    arguments = [
        "plan",
        f"{tmp_path / 'given.py'}:small",
        "-k",
        "2",
        "--costs",
        "flops",
        "--format",
        "json",
    ]
    result = CliRunner().invoke(
        commands, [*arguments, "--optimizer", "momentum", "--master-weights"]
    )
    assert result.exit_code == 0, result.output
    plan = decode(result.stdout.encode(), Plan, origin="stdout")
    assert held(plan) == [4 * parameters for parameters in held(plan, "parameters")]
    refused = CliRunner().invoke(commands, [*arguments, "--optimizer", "lion"])
    assert refused.exit_code == 2
    assert "choose from sgd, momentum, rmsprop" in refused.stderr


@cache
def _costs() -> tuple[CostGraph, Captured]:
    options = options_for(target(), k=2, costs="flops", microbatches=4)
    captured = capture_target(target(), options, verify=False)
    return cost_graph(target(), "flops", 4, captured), captured


@settings(max_examples=8, deadline=None)
@given(
    memory=st.integers(90_000, 420_000) | st.tuples(*[st.integers(90_000, 420_000)] * 4),
    schedule=st.sampled_from(["1f1b", "gpipe", "zb-h1", "search", "zb-v", "interleaved-1f1b"]),
    recompute=st.sampled_from(["none", "stage", "except-last", "block", "sqrt"]),
    optimizer=st.sampled_from([None, "adamw"]),
    k=st.sampled_from([2, 4]),
)
def test_no_plan_holds_more_than_its_cap(
    memory: int | tuple[int, ...], schedule: str, recompute: str, optimizer: str | None, k: int
) -> None:
    graph, _ = _costs()
    ranks = k // 2 if schedule in ("zb-v", "interleaved-1f1b") else k
    memory = memory if isinstance(memory, int) else memory[:ranks]
    splits, searches = schedule in ("zb-h1", "zb-v", "search"), schedule == "search"
    assume(not (splits and recompute in ("block", "sqrt")))  # the options refuse these
    assume(not (searches and recompute == "except-last"))
    options = options_for(
        target(),
        k=k,
        costs="flops",
        microbatches=4,
        memory=memory,
        schedule=schedule,
        recompute=recompute,
        optimizer=optimizer,
    )
    try:
        plan = draft(
            graph,
            options,
            graph_digest="",
            capture=Provenance(verified=False),
            microbatch_shapes=[],
        )
    except (InfeasibleError, InputError):
        return
    caps = (memory,) * ranks if isinstance(memory, int) else memory
    assert all(
        rank.total.bound <= cap for rank, cap in zip(plan.prediction.memory, caps, strict=True)
    )
