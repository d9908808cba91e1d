"""The task itself: sizes of the networks, pixels, batches, metrics."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from rudra_zmq.errors import ConfigError
from rudra_zmq.tasks import data, fashion_mnist, load_task
from tests.unit.tasks.test_data import tiny


@pytest.mark.parametrize(("name", "parameters"), [("cnn", 99_550), ("small", 26_826)])
def test_networks(name: str, parameters: int) -> None:
    model = load_task(f"rudra_zmq.tasks.fashion_mnist:{name}", {"limit": 5}).model()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_two_models_of_one_seed_are_equal() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(fashion_mnist.cnn().model().state_dict())
    assert all(torch.equal(models[0][key], models[1][key]) for key in models[0])


def test_pixels_are_normalised(tmp_path: Path) -> None:
    folder = tiny(tmp_path)
    dataset = fashion_mnist.cnn(data=str(folder)).dataset("train")
    pixels, labels = data.load(folder, "train")
    expected = (pixels.astype(np.float64) / 255 - 0.2860) / 0.3530
    assert dataset.tensors.images.dtype == torch.float32
    assert dataset.tensors.labels.dtype == torch.int64
    np.testing.assert_allclose(dataset.tensors.images[:, 0].numpy(), expected, atol=1e-6)
    assert dataset.tensors.labels.tolist() == labels.tolist()


def test_the_ways_to_a_batch_agree(tmp_path: Path) -> None:
    dataset = fashion_mnist.small(data=str(tiny(tmp_path))).dataset("train")
    images, labels = next(iter(DataLoader(dataset, batch_size=3, sampler=[4, 0, 2])))
    at = torch.tensor([4, 0, 2])
    assert torch.equal(images, dataset.tensors.images[at])
    assert torch.equal(labels, dataset.tensors.labels[at])
    assert all(torch.equal(a, b) for a, b in zip(dataset[4], (images[0], labels[0]), strict=True))


def test_limit_cuts_the_training_images_alone(tmp_path: Path) -> None:
    task = fashion_mnist.cnn(limit=2, data=str(tiny(tmp_path)))
    assert (len(task.dataset("train")), len(task.dataset("test"))) == (2, 3)


def test_metrics_add_up_to_the_loss(tmp_path: Path) -> None:
    task = fashion_mnist.cnn(data=str(tiny(tmp_path)))
    model, tensors = task.model(), task.dataset("train").tensors
    whole = task.metrics(model, tensors)
    parts = [task.metrics(model, (tensors.images[a:b], tensors.labels[a:b])) for a, b in ((0, 2), (2, 5))]
    assert whole["count"] == sum(part["count"] for part in parts) == 5
    assert whole["correct"] == sum(part["correct"] for part in parts)
    assert whole["loss_sum"] == pytest.approx(sum(part["loss_sum"] for part in parts), rel=1e-5)
    assert whole["loss_sum"] / 5 == pytest.approx(task.loss(model, tensors).item(), rel=1e-5)
    predicted = model(tensors.images).argmax(1)
    assert whole["correct"] == (predicted == tensors.labels).sum().item()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not there"):
        fashion_mnist.cnn(data=str(tmp_path / "gone")).dataset("train")


def test_the_published_data(fashion_data: Path) -> None:
    """Ten equal classes; the mean and the deviation of the training images are the constants."""
    images, labels = data.load(fashion_data, "train")
    assert np.bincount(labels).tolist() == [6000] * 10
    assert images.mean() / 255 == pytest.approx(fashion_mnist.MEAN, abs=1e-4)
    assert images.std() / 255 == pytest.approx(fashion_mnist.STD, abs=1e-4)
    assert np.bincount(data.load(fashion_data, "test")[1]).tolist() == [1000] * 10
