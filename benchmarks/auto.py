"""Is what is chosen for devices better than the default, and than the best of a grid by hand?

    python -m benchmarks.auto [CASE …]          (default: all of them)

Models on the meta device are planned for 8 to 64 H100. Each row has four answers: the default
before devices were given (k = the devices, microbatches = k, 1F1B; with recompute auto if it does
not fit otherwise), the best of a grid that an engineer would try (each number of replicas, the
three usual schedules, 1, 2, 4 and 8 microbatches for each rank; with whole stages recomputed if it
does not fit otherwise), the joint search, and its bound. What a bound rules out is left out of the
grid, since it is not the best of it.

Prints a table; writes results/auto.json.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from benchmarks.command_line import checked_names, parser_of
from benchmarks.published_models import Decoder, token_loss
from pipecompile.api.cluster import caps_of, cluster_of
from pipecompile.api.model_costs import ModelCosts
from pipecompile.api.options import options_for
from pipecompile.errors import InfeasibleError, InputError
from pipecompile.frontend.target import Target
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.options import DEFAULT_EFFORT
from pipecompile.ir.plan import Options, Plan, Recompute
from pipecompile.ir.setting import Setting
from pipecompile.partition.budget import QUICK
from pipecompile.planner.draft import draft
from pipecompile.planner.joint_search import JointLimits, joint_plan
from pipecompile.planner.setting_bounds import Work, least_step_ns, state_bytes
from pipecompile.planner.setting_space import SettingSpace
from pipecompile.planner.target_costs import Source

RESULT = Path(__file__).parent / "results" / "auto.json"
SCHEDULES = ("1f1b", "zb-h1", "interleaved-1f1b")
MICROBATCHES_PER_RANK = (1, 2, 4, 8)


@dataclass(frozen=True)
class Case:
    """A model with its minibatch, on so many devices."""

    target: Callable[[], Target]
    devices: str
    master_weights: bool = True


def _target(model: nn.Module, sample: Any, targets: Any, loss: Any) -> Target:
    fields = {"model": model, "sample_input": sample, "targets": targets, "loss_fn": loss}
    return Target.of({**fields, "optimizer": "adamw"}, "benchmarks.auto")


def _llama(layers: int, hidden: int, intermediate: int, heads: int, samples: int) -> Target:
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "intermediate": intermediate,
        "heads": heads,
        "kv_heads": 8,
        "vocabulary": 128256,
        "sequence": 4096,
    }
    with _bfloat16(), torch.device("meta"):
        model: nn.Module = Decoder(sizes, 1, 1)
        tokens = torch.zeros(samples, sizes["sequence"], dtype=torch.int64)
    return _target(model, tokens, tokens, token_loss)


@contextmanager
def _bfloat16() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _mixtral() -> Target:
    """Return Mixtral 8x7B, with the products of all experts of a layer as one of groups."""
    import transformers

    config = transformers.MixtralConfig(use_cache=False, experts_implementation="grouped_mm")
    with _bfloat16(), torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
        tokens = torch.zeros(64, 4096, dtype=torch.int64)
    return _target(model, {"input_ids": tokens}, tokens, _logits_loss)


def _gpt2_xl() -> Target:
    import transformers

    config = transformers.GPT2Config(n_embd=1600, n_layer=48, n_head=25, use_cache=False)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
        tokens = torch.zeros(64, 1024, dtype=torch.int64)
    return _target(model, {"input_ids": tokens}, tokens, _logits_loss)


def _logits_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return token_loss(output.logits, targets)


def _unet() -> Target:
    from examples.models import UNet

    with torch.device("meta"):
        images = torch.zeros(64, 3, 256, 256)
        model = UNet()
    return _target(model, images, None, None)


def _vit() -> Target:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=1280, num_hidden_layers=32, num_attention_heads=16, intermediate_size=5120
    )
    with torch.device("meta"):
        model = transformers.ViTForImageClassification(config)
        images = torch.zeros(256, 3, 224, 224)
        labels = torch.zeros(256, dtype=torch.int64)
    return _target(model, {"pixel_values": images}, labels, _class_loss)


def _class_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.logits, labels)


CASES = {
    "gpt2-xl": Case(_gpt2_xl, "8xh100", master_weights=False),
    "llama3-8b": Case(lambda: _llama(32, 4096, 14336, 32, 64), "8xh100"),
    "llama3-70b": Case(lambda: _llama(80, 8192, 28672, 64, 256), "8x8xh100"),
    "mixtral-8x7b": Case(_mixtral, "2x8xh100"),
    "vit-huge": Case(_vit, "8xh100", master_weights=False),
    "unet": Case(_unet, "8xh100", master_weights=False),
}


@dataclass
class TimedCosts:
    """The costs of a model, and the CPU seconds that captures and costs have taken."""

    costs: ModelCosts
    seconds: float = 0.0

    def check(self, plan: Plan) -> None:
        """Raise StalePlanError unless the plan was made for the model."""
        self.costs.check(plan)

    def graph(self, options: Options) -> CostGraph:
        """Return the cost graph of a microbatch."""
        began = time.process_time()
        graph = self.costs.graph(options)
        self.seconds += time.process_time() - began
        return graph

    def source(self, options: Options) -> Source:
        """Return what that graph is of."""
        return self.costs.source(options)


class FirstAnswer(logging.Handler):
    """Notes the CPU seconds of the process when a search has its first plan."""

    seconds: float | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Note the time of the first plan."""
        if record.msg.startswith("best so far") and self.seconds is None:
            self.seconds = time.process_time()


