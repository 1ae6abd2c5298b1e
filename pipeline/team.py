"""The processes that train one drafter together, seen from one of them."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline.launch import meet

T = TypeVar("T")


class Team:
    """This process and the others; most often it is alone.

    ddp    every process holds the whole drafter, and gradients are averaged;
    fsdp2  each holds its share of parameters, gradients and moments, and layers are gathered as
           they are needed (PyTorch's fully_shard: accelerate's own switch for it leaves CPUs out).
    """

    def __init__(self, device: str, sharding: str) -> None:
        self.accelerator = accelerator_on(device)
        self.size, self.index = self.accelerator.num_processes, self.accelerator.process_index
        self.device = self.accelerator.device
        self.shards = sharding == "fsdp2" and self.size > 1

    @property
    def is_first(self) -> bool:
        """Whether it is this process that writes."""
        return self.index == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """What falls to this process, dealt like cards."""
        return items[self.index :: self.size]

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module as the team trains it; with fsdp2 its parameters are shares from now on."""
        if not self.shards:
            return self.accelerator.prepare(module)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.size,))
        for layer in _layers(module):
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        return module

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    @contextmanager
    def gathering(self, module: nn.Module, now: bool) -> Iterator[None]:
        """Whether gradients of a backward pass within are averaged at once, or stay to be added."""
        wrapped: Any = module
        if self.shards:
            wrapped.set_requires_gradient_sync(now)
            yield
        else:
            with nullcontext() if now else self.accelerator.no_sync(module):
                yield

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, on this one's device; gloo adds up on the CPU."""
        if self.size > 1:
            gloo = torch.distributed.get_backend() == "gloo"
            values = values.to("cpu" if gloo else self.device)
            torch.distributed.all_reduce(values)
        return values.to(self.device)

    def wait(self) -> None:
        """Until all processes are here."""
        meet()  # accelerate would name a GPU by LOCAL_RANK, one too many where they are shared


class Alone(Team):
    """One process of several that does something of its own."""

    def __init__(self, team: Team) -> None:
        self.size, self.index, self.shards = 1, 0, False
        self.device = team.device

    def wrap(self, module: nn.Module) -> nn.Module:
        return module

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    @contextmanager
    def gathering(self, module: nn.Module, now: bool) -> Iterator[None]:
        yield

    def wait(self) -> None:
        return


def accelerator_on(device: str) -> Accelerator:
    """An accelerator on this kind of device, whichever one an earlier run of this process used."""
    if AcceleratorState._shared_state and AcceleratorState().device.type != device:
        AcceleratorState._reset_state(reset_partial_state=True)
    quiet = DistributedDataParallelKwargs(broadcast_buffers=False)  # they never change
    return Accelerator(cpu=device == "cpu", mixed_precision="no", kwargs_handlers=[quiet])


def full(value: Tensor) -> Tensor:
    """The whole of a tensor of which each process may hold a share; all must ask together."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def share_of(whole: Tensor, like: Tensor) -> Tensor:
    """This process's share of a tensor that all of them have, cut as `like` is."""
    if not isinstance(like, DTensor):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh = like.device_mesh
    return distribute_tensor(whole.to(like.device), mesh, like.placements, src_data_rank=None)


def second(network: nn.Module) -> Any:
    """A copy of the network that shares the parts which are the target's own."""
    inside = {id(module) for module in network.modules()}
    parts = [part for module in network.modules() for part in getattr(module, "_frozen", ())]
    return copy.deepcopy(network, {id(part): part for part in parts if id(part) not in inside})


def compile_layers(module: nn.Module) -> None:
    """Let each layer be compiled when it is first called: equal layers share what is compiled."""
    for layer in _layers(module):
        layer.compile(dynamic=True)  # one graph for batches of any size


def _layers(module: nn.Module) -> list[nn.Module]:
    """The members of the outermost lists of modules: a model's layers."""
    if isinstance(module, nn.ModuleList):
        return list(module)
    return [layer for child in module.children() for layer in _layers(child)]
