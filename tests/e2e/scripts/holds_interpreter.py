"""A learner whose fourth step keeps the interpreter to itself for 14 s: no other thread of it has a turn."""

import sys
import time

import torch

import rudra_zmq as rudra

with rudra.join() as learner:
    model = learner.attach(torch.nn.Linear(4, 2))
    learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train = torch.utils.data.TensorDataset(torch.randn(640, 4), torch.arange(640) % 2)
    for step, (x, y) in enumerate(learner.batches(train, batch_size=4)):
        if step == 3 and learner.rank == 1 and learner.incarnation == 1:
            print("begins", flush=True)
            sys.setswitchinterval(1000)
            end = time.monotonic() + 14
            while time.monotonic() < end:
                pass
            sys.setswitchinterval(0.005)
            print("goes on", flush=True)
        learner.step(torch.nn.functional.cross_entropy(model(x), y))
