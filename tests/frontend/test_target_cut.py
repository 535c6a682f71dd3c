"""Targets are cut where they have the batch, as they are told, or refused."""

from __future__ import annotations

from array import array
from collections import OrderedDict, UserDict, deque
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipecompile.errors import InputError
from pipecompile.frontend.target_cut import cut_targets


class InSlots:
    __slots__ = ("y",)

    def __init__(self, y: Tensor) -> None:
        self.y = y


class Color(Enum):
    RED = 1


def rows(count: int, *rest: int) -> Tensor:
    return torch.arange(count * max(1, sum(rest))).reshape(count, *rest)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    dim=st.integers(-2, 2),
    each=st.integers(1, 3),
)
def test_parts_are_the_target_in_order(sizes: list[int], dim: int, each: int) -> None:
    shape = [2, 2, 2]
    shape[dim] = sum(sizes) * each
    target = torch.arange(torch.Size(shape).numel()).reshape(shape)
    parts = cut_targets(target, sizes, dim)
    assert [part.shape[dim] for part in parts] == [size * each for size in sizes]
    assert torch.equal(torch.cat(parts, dim), target)


def test_the_batch_is_known_by_its_size() -> None:
    target = {"labels": rows(6, 2), "scale": torch.tensor(2.0), "name": "a", "none": None}
    first, second = cut_targets(target, (4, 2))
    assert torch.equal(first["labels"], rows(6, 2)[:4])
    assert torch.equal(second["labels"], rows(6, 2)[4:])
    for part in (first, second):
        assert (part["scale"], part["name"], part["none"]) == (2.0, "a", None)
    assert cut_targets(None, (4, 2)) == [None, None]


def test_a_tree_says_how_each_target_is_cut() -> None:
    labels, weights = rows(2, 8), torch.ones(2)
    parts = cut_targets((labels, [weights, weights]), (4, 4), (1, None))
    assert [tuple(part[0].shape) for part in parts] == [(2, 4), (2, 4)]
    assert all(part[1][0] is weights for part in parts)
    # A list of as many tensors as there are samples is what the tree says.
    assert len(cut_targets([weights] * 8, (4, 4), [None] * 8)[0]) == 8


def test_a_list_of_samples_is_cut_if_it_is_said_so() -> None:
    boxes = [{"class": index, "boxes": torch.ones(index + 1, 4)} for index in range(8)]
    for targets, dims in ((boxes, 0), ({"a": boxes, "scale": 2.0}, {"a": 0, "scale": None})):
        parts = cut_targets(targets, (6, 2), dims)
        first, second = (each if dims == 0 else each["a"] for each in parts)
        assert [each["class"] for each in first] == list(range(6))
        assert [each["class"] for each in second] == [6, 7]
    assert cut_targets([2] * 8, (4, 4), [None] * 8) == [[2] * 8] * 2
    # Tensors of as many rows as there are samples may be of all samples, or of one each.
    assert [len(each[0]) for each in cut_targets([rows(8)] * 8, (6, 2), [0] * 8)] == [6, 2]
    parts = cut_targets([rows(8)] * 8, (6, 2), "samples")
    assert [[len(each) for each in part] for part in parts] == [[8] * 6, [8] * 2]


@pytest.mark.parametrize(
    "value",
    [None, True, 2, 0.5, 1j, "a", b"a", Color.RED, slice(2), torch.float32, np.float32(2), set()],
)
def test_what_holds_no_samples_is_given_to_every_microbatch(value: Any) -> None:
    parts = cut_targets({"y": rows(8), "value": value}, (4, 4))
    assert all(part["value"] is value for part in parts)


def test_an_object_may_be_given_to_every_microbatch_if_it_is_said_so() -> None:
    value = InSlots(rows(8))
    parts = cut_targets((rows(8), value), (4, 4), (0, None))
    assert all(part[1] is value for part in parts)
    for alone in (value, rows(3)):
        assert all(part is alone for part in cut_targets(alone, (4, 4), (None,)))


