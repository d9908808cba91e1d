"""A training script of one's own: the marked lines are all that rudra-zmq asks for.

    python examples/own_script.py                        alone: the same rules, in this process
    rudra run -s learners.count=4 examples/own_script.py --width 64

The data is made up (points around the corners of a cube), so that nothing has to be downloaded.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import rudra_zmq as rudra  # 1


def corners(samples: int, seed: int) -> TensorDataset:
    """Points of 3 dimensions around the 8 corners of a cube, and the number of their corner."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 8, (samples,), generator=generator)
    corner = torch.stack([(label >> bit & 1).float() for bit in range(3)], dim=1)
    return TensorDataset(corner + 0.3 * torch.randn(samples, 3, generator=generator), label)


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """The share of `data` that the model gets right."""
    model.eval()
    points, label = data.tensors
    with torch.no_grad():
        right = (model(points).argmax(dim=1) == label).float().mean().item()
    model.train()
    return right


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3, help="when it runs alone; a job has job.epochs")
    args = parser.parse_args()

    train_set, test_set = corners(8000, seed=1), corners(2000, seed=2)
    with rudra.join(epochs=args.epochs) as learner:  # 2
        model = nn.Sequential(nn.Linear(3, args.width), nn.ReLU(), nn.Linear(args.width, 8))
        learner.attach(model)  # 3
        opt = learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))  # 4
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
        for epoch in learner.epochs():  # 5
            for points, label in learner.batches(train_set):  # 6: leased, each sample once per epoch
                loss = functional.cross_entropy(model(points), label)
                learner.step(loss)  # 7: backward(), step(), zero_grad()
            scheduler.step()
            if learner.is_chief:
                with learner.frozen():
                    right = accuracy(model, test_set)
                learner.log(accuracy=right)
                print(f"epoch {epoch}: accuracy {right:.3f}, {learner.size} learners", flush=True)
        learner.save("corners.safetensors")  # the chief alone writes


if __name__ == "__main__":
    main()
