"""How much memory tensors hold, to find what an update or a layer leaves behind."""

import gc

import torch


def held_bytes(device: str = "cpu") -> int:
    """Bytes of all tensors: of the GPU's allocator, or of what Python can reach."""
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    storages = {}
    for thing in gc.get_objects():
        # isinstance would ask lazy objects for their class.
        if issubclass(type(thing), torch.Tensor) and thing.device.type != "meta":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
