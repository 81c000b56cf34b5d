"""Measures PyTorch's DistributedDataParallel, one process per core. Usage: python -m benchmarks.measure_torch TASK

Settings meant for speed (not measured one by one): gradients are views of the buckets, a static graph, the fused
Adam, channels last for images (the layout of PyTorch's CPU convolutions).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

# PyTorch is in an environment of its own (benchmarks/environments.py), not in the project's.
import torch  # pyright: ignore[reportMissingImports]
from torch import distributed, multiprocessing, nn  # pyright: ignore[reportMissingImports]

from benchmarks import torch_models, workloads
from benchmarks.task import Clock, Task, pin


def batches(task: Task, rank: int) -> list[tuple[Any, Any]]:
    """This rank's slices of the global batches, cut and laid out once: less work than any input pipeline."""
    batch = task.work.per_replica_batch
    inputs, classes = (torch.from_numpy(array) for array in task.work.data(batch * task.replicas))
    if inputs.ndim == 4:
        inputs = inputs.permute(0, 3, 1, 2)
    starts = range(rank * batch, len(classes), batch * task.replicas)
    slices = [(inputs[i : i + batch], classes[i : i + batch].long()) for i in starts]
    return [(laid_out(x) if task.work.tokens is False else x.long(), y.clone()) for x, y in slices]


def laid_out(images: Any) -> Any:
    return images.contiguous(memory_format=torch.channels_last) if images.ndim == 4 else images.clone()


def endless(examples: list[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    while True:
        yield from examples


def train(rank: int, task: Task, port: int) -> None:
    """The whole training of one rank; the first answers."""
    pin([task.cores[rank % len(task.cores)]])
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    torch.manual_seed(workloads.SEED)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=task.replicas)
    model = torch_models.MODELS[task.workload]()
    if len(task.work.shape) == 3:
        model = model.to(memory_format=torch.channels_last)
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=workloads.LEARNING_RATE, fused=True)
    loss_of = nn.CrossEntropyLoss()
    examples = endless(batches(task, rank))
    clock, mean = Clock(), torch.zeros(())
    for _ in range(1 + workloads.MEASURED_EPOCHS):
        total = torch.zeros(())
        for _ in range(task.epoch_steps):
            inputs, classes = next(examples)
            optimizer.zero_grad()
            loss = loss_of(model(inputs), classes)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        mean = total / task.epoch_steps
        clock.epoch_ended()
    if rank == 0:
        clock.answer(task, task.work.per_replica_batch * task.replicas, float(mean))
    distributed.destroy_process_group()


def main() -> None:
    task = Task.from_arguments()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(train, (task, port), nprocs=task.replicas)


if __name__ == "__main__":
    main()
