"""A script that does not do what a learner does: ends_early.py WHEN, with status 0."""

import sys

import torch

import rudra_zmq as rudra

when = sys.argv[1]
if when == "before-join":
    raise SystemExit(0)
with rudra.join() as learner:
    model = learner.attach(torch.nn.Linear(4, 2))
    if when == "before-batches":
        raise SystemExit(0)
    learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.arange(64) % 2)
    for x, y in learner.batches(train, batch_size=4):
        learner.step(torch.nn.functional.cross_entropy(model(x), y))
        if when == "in-mid-epoch":
            raise SystemExit(0)