@pytest.mark.parametrize(
    ("target", "dims"),
    [
        (tuple("abcdefgh"), 0),
        (tuple(rows(3 + number) for number in range(8)), 0),
        ((rows(8), tuple("abcdefgh")), 0),
        ({"text": tuple("abcdefgh"), "y": rows(8)}, 0),
        (tuple({"boxes": rows(3)} for _ in range(8)), 0),
    ],
)
def test_a_tuple_with_an_item_for_each_sample_is_cut_like_a_list(target: Any, dims: Any) -> None:
    parts = cut_targets(target, (4, 4), dims)
    lists = pytree.tree_map(as_list, target, is_leaf=is_of_samples)
    as_lists = cut_targets(lists, (4, 4), dims)
    for part, wanted in zip(parts, as_lists, strict=True):
        leaves, others = pytree.tree_leaves(part), pytree.tree_leaves(wanted)
        assert len(leaves) == len(others) and all(map(is_equal, leaves, others))


def is_of_samples(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 8


def as_list(value: Any) -> Any:
    return list(value) if is_of_samples(value) else value


def is_equal(left: Any, right: Any) -> bool:
    return torch.equal(left, right) if isinstance(left, Tensor) else left == right


def test_a_pair_for_two_samples_is_no_pair_of_samples() -> None:
    for pair in ((rows(2), rows(2, 3)), (rows(2), 3.0), ({"y": rows(2)}, rows(2))):
        parts = cut_targets(pair, (1, 1))
        assert all(len(part) == 2 for part in parts)
        assert len(cut_targets(pair, (1, 1), (0, 0))[1]) == 2


def test_lists_of_two_samples_in_a_pair_are_cut_each_by_its_own_dimension() -> None:
    """Two lists of as many samples as there are lists may be two samples of two parts each."""
    boxes, labels = [rows(4), rows(6)], [rows(4, 1), rows(6, 1)]
    parts = cut_targets((boxes, labels), (1, 1), (0, 0))
    for index, part in enumerate(parts):
        assert part[0][0] is boxes[index] and part[1][0] is labels[index]
        assert [len(each) for each in part] == [1, 1]
    for pair in ((boxes, labels), ((1, "a"), (2, "b")), (rows(2), rows(2, 3)), [rows(2)] * 2):
        kind = type(pair).__name__
        with pytest.raises(InputError, match=f"a {kind} of 2, .* a {kind} of 2 times 0"):
            cut_targets(pair, (1, 1), 0)
    samples = ((1, "a"), (2, "b"))
    assert cut_targets(samples, (1, 1), "samples") == [((1, "a"),), ((2, "b"),)]
    of_two_boxes = [rows(2), rows(2)]
    parts = cut_targets((of_two_boxes, labels), (1, 1), ("samples", "samples"))
    assert all(part[0][0] is boxes for part, boxes in zip(parts, of_two_boxes, strict=True))
    scalar = torch.tensor(3.0)
    assert cut_targets((rows(2), scalar), (1, 1))[1][1] is scalar


@dataclass
class Pair:
    labels: Any
    weights: Any
    more: Any = None


@pytest.mark.parametrize(
    ("target", "dims"),
    [
        (Pair(rows(8), rows(3)), Pair(0, None)),
        ({"a": rows(8), "b": rows(3)}, {"b": None, "a": 0}),
        (OrderedDict(a=rows(8), b=rows(3)), {"a": 0, "b": None}),
    ],
)
def test_dimensions_are_found_by_name(target: Any, dims: Any) -> None:
    for index, part in enumerate(cut_targets(target, (6, 2), dims)):
        labels, weights = part.values() if isinstance(part, dict) else (part.labels, part.weights)
        assert len(labels) == (6, 2)[index]
        assert len(weights) == 3


def test_a_list_of_a_tensor_and_texts_is_not_cut_in_two_ways() -> None:
    """A batch of two would otherwise be cut between the labels and the texts."""
    collated: Any = [rows(2, 1), ("a", "b")]
    with pytest.raises(InputError, match="a list of 2 times 0 if each of its items is"):
        cut_targets(collated, (1, 1), 0)
    for part in cut_targets(collated, (1, 1), [0, 0]):
        assert [len(each) for each in part] == [1, 1]
    assert cut_targets((rows(2), torch.tensor(1.0)), (1, 1), (0, 0))[1][1] == 1.0
    assert cut_targets(deque("abcd"), (3, 1), 0) == [["a", "b", "c"], ["d"]]


def test_a_list_is_cut_along_a_later_dimension_of_its_tensors() -> None:
    parts = cut_targets([rows(3, 8)] * 8, (4, 4), 1)
    assert all(tuple(each.shape) == (3, 4) for part in parts for each in part)
    assert cut_targets({}, (4, 4)) == cut_targets({}, (4, 4), 0) == [{}, {}]


@pytest.mark.parametrize(
    ("target", "dims", "words"),
    [
        (torch.ones(2), None, r"the target is of shape \(2,\), but the batch has 8 samples; say"),
        (rows(4, 3), None, r"\(4, 3\), but the batch has 8"),
        (rows(16, 3), None, r"\(16, 3\), but the batch has 8"),
        ({"y": rows(8), "w": torch.ones(10)}, None, r"the target\['w'\] is of shape \(10,\)"),
        ((rows(8), (rows(1, 8),)), None, r"the target\[1\]\[0\] is of shape \(1, 8\)"),
        (
            [rows(8)] * 8,
            None,
            r"a list of 8, as many as there .*='samples' .* list of 8 times None .* 8 times 0",
        ),
        (rows(8), "samples", r"says 'samples' of a Tensor, but that is for a list or tuple of 8"),
        ({"boxes": [rows(8)] * 8}, None, r"target\['boxes'\] is a list of 8, as many as there"),
        ((rows(8), ["a"] * 8), None, r"the target\[1\] is a list of 8"),
        (tuple("abcdefgh"), None, "the target is a tuple of 8, as many as there"),
        ({"text": tuple("abcdefgh")}, None, r"the target\['text'\] is a tuple of 8"),
        ((rows(8), (1, 2, 3, 4, 5, 6, 7, 8)), None, r"the target\[1\] is a tuple of 8"),
        (tuple(rows(3) for _ in range(8)), None, "the target is a tuple of 8"),
        (np.zeros(8), 0, "a target is a numpy.ndarray of shape"),
        (UserDict(y=rows(8)), None, "the target is a UserDict, and what that holds is not cut"),
        ({"y": SimpleNamespace(y=rows(8))}, None, r"the target\['y'\] is a SimpleNamespace"),
        (torch.distributions.Normal(rows(8) * 1.0, 1.0), None, "the target is a Normal, and"),
        ({rows(8)}, None, "the target is a set"),
        ({"y": InSlots(rows(8))}, None, r"target\['y'\] is a InSlots, .*target_batch_dims="),
        (partial(torch.add, rows(8)), None, "the target is a partial"),
        (lambda: rows(8), None, "the target is a function"),
        (iter([rows(4)] * 2), None, "the target is a list_iterator"),
        (range(8), None, "the target is a range"),
        (array("f", [0.0] * 8), None, "the target is a array"),
        (rows(8), (0, None), "does not fit the target"),
        (rows(8), "0", "does not fit the target"),
        (rows(8), True, "does not fit the target"),
        (rows(8), np.zeros(2), "does not fit the target"),
        (Pair(rows(8), rows(8)), {"labels": 0}, "does not fit the target"),
        (UserDict(y=rows(8)), 0, "a target is a UserDict, and what that holds is not cut"),
        (range(8), 0, "a target is a range"),
        (deque(range(8)), None, "the target is a deque of 8"),
        ([rows(2)] * 2, "samples", "for a list or tuple of 8"),
        (rows(6, 8), 0, r"cannot be cut along dimension 0 into microbatches of \[4, 4\]"),
        (rows(8), 1, "cannot be cut along dimension 1"),
    ],
)
def test_what_is_ambiguous_is_refused(target: Any, dims: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        cut_targets(target, (4, 4), dims)


def test_a_target_has_the_batch_where_the_inputs_have_it() -> None:
    target = {"over time": rows(5, 8), "classes": rows(8, 3), "scale": torch.tensor(2.0)}
    first, second = cut_targets(target, (6, 2), None, (1, None, 1))
    assert torch.equal(first["over time"], rows(5, 8)[:, :6])
    assert torch.equal(second["classes"], rows(8, 3)[6:])
    assert first["scale"] is target["scale"]


def test_two_dimensions_as_long_as_the_batch_are_refused() -> None:
    with pytest.raises(InputError, match=r"\(8, 8\), and the batch has 8 .*dimensions \[0, 1\]\?"):
        cut_targets(rows(8, 8), (4, 4), None, (1,))
    parts = cut_targets(rows(8, 8), (4, 4), 1, (1,))
    assert torch.equal(torch.cat(parts, 1), rows(8, 8))
    # Where inputs have the batch first, so have targets.
    assert torch.equal(torch.cat(cut_targets(rows(8, 8), (4, 4)), 0), rows(8, 8))
