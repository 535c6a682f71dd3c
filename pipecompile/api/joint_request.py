"""What a user asks for by `devices`: what is fixed, and what a joint search is to choose. Needs no
PyTorch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from pipecompile.api.choices import open_options, plan_options
from pipecompile.api.cluster import ClusterInput, caps_of, cluster_of
from pipecompile.api.links import LinksInput, links_of
from pipecompile.errors import InputError
from pipecompile.ir.cluster import Cluster
from pipecompile.ir.links import FREE, Links
from pipecompile.ir.option_names import INFERENCE_OBJECTIVES
from pipecompile.ir.options import DEFAULT_EFFORT, DEFAULT_TOP
from pipecompile.ir.plan import Options
from pipecompile.planner.joint_search import JointLimits
from pipecompile.planner.setting_space import JOINT_CHOICES, SettingSpace
from pipecompile.planner.unequal_devices import UnequalDevices
from pipecompile.schedule.named_orders import ASYNCHRONOUS

__all__ = ["JointRequest", "joint_request"]

logger = logging.getLogger("pipecompile.api")


@dataclass(frozen=True)
class JointRequest:
    """The devices, the options that are not chosen, those that are fixed, and how much to search.

    `base` is complete except for the numbers that are chosen, and costs and caps of `unequal`
    devices.
    """

    cluster: Cluster
    links: Links
    base: Options
    fixed: Mapping[str, Any]
    limits: JointLimits
    unequal: UnequalDevices | None = None

    def space(self, samples: int) -> SettingSpace:
        """Return the settings for a minibatch of so many samples over all replicas."""
        devices = self.cluster.devices
        return SettingSpace(len(devices), samples, self.base, self.fixed, self.unequal)


def joint_request(devices: ClusterInput, links: LinksInput = None, **choices: Any) -> JointRequest:
    """Return the request of a user who gave `devices`, and `choices` as for `requested_options`.

    Costs are those of roofline and memory that of the devices, unless they are given. InputError
    says what cannot be chosen jointly.
    """
    cluster = cluster_of(devices)
    given = open_options(**choices)
    if given["stage_replicas"] is not None:
        raise InputError(
            "a joint search gives all stages equally many ranks; leave out stage_replicas, or "
            "devices"
        )
    # Before costs and memory are implied, or those would look as if the user had given them.
    unequal = _unequal(cluster, given) if len(cluster.kinds) > 1 else None
    limits = _limits(given)
    # Likewise: `plan_options` fills in what is open, after which nobody could tell it from a
    # choice.
    fixed = {name: given[name] for name in JOINT_CHOICES if given[name] is not None}
    _refuse_other_steps(fixed)
    implied = {"costs": f"roofline:{cluster.kinds[0]}", "memory": min(caps_of(cluster))}
    for name, value in implied.items():
        given[name] = value if given[name] is None else given[name]
    _refuse_table(given["costs"], fixed)
    # A layout has its own k. Options have no word for "open": a number that is to be chosen is 1
    # until it is.
    k = None if given["layout"] is not None else 1
    base = plan_options({**given, "ranks": None, "k": k, "replicas": None, "microbatches": 1})
    if base.layout is not None:
        fixed["k"] = base.k
    # Links that are given win over those of the devices, but must cover all of them.
    connected = cluster.links if links is None else links_of(links)
    if not connected.fits(len(cluster.devices)):
        raise InputError(
            f"the links are for {connected.ranks} ranks, but there are {len(cluster.devices)} "
            "devices; give links among all of them"
        )
    if given["costs"] == "flops" and connected != FREE:
        logger.warning(
            "costs by flops are relative units, but links take nanoseconds: steps over several "
            "devices do not compare; leave costs out (roofline), or give links that are free"
        )
    return JointRequest(cluster, connected, base, fixed, limits, unequal)


def _unequal(cluster: Cluster, given: Mapping[str, Any]) -> UnequalDevices:
    """Return the devices of a cluster with several kinds, under the cap that is given or their
    memory; InputError if costs or a list of caps are given, which belong to ranks.
    """
    memory, costs = given["memory"], given["costs"]
    if costs is not None or isinstance(memory, tuple):
        name, value = ("costs", costs) if costs is not None else ("memory", memory)
        raise InputError(
            f"{name}={value!r}, but devices={cluster.text!r} are of several kinds, whose order "
            "along the pipeline is chosen; leave it out: each rank has the roofline and the memory "
            "of its device"
        )
    sizes = dict(zip(cluster.devices, caps_of(cluster), strict=True))
    # By kind and not by rank: which device runs which stage is a part of the search.
    caps = {kind: size if memory is None else memory for kind, size in sizes.items()}
    return UnequalDevices(cluster.devices, caps)


def _limits(given: Mapping[str, Any]) -> JointLimits:
    """Return how much is to be searched; InputError unless the time limit is positive."""
    seconds = given["time_limit"]
    if seconds is not None and not 0 < seconds < inf:
        raise InputError(f"time_limit={seconds!r} must be a number of seconds above 0")
    return JointLimits(
        effort=given["effort"] or DEFAULT_EFFORT,
        seconds=inf if seconds is None else seconds,
        top=given["top"] or DEFAULT_TOP,
    )


def _refuse_table(costs: str, fixed: Mapping[str, Any]) -> None:
    """Raise InputError if costs are of one size of microbatches, and several would be tried."""
    if costs.startswith("table:") and not {"replicas", "microbatches"} <= fixed.keys():
        raise InputError(
            f"costs={costs!r} are of microbatches of one size, but a joint search tries several; "
            "give replicas and microbatches too, or other costs"
        )


def _refuse_other_steps(fixed: Mapping[str, Any]) -> None:
    """Raise InputError unless what is fixed leaves a synchronous training step."""
    schedule, objective = fixed.get("schedule"), fixed.get("objective")
    if schedule == "forward-only" or objective in INFERENCE_OBJECTIVES or schedule in ASYNCHRONOUS:
        raise InputError(
            f"{schedule or objective} has no step that ends with a flush, which is what devices= "
            "makes short; leave devices out, or choose another schedule"
        )
