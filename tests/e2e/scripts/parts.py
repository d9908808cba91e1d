"""A model with a part that is frozen, one that is never used, and one that keeps statistics of its own."""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import rudra_zmq as rudra


class Net(torch.nn.Module):
    """fixed: used and frozen. spare: never used. norm: running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = torch.nn.Linear(8, 6).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(6)
        self.spare = torch.nn.Linear(3, 3)
        self.last = torch.nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.fixed(x)))


def data() -> torch.utils.data.TensorDataset:
    g = torch.Generator().manual_seed(4)
    x = torch.randn(90, 8, generator=g) * 3 + 1
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 8).long())


def test(model: torch.nn.Module) -> float:
    """Accuracy, 0 to 1."""
    model.eval()
    with torch.no_grad():
        x, y = data().tensors
        right = int((model(x).argmax(1) == y).sum())
    model.train()
    return right / len(y)


def main(folder: Path) -> None:
    with rudra.join() as learner:
        model = learner.attach(Net())
        opt = learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        with open(folder / f"buffers-{learner.rank}.jsonl", "w", buffering=1) as notes:
            for _ in learner.epochs():
                for x, y in learner.batches(data(), batch_size=8):
                    opt.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    buffers = {name: b.tolist() for name, b in model.named_buffers()}
                    notes.write(json.dumps({"id": [learner.rank, learner.incarnation, learner.seq]} | buffers) + "\n")
                    opt.step()
                with learner.frozen():
                    accuracy = [test(model) for _ in range(2)]
                learner.log(accuracy=accuracy[0])
        (folder / f"tests-{learner.rank}.json").write_text(json.dumps(accuracy))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
