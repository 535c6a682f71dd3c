"""The target of a command: what the factory that a user names has returned."""

from __future__ import annotations

import torch

from pipecompile import __version__
from pipecompile.api.factory import Factory
from pipecompile.frontend.target import Target
from pipecompile.ir.plan import Plan

__all__ = ["load_target", "made_with", "planned_target", "target_of"]


def load_target(text: str) -> Target:
    """Call the factory that `package.module:factory` or `path/file.py:factory` names."""
    return target_of(Factory.of(text))


def target_of(factory: Factory) -> Target:
    """Call `factory`; raise InputError unless it returns a target."""
    return Target.of(factory.call(), factory.text)


def planned_target(target: Target, plan: Plan) -> Target:
    """Return what one replica of a plan trains: where devices were given its
    share of the minibatch.
    """
    # devices= plans a minibatch of all replicas: of 64 samples each of 2 replicas trains 32. A plan
    # without devices was made for the minibatch that one process is given, also in 2 replicas.
    is_whole = plan.joint is not None and plan.joint.devices != ""
    return target.share(plan.replicas) if is_whole else target


def made_with(target: Target) -> str:
    """Return the versions and the device that a plan of `target` comes from, in one line."""
    return f"made with pipecompile {__version__}, torch {torch.__version__}, on {target.device}"
