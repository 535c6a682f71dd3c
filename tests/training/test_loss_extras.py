from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from pipecompile.errors import InputError
from pipecompile.frontend.microbatch import MicrobatchSizes
from pipecompile.training.loss_extras import LossExtras


def total(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum()


def merged(trees: Sequence[Any], sizes: tuple[int, ...]) -> Any:
    return LossExtras.of(trees).joined(total, MicrobatchSizes(sizes[0], sizes).mean)


def test_scalars_are_averaged_and_the_rest_is_joined() -> None:
    joined = merged(
        [
            {"loss": torch.tensor(float(i)), "logits": torch.full((2, 1), float(i)), "name": "n"}
            for i in (1, 2)
        ],
        (1, 1),
    )
    assert joined["loss"].item() == 1.5
    assert joined["logits"].flatten().tolist() == [1, 1, 2, 2]
    assert joined["name"] == "n"


def test_whole_numbers_are_counts_and_numbers_of_python_are_scalars() -> None:
    parts = [
        {"right": torch.tensor(i), "rows": 2 * i, "share": i / 10, "has": torch.tensor(i > 1)}
        for i in (1, 2)
    ]
    joined = merged(parts, (2, 1))
    assert joined == {"right": 3, "rows": 6, "share": (2 * 0.1 + 0.2) / 3, "has": 1}
    assert isinstance(joined["share"], float)


@pytest.mark.parametrize("column", [(0, 0.5, 1), (0.0, 0.5, 1.0), (0, torch.tensor(0.5), 1)])
def test_a_mean_may_be_a_whole_number_in_some_microbatches(column: tuple[Any, ...]) -> None:
    assert merged(column, (2, 2, 2)) == 0.5


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((torch.zeros(2, 3), torch.zeros(2, 4)), r"shapes \[\(2, 3\), \(2, 4\)\] .* pad them"),
        (({"x": 1.0}, {"x": 1.0, "y": 2.0}), "return the same structure with each"),
        ((torch.zeros(2), torch.tensor(1.0)), r"came a Tensor of shape \(2,\), a Tensor of shape"),
        ((1.0, None), "came a float, a NoneType, which cannot be joined; return the same kind"),
        ((torch.zeros(2), None), "return the same kind with each"),
        (("text", 1), "return the same kind with each"),
    ],
)
def test_what_cannot_be_joined_is_an_error(parts: tuple[object, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        merged(parts, (2, 2))


def of_replicas(*replicas: Sequence[Any]) -> list[LossExtras | str]:
    """What each replica gets, or the error that it raises."""
    told: list[Any] = []

    def tell(own: object) -> list[Any]:
        told.append(own)
        return [own]

    for trees in replicas:
        with suppress(InputError):
            LossExtras.of_replicas(trees, tell)
    got: list[LossExtras | str] = []
    for trees in replicas:
        try:
            got.append(LossExtras.of_replicas(trees, lambda own: told))
        except InputError as error:
            got.append(str(error))
    return got


def test_replicas_agree_on_what_counts() -> None:
    first, second = of_replicas([{"share": 0, "right": 1}], [{"share": 0.5, "right": 2}])
    assert isinstance(first, LossExtras) and isinstance(second, LossExtras)
    calls = [
        extras.joined(lambda _: torch.tensor(1), lambda _: torch.tensor(0.5))
        for extras in (first, second)
    ]
    assert calls == [{"share": 0.5, "right": 1}] * 2


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ({"a": 1.0}, {"b": 1.0}, "{'a': 'a scalar'} with its losses on one replica, and {'b'"),
        ({"a": 1.0}, {"a": 1.0, "b": 1.0}, "return the same structure on all of them"),
        (1.0, None, "the loss function returned 'a scalar' with its losses on one replica"),
        ([torch.zeros(2)], [1.0], "return the same structure on all of them"),
    ],
)
def test_replicas_that_return_other_structures_are_told(
    one: object, other: object, message: str
) -> None:
    for text in of_replicas([one], [other]):
        assert isinstance(text, str) and message in text


def test_a_replica_that_cannot_join_its_own_is_named() -> None:
    own, others = of_replicas([{"a": 1}, {"b": 1}], [{"a": 1}, {"a": 1}])
    assert isinstance(own, str) and own.startswith("the loss function returned")
    assert others == f"another replica: {own}"
