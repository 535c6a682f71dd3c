"""What code of the user reads of objects of installed packages is read again in each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding, PretrainedConfig

from pipecompile import pipecompile
from pipecompile.errors import InputError
from pipecompile.frontend import library_reads
from pipecompile.frontend.attribute_reads import AttributeReads

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Config:
    """Finds its values by a way of its own, as those of OmegaConf and ml_collections do."""

    def __init__(self, **values: Any) -> None:
        object.__setattr__(self, "_values", values)

    def __getattr__(self, name: str) -> Any:
        values = object.__getattribute__(self, "_values")
        if name in values:
            return values[name]
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._values[name] = value

    def __getitem__(self, name: str) -> Any:
        return self._values[name]


class Model(nn.Module):
    def __init__(self, config: Any, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.config, self.read = config, read

    def forward(self, x: Tensor) -> Tensor:
        """A value of shape (N, 8) to the same shape."""
        return self.last(self.linear(x) * self.read(self.config))  # type: ignore[no-any-return]


def set_in(name: str, value: Any) -> Callable[[Any], None]:
    return lambda config: setattr(config, name, value)


def nested() -> Config:
    return Config(inner=Config(scale=2.0), items=[2.0], step=0, scale=2.0, scale_1=2.0)


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], Any]]] = {
    "an attribute": (nested, lambda c: c.scale, set_in("scale", 3.0)),
    "a computed name": (nested, lambda c: getattr(c, f"scale_{1}"), set_in("scale_1", 3.0)),
    "an item": (nested, lambda c: c["scale"], set_in("scale", 3.0)),
    "one that is missing": (nested, lambda c: getattr(c, "new", 1.0), set_in("new", 3.0)),
    "of an inner one": (nested, lambda c: c.inner.scale, lambda c: set_in("scale", 3.0)(c.inner)),
    "another inner one": (nested, lambda c: c.inner.scale, set_in("inner", Config(scale=3.0))),
    "a list": (nested, lambda c: c.items[0], lambda c: c.items.insert(0, 3.0)),
    "of transformers": (
        lambda: PretrainedConfig(scale=2.0, step=0),
        lambda c: c.scale,
        set_in("scale", 3.0),
    ),
    "an item of transformers": (
        lambda: BatchEncoding({"scale": 2.0}),
        lambda c: c["scale"],
        lambda c: c.update(scale=3.0),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_read_of_a_config_stays(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, read, change = CASES[case]
    own = Config.__module__.partition(".")[0]
    for name in ("name_search", "library_reads", "packages", "attribute_reads"):
        module = __import__(f"pipecompile.frontend.{name}", fromlist=[name])
        monkeypatch.setattr(module, "is_installed", lambda p: p in ("transformers", f"{own}s"))
    monkeypatch.setattr(Config, "__module__", f"{own}s")
    is_own = lambda frame: frame.f_code.co_name not in vars(Config)  # noqa: E731
    monkeypatch.setattr(library_reads, "_is_own_code", is_own)
    config = make()
    before = dict(vars(type(config)))
    pipeline = pipecompile(
        Model(config, read), X, 2, microbatches=2, costs="flops", loss_fn=lambda o, _: o.sum()
    )
    assert dict(vars(type(config))) == before
    pipeline.step(X)
    config.step = 1
    pipeline.step(X)
    change(config)
    with pytest.raises(InputError, match="has changed since the model was compiled"):
        pipeline.step(X)


SETTINGS = PretrainedConfig(scale=2.0, step=0)


class Holder:
    """A class of the user's that has a config."""

    settings = SETTINGS


def of_global(_: Any) -> float:
    return SETTINGS.scale  # type: ignore[no-any-return]


def of_class(_: Any) -> float:
    return Holder.settings.scale  # type: ignore[no-any-return]


def of_closure() -> Callable[[Any], float]:
    settings = SETTINGS
    return lambda _: settings.scale  # type: ignore[no-any-return]


def of_table() -> Callable[[Any], float]:
    table = {"all": [SETTINGS]}
    return lambda _: table["all"][0].scale  # type: ignore[no-any-return]


@pytest.mark.parametrize("read", [of_global, of_class, of_closure(), of_table()])
def test_so_it_does_wherever_the_config_is(
    read: Callable[[Any], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = pipecompile(
        Model(None, read), X, 2, microbatches=2, costs="flops", loss_fn=lambda o, _: o.sum()
    )
    pipeline.step(X)
    monkeypatch.setattr(SETTINGS, "step", 1)
    pipeline.step(X)
    monkeypatch.setattr(SETTINGS, "scale", 3.0)
    with pytest.raises(InputError, match=r"'scale' in a Pre.rainedConfig has changed"):
        pipeline.step(X)


def test_what_a_package_reads_of_its_own_objects_is_not_noted() -> None:
    model = nn.Module()
    model.config = PretrainedConfig()
    reads = AttributeReads()
    with reads.noted(model):
        model.config.to_dict()
    assert {key for _, _, key in reads.of_libraries._owners} == {"to_dict"}
    assert not reads.of_libraries.values()
    assert library_reads._is_of_library(PretrainedConfig)
