"""What one step on fake tensors shows of each node: sizes, saved tensors, peaks and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipecompile.ir.encodings import Use
from pipecompile.ir.graph import Content, GradientStorage, SavesAt

__all__ = ["NodeObservation", "StepObservation"]


@dataclass(frozen=True)
class NodeObservation:
    """One node. Sizes are in bytes; storages are indices into `StepObservation.storages`.

    Of its value: `bytes` and `gradient_bytes` count the elements of the value and of its
    differentiable part, and `storages` are those that it lies in. `is_permuted`, `is_dense`,
    `strided_copy_bytes` and `consumers_without_gradient` are as in the cost graph's `Tensor`.

    Of its forward and backward: `saved` are the storages that the backward keeps, in the order of
    their first use, and `uses` what for, by saved tensor. `forward_peak` and `backward_peak` are
    the most that lives while it runs, above what lived when it began, and `workspace` is what its
    kernels take besides. `saves_at` is as in the cost graph's `Node`.

    `has_ordered_gradients` is as in `Node`. `sums_with` is the first node whose value is the same
    tensor to autograd, a `get_attr` node for a parameter; None for a tensor of its own.

    Of its parameters: `parameters` are the canonical names of those that it reads.
    `view_gradients` and `gradients_by_input_backward` are some of these, as in `Node`.

    `differentiable` and `mutates` are as in `NodeCall`. Storages of parameters and buffers are not
    mentioned anywhere.
    """

    operator: str
    bytes: int
    gradient_bytes: int
    storages: tuple[int, ...]
    is_permuted: bool
    is_dense: bool
    strided_copy_bytes: int
    saved: tuple[int, ...]
    uses: tuple[tuple[Use, ...], ...]
    saves_at: SavesAt
    parameters: tuple[str, ...]
    differentiable: tuple[bool, ...]
    mutates: bool
    # The following are known after the backward.
    forward_peak: int = 0
    backward_peak: int = 0
    workspace: int = 0
    view_gradients: tuple[str, ...] = ()
    gradients_by_input_backward: tuple[str, ...] = ()
    has_ordered_gradients: bool = False
    sums_with: str | None = None
    consumers_without_gradient: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepObservation:
    """The observations of every node but `get_attr`, by name, and what they refer to.

    `storages` are the bytes of the storages. `contents` describes those that are saved and consist
    of plain elements. `gradients` are the gradients that live longer than the node that makes them,
    or that are captured, without those of parameters and inputs. `expanded_by` has by node the only
    reader that gives a gradient for it, if this gradient repeats elements.
    """

    nodes: dict[str, NodeObservation]
    storages: tuple[int, ...]
    contents: Mapping[int, Content]
    gradients: tuple[GradientStorage, ...]
    expanded_by: Mapping[str, str]
