from __future__ import annotations

import pytest
import torch
from torch import nn

from dprims import LayoutError, ParallelLayout
from dprims.tied import TiedParameters, find_tied_parameters


class Tied(nn.Module):
    """An embedding and a head over one storage: as one parameter, or as two."""

    def __init__(self, *, one_parameter: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 12, bias=False)
        weight = self.embed.weight
        self.head.weight = weight if one_parameter else nn.Parameter(weight.detach())


def module_of(**tensors: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return module


def stage_of(name: str) -> int:
    return {"embed": 0, "middle": 0, "head": 1}[name.partition(".")[0]]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("one_parameter", [True, False])
def test_tied_weights_are_found_by_storage(device: str, one_parameter: bool) -> None:
    with torch.device(device):
        model = Tied(one_parameter=one_parameter)
    assert find_tied_parameters(model) == (TiedParameters(("embed.weight", "head.weight")),)
    (pair,) = find_tied_parameters(model, stage_of=stage_of)
    assert pair.stages == (0, 1)
    assert str(pair) == "embed.weight (stage 0) = head.weight (stage 1)"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_equal_values_in_separate_memory_are_not_tied(device: str) -> None:
    with torch.device(device):
        assert find_tied_parameters(module_of(a=torch.zeros(3), b=torch.zeros(3), c=torch.zeros(0))) == ()


def test_slices_of_one_storage_are_tied_when_they_overlap() -> None:
    flat = torch.zeros(8, 8)
    assert find_tied_parameters(module_of(upper=flat[:4], lower=flat[4:])) == ()
    assert find_tied_parameters(module_of(left=flat[:, :4], right=flat[:, 4:])) == ()
    assert find_tied_parameters(module_of(upper=flat[:5], lower=flat[4:])) != ()
    assert find_tied_parameters(module_of(left=flat[:, :5], right=flat[:, 4:])) != ()
    assert find_tied_parameters(module_of(as_float=flat[0], as_bytes=flat.view(torch.uint8)[0, :2])) != ()


def test_more_than_two_are_one_set() -> None:
    flat = torch.zeros(6)
    model = module_of(first=flat[:3], alone=torch.zeros(2), last=flat[3:], across=flat[2:4])
    assert find_tied_parameters(model) == (TiedParameters(("first", "last", "across")),)


def test_pipeline_parallelism_refuses_what_it_would_separate() -> None:
    model = Tied(one_parameter=False)
    staged, single = ParallelLayout(world_size=2, pp=2), ParallelLayout(world_size=2, tp=2)
    single.require_untied_weights(find_tied_parameters(model))
    with pytest.raises(LayoutError, match=r"embed\.weight \(stage 0\) = head\.weight \(stage 1\)"):
        staged.require_untied_weights(find_tied_parameters(model, stage_of=stage_of))
    with pytest.raises(LayoutError, match=r"embed\.weight = head\.weight"):
        staged.require_untied_weights(find_tied_parameters(model))
    staged.require_untied_weights(find_tied_parameters(model, stage_of=lambda name: 1))