@dataclass(frozen=True)
class Run:
    """One case under way: how to plan it under any options."""

    costs: TimedCosts
    base: Options
    space: SettingSpace
    devices: str

    @staticmethod
    def of(case: Case) -> Run:
        """Return the case with its options, which have the memory and the costs of its devices."""
        target, cluster = case.target(), cluster_of(case.devices)
        base = options_for(
            target,
            k=1,
            microbatches=1,
            costs=f"roofline:{cluster.kinds[0]}",
            memory=min(caps_of(cluster)),
            master_weights=case.master_weights,
        )
        space = SettingSpace(len(cluster.devices), target.samples, base)
        return Run(TimedCosts(ModelCosts(target)), base, space, case.devices)

    def planned(self, options: Options) -> Plan | None:
        """Return a plan by a quick search; None if none is found that fits."""
        whole = replace(options, microbatches=options.replicas * options.microbatches)
        links = cluster_of(self.devices).links
        try:
            graph, source = self.costs.graph(whole), self.costs.source(whole)
            return draft(graph, options, **source._asdict(), links=links, effort=QUICK)
        except (InfeasibleError, InputError):
            return None

    def default(self) -> Plan | None:
        """Return the plan by the defaults of a call with k alone."""
        k = self.space.devices
        return self.fitting(replace(self.base, k=k, microbatches=k), "auto")

    def fitting(self, options: Options, recompute: Recompute) -> Plan | None:
        """Return a plan without recompute; with this one if there is none."""
        return self.planned(options) or self.planned(replace(options, recompute=recompute))

    def by_hand(self) -> Plan | None:
        """Return the best plan of the grid."""
        best: Plan | None = None
        for setting in self._grid():
            options = self.space.options(setting)
            graph = self.costs.graph(replace(options, microbatches=setting.parts))
            is_too_large = state_bytes(graph, options) > sum(options.caps(setting.ranks) or ())
            least = least_step_ns(Work.of(graph), setting)
            if is_too_large or (best is not None and least >= best.prediction.step_ns):
                continue
            plans = filter(None, (best, self.fitting(options, "stage")))
            best = min(plans, key=lambda plan: plan.prediction.step_ns, default=None)
        return best

    def _grid(self) -> Iterator[Setting]:
        for setting in self.space.settings():
            is_usual = setting.schedule in SCHEDULES and setting.recompute == "none"
            # On one rank every order is the same.
            is_usual &= setting.ranks > 1 or setting.schedule == "1f1b"
            if is_usual and setting.microbatches / setting.ranks in MICROBATCHES_PER_RANK:
                yield setting

    def joint(self, effort: int) -> Plan:
        """Return the plan of the joint search."""
        links, limits = cluster_of(self.devices).links, JointLimits(effort=effort)
        return joint_plan(self.space, self.costs, links, self.devices, limits)


def row(name: str, effort: int, *, has_grid: bool) -> dict[str, Any]:
    """Return the figures of a case; times of steps are milliseconds, those of searches seconds."""
    run = Run.of(CASES[name])
    logger, first = logging.getLogger("pipecompile.planner"), FirstAnswer()
    logger.setLevel(logging.INFO)
    logger.addHandler(first)
    began, cpu = time.perf_counter(), time.process_time()
    plan = run.joint(effort)
    seconds, whole = time.perf_counter() - began, time.process_time() - cpu
    logger.removeHandler(first)
    costing, joint = run.costs.seconds, plan.joint
    assert joint is not None
    assert first.seconds is not None
    default, began_grid = run.default(), time.process_time()
    by_hand = run.by_hand() if has_grid else None
    grid_seconds = time.process_time() - began_grid
    return {
        "case": name,
        "devices": run.devices,
        "effort": effort,
        "default_ms": _milliseconds(default),
        "by_hand_ms": _milliseconds(by_hand),
        "by_hand": None if by_hand is None else str(_setting_of(by_hand)),
        "cpu_seconds_of_grid": round(grid_seconds, 1) if has_grid else None,
        "joint_ms": _milliseconds(plan),
        "bound_ms": joint.bound_ns / 1e6,
        "gap": joint.gap,
        "setting": str(joint.best[0].setting),
        "settings": joint.settings,
        "counts": joint.counts,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(whole, 1),
        "cpu_seconds_of_captures_and_costs": round(costing, 1),
        "cpu_seconds_to_first_plan": round(first.seconds - cpu, 1),
    }


def _setting_of(plan: Plan) -> Setting:
    return Setting(
        ranks=plan.ranks,
        stages_per_rank=plan.stages_per_rank,
        replicas=plan.replicas,
        microbatches=plan.microbatches,
        schedule=plan.options.schedule,
        recompute=plan.options.recompute,
    )


def _milliseconds(plan: Plan | None) -> float | None:
    return None if plan is None else plan.prediction.step_ns / 1e6


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if isinstance(value, float) else str(value)


def main(names: list[str], effort: int, *, has_grid: bool) -> None:
    """Print and write the rows of these cases; rows of other cases stay in the file."""
    known = json.loads(RESULT.read_text()) if RESULT.exists() else []
    rows = {each["case"]: each for each in known}
    columns = ("case", "devices", "default_ms", "by_hand_ms", "joint_ms", "bound_ms", "cpu_seconds")
    columns += ("cpu_seconds_of_captures_and_costs", "cpu_seconds_to_first_plan")
    print("  ".join((*columns, "setting")))
    for name in names or list(CASES):
        rows[name] = row(name, effort, has_grid=has_grid)
        cells = (_text(rows[name][column]) for column in (*columns, "setting"))
        print("  ".join(cells), flush=True)
        RESULT.write_text(json.dumps(list(rows.values()), indent=2) + "\n")


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--effort", type=int, default=DEFAULT_EFFORT)
    parser.add_argument("--no-grid", action="store_true")
    arguments = parser.parse_args()
    cases = checked_names(parser, arguments.cases, "case", CASES)
    main(cases, arguments.effort, has_grid=not arguments.no_grid)
