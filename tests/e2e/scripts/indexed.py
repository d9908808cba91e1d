"""A script of one's own that writes down which samples each of its gradients was made of."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import rudra_zmq as rudra

folder, samples, mu = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])


class Indexed(torch.utils.data.Dataset):
    """Points on a line with their own index beside them."""

    def __init__(self, n: int) -> None:
        g = torch.Generator().manual_seed(0)
        self.x = torch.randn(n, 8, generator=g)
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int):
        return self.x[i], self.y[i], i


with rudra.join() as learner:
    model = learner.attach(torch.nn.Linear(8, 2))
    opt = learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    with open(folder / f"seen-{learner.rank}-{learner.incarnation}.jsonl", "w", buffering=1) as seen:
        seen.write(json.dumps({"pid": os.getpid()}) + "\n")
        for epoch in learner.epochs():
            for x, y, i in learner.batches(Indexed(samples), batch_size=mu):
                gid = [learner.rank, learner.incarnation, learner.seq]
                seen.write(json.dumps({"id": gid, "epoch": epoch, "indices": i.tolist()}) + "\n")
                learner.step(F.cross_entropy(model(x), y))
