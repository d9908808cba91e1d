"""A small job whose every number can be recomputed: a convolutional net on fixed random pictures."""

import sys

import torch
import torch.nn.functional as F

import rudra_zmq as rudra

SAMPLES = 700


def net() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * 36, 10),
    )


def data() -> torch.utils.data.TensorDataset:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 1, 12, 12, generator=g)
    return torch.utils.data.TensorDataset(x, (x.mean((1, 2, 3)) * 60).long().clamp(-4, 5) + 4)


def main(mu: int) -> None:
    with rudra.join() as learner:
        model = learner.attach(net())
        opt = learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3))
        for _ in learner.epochs():
            for x, y in learner.batches(data(), batch_size=mu):
                opt.zero_grad()
                F.cross_entropy(model(x), y).backward()
                opt.step()


if __name__ == "__main__":
    main(int(sys.argv[1]))
