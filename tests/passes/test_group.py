from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from pipecompile.frontend.capture import capture
from pipecompile.frontend.signature import arguments_of
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.group import Group


def grouped(
    model: nn.Module, sample: object, together: tuple[tuple[str, ...], ...] = ()
) -> fx.GraphModule:
    call = arguments_of(model, sample)
    module = capture(model, call).instantiate(call)
    apply_passes(module.graph, [Group(together)])
    return module


def groups(module: fx.GraphModule) -> dict[str, list[str]]:
    """Return the nodes of each group, by its name."""
    found: dict[str, list[str]] = {}
    for node in module.graph.nodes:
        if node.op != "get_attr" and node.meta["group"] is not None:
            found.setdefault(node.meta["group"], []).append(node.name)
    return found


class Body(nn.Module):
    """Operations around `body`, so that it is not grouped with inputs or outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.sin()).cos()

    def body(self, x: Tensor) -> Tensor:
        raise NotImplementedError


X = torch.randn(4, 6)
ENDS = {"inputs": ["x", "sin"], "outputs": ["cos", "output"]}


def test_inputs_stay_with_the_first_operation_and_outputs_with_the_last() -> None:
    class Plain(Body):
        def body(self, x: Tensor) -> Tensor:
            return x.tanh().exp()

    assert groups(grouped(Plain(), X)) == ENDS


def test_all_inputs_are_together() -> None:
    class Two(nn.Module):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return (left.sin() + right).exp().cos()

    assert groups(grouped(Two(), (X, X)))["inputs"] == ["left", "right", "sin"]


def test_a_tuple_is_grouped_with_the_readers_of_its_items() -> None:
    class Chunks(Body):
        def body(self, x: Tensor) -> Tensor:
            left, right = x.chunk(2, dim=1)
            return left.exp() + right

    assert groups(grouped(Chunks(), X)) == {**ENDS, "chunk": ["chunk", "getitem", "getitem_1"]}


def test_an_lstm_is_grouped_with_the_readers_of_its_items() -> None:
    class Recurrent(Body):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 6, batch_first=True)

        def body(self, x: Tensor) -> Tensor:
            out, (hidden, _) = self.lstm(x[:, None])
            return out[:, 0].exp() + hidden[0]

    found = groups(grouped(Recurrent(), X))["lstm"]
    assert found[0] == "lstm"
    assert len(found) >= 4


def test_a_write_is_grouped_with_all_nodes_that_touched_the_storage_before() -> None:
    class InPlace(Body):
        def body(self, x: Tensor) -> Tensor:
            hidden = x.exp()
            other = hidden.tanh()
            hidden.add_(1)
            return (hidden + other).sigmoid()

    found = groups(grouped(InPlace(), X))
    assert found["exp"] == ["exp", "tanh", "add_"]
    assert found == {**ENDS, "exp": found["exp"]}


def test_a_view_of_a_written_storage_is_grouped_too() -> None:
    class View(Body):
        def body(self, x: Tensor) -> Tensor:
            hidden = x.exp()
            view = hidden.view(4, 3, 2).transpose(1, 2)
            hidden.mul_(2)
            return view.reshape(4, 6).sigmoid().tanh()

    (name,) = set(groups(grouped(View(), X))) - {"inputs", "outputs"}
    assert name == "exp"
    assert groups(grouped(View(), X))["exp"] == ["exp", "view", "transpose", "mul_"]


def test_an_assigned_slice_is_grouped_with_readers_before_the_next_assignment() -> None:
    class SetItem(Body):
        def body(self, x: Tensor) -> Tensor:
            hidden = x.exp()
            hidden[:, 0] = 0
            between = hidden.tanh()
            hidden[:, 1] = 0
            return hidden.cos() + between.sin()

    assert groups(grouped(SetItem(), X))["exp"] == ["exp", "setitem", "tanh", "setitem_1"]


def test_a_written_buffer_is_grouped_with_its_readers() -> None:
    class Counting(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(6))

        def body(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return (x.exp().tanh() + self.count).sigmoid()

    assert groups(grouped(Counting(), X))["add_"] == ["add_", "add"]


def test_nodes_that_share_nothing_are_in_no_group() -> None:
    class Free(Body):
        def body(self, x: Tensor) -> Tensor:
            return x.view(4, 3, 2).transpose(1, 2).reshape(4, 6).exp()

    assert groups(grouped(Free(), X)) == ENDS


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(11))
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).tanh()
        for block in self.blocks:
            x = block(x)
        return self.head(x.sigmoid())


def test_chosen_modules_are_together_with_all_nodes_in_them() -> None:
    found = groups(grouped(Blocks(), X, (("blocks.1",),)))
    assert found["blocks_1_0"] == ["blocks_1_0", "blocks_1_1"], "and not those of blocks.10"


def test_chosen_modules_and_nodes_mix() -> None:
    found = groups(grouped(Blocks(), X, (("blocks.2", "sigmoid"), ("blocks.4.0", "blocks.2.1"))))
    assert found["blocks_2_0"] == ["blocks_2_0", "blocks_2_1", "blocks_4_0", "sigmoid"]


def test_groups_that_touch_the_ends_keep_the_name_of_the_end() -> None:
    found = groups(grouped(Blocks(), X, (("stem", "blocks.0"),)))
    assert found["inputs"] == ["x", "stem", "blocks_0_0", "blocks_0_1"]


def test_a_module_is_grouped_with_nodes_that_write_to_its_state() -> None:
    class Scale(nn.Identity):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("factor", torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor.clone()

    class Annealed(Body):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Scale()

        def body(self, x: Tensor) -> Tensor:
            hidden = self.scale(x.exp()).tanh()
            self.scale.factor.mul_(0.5)
            return hidden.exp()

    assert groups(grouped(Annealed(), X)) == {**ENDS, "scale": ["scale", "mul_"]}


class Readers(Body):
    """Weights with two readers under autocast; an embedding and a layer read `table`."""

    def __init__(self, *, cache: bool = True, apart: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.linear, self.conv, self.norm = nn.Linear(6, 6), nn.Conv1d(6, 6, 1), nn.LayerNorm(6)
        self.embedding, self.table = nn.Embedding(4, 6), nn.Linear(6, 4, bias=False)
        self.table.weight = self.embedding.weight
        self.requires_grad_(not frozen)
        self.cache, self.apart = cache, apart

    def body(self, x: Tensor) -> Tensor:
        if self.apart:
            return self.once(self.once(x))
        with self.region():
            return self.work(self.work(x))

    def once(self, x: Tensor) -> Tensor:
        with self.region():
            return self.work(x)

    def region(self) -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=self.cache)

    def work(self, x: Tensor) -> Tensor:
        x = self.conv(self.linear(x.exp())[..., None])[..., 0]
        x = (
            self.norm(x)
            + self.embedding(torch.arange(4))
            + nn.functional.embedding(torch.arange(4), self.table.weight)
        )
        return (
            x
            + self.table(x).sum(dim=1, keepdim=True)
            + torch.matmul(x, self.table.weight.t()).sum()
        )


CAST_ONCE = {
    "linear": ["linear", "linear_1"],
    "conv": ["conv", "conv_1"],
    "table": ["table", "table_1"],
}


def test_readers_of_a_weight_that_autocast_casts_once_are_together() -> None:
    """Embeddings and norms read the weight itself; readers of a view cast for themselves."""
    assert groups(grouped(Readers(), X)) == {**ENDS, **CAST_ONCE}


@pytest.mark.parametrize("options", [{"cache": False}, {"apart": True}, {"frozen": True}])
def test_readers_for_each_of_which_a_weight_is_cast_are_free(options: dict[str, bool]) -> None:
    assert groups(grouped(Readers(**options), X)) == ENDS


@pytest.mark.parametrize("apart", [False, True])
def test_an_autocast_around_the_model_keeps_casts_throughout(apart: bool) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert groups(grouped(Readers(apart=apart), X)) == {**ENDS, **CAST_ONCE}
