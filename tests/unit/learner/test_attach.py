"""The flat vectors of a model: weights in, gradients out, and changes that nobody announced."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn

from rudra_zmq.errors import Rejected
from rudra_zmq.learner.attach import PIECE, WINDOW, AttachedModel, Mark
from tests.unit.learner.world import net, normed


def flat(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()]).numpy()


def change(attached: AttachedModel, value: float) -> None:
    attached.weights.params[:] = value
    attached.load()


def test_new_weights_are_in_every_parameter() -> None:
    model = net()
    before = flat(model)
    attached = AttachedModel(model)
    assert np.array_equal(attached.weights.params, before) and np.array_equal(flat(model), before)
    change(attached, 0.25)
    assert (flat(model) == 0.25).all()


def test_half_precision_and_channels_last_are_copied_with_float32_masters() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 3).to(torch.bfloat16))
    model[0].weight.data = model[0].weight.data.to(memory_format=torch.channels_last)
    attached = AttachedModel(model)
    attached.weights.params[:] = np.arange(attached.layout.P) / 7
    attached.load()
    expected = torch.from_numpy(attached.weights.params)
    at = 0
    for p in model.parameters():
        want = expected[at : at + p.numel()].view(p.shape)
        assert torch.equal(p.detach(), want.to(p.dtype))
        at += p.numel()
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_buffers_ride_in_the_tail_and_come_back() -> None:
    model = normed()
    model.register_buffer("mask", torch.tensor([True, False]))
    attached = AttachedModel(model)
    model(torch.randn(8, 4))
    attached.read_buffers(attached.gradient)
    assert np.array_equal(attached.gradient.floats[:6], model[1].running_mean.numpy())
    assert attached.gradient.ints.tolist() == [1, 0, 1] or attached.gradient.ints.tolist() == [1, 1, 0]
    attached.weights.floats[:] = 2.0
    attached.weights.ints[:] = 0
    attached.load()
    assert (model[1].running_var == 2.0).all() and model[1].num_batches_tracked == 0
    assert model.mask.dtype == torch.bool and not model.mask.any()


def test_gradients_are_gathered_and_absent_ones_are_zero_and_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    attached = AttachedModel(model)
    attached.gradient.params[:] = 9.0
    model[0](torch.ones(1, 2)).sum().backward()
    attached.gather()
    assert attached.gradient.params.tolist() == [1.0] * 6 + [0.0] * 6
    assert attached.unused == ("1.weight", "1.bias")


def test_gradients_add_up_with_weights() -> None:
    model = nn.Linear(2, 1, bias=False)
    attached = AttachedModel(model)
    model.weight.grad = torch.tensor([[1.0, 2.0]])
    attached.gather(3.0, first=True)
    model.weight.grad = torch.tensor([[10.0, 0.0]])
    attached.gather(1.0, first=False)
    attached.divide(4.0)
    assert attached.gradient.params.tolist() == [3.25, 1.5]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, PIECE - 1, PIECE, 2 * PIECE + 4, -4, -1])
def test_what_is_not_finite_is_seen_as_it_is_gathered(at: int, value: float) -> None:
    large, small = nn.Parameter(torch.zeros(2 * PIECE + 5)), nn.Linear(3, 1)
    model = nn.ModuleDict({"small": small})
    model.register_parameter("large", large)
    attached = AttachedModel(model)
    flat_grads = torch.full((attached.layout.P,), 1e30)  # the squares of these overflow
    for p, place in zip([p for _, p in attached.signature.params], attached.layout.params, strict=True):
        p.grad = flat_grads[place.start : place.stop].view(p.shape)
    attached.gather()
    assert attached.finite() is True and np.array_equal(attached.gradient.params, flat_grads.numpy())
    flat_grads[at] = value
    attached.gather()
    assert attached.finite() is False
    attached.gather(2.0)
    assert attached.finite() is None, "what is added up is looked at before it leaves"


def test_a_buffer_that_is_not_finite_is_seen_too() -> None:
    attached = AttachedModel(normed())
    attached.gather()
    attached.read_buffers(attached.gradient)
    assert attached.finite() is True
    attached.gradient.floats[-1] = np.nan
    assert attached.finite() is False


def test_half_precision_gradients_become_float32() -> None:
    model = nn.Linear(2, 1, bias=False).to(torch.float16)
    attached = AttachedModel(model)
    model.weight.grad = torch.tensor([[0.5, 2.0]], dtype=torch.float16)
    attached.gather()
    assert attached.gradient.params.tolist() == [0.5, 2.0]


def test_a_frozen_parameter_with_a_gradient_is_refused_by_name() -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    attached = AttachedModel(model)
    model[0].weight.requires_grad_(True)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(Rejected, match=r"0\.weight was frozen"):
        attached.gather()


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Linear(2, 1, bias=False)
    attached = AttachedModel(model)
    model.weight.grad = torch.ones(1, 2).to_sparse()
    with pytest.raises(Rejected, match="weight has a sparse gradient"):
        attached.gather()


def assign(model: nn.Module) -> None:
    model[2].weight.data = torch.zeros(3, 6)


def load(model: nn.Module) -> None:
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        model[2].weight.clamp_(-0.01, 0.01)


def clamp_data(model: nn.Module) -> None:
    model[2].weight.data.clamp_(-0.01, 0.01)


@pytest.mark.parametrize("tamper", [load, clamp, clamp_data, assign])
def test_weights_changed_by_the_script_are_refused_by_name(tamper) -> None:
    model = net()
    attached = AttachedModel(model)
    attached.check()
    tamper(model)
    with pytest.raises(Rejected, match=r"parameter (0|2)\.weight was changed outside"):
        attached.check()


def test_a_change_that_new_weights_have_replaced_is_none() -> None:
    model = net()
    attached = AttachedModel(model)
    clamp(model)
    change(attached, 0.5)
    attached.check()


def test_what_data_hides_at_each_step_is_found_within_a_round_of_windows() -> None:
    model = nn.Linear(WINDOW, 3, bias=False)
    attached = AttachedModel(model)
    found = []
    for step in range(3):
        change(attached, 0.5)
        model.weight.data[2, 5] = 0.25
        try:
            attached.check()
        except Rejected:
            found.append(step)
    assert len(found) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_to_another_dtype_and_back_works(dtype: torch.dtype) -> None:
    model = net()
    attached = AttachedModel(model)
    attached.weights.params[:] = np.linspace(-1, 1, attached.layout.P)
    attached.load()
    model.to(dtype)
    attached.check()
    change(attached, 0.5)
    assert model[0].weight.dtype == dtype and (flat(model) == 0.5).all()
    model.float()
    attached.check()
    change(attached, 0.75)
    assert (flat(model) == 0.75).all()
    assert model[0].weight.data_ptr() == attached.weights.params.ctypes.data


def test_to_double_is_refused_by_name() -> None:
    model = net()
    attached = AttachedModel(model)
    model.double()
    with pytest.raises(Rejected, match=r"0\.weight became float64"):
        attached.check()


def test_a_replaced_layer_is_refused_by_name() -> None:
    model = net()
    attached = AttachedModel(model)
    attached.check_structure()
    model[2] = nn.Linear(6, 3)
    with pytest.raises(Rejected, match=r"2\.weight"):
        attached.check_structure()


def test_kept_weights_and_buffers_come_back() -> None:
    model = normed()
    attached = AttachedModel(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with attached.kept():
        model.load_state_dict({k: torch.full_like(v, 3) for k, v in model.state_dict().items()})
        model(torch.randn(4, 4))
    attached.check()
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_copy_and_a_saved_model_live_on_their_own() -> None:
    model = net()
    attached = AttachedModel(model)
    ema = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    before = flat(ema)
    change(attached, 0.5)
    assert np.array_equal(flat(ema), before)
    with torch.no_grad():
        for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)
    attached.check()
    file.seek(0)
    assert np.array_equal(flat(torch.load(file, weights_only=False)), before)


def test_a_model_can_be_attached_again() -> None:
    model = net()
    AttachedModel(model)
    second = AttachedModel(model)
    change(second, 0.5)
    assert (flat(model) == 0.5).all()


def test_state_has_all_names_and_shapes() -> None:
    model = normed()
    model.register_parameter("other", model[0].weight)
    state = AttachedModel(model).state_dict()
    assert set(state) == set(model.state_dict())
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_marks_tell_new_gradients_from_old_ones() -> None:
    model = net()
    attached = AttachedModel(model)
    empty = Mark(attached.grads())
    assert empty.same_as([]) and not empty.replaced([])
    model(torch.ones(1, 4)).sum().backward()
    mark = Mark(attached.grads())
    assert mark.same_as(attached.grads()) and not empty.same_as(attached.grads())
    model(torch.ones(1, 4)).sum().backward()
    assert not mark.same_as(attached.grads()) and not mark.replaced(attached.grads())
    model.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    assert mark.replaced(attached.grads())
